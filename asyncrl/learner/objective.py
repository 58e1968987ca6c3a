"""Computes the number to minimise for decisions that the current weights have just evaluated.

    loss = sum over units of counts * (w * objective's loss - entropy_coef * entropy + kl_coef * KL)
         + coef * sum over values of counts * value loss

Dimension letters used in this file:
    M  decisions of the micro-batch     C  steps per decision      A  numbers per step
    U, V  units of a decision (`losses`)     K  values of a decision: 1, or C
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learner.corrections import beyond_trust_region, staleness_metrics, truncated_weights
from asyncrl.learner.losses import kl_penalty, log_ratio, taught, valid_units, value_loss
from asyncrl.learner.metrics import MetricAccumulator
from asyncrl.learner.minibatches import MicroBatch
from asyncrl.learner.recipe import Recipe
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import LAG_RANGES
from asyncrl.policies.interface import EvaluateResult

LossAndMetrics = tuple[Tensor, MetricAccumulator]


def update_loss(
    recipe: Recipe,
    now: EvaluateResult,
    micro: MicroBatch,
    *,
    policy: bool = True,
    trust_region: float = 0.0,
) -> LossAndMetrics:
    """Return the loss ``[]`` with gradient, and its metrics.

    Args:
        policy: False while only the critic learns.
        trust_region: Bound of `beyond_trust_region`; 0: none.
    """
    # A token that top-k would not draw any more has a number all the same: `action_distribution` keeps it.
    old_logprob, mask = now.logprob.detach(), micro.mask
    if micro.old_logprob is not None:  # Of what teaches nothing it need not be known.
        old_logprob = torch.where(taught(micro.advantages)[:, None, None], micro.old_logprob, old_logprob)
    logprob, old_logprob = (torch.where(mask, x, 0.0) for x in (now.logprob, old_logprob))
    terms: list[LossAndMetrics] = []
    if policy:
        terms.append(_policy_loss(recipe, logprob, old_logprob, mask, micro, trust_region))
        terms.append(_regularisers(recipe, now, logprob, micro))
    if micro.targets is not None:
        terms.append(_value_loss(recipe, now, micro))
    loss = torch.stack([term for term, _ in terms]).sum()
    metrics = MetricAccumulator()
    for _, found in terms:
        metrics.fold(found)
    metrics.total(m.LOSS, loss)
    return loss, metrics


def _policy_loss(
    recipe: Recipe,
    logprob: Tensor,
    old_logprob: Tensor,
    mask: Tensor,
    micro: MicroBatch,
    trust_region: float,
) -> LossAndMetrics:
    """The objective's loss, weighed and counted; also how stale decisions are that are seen first here."""
    metrics, level = MetricAccumulator(), recipe.algorithm.level
    behaviour = torch.where(mask, micro.behaviour, 0.0)
    proximal = recipe.proximal(logprob, old_logprob, behaviour, micro.lag)
    weights = micro.weights
    if weights is None:
        ratios = torch.where(mask, log_ratio(proximal, behaviour), 0.0)
        weights = recipe.weights(ratios, mask, micro.episode)
    settings, taught_M = recipe.correction_settings, taught(micro.advantages)
    if micro.old_logprob is None:
        policies = (old_logprob, proximal, behaviour)
        metrics.fold(
            staleness_metrics(settings, level, *policies, mask, weights, micro.episode, micro.lag, taught_M)
        )
    terms = recipe.unit_loss(logprob, proximal, mask, micro.advantages)
    units = valid_units(mask, level)
    weighed = micro.counts * terms.loss if weights is None else micro.counts * weights * terms.loss
    beyond = torch.zeros_like(units)
    if trust_region:
        beyond = beyond_trust_region(logprob, behaviour, mask, micro.advantages, level, trust_region)
    loss = torch.where(units & ~beyond, weighed, 0.0).sum()
    metrics.total(m.POLICY_LOSS, loss)
    read = units & taught_M[:, None, None]
    metrics.mean(m.CLIP_FRACTION, terms.clipped.float(), read)
    metrics.mean(m.DUAL_CLIPPED, terms.dual_clipped.float(), read)
    metrics.mean(m.CLIPPED_RATIO, terms.clipped_ratio, read)
    metrics.mean(m.OUTSIDE_TRUST_REGION, beyond.float(), read)
    metrics.mean(m.RATIO, log_ratio(logprob, proximal).exp(), mask & taught_M[:, None, None])
    without_gradient = (beyond | terms.clipped | terms.dual_clipped).float()
    for lags, metric in zip(LAG_RANGES, m.CLIPPED_AT_LAG, strict=True):
        metrics.mean(metric, without_gradient, read & lags.holds(micro.lag)[:, None, None])
    return loss, metrics


def _regularisers(recipe: Recipe, now: EvaluateResult, logprob: Tensor, micro: MicroBatch) -> LossAndMetrics:
    """Entropy bonus and KL penalty."""
    metrics, chosen, mask = MetricAccumulator(), recipe.algorithm, micro.mask
    read = mask & taught(micro.advantages)[:, None, None]
    metrics.mean(m.ENTROPY_LOSS, now.entropy, read)
    loss = torch.zeros((), device=logprob.device)
    if chosen.entropy_coef:
        loss = loss - chosen.entropy_coef * torch.where(mask, micro.token_counts * now.entropy, 0.0).sum()
    if micro.reference is not None:
        reachable = mask & torch.isfinite(micro.reference)
        reference = torch.where(reachable, micro.reference, logprob.detach())
        penalty = torch.where(reachable, kl_penalty(logprob, reference, chosen.kl_estimator), 0.0)
        weights = torch.ones_like(penalty)
        if "behaviour" in recipe.needs:
            behind = torch.where(mask, log_ratio(logprob, micro.behaviour), 0.0)
            weights = truncated_weights(behind, cap=recipe.correction_settings.max_weight)
        metrics.mean(m.KL_REFERENCE, weights * penalty, reachable & read)
        loss = loss + chosen.kl_coef * (micro.token_counts * weights * penalty).sum()
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
