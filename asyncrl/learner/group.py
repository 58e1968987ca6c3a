"""The learner ranks as one: what must be the same on all of them, and how work is shared out.

Every method is a collective: all ranks call the same ones in the same order. `Alone` is a group of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from asyncrl.records import Episode

Groups = Sequence[Sequence[Episode]]


class LearnerGroup(Protocol):
    """The learner ranks of a run. Used by one thread per rank."""

    rank: int
    """0 .. size - 1; rank 0 talks to the replay, the actors and the disk."""
    size: int

    def sum(self, values: Tensor) -> Tensor:
        """Add up a small tensor over the ranks; any device, returned there."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Take the elementwise largest over the ranks."""
        ...

    def share(
        self, groups: Groups | None, while_waiting: Callable[[], object] = lambda: None
    ) -> Groups | None:
        """Deal groups of episodes out: rank 0 gives a batch, or None to end the run; each gets its part.

        `while_waiting` is called often on the ranks that wait for rank 0.

        Raises:
            ConfigError: The batch has fewer groups than there are ranks.
        """
        ...

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather sharded tensors: on rank 0 the full ones (others: empty), ready to be copied."""
        ...


class Alone:
    """A group of one rank: nothing to exchange."""

    rank = 0
    size = 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    def share(
        self, groups: Groups | None, while_waiting: Callable[[], object] = lambda: None
    ) -> Groups | None:
        """Return the groups."""
        return groups

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors."""
        return dict(tensors)
