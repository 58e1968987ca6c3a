"""The learner ranks of a run, joined by torch.distributed's default process group (which has learners only).

    rank 0         samples, then shares its batch out       waits for: the others to receive their parts
                   says every few seconds that it waits     for a batch
    other ranks    wait for a part, or the end of the run   ended by: rank 0, or its end (the link breaks)

Episodes travel as our own messages (`messaging.wire`) through gloo, as raw bytes with a header of lengths:

    header   [1 + ranks] int64, to all: what follows (`_Announcement`), then the number of lengths per rank
    lengths  [n] int64, to one rank: groups, then per group: episodes, then per episode: frames, bytes of each
    bytes    [sum] uint8, to one rank: the frames one after another

Sums and full tensors are collectives on the device. Every wait ends with a `RunError` at its deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.ranks import Groups
from asyncrl.messaging.wire import decode, encode
from asyncrl.observability import process_status, waits
from asyncrl.records import Episode

COLLECTIVE_DEADLINE: Final = 300.0
"""Seconds that every rank has to join a collective; all make the same calls at about the same time."""
RESUME: Final = "continue with --resume"
"""What to do after a rank was lost, where nothing else is said."""
POLL_INTERVAL: Final = 0.02
"""Seconds between two questions whether an announcement has arrived."""


def abandon_group(device: torch.device) -> None:
    """Leave the default process group after a failure, without waiting for the others.

    What the device has begun waits for them, and to destroy the group is to wait for it: only once it is
    aborted does this process end and say why.
    """
    if device.type == "cuda":
        dist.distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]


class _Announcement(IntEnum):
    """What rank 0 says before it shares."""

    END = 0
    PARTS = 1
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
        """Make the link for episodes; collective, like every method.

        Args:
            batch_timeout: Seconds that rank 0 may say nothing (`still_waiting`) while the others wait.
            while_waiting: Called often while this rank waits in `scatter_groups`.
            remedy: What to do after a rank was lost.
        """
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

    def scatter_groups(
        self, groups: Groups | None, while_waiting: Callable[[], object] = lambda: None
    ) -> Groups | None:
        """See `LearnerRanks.scatter_groups`; group n goes to rank ``n % size``."""
        with explain_lost_peer(f"learner rank {self.rank} of {self.size} to share a batch"):
            return self._send_parts(groups) if self.rank == 0 else self._receive_part(while_waiting)

    def still_waiting(self) -> None:
        """See `LearnerRanks.still_waiting`."""
        with explain_lost_peer(f"learner rank {self.rank} of {self.size} to say that it waits"):
            self._announce(_Announcement.WAITING, [])

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

    def _send_parts(self, groups: Groups | None) -> Groups | None:
        if groups is None:
            self._announce(_Announcement.END, [])
            return None
        if len(groups) < self.size:
            self._announce(_Announcement.TOO_FEW, [])
            raise too_few(self.size)
        packed = [pack(groups[rank :: self.size]) for rank in range(1, self.size)]
        self._announce(_Announcement.PARTS, [len(lengths) for lengths, _ in packed])
        for rank, (lengths, frames) in enumerate(packed, start=1):
            dist.send(lengths, rank, group=self._link)
            dist.send(frames, rank, group=self._link)
        return groups[:: self.size]

    def _announce(self, announcement: _Announcement, counts: list[int]) -> None:
        header = torch.tensor([announcement, 0, *(counts or [0] * (self.size - 1))])
        dist.broadcast(header, 0, group=self._link)

    def _receive_part(self, while_waiting: Callable[[], object]) -> Groups | None:
        with waits.waiting(waits.PART, self.batch_timeout):
            announcement, count = self._next_announcement(while_waiting)
            while announcement is _Announcement.WAITING:
                process_status.progress()
                announcement, count = self._next_announcement(while_waiting)
        if announcement is _Announcement.TOO_FEW:
            raise too_few(self.size)
        if announcement is _Announcement.END:
            return None
        lengths = torch.zeros(count, dtype=torch.int64)
        dist.recv(lengths, 0, group=self._link)
        frames = torch.zeros(sum(_frame_sizes(lengths.tolist())), dtype=torch.uint8)
        dist.recv(frames, 0, group=self._link)
        return unpack(lengths, frames)

    def _next_announcement(self, while_waiting: Callable[[], object]) -> tuple[_Announcement, int]:
        """Wait for rank 0 to say something; returns it, and the number of lengths of this rank's part."""
        header = torch.zeros(1 + self.size, dtype=torch.int64)
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
        return _Announcement(int(header[0])), int(header[1 + self.rank])


def too_few(ranks: int) -> ConfigError:
    """Return the error for a batch that cannot be shared out."""
    return ConfigError(
        f"--placement names {ranks} learner ranks, but a batch has fewer groups of episodes, so one "
        f"would have nothing to learn from. Use --algorithm.groups-per-update {ranks} or a multiple of it, "
        "or name fewer learner ranks in --placement."
    )


def pack(groups: Groups) -> tuple[Tensor, Tensor]:
    """Write groups of episodes as ``[n]`` int64 lengths and ``[sum]`` uint8 frames; see the module's text."""
    lengths, parts = [len(groups)], []
    for group in groups:
        lengths.append(len(group))
        for episode in group:
            frames = encode("episode", episode)
            lengths += [len(frames), *(len(frame) for frame in frames)]
            parts += frames
    return torch.tensor(lengths), torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def unpack(lengths: Tensor, frames: Tensor) -> list[list[Episode]]:
    """Read what `pack` wrote.

    Args:
        lengths: ``[n]`` int64, on the CPU.
        frames: ``[sum]`` uint8, on the CPU.

    Raises:
        WireError: An episode breaks the wire format.
    """
    numbers, offset = iter(lengths.tolist()), 0
    view = frames.numpy().data
    groups: list[list[Episode]] = []
    for _ in range(next(numbers)):
        group: list[Episode] = []
        for _ in range(next(numbers)):
            message: list[memoryview] = []
            for _ in range(next(numbers)):
                size = next(numbers)
                message.append(view[offset : offset + size])
                offset += size
            episode = decode(message).episode
            assert episode is not None  # The kind carries one.
            group.append(episode)
        groups.append(group)
    return groups


def _frame_sizes(lengths: list[int]) -> Iterator[int]:
    numbers = iter(lengths)
    for _ in range(next(numbers)):
        for _ in range(next(numbers)):
            for _ in range(next(numbers)):
                yield next(numbers)


@contextmanager
def explain_lost_peer(awaited: str, remedy: str = RESUME) -> Iterator[None]:
    """Turn the failure of a collective into an error that says what was waited for.

    Args:
        awaited: For example 'learner rank 1 of 2 to gather the weights'.
        remedy: What to do once the cause is known.

    Raises:
        RunError: A peer is gone or did not come in time.
    """
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
