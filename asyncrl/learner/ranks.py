"""The learner ranks of a run: collectives over them, and how a batch is sharded.

Every method is a collective: all ranks call the same ones in the same order. A `LearnerRanks` is one rank
alone; `DistributedRanks` are joined by torch.distributed's default process group, which has learners only.

    rank 0         chooses a batch and announces it         waits for: the others to have their shards
                   announces every few seconds that it waits for a batch
    other ranks    wait for a batch, or the end of the run  ended by: rank 0, or its end (the link breaks)

A batch is announced through gloo as JSON. Every wait ends with a `RunError` at its deadline.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor

from asyncrl.errors import RunError
from asyncrl.learner.batches import GroupOutcome
from asyncrl.learner.fsdp import Precision
from asyncrl.observability import process_status, waits
from asyncrl.records import Episode
from asyncrl.replay.interface import BatchDescription, GroupLost, LearnerPort

Groups = Sequence[Sequence[Episode]]
COLLECTIVE_DEADLINE: Final = 300.0  # Seconds for all ranks to join a collective
RESUME: Final = "continue with --resume"  # Remedy after a lost rank
POLL_INTERVAL: Final = 0.02  # Seconds between two queries whether an announcement has arrived
FREED_SECONDS: Final = 0.2  # Seconds in which gloo's threads free the tensors of the last exchange
_log = logging.getLogger(__name__)


class LearnerRanks:
    """One rank alone, and the base of several. Used by one thread per rank."""

    rank = 0  # 0 .. size - 1; rank 0 talks to the replay, the actors and the disk.
    size = 1

    def sum(self, values: Tensor) -> Tensor:
        """Add up a small tensor over the ranks."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """Take the elementwise maximum over the ranks."""
        return values

    def share_batch(
        self, batch: BatchDescription | None, while_waiting: Callable[[], object] = lambda: None
    ) -> BatchDescription | None:
        """Distribute rank 0's batch and return this rank's shard; None ends the run on all ranks."""
        return batch

    def gather_states(self, state: ShardState) -> list[ShardState]:
        """Gather the states of all ranks' shards, in the order of the ranks."""
        return [state]

    def gather_outcomes(self, shard: Sequence[GroupOutcome]) -> list[GroupOutcome]:
        """Gather the outcomes of the whole batch on rank 0, in its order; empty on others."""
        return list(shard)

    def send_heartbeat(self) -> None:
        """Rank 0: renew the deadline of the ranks that wait in `share_batch`."""

    def gather_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather sharded tensors on rank 0, ready to be copied; empty on others."""
        return dict(tensors)


class DistributedRanks(LearnerRanks):
    """`LearnerRanks` over the default process group; messages of JSON over a second, gloo group."""

    def __init__(self, batch_timeout: float, *, remedy: str = RESUME) -> None:
        self.rank, self.size, self.remedy = dist.get_rank(), dist.get_world_size(), remedy
        self.batch_timeout, self._longest = batch_timeout, batch_timeout + COLLECTIVE_DEADLINE
        self._link: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._longest))

    def sum(self, values: Tensor) -> Tensor:
        """Add up by an all-reduce."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Take the maximum by an all-reduce."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def share_batch(
        self, batch: BatchDescription | None, while_waiting: Callable[[], object] = lambda: None
    ) -> BatchDescription | None:
        """Announce, or await, the batch over the link."""
        with explain_lost_peer(f"learner rank {self.rank} of {self.size} to share a batch"):
            if self.rank == 0:
                self._announce(asdict(batch) if batch else None)
            else:
                batch = self._receive_batch(while_waiting)
        return batch and batch.part(self.rank, self.size)

    def gather_states(self, state: ShardState) -> list[ShardState]:
        """Gather over the link, once the last rank has its shard or gave it up."""
        states = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with (
            explain_lost_peer(f"the parts of {self.size} learner ranks, at rank {self.rank}"),
            process_status.waiting(waits.FETCH, self._longest),
        ):
            dist.all_gather(states, torch.tensor([int(state)]), group=self._link)
        return [ShardState(int(each)) for each in states]

    def gather_outcomes(self, shard: Sequence[GroupOutcome]) -> list[GroupOutcome]:
        """Receive the others' outcomes over the link."""
        with explain_lost_peer(f"the outcomes of {self.size} learner ranks, at rank {self.rank}"):
            if self.rank > 0:
                text = _to_bytes(list(shard))
                dist.send(torch.tensor([len(text)]), 0, group=self._link)
                dist.send(text, 0, group=self._link)
                return []
            shards = [list(shard)]
            for rank in range(1, self.size):
                length = torch.zeros(1, dtype=torch.int64)
                dist.recv(length, rank, group=self._link)
                text = torch.zeros(int(length), dtype=torch.uint8)
                dist.recv(text, rank, group=self._link)
                shards.append([GroupOutcome(*row) for row in _from_bytes(text)])
        return [shards[n % self.size][n // self.size] for n in range(sum(map(len, shards)))]

    def send_heartbeat(self) -> None:
        """Announce that rank 0 waits."""
        with explain_lost_peer(f"learner rank {self.rank} of {self.size} to say that it waits"):
            self._announce({})

    def gather_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather one tensor at a time, in the order of their names."""
        gathered: dict[str, Tensor] = {}
        with explain_lost_peer(f"learner rank {self.rank} of {self.size} to gather the weights", self.remedy):
            for name in sorted(tensors):
                tensor = tensors[name].detach()
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if self.rank == 0:
                    gathered[name] = full
        return gathered

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        result = values.detach().clone()
        with explain_lost_peer(f"learner rank {self.rank} of {self.size} to add up numbers", self.remedy):
            dist.all_reduce(result, operation)
        return result

    def _announce(self, batch: dict[str, Any] | None) -> None:
        """Broadcast a batch; None: the run ends; empty: rank 0 waits for a batch."""
        text = _to_bytes(batch)
        dist.broadcast(torch.tensor([len(text)]), 0, group=self._link)
        dist.broadcast(text, 0, group=self._link)

    def _receive_batch(self, while_waiting: Callable[[], object]) -> BatchDescription | None:
        length = torch.zeros(1, dtype=torch.int64)
        with process_status.waiting(waits.PART, self.batch_timeout):
            while True:
                work = dist.broadcast(length, 0, group=self._link, async_op=True)
                assert work is not None  # This rank is in the group.
                until = time.monotonic() + self.batch_timeout
                while not work.is_completed() and time.monotonic() < until:
                    while_waiting()
                    time.sleep(POLL_INTERVAL)
                if not work.is_completed():
                    raise RunError(
                        f"Learner rank {self.rank} waited {self.batch_timeout:g} s for rank 0 to share a "
                        "batch or to say that it waits for one. It hangs: see its output and the actors' "
                        "logs."
                    )
                work.wait()
                text = torch.zeros(int(length), dtype=torch.uint8)
                dist.broadcast(text, 0, group=self._link)
                if (batch := _from_bytes(text)) is None:
                    return None
                if batch:
                    return BatchDescription(request=batch["request"], numbers=tuple(batch["numbers"]))
                process_status.progress()


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


class ShardState(IntEnum):
    """State of a rank's shard of a batch."""

    HELD = 0
    LOST = 1  # A group of it cannot be read any more: another batch has to be chosen
    FAILED = 2  # It could not be fetched: the run ends


def fetch_shard(
    replay: LearnerPort,
    ranks: LearnerRanks,
    shard: BatchDescription,
    timeout: float,
    while_waiting: Callable[[], object],
) -> Groups | Exception | None:
    """Fetch this rank's shard; an exception ends the run; None if another batch has to be chosen."""
    state, groups, failure = ShardState.FAILED, None, None
    try:
        with process_status.waiting(waits.FETCH, timeout):
            groups = replay.fetch(shard, timeout=timeout, while_waiting=while_waiting)
        state = ShardState.HELD
    except GroupLost as lost:
        _log.warning("%s Another batch is chosen.", lost)
        state = ShardState.LOST
    except Exception as error:  # Kept until the other ranks know; the learner raises it.
        failure = error
    states = ranks.gather_states(state)
    if ShardState.FAILED in states:
        elsewhere = RunError(
            f"Learner rank {states.index(ShardState.FAILED)} of {ranks.size} did not get its part of a "
            "batch. Its output has the reason."
        )
        return failure or elsewhere
    return None if ShardState.LOST in states else groups


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor], ranks: LearnerRanks) -> list[str]:
    """Return, on every rank, the names of the tensors with a non-finite number on any rank."""
    parts = local_tensors(tensors.values())
    # All in a few kernels, where one for each tensor takes a thousand. NaN stays NaN; a shard may be empty.
    largest = torch.nn.utils.get_total_norm([part for part in parts if part.numel()], norm_type=math.inf)
    if not float(ranks.max((~largest.isfinite()).float().reshape(1))[0]):
        return []
    bad_T = torch.stack([~part.isfinite().all() for part in parts])
    bad_on_any = ranks.max(bad_T.float()).tolist()
    return [name for name, bad in zip(tensors, bad_on_any, strict=True) if bad]


