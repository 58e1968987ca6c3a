"""Prepares a batch for its optimizer steps: old log-probs, advantages, importance weights; minibatches.

A minibatch is one optimizer step of whole episodes, a micro-batch one pass over prompts of about equal
length. A rank without decisions repeats a masked one, to keep in step with others.

D decisions of the batch, R those evaluated before the first step, N those evaluated for the first time,
E episodes of a minibatch, M decisions of a micro-batch or minibatch, C steps per decision, A numbers per
step, U, V units of a decision (`losses`), K values of a decision: 1, or C.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings, Level
from asyncrl.devices.tensors import moved
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import staleness_metrics
from asyncrl.learner.forward import PADDING_ROW, PolicyForward, longest_first
from asyncrl.learner.interface import AdvantagesAndTargets, OldPolicy
from asyncrl.learner.losses import (
    aggregation_weights,
    has_advantage,
    log_ratio,
    sum_per_episode,
    units_per_decision,
    valid_units,
)
from asyncrl.learner.metrics import MetricAccumulator
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.recipe import Recipe


@dataclass(kw_only=True)
class PreparedBatch:
    """Facts from before the first step, and those that the first pass over a decision adds."""

    estimates: AdvantagesAndTargets
    old_logprob: Tensor | None = None  # [D, C, A] where there is an advantage; None before the first epoch
    importance_weights: Tensor | None = None  # None: there are none, or they are computed per micro-batch
    values: Tensor | None = None  # [D, K] float32, on the CPU; None without a critic
    first_logprob: Tensor  # [D, C, A] float32 log-probs when a decision was first evaluated in this update
    evaluated: Tensor  # [D] bool, on the CPU

    def record_first_logprob(self, rows: Tensor, logprob: Tensor) -> None:
        """Store log-probs ``[M, C, A]`` of the rows ``[M]`` that are evaluated for the first time."""
        new_N = torch.nonzero(~self.evaluated[rows]).flatten()
        if len(new_N):
            device = self.first_logprob.device
            self.first_logprob[moved(rows[new_N], device)] = logprob.detach()[moved(new_N, device)]
            self.evaluated[rows] = True

    def first_evaluation(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return `first_logprob` ``[M, C, A]`` and `evaluated` ``[M, 1, 1]`` of rows, on one device."""
        device = self.first_logprob.device
        return self.first_logprob[moved(rows, device)], moved(self.evaluated[rows], device)[:, None, None]

    def value_mask(self, batch: Batch) -> Tensor:
        """Mark values of valid decisions or steps: ``[D, K]`` bool; ``[D, 1]`` without a critic."""
        steps_DC = batch.mask.any(dim=2)
        per_step = self.values is not None and self.values.shape[1] > 1
        return steps_DC if per_step else steps_DC.any(dim=1, keepdim=True)


def prepare_batch(
    batch: Batch, recipe: Recipe, forward: PolicyForward
) -> tuple[PreparedBatch, MetricAccumulator]:
    """Evaluate decisions whose old log-probs are needed; estimate advantages and staleness; collective."""
    if not recipe.needs_old_policy_pass:
        prepared = PreparedBatch(
            estimates=recipe.estimate(batch, None, forward.ranks),
            first_logprob=torch.zeros(batch.mask.shape, device=forward.device),
            evaluated=torch.zeros(len(batch.tasks), dtype=torch.bool),
        )
        return prepared, MetricAccumulator()
    values = None
    if recipe.advantages_need_old_policy:
        rows_R = torch.arange(len(batch.tasks))
        old_logprob, old = _evaluate_old_policy(batch, recipe, forward, rows_R)
        estimates, values = recipe.estimate(batch, old, forward.ranks), old.values
    else:
        estimates = recipe.estimate(batch, None, forward.ranks)
        rows_R = _rows_with_advantage(batch, estimates, recipe)
        old_logprob, _ = forward.evaluate_rows(batch, rows_R)
    importance_weights, metrics = _importance_weights(batch, old_logprob, recipe, estimates, rows_R)
    evaluated = torch.zeros(len(batch.tasks), dtype=torch.bool)
    evaluated[rows_R] = True
    prepared = PreparedBatch(
        estimates=estimates,
        old_logprob=old_logprob,
        importance_weights=None if recipe.importance_weights_move else importance_weights,
        values=values,
        first_logprob=old_logprob.clone(),
        evaluated=evaluated,
    )
    return prepared, metrics


