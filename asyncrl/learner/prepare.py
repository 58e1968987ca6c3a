"""Looks at a batch once before the first step: old log-probs and values, advantages, importance weights.

Dimension letters used in this file:
    D  decisions of the batch      M  of a micro-batch      C  steps per decision      A  numbers per step
    U, V  units of a decision (`levels`)      K  values of a decision: 1, or C
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.learner.accumulator import MetricAccumulator
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import staleness_metrics
from asyncrl.learner.forward import PolicyForward
from asyncrl.learner.interface import AdvantagesAndTargets, OldPolicy
from asyncrl.learner.losses import log_ratio
from asyncrl.learner.recipe import Recipe


@dataclass(kw_only=True)
class PreparedBatch:
    """What was known before the first step, and what the first pass over a decision adds to it."""

    estimates: AdvantagesAndTargets
    old_logprob: Tensor | None = None
    """``[D, C, A]`` float32 log-probs on the policy's device; None: the first epoch finds them."""
    weights: Tensor | None = None
    """Importance weights of the batch; None: there are none, or they are computed per micro-batch."""
    values: Tensor | None = None
    """``[D, K]`` float32, on the CPU; None without a critic."""
    first_logprob: Tensor
    """``[D, C, A]`` float32 log-probs when a decision was first evaluated in this update."""
    evaluated: Tensor
    """``[D]`` bool, on the CPU: which decisions were evaluated."""

    def record_old_logprob(self, rows: Tensor, logprob: Tensor) -> None:
        """Remember the log-probs of decisions that are evaluated for the first time.

        Args:
            rows: ``[M]`` int64, on the CPU; which decisions of the batch.
            logprob: ``[M, C, A]`` float32, nats.
        """
        if not self.evaluated[rows].all():
            self.first_logprob[rows.to(self.first_logprob.device)] = logprob.detach()
            self.evaluated[rows] = True

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
    """Evaluate the batch where later stages need it as it was, and decide what it teaches.

    Returns:
        What was found, and how stale the batch is if all of it was evaluated.
    """
    decisions = len(batch.tasks)
    if not recipe.needs_old_policy_pass:
        prepared = PreparedBatch(
            estimates=recipe.estimate(batch, None, forward.ranks),
            first_logprob=torch.zeros(batch.mask.shape, device=forward.device),
            evaluated=torch.zeros(decisions, dtype=torch.bool),
        )
        return prepared, MetricAccumulator()
    old_logprob, values = forward.evaluate_all(batch)
    final_values = torch.zeros(len(batch.returns))
    if recipe.trains_critic:
        assert values is not None, "ppo needs a policy with a value head"
        if recipe.critic.truncation == "bootstrap":
            final_values = forward.final_values(batch).cpu()
    values = values.cpu() if recipe.trains_critic and values is not None else None
    old = OldPolicy(old_logprob.cpu(), values, final_values)
    estimates = recipe.estimate(batch, old, forward.ranks)
    taught = (estimates.advantages != 0).flatten(1).any(dim=1)
    weights, metrics = _weights(batch, old_logprob, recipe, taught)
    prepared = PreparedBatch(
        estimates=estimates,
        old_logprob=old_logprob,
        weights=None if recipe.weights_move else weights,
        values=values,
        first_logprob=old_logprob.clone(),
        evaluated=torch.ones(decisions, dtype=torch.bool),
    )
    return prepared, metrics


def _weights(
    batch: Batch, old_logprob: Tensor, recipe: Recipe, taught: Tensor
) -> tuple[Tensor | None, MetricAccumulator]:
    """Importance weights of the whole batch, and how stale what is taught something is."""
    device = old_logprob.device
    behaviour, episode = batch.logprob_behaviour.to(device), batch.episode.to(device)
    mask, lag, taught = (x.to(device) for x in (batch.mask, batch.lag, taught))
    old_logprob, behaviour = (torch.where(mask, x, 0.0) for x in (old_logprob, behaviour))
    proximal = recipe.proximal(old_logprob, old_logprob, behaviour, lag)
    weights = recipe.weights(torch.where(mask, log_ratio(proximal, behaviour), 0.0), mask, episode)
    settings, level = recipe.correction_settings, recipe.algorithm.level
    policies = (old_logprob, proximal, behaviour)
    metrics = staleness_metrics(settings, level, *policies, mask, weights, episode, lag, taught)
    return weights, metrics