@torch.no_grad()
def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shard of each tensor, perhaps empty; operations on DTensors are slow."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


@contextmanager
def joined_ranks(
    device: torch.device,
    rank: int,
    size: int,
    precision: Precision,
    meeting: str,
    work: str,
    *,
    store: Store | None = None,
    patience: float = COLLECTIVE_DEADLINE,
    remedy: str = RESUME,
) -> Iterator[LearnerRanks]:
    """Join the default process group for the block, through `store` or else torchrun's rendezvous.

    One rank that computes in float32 needs no group; FSDP's passes in bfloat16 do.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1 and precision == "fp32":
        yield LearnerRanks()
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    deadline, at = timedelta(seconds=COLLECTIVE_DEADLINE), HashStore() if size == 1 else store
    with explain_lost_peer(meeting, remedy):
        dist.init_process_group(backend, store=at, rank=rank, world_size=size, timeout=deadline)
    try:
        with explain_lost_peer(work, remedy):
            yield DistributedRanks(patience, remedy=remedy)
    except BaseException:
        if device.type == "cuda":  # Destroying the group would wait for kernels that wait for other ranks.
            dist.distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
        raise
    leave_group()


def leave_group() -> None:
    """Leave the default process group; gloo must free tensors before the interpreter ends, else SIGABRT."""
    dist.destroy_process_group()
    time.sleep(FREED_SECONDS)


@contextmanager
def explain_lost_peer(awaited: str, remedy: str = RESUME) -> Iterator[None]:
    """Turn the failure of a collective into a RunError that names `awaited`."""
    try:
        yield
    except RuntimeError as error:
        signs = ("gloo", "Connection closed", "Connection reset", "Timed out", "timed out", "NCCL")
        if not isinstance(error, dist.DistError) and not any(sign in str(error) for sign in signs):
            raise
        raise RunError(
            f"Waited in vain for {awaited}: another rank is gone or did not come in time "
            f"({str(error).strip().splitlines()[-1][:200]}). See the output of the other ranks, "
            f"and {remedy}."
        ) from error
