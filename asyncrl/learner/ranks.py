"""The learner ranks as one: what must be the same on all of them, and how work is shared out.

Every method is a collective: all ranks call the same ones in the same order. `SingleRank` is one alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.learner.outcomes import GroupOutcome
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