def _evaluate_old_policy(
    batch: Batch, recipe: Recipe, forward: PolicyForward, rows_R: Tensor
) -> tuple[Tensor, OldPolicy]:
    old_logprob, values = forward.evaluate_rows(batch, rows_R)
    final_values = torch.zeros(len(batch.returns))
    if recipe.trains_critic:
        assert values is not None, "ppo needs a policy with a value head"
        if recipe.critic.truncation == "bootstrap":
            final_values = forward.final_values(batch).cpu()
    values = values.cpu() if recipe.trains_critic and values is not None else None
    return old_logprob, OldPolicy(old_logprob.cpu(), values, final_values)


def _rows_with_advantage(batch: Batch, estimates: AdvantagesAndTargets, recipe: Recipe) -> Tensor:
    """Weights may read whole episodes."""
    valid_D = batch.mask.flatten(1).any(dim=1)
    read_D = valid_D & has_advantage(estimates.advantages)
    if "whole_episodes" in recipe.needs:
        read_D = valid_D & (sum_per_episode(read_D.float(), batch.episode) > 0)
    return torch.nonzero(read_D).flatten()


def _importance_weights(
    batch: Batch, old_logprob: Tensor, recipe: Recipe, estimates: AdvantagesAndTargets, rows_R: Tensor
) -> tuple[Tensor | None, MetricAccumulator]:
    device, any_rows = old_logprob.device, bool(len(rows_R))
    rows_R = rows_R if any_rows else PADDING_ROW
    behaviour, episode, mask, lag, with_advantage_R = (
        moved(x[rows_R], device)
        for x in (
            batch.behaviour_logprob,
            batch.episode,
            batch.mask & any_rows,
            batch.lag,
            has_advantage(estimates.advantages),
        )
    )
    here_R = moved(rows_R, device)
    old_logprob, behaviour = (torch.where(mask, x, 0.0) for x in (old_logprob[here_R], behaviour))
    proximal = recipe.proximal(old_logprob, old_logprob, behaviour, lag)
    weights = recipe.importance_weights(torch.where(mask, log_ratio(proximal, behaviour), 0.0), mask, episode)
    settings, level = recipe.correction_settings, recipe.algorithm.level
    policies = (old_logprob, proximal, behaviour)
    metrics = staleness_metrics(settings, level, *policies, mask, weights, episode, lag, with_advantage_R)
    if weights is None:
        return None, metrics
    all_weights = weights.new_ones(len(batch.tasks), *weights.shape[1:])
    all_weights[here_R] = weights
    return all_weights, metrics


