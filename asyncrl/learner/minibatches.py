"""Cuts a batch into minibatches of whole episodes, and these into micro-batches of decisions.

A minibatch decides an optimizer step, so its episodes are whole. A micro-batch only decides how much memory
a pass takes: it holds decisions whose prompts are about equally long, so that little is padded. A rank that
has no decisions left repeats one that counts nothing, to keep in step with others.

Dimension letters used in this file:
    M  decisions of a micro-batch, or minibatch     E  episodes of a minibatch, on this rank
    C  steps per decision                           A  numbers per step
    U, V  units of a decision (`losses`)            K  values of a decision: 1, or C
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.algorithm import Level
from asyncrl.devices.tensors import moved
from asyncrl.learner.batches import Batch
from asyncrl.learner.forward import longest_first
from asyncrl.learner.losses import aggregation_weights, taught, units_per_decision, valid_units
from asyncrl.learner.prepare import PreparedBatch
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Decisions with all that their loss needs, on the policy's device. A minibatch is one too."""

    rows: Tensor
    """``[M]`` int64 on the CPU, rows of the batch."""
    counted: Tensor
    """``[M]`` bool on the CPU; False: a decision that only keeps this rank in step and counts nothing."""
    mask: Tensor
    """``[M, C, A]`` bool."""
    behaviour: Tensor
    """``[M, C, A]`` float32 log-probs of the policy that sampled."""
    lag: Tensor
    """``[M]`` int64."""
    episode: Tensor
    """``[M]`` int64."""
    advantages: Tensor
    """``[M, 1, 1]`` or ``[M, C, 1]`` float32."""
    counts: Tensor
    """``[M, U, V]`` float32, what each unit counts."""
    token_counts: Tensor
    """``[M, C, A]`` float32, the same per token, for entropy and KL."""
    value_counts: Tensor
    """``[M, K]`` float32."""
    old_logprob: Tensor | None = None
    """``[M, C, A]`` float32 log-probs before the update, of what is taught something; None: this pass finds
    them."""
    weights: Tensor | None = None
    """Importance weights, which broadcast to ``[M, U, V]``; None: computed in the pass."""
    values: Tensor | None = None
    """``[M, K]`` float32 critic's values before the update."""
    targets: Tensor | None = None
    """``[M, K]`` float32."""
    reference: Tensor | None = None
    """``[M, C, A]`` float32 log-probs of the reference policy."""

    @property
    def decisions(self) -> int:
        """Count the decisions that count in the loss."""
        return int(self.counted.sum())

    def part(self, rows: slice | None) -> MicroBatch:
        """Cut out a micro-batch; None gives the row that counts nothing."""
        rows = slice(-1, None) if rows is None else rows
        return replace(self, **{name: x[rows] for name, x in self._tensors().items()})

    def to(self, device: torch.device) -> MicroBatch:
        """Move all but rows and counted to a device."""
        tensors = self._tensors()
        stay = {name: tensors.pop(name) for name in ("rows", "counted")}
        return replace(self, **stay, **{name: moved(x, device) for name, x in tensors.items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: x for f in fields(self) if (x := getattr(self, f.name)) is not None}


def split_minibatches(
    episodes: int, minibatches: int, seed: tuple[int, ...], *, before: int = 0
) -> list[Tensor]:
    """Share episodes out to minibatches whose sizes differ by at most one; one alone keeps their order.

    The ranks go on dealing where the one before stopped, so that this holds for all of them together: none
    is empty while there are as many episodes as minibatches. An empty one would still move the weights, by
    the optimizer's momentum.

    Returns:
        ``[E]`` int64 indices of episodes per minibatch. The same seed gives the same ones: nothing to save.
    """
    if minibatches == 1:
        return [torch.arange(episodes)]
    order = torch.from_numpy(np.random.default_rng(seed).permutation(episodes))
    return [order[(number - before) % minibatches :: minibatches] for number in range(minibatches)]


def episodes_before(episodes: int, ranks: LearnerRanks) -> int:
    """Count the episodes of the ranks before this one; collective."""
    counts = torch.zeros(ranks.size, dtype=torch.int64)
    counts[ranks.rank] = episodes
    return int(ranks.sum(counts)[: ranks.rank].sum())


def build_minibatch(
    batch: Batch,
    prepared: PreparedBatch,
    episodes: Tensor,
    recipe: Recipe,
    ranks: LearnerRanks,
    *,
    max_decisions: int,
    prompt_lengths: Tensor,
) -> MicroBatch:
    """Collect the decisions of some episodes that can have a gradient; collective.

    Args:
        episodes: ``[E]`` int64, this rank's episodes of the minibatch.
        prompt_lengths: ``[D]`` int64 of the batch's decisions, tokens; long ones come first.

    Returns:
        On the device of `prepared`; its last row counts nothing.
    """
    chosen = recipe.algorithm
    rows_M = torch.nonzero(torch.isin(batch.episode, episodes)).flatten()
    mask, episode = batch.mask[rows_M], batch.episode[rows_M]
    units, values = valid_units(mask, chosen.level), prepared.value_mask(batch)[rows_M]
    sums = torch.tensor([units.sum(), mask.sum(), len(episodes), values.sum()], dtype=torch.float64)
    n_units, n_tokens, n_episodes, n_values = ranks.sum(sums).tolist()
    teaches = mask.flatten(1).any(dim=1)
    if not (recipe.trains_critic or chosen.entropy_coef or chosen.kl_coef):
        teaches &= taught(prepared.estimates.advantages[rows_M])
    kept = torch.nonzero(teaches).flatten()
    kept = kept[longest_first(prompt_lengths[rows_M[kept]])]
    rows = torch.cat([rows_M[kept], torch.zeros(1, dtype=torch.int64)])
    counted = torch.arange(len(rows)) < len(rows) - 1

    def counts(valid: Tensor, number: float, level: Level) -> Tensor:
        longest = max_decisions * units_per_decision(level, *batch.mask.shape[1:])
        found = aggregation_weights(
            valid, episode, chosen.aggregation, units=number, episodes=n_episodes, longest=longest
        )
        return with_last_row(found)

    def with_last_row(found: Tensor) -> Tensor:
        return torch.cat([found[kept], found.new_zeros(1, *found.shape[1:])])

    def at_rows(found: Tensor | None) -> Tensor | None:
        return None if found is None else found[moved(rows, found.device)]

    minibatch = MicroBatch(
        rows=rows,
        counted=counted,
        mask=batch.mask[rows] & counted[:, None, None],
        behaviour=batch.logprob_behaviour[rows],
        lag=batch.lag[rows],
        episode=batch.episode[rows],
        advantages=prepared.estimates.advantages[rows],
        counts=counts(units, n_units, chosen.level),
        token_counts=counts(mask, n_tokens, "token"),
        value_counts=with_last_row(values.float() / max(n_values, 1.0)),
        old_logprob=at_rows(prepared.old_logprob),
        weights=at_rows(prepared.weights),
        values=at_rows(prepared.values),
        targets=at_rows(prepared.estimates.targets),
    )
    return minibatch.to(prepared.first_logprob.device)
