"""The learner ranks as one: values that must be equal on all of them, and how work is shared out.

Every method is a collective: all ranks call the same ones in the same order. `SingleRank` is one alone;
`DistributedRanks` are joined by torch.distributed's default process group, which has learners only.

    rank 0         chooses a batch and announces it         waits for: the others to have their parts
                   announces every few seconds that it waits for a batch
    other ranks    wait for a batch, or the end of the run  ended by: rank 0, or its end (the link breaks)

A batch is announced through gloo by a header ``[2]`` int64 (`_Announcement`, bytes of the JSON that follows);
each rank fetches its episodes from the replay itself. Sums and full tensors are collectives on the device.
Every wait ends with a `RunError` at its deadline.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor

from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.batches import GroupOutcome, pack, unpack
from asyncrl.observability import process_status, waits
from asyncrl.records import Episode
from asyncrl.replay.interface import BatchDescription


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor], ranks: LearnerRanks) -> list[str]:
    """Find the tensors that hold a number which is not finite, on any rank.

    Args:
        tensors: Not empty, any shapes and float dtypes; this rank's part where they are sharded.

    Returns:
        Their names, the same on all ranks.
    """
    parts = own_parts(tensors.values())
    # All in a few kernels, where one for each tensor takes a thousand. NaN stays NaN; a shard may be empty.
    largest = torch.nn.utils.get_total_norm([part for part in parts if part.numel()], norm_type=math.inf)
    if not float(ranks.max((~largest.isfinite()).float().reshape(1))[0]):
        return []
    bad_T = torch.stack([~part.isfinite().all() for part in parts])
    found = ranks.max(bad_T.float()).tolist()
    return [name for name, bad in zip(tensors, found, strict=True) if bad]


@torch.no_grad()
def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's part of each tensor, which may be empty; all of it where it is not sharded.

    What is done with plain tensors costs a thousand of them a few calls; DTensors cost each its own.
    """
    from torch.distributed.tensor import DTensor

    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


Groups = Sequence[Sequence[Episode]]


class PartState(IntEnum):
    """Whether a rank has its part of a batch."""

    HELD = 0
    LOST = 1
    """A group of it cannot be read any more: another batch has to be chosen."""
    FAILED = 2
    """It could not be fetched: the run ends."""


class LearnerRanks(Protocol):
    """The learner ranks of a run. Used by one thread per rank."""

    rank: int
    """0 .. size - 1; rank 0 talks to the replay, the actors and the disk."""
    size: int

    def sum(self, values: Tensor) -> Tensor:
        """Add up a small tensor over the ranks; any shape, numeric dtype and device, also the sum's."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Take the elementwise largest over the ranks. See `LearnerRanks.sum` for shape, dtype and device."""
        ...

    def deal(
        self, batch: BatchDescription | None, while_waiting: Callable[[], object] = lambda: None
    ) -> BatchDescription | None:
        """Share a batch out: rank 0 says what it is, or None to end the run; each gets its part of it.

        `while_waiting` is called often on the ranks that wait for rank 0.

        Raises:
            ConfigError: The batch has fewer groups than there are ranks.
        """
        ...

    def gather_states(self, state: PartState) -> list[PartState]:
        """Say whether this rank has its part; returns what every rank said, in their order."""
        ...

    def gather_outcomes(self, part: Sequence[GroupOutcome]) -> list[GroupOutcome]:
        """Gather what the ranks say of their parts.

        Returns:
            On rank 0 that of the whole batch, in its order; on others nothing.
        """
        ...

    def still_waiting(self) -> None:
        """Rank 0: tell those that wait in `deal` that a batch is still to come."""
        ...

    def gather_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather sharded tensors of any shape and dtype.

        Returns:
            On rank 0 the full ones by name, of the same dtype, ready to be copied; on others nothing.
        """
        ...


class SingleRank:
    """One rank alone: nothing to exchange."""

    rank = 0
    size = 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the values. See `LearnerRanks.sum`."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """Return the values. See `LearnerRanks.max`."""
        return values

    def deal(
        self, batch: BatchDescription | None, while_waiting: Callable[[], object] = lambda: None
    ) -> BatchDescription | None:
        """Return the batch: its part is all of it."""
        return batch

    def gather_states(self, state: PartState) -> list[PartState]:
        """Return its own."""
        return [state]

    def gather_outcomes(self, part: Sequence[GroupOutcome]) -> list[GroupOutcome]:
        """Return those of all groups."""
        return list(part)

    def still_waiting(self) -> None:
        """Do nothing: nobody waits."""

    def gather_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors. See `LearnerRanks.gather_full`."""
        return dict(tensors)