# --- minibatches and micro-batches ---


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Inputs of the loss of a minibatch's or micro-batch's decisions, on the policy's device."""

    rows: Tensor  # [M] int64 on the CPU, rows of the batch
    counted: Tensor  # [M] bool on the CPU; False: padding that keeps this rank in step
    mask: Tensor
    behaviour: Tensor
    lag: Tensor
    episode: Tensor
    advantages: Tensor  # [M, 1, 1] or [M, C, 1]
    unit_weights: Tensor  # [M, U, V] weight of each unit in the loss
    token_weights: Tensor  # [M, C, A] the same per token, for entropy and KL
    value_weights: Tensor  # [M, K]
    old_logprob: Tensor | None = None  # [M, C, A] where there is an advantage; None: those of this pass
    importance_weights: Tensor | None = None  # They broadcast to [M, U, V]; None: computed in the pass
    values: Tensor | None = None  # [M, K] before the update
    targets: Tensor | None = None
    reference: Tensor | None = None  # [M, C, A] log-probs of the reference policy

    @property
    def decisions(self) -> int:
        """Count the decisions without padding."""
        return int(self.counted.sum())

    def part(self, rows: slice | None) -> LossInputs:
        """Return a micro-batch of the rows; None: of the padding row."""
        rows = slice(-1, None) if rows is None else rows
        return replace(self, **{name: x[rows] for name, x in self._tensors().items()})

    def to(self, device: torch.device) -> LossInputs:
        """Move all but rows and counted to a device."""
        on_cpu = ("rows", "counted")
        tensors = {name: x for name, x in self._tensors().items() if name not in on_cpu}
        return replace(self, **{name: moved(x, device) for name, x in tensors.items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: x for f in fields(self) if (x := getattr(self, f.name)) is not None}


def split_minibatches(
    episodes: int, minibatches: int, seed: tuple[int, ...], *, before: int = 0
) -> list[Tensor]:
    """Deal episodes to minibatches whose sizes differ by at most one: ``[E]`` int64 indices of each.

    Each rank continues where the one before stopped (`before`), so this holds over all ranks: an empty
    minibatch would still move the weights by the optimizer's momentum. A single one keeps the order.
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
) -> LossInputs:
    """Collect the decisions of episodes ``[E]`` that can have a gradient, and a padding row; collective."""
    rows_M = torch.nonzero(torch.isin(batch.episode, episodes)).flatten()
    mask, values = batch.mask[rows_M], prepared.value_mask(batch)[rows_M]
    unit_weights, token_weights, value_weights = _loss_weights(
        mask, values, batch.episode[rows_M], len(episodes), recipe.algorithm, ranks, max_decisions
    )
    kept = _rows_with_gradient(mask, prepared.estimates.advantages[rows_M], recipe)
    kept = kept[longest_first(prompt_lengths[rows_M[kept]])]
    rows = torch.cat([rows_M[kept], PADDING_ROW])
    counted = torch.arange(len(rows)) < len(rows) - 1

    def padded(values: Tensor) -> Tensor:
        return torch.cat([values[kept], values.new_zeros(1, *values.shape[1:])])

    def optional(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[moved(rows, values.device)]

    minibatch = LossInputs(
        rows=rows,
        counted=counted,
        mask=batch.mask[rows] & counted[:, None, None],
        behaviour=batch.behaviour_logprob[rows],
        lag=batch.lag[rows],
        episode=batch.episode[rows],
        advantages=prepared.estimates.advantages[rows],
        unit_weights=padded(unit_weights),
        token_weights=padded(token_weights),
        value_weights=padded(value_weights),
        old_logprob=optional(prepared.old_logprob),
        importance_weights=optional(prepared.importance_weights),
        values=optional(prepared.values),
        targets=optional(prepared.estimates.targets),
    )
    return minibatch.to(prepared.first_logprob.device)


def _loss_weights(
    mask: Tensor,
    values: Tensor,
    episode: Tensor,
    episodes: int,
    settings: AlgorithmSettings,
    ranks: LearnerRanks,
    max_decisions: int,
) -> tuple[Tensor, Tensor, Tensor]:
    units = valid_units(mask, settings.level)
    sums = torch.tensor([units.sum(), mask.sum(), episodes, values.sum()], dtype=torch.float64)
    n_units, n_tokens, n_episodes, n_values = ranks.sum(sums).tolist()
    counted: list[tuple[Tensor, float, Level]] = [(units, n_units, settings.level), (mask, n_tokens, "token")]
    unit_weights, token_weights = (
        aggregation_weights(
            valid,
            episode,
            settings.aggregation,
            units=number,
            episodes=n_episodes,
            max_units=max_decisions * units_per_decision(level, *mask.shape[1:]),
        )
        for valid, number, level in counted
    )
    return unit_weights, token_weights, values.float() / max(n_values, 1.0)


def _rows_with_gradient(mask: Tensor, advantages: Tensor, recipe: Recipe) -> Tensor:
    kept = mask.flatten(1).any(dim=1)
    if not (recipe.trains_critic or recipe.algorithm.entropy_coef or recipe.algorithm.kl_coef):
        kept &= has_advantage(advantages)
    return torch.nonzero(kept).flatten()
