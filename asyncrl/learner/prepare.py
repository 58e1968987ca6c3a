"""Prepares a batch for its optimizer steps: old log-probs, advantages, importance weights; minibatches.

A minibatch is one optimizer step of whole episodes, a micro-batch one pass over prompts of about equal
length. A rank without decisions repeats a masked one, to keep step with the others.

A row is a decision, by its index in the batch. D decisions of the batch, R those evaluated before the first
step, N those evaluated for the first time, E episodes of a minibatch, M decisions of a micro-batch or
minibatch, C steps per decision, A numbers per step, U, V units of a decision (`losses`), K values of a
decision: 1, or C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.devices.tensors import moved
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import staleness_metrics
from asyncrl.learner.forward import PADDING_ROW, PolicyForward, longest_first
from asyncrl.learner.interface import AdvantagesAndTargets, OldPolicy
from asyncrl.learner.losses import aggregation_weights, has_advantage, log_ratio, sum_per_episode, valid_units
from asyncrl.learner.recipe import Recipe
from asyncrl.learner.update_metrics import MetricAccumulator


@dataclass(kw_only=True)
class PreparedBatch:
    """Values computed before the first step, and those that a decision's first pass adds."""

    estimates: AdvantagesAndTargets
    first_logprob: Tensor  # [D, C, A] float32 log-probs when a decision was first evaluated in this update
    evaluated: Tensor  # [D] bool, on the CPU
    old_known: bool = False  # `first_logprob` serves as the old policy's, where there is an advantage
    importance_weights: Tensor | None = None  # None: there are none, or they are computed per micro-batch
    values: Tensor | None = None  # [D, K] float32, on the CPU; None without a critic

    def record_first_logprob(self, rows: Tensor, logprob: Tensor) -> None:
        """Store log-probs ``[M, C, A]`` of the rows ``[M]`` that are evaluated for the first time."""
        new_N = torch.nonzero(~self.evaluated[rows]).flatten()
        if len(new_N):
            device = self.first_logprob.device
            self.first_logprob[moved(rows[new_N], device)] = logprob.detach()[moved(new_N, device)]
            self.evaluated[rows] = True

    def value_mask(self, batch: Batch) -> Tensor:
        """Mark values of valid decisions or steps: ``[D, K]`` bool; ``[D, 1]`` without a critic."""
        steps_DC = batch.mask.any(dim=2)
        per_step = self.values is not None and self.values.shape[1] > 1
        return steps_DC if per_step else steps_DC.any(dim=1, keepdim=True)


def prepare_batch(
    batch: Batch, recipe: Recipe, forward: PolicyForward, metrics: MetricAccumulator
) -> PreparedBatch:
    """Evaluate decisions whose old log-probs are needed; estimate advantages and staleness; collective."""
    evaluated = torch.zeros(len(batch.tasks), dtype=torch.bool)
    if not recipe.needs_old_policy_pass:
        nothing = torch.zeros(batch.mask.shape, device=forward.device)
        estimates = recipe.estimate(batch, None, forward.ranks)
        return PreparedBatch(estimates=estimates, first_logprob=nothing, evaluated=evaluated)
    values = None
    if recipe.advantages_need_old_policy:
        rows_R = torch.arange(len(batch.tasks))
        logprob, values = forward.evaluate_rows(batch, rows_R)
        values = values.cpu() if recipe.trains_critic and values is not None else None
        final_values = torch.zeros(len(batch.returns))
        if recipe.trains_critic:
            assert values is not None, "ppo needs a policy with a value head"
            if recipe.critic.truncation == "bootstrap":
                final_values = forward.final_values(batch).cpu()
        estimates = recipe.estimate(batch, OldPolicy(logprob.cpu(), values, final_values), forward.ranks)
    else:
        estimates = recipe.estimate(batch, None, forward.ranks)
        rows_R = _rows_with_advantage(batch, estimates, recipe)
        logprob, _ = forward.evaluate_rows(batch, rows_R)
    weights = _importance_weights(batch, logprob, recipe, estimates, rows_R, metrics)
    evaluated[rows_R] = True
    return PreparedBatch(
        estimates=estimates,
        first_logprob=logprob,
        evaluated=evaluated,
        old_known=True,
        importance_weights=None if recipe.importance_weights_move else weights,
        values=values,
    )


def _rows_with_advantage(batch: Batch, estimates: AdvantagesAndTargets, recipe: Recipe) -> Tensor:
    valid_D = batch.mask.flatten(1).any(dim=1)
    read_D = valid_D & has_advantage(estimates.advantages)
    if "whole_episodes" in recipe.needs:
        read_D = valid_D & (sum_per_episode(read_D.float(), batch.episode) > 0)
    return torch.nonzero(read_D).flatten()