COLLECTIVE_DEADLINE: Final = 300.0
"""Seconds that every rank has to join a collective; all make the same calls at about the same time."""
RESUME: Final = "continue with --resume"
"""What to do after a rank was lost, where nothing else is said."""
POLL_INTERVAL: Final = 0.02
"""Seconds between two questions whether an announcement has arrived."""
FREED_SECONDS: Final = 0.2
"""How long gloo's threads have to free what was exchanged last."""


@contextmanager
def default_group(
    device: torch.device,
    meeting: str,
    work: str,
    *,
    store: Store | None = None,
    rank: int = -1,
    size: int = -1,
    remedy: str = RESUME,
) -> Iterator[None]:
    """Be in the default process group for the time of the block; all ranks enter at about the same time.

    Args:
        store: Where the ranks meet. None: where torchrun's environment says, which also says who this is.

    Raises:
        RunError: A rank did not come, or is gone.
    """
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    deadline = timedelta(seconds=COLLECTIVE_DEADLINE)
    with explain_lost_peer(meeting, remedy):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=deadline)
    try:
        with explain_lost_peer(work, remedy):
            yield
    except BaseException:
        abandon_group(device)
        raise
    leave_group()


def abandon_group(device: torch.device) -> None:
    """Leave the default process group after a failure, without waiting for the others.

    What the device has begun waits for them, and to destroy the group is to wait for it: only once it is
    aborted does this process end and say why.
    """
    if device.type == "cuda":
        dist.distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]


def leave_group() -> None:
    """Leave the default process group at the end of a job, behind the last exchange of its ranks.

    A thread of gloo's frees the tensors of an exchange a moment after the result is there, for which it needs
    the interpreter. Where that has begun to end, the thread is ended in the middle of it and the process with
    it (SIGABRT), whereupon torchrun ends the other ranks, whatever they are writing. To destroy a group joins
    its threads, but not as long as somebody refers to it; meshes do, which torch keeps.
    """
    dist.destroy_process_group()
    time.sleep(FREED_SECONDS)


class _Announcement(IntEnum):
    """What rank 0 says."""

    END = 0
    BATCH = 1
    TOO_FEW = 2
    WAITING = 3


