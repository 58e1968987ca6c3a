"""A micro-batch seen by the current weights in, the number to minimise and its readings out.

    loss = sum over units of counts * (w * clipped loss - entropy_coef * entropy + kl_coef * KL)
         + coef * sum over values of counts * value loss

Dimension letters used in this file:
    M  decisions of the micro-batch     C  steps per decision (8)      A  action dimensions (7)
    U, V  units of a decision (`levels`)     K  values of a decision: 1 or 8
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config.run import TrainConfig
from asyncrl.learner.accumulator import MetricAccumulator
from asyncrl.learner.corrections import (
    WEIGHTED,
    correction_level,
    importance_weights,
    k3,
    log_linear_proximal,
    log_ratio,
    vetoed,
)
from asyncrl.learner.levels import reduce_to_level, summed, valid_units
from asyncrl.learner.losses import MAX_LOG_RATIO, UnitLoss, cispo_loss, clipped_loss, kl_penalty, value_loss
from asyncrl.observability import metrics_training as m
from asyncrl.policies.interface import EvaluateResult


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Decisions with all that their loss needs, on the policy's device."""

    mask: Tensor
    """``[M, C, A]`` bool."""
    behaviour: Tensor
    """``[M, C, A]`` float32 log-probs of the policy that sampled."""
    old_logprob: Tensor | None
    """``[M, C, A]`` float32 log-probs before the update; None: this pass finds them."""
    weights: Tensor | None
    """``[M, U, V]`` importance weights; None: computed from `start` and `behaviour`."""
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
    reference: Tensor | None = None
    """``[M, C, A]`` float32 log-probs of the reference policy."""
    values: Tensor | None = None
    """``[M, K]`` float32 critic's values before the update."""
    targets: Tensor | None = None
    """``[M, K]`` float32."""
    value_counts: Tensor | None = None
    """``[M, K]`` float32."""


