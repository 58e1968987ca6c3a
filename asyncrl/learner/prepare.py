"""Looks at a batch once before the first step: old log-probs and values, advantages, importance weights.

Only decisions whose old log-probs something reads are evaluated: all of them for a critic, otherwise those
with an advantage.

Dimension letters used in this file:
    D  decisions of the batch      R  those that are evaluated      M  those of a micro-batch
    N  those of them that are new  C  steps per decision      A  numbers per step
    U, V  units of a decision (`losses`)      K  values of a decision: 1, or C
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.devices.tensors import moved
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import staleness_metrics
from asyncrl.learner.forward import ROW_IN_STEP, PolicyForward
from asyncrl.learner.interface import AdvantagesAndTargets, OldPolicy
from asyncrl.learner.losses import log_ratio, sum_per_episode, taught
from asyncrl.learner.metrics import MetricAccumulator
from asyncrl.learner.recipe import Recipe


@dataclass(kw_only=True)
class PreparedBatch:
    """What was known before the first step, and what the first pass over a decision adds to it."""

    estimates: AdvantagesAndTargets
    old_logprob: Tensor | None = None
    """``[D, C, A]`` float32 log-probs on the policy's device, of what is taught something at least; None: the
    first epoch finds them."""
    weights: Tensor | None = None
    """Importance weights of the batch; None: there are none, or they are computed per micro-batch."""
    values: Tensor | None = None
    """``[D, K]`` float32, on the CPU; None without a critic."""
    first_logprob: Tensor
    """``[D, C, A]`` float32 log-probs when a decision was first evaluated in this update."""
    evaluated: Tensor
    """``[D]`` bool, on the CPU: which decisions were evaluated."""

    def record_first_logprob(self, rows: Tensor, logprob: Tensor) -> None:
        """Remember the log-probs of decisions that are evaluated for the first time.

        Args:
            rows: ``[M]`` int64, on the CPU; which decisions of the batch.
            logprob: ``[M, C, A]`` float32, nats.
        """
        new_N = torch.nonzero(~self.evaluated[rows]).flatten()
        if len(new_N):
            device = self.first_logprob.device
            self.first_logprob[moved(rows[new_N], device)] = logprob.detach()[moved(new_N, device)]
            self.evaluated[rows] = True

    def first_seen(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs of rows ``[M]`` when first evaluated, and whether they were evaluated at all.

        On the device of `first_logprob`: ``[M, C, A]`` float32, nats, and ``[M, 1, 1]`` bool.
        """
        device = self.first_logprob.device
        return self.first_logprob[moved(rows, device)], moved(self.evaluated[rows], device)[:, None, None]

    def end_epoch(self) -> None:
        """From the second epoch on, what the first one found is the policy before the update."""
        if self.old_logprob is None:
            self.old_logprob = self.first_logprob

    def value_mask(self, batch: Batch) -> Tensor:
        """Say which values are of a valid decision or step: ``[D, K]`` bool; ``[D, 1]`` without a critic."""
        steps_DC = batch.mask.any(dim=2)
        wide = self.values is not None and self.values.shape[1] > 1
        return steps_DC if wide else steps_DC.any(dim=1, keepdim=True)


def prepare_batch(
    batch: Batch, recipe: Recipe, forward: PolicyForward
) -> tuple[PreparedBatch, MetricAccumulator]:
    """Evaluate decisions where later stages need them as they were, and decide what the batch teaches.

    Returns:
        What was found, and how stale the batch is if all that it teaches was evaluated.
    """
    if not recipe.needs_old_policy_pass:
        prepared = PreparedBatch(
            estimates=recipe.estimate(batch, None, forward.ranks),
            first_logprob=torch.zeros(batch.mask.shape, device=forward.device),
            evaluated=torch.zeros(len(batch.tasks), dtype=torch.bool),
        )
        return prepared, MetricAccumulator()
    values = None
    if recipe.estimates_look_back:
        rows_R = torch.arange(len(batch.tasks))
        old_logprob, old = _look_back(batch, recipe, forward, rows_R)
        estimates, values = recipe.estimate(batch, old, forward.ranks), old.values
    else:
        estimates = recipe.estimate(batch, None, forward.ranks)
        rows_R = rows_that_teach(batch, estimates, recipe)
        old_logprob, _ = forward.evaluate_rows(batch, rows_R)
    weights, metrics = _weights(batch, old_logprob, recipe, estimates, rows_R)
    evaluated = torch.zeros(len(batch.tasks), dtype=torch.bool)
    evaluated[rows_R] = True
    prepared = PreparedBatch(
        estimates=estimates,
        old_logprob=old_logprob,
        weights=None if recipe.weights_move else weights,
        values=values,
        first_logprob=old_logprob.clone(),
        evaluated=evaluated,
    )
    return prepared, metrics


def _look_back(
    batch: Batch, recipe: Recipe, forward: PolicyForward, rows_R: Tensor
) -> tuple[Tensor, OldPolicy]:
    """Ask the policy before the update about rows ``[R]``; its log-probs also as they are on its device."""
    old_logprob, values = forward.evaluate_rows(batch, rows_R)
    final_values = torch.zeros(len(batch.returns))
    if recipe.trains_critic:
        assert values is not None, "ppo needs a policy with a value head"
        if recipe.critic.truncation == "bootstrap":
            final_values = forward.final_values(batch).cpu()
    values = values.cpu() if recipe.trains_critic and values is not None else None
    return old_logprob, OldPolicy(old_logprob.cpu(), values, final_values)


def rows_that_teach(batch: Batch, estimates: AdvantagesAndTargets, recipe: Recipe) -> Tensor:
    """Find the decisions whose old log-probs anything reads: ``[R]`` int64 on the CPU.

    A loss is read where there is an advantage, and a weight of a whole episode is made of all its decisions.
    """
    valid_D = batch.mask.flatten(1).any(dim=1)
    wanted_D = valid_D & taught(estimates.advantages)
    if "whole_episodes" in recipe.needs:
        wanted_D = valid_D & (sum_per_episode(wanted_D.float(), batch.episode) > 0)
    return torch.nonzero(wanted_D).flatten()


def _weights(
    batch: Batch, old_logprob: Tensor, recipe: Recipe, estimates: AdvantagesAndTargets, rows_R: Tensor
) -> tuple[Tensor | None, MetricAccumulator]:
    """Return importance weights ``[D, ...]`` (1 for rows not evaluated) and the staleness metrics."""
    device, counts = old_logprob.device, bool(len(rows_R))
    rows_R = rows_R if counts else ROW_IN_STEP
    behaviour, episode, mask, lag, taught_R = (
        moved(x[rows_R], device)
        for x in (
            batch.logprob_behaviour,
            batch.episode,
            batch.mask & counts,
            batch.lag,
            taught(estimates.advantages),
        )
    )
    here_R = moved(rows_R, device)
    old_logprob, behaviour = (torch.where(mask, x, 0.0) for x in (old_logprob[here_R], behaviour))
    proximal = recipe.proximal(old_logprob, old_logprob, behaviour, lag)
    weights = recipe.weights(torch.where(mask, log_ratio(proximal, behaviour), 0.0), mask, episode)
    settings, level = recipe.correction_settings, recipe.algorithm.level
    policies = (old_logprob, proximal, behaviour)
    metrics = staleness_metrics(settings, level, *policies, mask, weights, episode, lag, taught_R)
    if weights is None:
        return None, metrics
    all_weights = weights.new_ones(len(batch.tasks), *weights.shape[1:])
    all_weights[here_R] = weights
    return all_weights, metrics
