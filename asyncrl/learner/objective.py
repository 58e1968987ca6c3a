"""Computes the number to minimise for decisions that the current weights have just evaluated.

    loss = sum over units of counts * (w * objective's loss - entropy_coef * entropy + kl_coef * KL)
         + coef * sum over values of counts * value loss

Dimension letters used in this file:
    M  decisions of the micro-batch     C  steps per decision      A  numbers per step
    U, V  units of a decision (`levels`)     K  values of a decision: 1, or C
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learner.accumulator import MetricAccumulator
from asyncrl.learner.corrections import staleness_metrics
from asyncrl.learner.levels import valid_units
from asyncrl.learner.losses import kl_penalty, log_ratio, value_loss
from asyncrl.learner.minibatches import MicroBatch
from asyncrl.learner.recipe import Recipe
from asyncrl.observability import metrics_training as m
from asyncrl.policies.interface import EvaluateResult

LossAndMetrics = tuple[Tensor, MetricAccumulator]


def update_loss(
    recipe: Recipe, now: EvaluateResult, micro: MicroBatch, *, policy: bool = True
) -> LossAndMetrics:
    """Return the loss ``[]`` with gradient, and its metrics.

    Args:
        recipe: Correction, objective, coefficients.
        now: What the current weights say.
        micro: The decisions, on the policy's device.
        policy: False while only the critic learns.
    """
    # A token that top-k removed from one of the policies cannot be drawn any more: it teaches nothing.
    old_logprob = now.logprob.detach() if micro.old_logprob is None else micro.old_logprob
    mask = micro.mask & ~torch.isneginf(now.logprob) & ~torch.isneginf(old_logprob)
    logprob, old_logprob = (torch.where(mask, x, 0.0) for x in (now.logprob, old_logprob))
    terms: list[LossAndMetrics] = []
    if policy:
        terms.append(_policy_loss(recipe, logprob, old_logprob, mask, micro))
        terms.append(_regularisers(recipe, now, logprob, mask, micro))
    if micro.targets is not None:
        terms.append(_value_loss(recipe, now, micro))
    loss = torch.stack([term for term, _ in terms]).sum()
    metrics = MetricAccumulator()
    for _, found in terms:
        metrics.fold(found)
    metrics.total(m.LOSS, loss)
    return loss, metrics


def _policy_loss(
    recipe: Recipe, logprob: Tensor, old_logprob: Tensor, mask: Tensor, micro: MicroBatch
) -> LossAndMetrics:
    """The objective's loss, weighed and counted; also how stale decisions are that are seen first here."""
    metrics, level = MetricAccumulator(), recipe.algorithm.level
    behaviour = torch.where(mask, micro.behaviour, 0.0)
    proximal = recipe.proximal(logprob, old_logprob, behaviour, micro.lag)
    weights = micro.weights
    if weights is None:
        ratios = torch.where(mask, log_ratio(proximal, behaviour), 0.0)
        weights = recipe.weights(ratios, mask, micro.episode)
    if micro.old_logprob is None:
        settings = recipe.correction_settings
        stale = staleness_metrics(settings, level, old_logprob, behaviour, mask, weights, micro.episode)
        metrics.fold(stale)
    terms = recipe.unit_loss(logprob, proximal, mask, micro.advantages)
    units = valid_units(mask, level)
    weighed = micro.counts * terms.loss if weights is None else micro.counts * weights * terms.loss
    loss = torch.where(units, weighed, 0.0).sum()
    metrics.total(m.POLICY_LOSS, loss)
    metrics.mean(m.CLIP_FRACTION, terms.clipped.float(), units)
    metrics.mean(m.DUAL_CLIPPED, terms.dual_clipped.float(), units)
    metrics.mean(m.CLIPPED_RATIO, terms.clipped_ratio, units)
    metrics.mean(m.RATIO, log_ratio(logprob, proximal).exp(), mask)
    return loss, metrics


def _regularisers(
    recipe: Recipe, now: EvaluateResult, logprob: Tensor, mask: Tensor, micro: MicroBatch
) -> LossAndMetrics:
    """Entropy bonus and KL penalty."""
    metrics, chosen = MetricAccumulator(), recipe.algorithm
    metrics.mean(m.ENTROPY_LOSS, now.entropy, micro.mask)
    loss = torch.zeros((), device=logprob.device)
    if chosen.entropy_coef:
        loss = loss - chosen.entropy_coef * torch.where(mask, micro.token_counts * now.entropy, 0.0).sum()
    if micro.reference is not None:
        reachable = mask & torch.isfinite(micro.reference)
        reference = torch.where(reachable, micro.reference, logprob.detach())
        penalty = torch.where(reachable, kl_penalty(logprob, reference, chosen.kl_estimator), 0.0)
        metrics.mean(m.KL_REFERENCE, penalty, reachable)
        loss = loss + chosen.kl_coef * (micro.token_counts * penalty).sum()
    return loss, metrics


def _value_loss(recipe: Recipe, now: EvaluateResult, micro: MicroBatch) -> LossAndMetrics:
    """The critic's loss times its coefficient."""
    assert now.value is not None
    assert micro.values is not None
    assert micro.targets is not None
    metrics, critic = MetricAccumulator(), recipe.critic
    losses, clipped = value_loss(
        now.value, micro.values, micro.targets, clip=critic.value_clip, huber=critic.huber
    )
    loss = (micro.value_counts * losses).sum()
    metrics.total(m.VALUE_LOSS, loss)
    metrics.mean(m.VALUE_CLIP_RATIO, clipped.float(), micro.value_counts > 0)
    return critic.coef * loss, metrics