class Objective:
    """The loss that the settings describe. Adds its readings to a tally."""

    def __init__(self, config: TrainConfig) -> None:
        self.algorithm, self.correction, self.critic = config.algorithm, config.correction, config.critic

    def __call__(
        self, now: EvaluateResult, micro: MicroBatch, accumulator: MetricAccumulator, *, policy: bool = True
    ) -> Tensor:
        """Return the loss ``[]``.

        Args:
            now: What the current weights say.
            micro: The decisions.
            accumulator: Takes the readings.
            policy: False while only the critic learns.
        """
        # A token that top-k removed from one of the policies cannot be drawn any more: it teaches nothing.
        old_logprob = now.logprob.detach() if micro.old_logprob is None else micro.old_logprob
        mask = micro.mask & ~torch.isneginf(now.logprob) & ~torch.isneginf(old_logprob)
        logprob, old_logprob = (torch.where(mask, x, 0.0) for x in (now.logprob, old_logprob))
        parts = []
        if policy:
            parts.append(self._policy_loss(logprob, old_logprob, mask, micro, accumulator))
            parts.append(self._regularisers(now, logprob, mask, micro, accumulator))
        if micro.targets is not None:
            parts.append(self._value_loss(now, micro, accumulator))
        loss = torch.stack(parts).sum()
        accumulator.total(m.LOSS, loss)
        return loss

    def _policy_loss(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        mask: Tensor,
        micro: MicroBatch,
        accumulator: MetricAccumulator,
    ) -> Tensor:
        behaviour = torch.where(mask, micro.behaviour, 0.0)
        proximal = self.proximal(logprob, old_logprob, behaviour, micro.lag)
        weights = micro.weights
        if weights is None:
            weights = self.weights(proximal, behaviour, mask, micro.episode)
        if micro.old_logprob is None:
            self.read_staleness(old_logprob, behaviour, mask, weights, micro.episode, accumulator)
        terms = self.unit_loss(logprob, proximal, mask, micro.advantages)
        units = valid_units(mask, self.algorithm.level)
        loss = torch.where(units, micro.counts * weights * terms.loss, 0.0).sum()
        accumulator.total(m.POLICY_LOSS, loss)
        accumulator.mean(m.CLIP_FRACTION, terms.clipped.float(), units)
        accumulator.mean(m.DUAL_CLIPPED, terms.dual_clipped.float(), units)
        accumulator.mean(m.CLIPPED_RATIO, terms.clipped_ratio, units)
        accumulator.mean(m.RATIO, log_ratio(logprob, proximal).exp(), mask)
        return loss

    def proximal(self, logprob: Tensor, old_logprob: Tensor, behaviour: Tensor, lag: Tensor) -> Tensor:
        """Log-probs of the policy that the clipped ratio is taken against."""
        if self.correction.kind == "naive":
            return behaviour
        if self.correction.kind in WEIGHTED and self.correction.proximal == "log_linear":
            return log_linear_proximal(logprob, behaviour, lag)
        return old_logprob

    def weights(self, proximal: Tensor, behaviour: Tensor, mask: Tensor, episode: Tensor) -> Tensor:
        """Importance weights ``[M, U, V]``; see `corrections.importance_weights`."""
        ratios = torch.where(mask, log_ratio(proximal, behaviour), 0.0)
        return importance_weights(self.correction, ratios, mask, episode, self.algorithm.level)

    def unit_loss(self, logprob: Tensor, proximal: Tensor, mask: Tensor, advantages: Tensor) -> UnitLoss:
        """The objective's loss per unit ``[M, U, V]``, before weights and counts."""
        chosen, level = self.algorithm, self.algorithm.level
        ratios = summed(logprob - proximal, mask, level, mean=chosen.objective == "gspo")
        if chosen.objective == "cispo":
            return cispo_loss(
                summed(logprob, mask, level),
                ratios,
                advantages,
                clip_low=chosen.clip_low,
                clip_high=chosen.clip_high,
            )
        return clipped_loss(
            ratios,
            advantages,
            clip_low=chosen.clip_low,
            clip_high=chosen.clip_high,
            dual_clip=chosen.dual_clip,
        )

    def _regularisers(
        self,
        now: EvaluateResult,
        logprob: Tensor,
        mask: Tensor,
        micro: MicroBatch,
        accumulator: MetricAccumulator,
    ) -> Tensor:
        accumulator.mean(m.ENTROPY_LOSS, now.entropy, micro.mask)
        loss = torch.zeros((), device=logprob.device)
        if self.algorithm.entropy_coef:
            entropy = torch.where(mask, micro.token_counts * now.entropy, 0.0).sum()
            loss = loss - self.algorithm.entropy_coef * entropy
        if micro.reference is not None:
            reachable = mask & torch.isfinite(micro.reference)
            reference = torch.where(reachable, micro.reference, logprob.detach())
            penalty = kl_penalty(logprob, reference, self.algorithm.kl_estimator)
            penalty = torch.where(reachable, penalty, 0.0)
            accumulator.mean(m.KL_REFERENCE, penalty, reachable)
            loss = loss + self.algorithm.kl_coef * (micro.token_counts * penalty).sum()
        return loss

    def _value_loss(self, now: EvaluateResult, micro: MicroBatch, accumulator: MetricAccumulator) -> Tensor:
        assert now.value is not None
        assert micro.values is not None
        assert micro.targets is not None
        assert micro.value_counts is not None
        losses, clipped = value_loss(
            now.value, micro.values, micro.targets, clip=self.critic.value_clip, huber=self.critic.huber
        )
        valid = micro.value_counts > 0
        loss = (micro.value_counts * losses).sum()
        accumulator.total(m.VALUE_LOSS, loss)
        accumulator.mean(m.VALUE_CLIP_RATIO, clipped.float(), valid)
        return self.critic.coef * loss

    def read_staleness(
        self,
        old_logprob: Tensor,
        behaviour: Tensor,
        mask: Tensor,
        weights: Tensor,
        episode: Tensor,
        accumulator: MetricAccumulator,
    ) -> None:
        """Compare the policy before the update with the one that sampled, once per decision and update."""
        ratios = torch.where(mask, log_ratio(old_logprob, behaviour), 0.0)
        accumulator.mean(m.MISMATCH_KL, k3(ratios), mask)
        level = correction_level(self.correction, self.algorithm.level)
        units = valid_units(mask, "chunk" if level == "episode" else level)
        raw = reduce_to_level(ratios, mask, level, episode, mean=self.correction.geometric)
        raw = raw.clamp(max=MAX_LOG_RATIO).exp()
        accumulator.moments("ratio", raw, units)
        accumulator.largest(m.IMPORTANCE_MAX, raw, units)
        if self.correction.kind in WEIGHTED:
            accumulator.mean(m.IMPORTANCE_CAPPED, (weights != raw).float(), units)
            accumulator.mean(m.IMPORTANCE_MEAN, weights, units)
            accumulator.moments("weight", weights, units)
        if self.correction.veto:
            dropped = vetoed(ratios, mask, episode, self.correction.veto)[:, None, None]
            accumulator.mean(m.VETOED, dropped.float(), units)