class DistributedRanks:
    """A `LearnerRanks` over the default process group. Used by one thread per rank."""

    def __init__(
        self,
        batch_timeout: float,
        *,
        while_waiting: Callable[[], object] = lambda: None,
        remedy: str = RESUME,
    ) -> None:
        """Make the link for batches; collective, like every method."""
        self.rank, self.size, self.remedy = dist.get_rank(), dist.get_world_size(), remedy
        self.batch_timeout, self.while_waiting = batch_timeout, while_waiting
        self._link: Any = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=batch_timeout + COLLECTIVE_DEADLINE)
        )

    def sum(self, values: Tensor) -> Tensor:
        """See `LearnerRanks.sum`."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """See `LearnerRanks.max`."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def deal(
        self, batch: BatchDescription | None, while_waiting: Callable[[], object] = lambda: None
    ) -> BatchDescription | None:
        """See `LearnerRanks.deal`."""
        with explain_lost_peer(f"learner rank {self.rank} of {self.size} to share a batch"):
            whole = self._tell(batch) if self.rank == 0 else self._hear(while_waiting)
        return whole and whole.part(self.rank, self.size)

    def gather_states(self, state: PartState) -> list[PartState]:
        """See `LearnerRanks.gather_states`; ends when the last one has its part, or gave it up."""
        said = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        deadline = self.batch_timeout + COLLECTIVE_DEADLINE
        with (
            explain_lost_peer(f"the parts of {self.size} learner ranks, at rank {self.rank}"),
            waits.waiting(waits.FETCH, deadline),
        ):
            dist.all_gather(said, torch.tensor([int(state)]), group=self._link)
        return [PartState(int(each)) for each in said]

    def gather_outcomes(self, part: Sequence[GroupOutcome]) -> list[GroupOutcome]:
        """See `LearnerRanks.gather_outcomes`."""
        with explain_lost_peer(f"what {self.size} learner ranks say of their parts, at rank {self.rank}"):
            if self.rank > 0:
                arrays = pack(part)
                dist.send(torch.tensor([len(array) for array in arrays]), 0, group=self._link)
                for array in arrays:
                    dist.send(torch.from_numpy(array), 0, group=self._link)
                return []
            parts = [list(part), *(self._outcomes_of(rank) for rank in range(1, self.size))]
        groups = sum(map(len, parts))
        return [parts[n % self.size][n // self.size] for n in range(groups)]

    def _outcomes_of(self, rank: int) -> list[GroupOutcome]:
        lengths = torch.zeros(2, dtype=torch.int64)
        dist.recv(lengths, rank, group=self._link)
        numbers = torch.zeros(int(lengths[0]), dtype=torch.int64)
        episodes = torch.zeros(int(lengths[1]), dtype=torch.float64)
        for tensor in (numbers, episodes):
            dist.recv(tensor, rank, group=self._link)
        return unpack(numbers.numpy(), episodes.numpy())

    def still_waiting(self) -> None:
        """See `LearnerRanks.still_waiting`."""
        with explain_lost_peer(f"learner rank {self.rank} of {self.size} to say that it waits"):
            self._announce(_Announcement.WAITING)

    def gather_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `LearnerRanks.gather_full`; one tensor at a time, in the order of their names."""
        found: dict[str, Tensor] = {}
        with explain_lost_peer(f"learner rank {self.rank} of {self.size} to gather the weights", self.remedy):
            for name in sorted(tensors):
                tensor = tensors[name].detach()
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if self.rank == 0:
                    found[name] = full
        return found

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        result = values.detach().clone()
        with explain_lost_peer(f"learner rank {self.rank} of {self.size} to add up numbers", self.remedy):
            dist.all_reduce(result, operation)
        return result

    def _tell(self, batch: BatchDescription | None) -> BatchDescription | None:
        if batch is None:
            self._announce(_Announcement.END)
            return None
        if len(batch.numbers) < self.size:
            self._announce(_Announcement.TOO_FEW)
            raise too_few(self.size)
        self._announce(_Announcement.BATCH, json.dumps(asdict(batch)).encode())
        return batch

    def _announce(self, announcement: _Announcement, text: bytes = b"") -> None:
        dist.broadcast(torch.tensor([announcement, len(text)]), 0, group=self._link)
        if text:
            dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0, group=self._link)

    def _hear(self, while_waiting: Callable[[], object]) -> BatchDescription | None:
        with waits.waiting(waits.PART, self.batch_timeout):
            announcement, length = self._next_announcement(while_waiting)
            while announcement is _Announcement.WAITING:
                process_status.progress()
                announcement, length = self._next_announcement(while_waiting)
        if announcement is _Announcement.TOO_FEW:
            raise too_few(self.size)
        if announcement is _Announcement.END:
            return None
        text = torch.zeros(length, dtype=torch.uint8)
        dist.broadcast(text, 0, group=self._link)
        said = json.loads(text.numpy().tobytes())
        return BatchDescription(request=said["request"], numbers=tuple(said["numbers"]))

    def _next_announcement(self, while_waiting: Callable[[], object]) -> tuple[_Announcement, int]:
        """Wait for rank 0 to say something; returns it, and how many bytes follow."""
        header = torch.zeros(2, dtype=torch.int64)
        awaited = dist.broadcast(header, 0, group=self._link, async_op=True)
        assert awaited is not None  # This rank is in the group.
        until = time.monotonic() + self.batch_timeout
        while not awaited.is_completed() and time.monotonic() < until:
            self.while_waiting()
            while_waiting()
            time.sleep(POLL_INTERVAL)
        if not awaited.is_completed():
            raise RunError(
                f"Learner rank {self.rank} waited {self.batch_timeout:g} s for rank 0 to share a batch or to "
                "say that it waits for one. It hangs: see its output and the actors' logs."
            )
        awaited.wait()
        return _Announcement(int(header[0])), int(header[1])


def too_few(ranks: int) -> ConfigError:
    """Return the error for a batch that cannot be shared out."""
    return ConfigError(
        f"--placement names {ranks} learner ranks, but a batch has fewer groups of episodes, so one "
        f"would have nothing to learn from. Use --algorithm.groups-per-update {ranks} or a multiple of it, "
        "or name fewer learner ranks in --placement."
    )


@contextmanager
def explain_lost_peer(awaited: str, remedy: str = RESUME) -> Iterator[None]:
    """Turn the failure of a collective into an error that says what was waited for."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise RunError(
            f"Waited in vain for {awaited}: another rank is gone or did not come in time "
            f"({str(error).strip().splitlines()[-1][:200]}). See the output of the other ranks, "
            f"and {remedy}."
        ) from error


def is_lost_peer(error: BaseException) -> bool:
    """Tell whether an error of torch.distributed means that another rank is gone, late or broken."""
    if isinstance(error, dist.DistError):
        return True
    signs = ("gloo", "Connection closed", "Connection reset", "Timed out", "timed out", "NCCL")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
