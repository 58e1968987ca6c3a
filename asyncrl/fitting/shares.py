"""Shares the examples of a step out: to the ranks that fit together, and to the micro-batches of each.

All ranks draw the same examples and the same noise, and each keeps its own part, so a step is that of one
rank alone, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.fitting.loop import FitRanks


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Who computes which examples of a step."""

    ranks: FitRanks
    parts: int
    """Micro-batches of each rank."""

    @classmethod
    def of(cls, batch: int, ranks: FitRanks, micro_batch: int) -> Shares:
        """Share a batch out; see `parts_of`."""
        return cls(ranks=ranks, parts=parts_of(batch, ranks.size, micro_batch))

    def own(self, drawn: Tensor) -> Tensor:
        """Return this rank's rows of what was drawn for a whole step, ``[batch, ...]`` of any dtype."""
        return drawn[self.ranks.rank :: self.ranks.size]

    def part(self, own: Tensor, part: int) -> Tensor:
        """Return the rows of a micro-batch of what `own` returned."""
        return own[part :: self.parts]


def parts_of(batch: int, ranks: int, micro_batch: int) -> int:
    """Count the micro-batches of a rank: alike for all, so that their means make up the batch's.

    Raises:
        ConfigError: The batch cannot be shared out evenly.
    """
    at_once = micro_batch or batch // max(1, ranks)
    if at_once < 1 or batch % (ranks * at_once):
        raise ConfigError(
            f"--batch is {batch} for {ranks} ranks and --micro-batch {at_once}: it is shared out evenly. "
            f"Use a --batch that is a multiple of {ranks * max(1, at_once)}."
        )
    return batch // (ranks * at_once)