def _importance_weights(
    batch: Batch,
    old_logprob: Tensor,
    recipe: Recipe,
    estimates: AdvantagesAndTargets,
    rows_R: Tensor,
    metrics: MetricAccumulator,
) -> Tensor | None:
    device, any_rows = old_logprob.device, bool(len(rows_R))
    rows_R = rows_R if any_rows else PADDING_ROW
    advantage_D = has_advantage(estimates.advantages)
    behaviour, episode, mask, lag, with_advantage_R = (
        moved(x[rows_R], device)
        for x in (batch.behaviour_logprob, batch.episode, batch.mask & any_rows, batch.lag, advantage_D)
    )
    here_R = moved(rows_R, device)
    old_logprob, behaviour = (torch.where(mask, x, 0.0) for x in (old_logprob[here_R], behaviour))
    proximal = recipe.proximal(old_logprob, old_logprob, behaviour, lag)
    weights = recipe.importance_weights(torch.where(mask, log_ratio(proximal, behaviour), 0.0), mask, episode)
    settings, level = recipe.correction_settings, recipe.algorithm.level
    policies = (old_logprob, proximal, behaviour)
    staleness_metrics(metrics, settings, level, *policies, mask, weights, episode, lag, with_advantage_R)
    if weights is None:
        return None
    all_weights = weights.new_ones(len(batch.tasks), *weights.shape[1:])
    all_weights[here_R] = weights
    return all_weights


# --- minibatches and micro-batches ---


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Inputs of the loss of a minibatch's or micro-batch's decisions, on the policy's device."""

    rows: Tensor  # [M] int64 on the CPU: decisions by index in the batch; a minibatch's last is padding
    mask: Tensor
    behaviour: Tensor
    lag: Tensor
    episode: Tensor
    advantages: Tensor  # [M, 1, 1] or [M, C, 1]
    unit_weights: Tensor  # [M, U, V] weight of each unit in the loss
    token_weights: Tensor  # [M, C, A] the same per token, for entropy and KL
    value_weights: Tensor  # [M, K]
    old_logprob: Tensor | None  # [M, C, A] where there is an advantage; None: those of this pass
    importance_weights: Tensor | None  # They broadcast to [M, U, V]; None: computed in the pass
    values: Tensor | None  # [M, K] before the update
    targets: Tensor | None

    def part(self, rows: slice | None) -> LossInputs:
        """Return a micro-batch of the rows; None: of the padding row."""
        rows = slice(-1, None) if rows is None else rows
        values: dict[str, Any] = {name: x if x is None else x[rows] for name, x in vars(self).items()}
        return LossInputs(**values)


def split_minibatches(
    episodes: int, minibatches: int, seed: tuple[int, ...], *, before: int = 0
) -> list[Tensor]:
    """Deal episodes to minibatches whose sizes differ by at most one: ``[E]`` int64 indices of each.

    Each rank continues after `before` episodes of lower ranks, so this holds over all ranks: an empty
    minibatch would still move the weights by the optimizer's momentum. A single minibatch keeps the order.
    """
    if minibatches == 1:
        return [torch.arange(episodes)]
    order = torch.from_numpy(np.random.default_rng(seed).permutation(episodes))
    return [order[(number - before) % minibatches :: minibatches] for number in range(minibatches)]


def build_minibatch(
    batch: Batch,
    prepared: PreparedBatch,
    episodes: Tensor,
    recipe: Recipe,
    forward: PolicyForward,
    max_decisions: int,
) -> LossInputs:
    """Collect the decisions of episodes ``[E]`` that can have a gradient, and a padding row; collective."""
    settings, device = recipe.algorithm, forward.device
    rows_M = torch.nonzero(torch.isin(batch.episode, episodes)).flatten()
    mask, values = batch.mask[rows_M], prepared.value_mask(batch)[rows_M]
    units = valid_units(mask, settings.level)
    sums = torch.tensor([units.sum(), mask.sum(), len(episodes), values.sum()], dtype=torch.float64)
    n_units, n_tokens, n_episodes, n_values = forward.ranks.sum(sums).tolist()
    teaches = mask.flatten(1).any(dim=1)
    if not (recipe.trains_critic or settings.entropy_coef or settings.kl_coef):
        teaches &= has_advantage(prepared.estimates.advantages[rows_M])
    kept = torch.nonzero(teaches).flatten()
    kept = kept[longest_first(forward.prompt_lengths([batch.tasks[row] for row in rows_M[kept].tolist()]))]
    rows = torch.cat([rows_M[kept], PADDING_ROW])

    def weights(valid: Tensor, number: float) -> Tensor:
        most = max_decisions * math.prod(valid.shape[1:])
        episode, kind = batch.episode[rows_M], settings.aggregation
        return aggregation_weights(valid, episode, kind, units=number, episodes=n_episodes, max_units=most)

    def padded(values: Tensor) -> Tensor:
        return moved(torch.cat([values[kept], values.new_zeros(1, *values.shape[1:])]), device)

    def of_rows(values: Any) -> Any:
        return None if values is None else moved(values[moved(rows, values.device)], device)

    return LossInputs(
        rows=rows,
        mask=padded(mask),
        behaviour=of_rows(batch.behaviour_logprob),
        lag=of_rows(batch.lag),
        episode=of_rows(batch.episode),
        advantages=of_rows(prepared.estimates.advantages),
        unit_weights=padded(weights(units, n_units)),
        token_weights=padded(weights(mask, n_tokens)),
        value_weights=padded(values.float() / max(n_values, 1.0)),
        old_logprob=of_rows(prepared.first_logprob if prepared.old_known else None),
        importance_weights=of_rows(prepared.importance_weights),
        values=of_rows(prepared.values),
        targets=of_rows(prepared.estimates.targets),
    )
