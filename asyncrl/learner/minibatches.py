"""Episodes in, minibatches of whole episodes and micro-batches of decisions out.

A minibatch decides an optimizer step, so its episodes are whole. A micro-batch only decides how much memory
a pass takes. Learner ranks have different numbers of decisions but make the same number of passes: those with
fewer repeat a decision that counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.learner.ranks import LearnerRanks


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """Decisions of one minibatch, or micro-batch, that can have a gradient, and what they count."""

    rows: Tensor
    """``[K]`` int64, rows of the batch."""
    counts: Tensor
    """``[K, U, V]`` float32 per unit."""
    token_counts: Tensor
    """``[K, C, A]`` float32 per token."""
    value_counts: Tensor
    """``[K, V]`` float32 per value."""
    real: bool = True
    """False: a decision that only keeps this rank in step."""

    def part(self, place: slice | None) -> Minibatch:
        """Cut out a micro-batch; None gives the decision that counts nothing."""
        if place is not None:
            return Minibatch(
                rows=self.rows[place],
                counts=self.counts[place],
                token_counts=self.token_counts[place],
                value_counts=self.value_counts[place],
            )
        nothing = [x.new_zeros(1, *x.shape[1:]) for x in (self.counts, self.token_counts, self.value_counts)]
        return Minibatch(
            rows=torch.zeros(1, dtype=torch.int64),
            counts=nothing[0],
            token_counts=nothing[1],
            value_counts=nothing[2],
            real=False,
        )


def split_minibatches(episodes: int, minibatches: int, seed: tuple[int, ...]) -> list[Tensor]:
    """Deal episodes out to minibatches whose sizes differ by at most one; one alone keeps their order.

    Returns:
        int64 indices of episodes per minibatch. The same seed deals the same way: nothing to save.
    """
    if minibatches == 1:
        return [torch.arange(episodes)]
    order = torch.from_numpy(np.random.default_rng(seed).permutation(episodes))
    return [order[start::minibatches] for start in range(minibatches)]


def micro_batches(rows: int, size: int, group: LearnerRanks) -> Iterator[slice | None]:
    """Cut `rows` decisions into places of at most `size`; None for every pass that only other ranks need."""
    own = -(-rows // size)
    needed = int(group.max(torch.tensor([float(own)]))[0])
    for number in range(needed):
        yield slice(number * size, min((number + 1) * size, rows)) if number < own else None
