"""Corrections for samples of older policies: importance weights and proximal policies.

behaviour  the policy that sampled (its log-probs travel with the episode)
proximal   the policy that the clipped ratio is taken against: the learner's at the start of the update
current    the policy that is being optimised

    kind        proximal policy                   importance weight w (multiplies the clipped loss)
    none        the learner's                     1: samples count as fresh
    naive       the behaviour policy              1: PPO's own ratio, current / behaviour, does the correction
    tis         the learner's                     clip(proximal / behaviour, low, cap)
    mis         the learner's                     proximal / behaviour inside [low, cap], 0 outside
    decoupled   the learner's                     proximal / behaviour up to cap, 0 above
    vtrace      the learner's                     1: `advantages.vtrace` corrects advantages and targets

Units beyond the trust region (any kind) stay in the denominator of the loss. Weights are detached; log-probs
are in nats. D decisions, C steps, A numbers per step, U, V units (`losses`), B episodes, T time steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.config.algorithm import CorrectionLevel, CorrectionSettings, Level
from asyncrl.learner.advantages import vtrace
from asyncrl.learner.losses import MAX_LOG_RATIO, log_ratio, reduce_to_level, summed, valid_units
from asyncrl.learner.update_metrics import MetricAccumulator
from asyncrl.observability import metrics_training as m


class NoCorrection:
    """Counts every sample as fresh."""

    def __init__(self, settings: CorrectionSettings) -> None:
        self.needs: frozenset[str] = frozenset({"old_policy"})

    def weights(self, log_ratios: Tensor, mask: Tensor, episode: Tensor, level: Level) -> None:
        """Return None: every weight is 1."""


class Naive:
    """Takes the clipped ratio against the policy that sampled."""

    def __init__(self, settings: CorrectionSettings) -> None:
        self.needs: frozenset[str] = frozenset({"behaviour"})

    def weights(self, log_ratios: Tensor, mask: Tensor, episode: Tensor, level: Level) -> None:
        """Return None: every weight is 1."""

    def proximal(self, logprob: Tensor, old_logprob: Tensor, behaviour: Tensor, lag: Tensor) -> Tensor:
        """Return the policy that sampled."""
        return behaviour


class TruncatedImportanceSampling:
    """Multiplies the loss by truncated importance weights."""

    def __init__(self, settings: CorrectionSettings) -> None:
        self.settings = settings
        self.low = 0.0 if settings.kind == "decoupled" else settings.min_weight
        self.cap = settings.max_weight
        whole = {"whole_episodes"} if settings.level == "episode" else set()
        self.needs: frozenset[str] = frozenset({"behaviour", "old_policy"} | whole)

    def limit(self, log_ratios: Tensor) -> Tensor:
        """Compute weights from log-ratios of any shape."""
        return truncated_weights(log_ratios, low=self.low, cap=self.cap)

    def weights(self, log_ratios: Tensor, mask: Tensor, episode: Tensor, level: Level) -> Tensor:
        """Compute the importance weights of the units of --correction.level."""
        own = correction_level(self.settings, level)
        return self.limit(reduce_to_level(log_ratios, mask, own, episode, mean=self.settings.geometric))


class MaskedImportanceSampling(TruncatedImportanceSampling):
    """Multiplies the loss by importance weights, 0 outside the limits (mis, decoupled)."""

    def limit(self, log_ratios: Tensor) -> Tensor:
        """Compute `masked_weights`."""
        return masked_weights(log_ratios, low=self.low, cap=self.cap)


class VTrace:
    """Corrects the advantages and the critic's targets in place of the loss."""

    def __init__(self, settings: CorrectionSettings) -> None:
        self.needs: frozenset[str] = frozenset({"behaviour", "critic", "whole_episodes", "old_policy"})

    def weights(self, log_ratios: Tensor, mask: Tensor, episode: Tensor, level: Level) -> None:
        """Return None: the advantages contain the weights."""

    estimates = staticmethod(vtrace)


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(q || p) per sample of q: ``r - 1 - log r >= 0``, ``r = p / q`` (J. Schulman, 2020)."""
    # For metrics alone: a sample of x nats counts e^x. From there on its tangent takes its place.
    near = log_ratio.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(near) - near + torch.expm1(near.detach()) * (log_ratio - near)


def truncated_weights(log_ratios: Tensor, *, low: float = 0.0, cap: float) -> Tensor:
    """Compute ``clip(r, low, cap)`` (truncated importance sampling, TIS).

    Sources: E. Ionides, "Truncated Importance Sampling" (2008); per token on a clipped loss, F. Yao et al.,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    return log_ratios.detach().clamp(max=MAX_LOG_RATIO).exp().clamp(low, cap)


def masked_weights(log_ratios: Tensor, *, low: float = 0.0, cap: float) -> Tensor:
    """Compute ``r`` from `low` to `cap`, 0 outside (masked importance sampling, MIS).

    Sources: per token IcePop, arXiv 2510.18855; ``low = 0``: AReaL's decoupled objective, arXiv 2505.24298.
    """
    ratios = log_ratios.detach().clamp(max=MAX_LOG_RATIO).exp()
    return torch.where((ratios < low) | (ratios > cap), 0.0, ratios)  # NaN stays.


def beyond_trust_region(
    logprob: Tensor, behaviour: Tensor, mask: Tensor, advantages: Tensor, level: Level, bound: float
) -> Tensor:
    """Mark the units ``[D, U, V]`` that moved too far from the behaviour policy, in advantage's direction.

    ``pi - mu > bound`` where A > 0, ``mu - pi > bound`` where A < 0, with ``pi`` and ``mu`` a unit's
    probability: of several tokens, the geometric mean. Source: DPPO with the total-variation mask (prime-rl).
    """
    now, then = (summed(x.detach(), mask, level, mean=True).exp() for x in (logprob, behaviour))
    return torch.sign(advantages.detach()) * (now - then) > bound


def correction_level(settings: CorrectionSettings, level: Level) -> CorrectionLevel:
    """Return the unit of an importance weight; `level` is the objective's."""
    return level if settings.level == "auto" else settings.level


def staleness_metrics(
    metrics: MetricAccumulator,
    settings: CorrectionSettings,
    level: Level,
    old_logprob: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    episode: Tensor,
    lag: Tensor,
    with_advantage: Tensor,
) -> None:
    """Compare the policy before the update with the one that sampled; once per decision and update.

    `with_advantage`: ``[D]`` bool; some recipes do not evaluate decisions without an advantage.
    """
    own = correction_level(settings, level)
    valid = mask & with_advantage[:, None, None]
    units = valid_units(valid, "decision" if own == "episode" else own)

    def at_level(log_ratios: Tensor) -> Tensor:
        reduced = reduce_to_level(log_ratios, mask, own, episode, mean=settings.geometric)
        return reduced.clamp(max=MAX_LOG_RATIO).exp()

    log_ratios, weighed = (
        torch.where(mask, log_ratio(logprob, behaviour), 0.0) for logprob in (old_logprob, proximal)
    )
    raw, mismatch = at_level(log_ratios), k3(log_ratios)
    metrics.mean(m.MISMATCH_KL, mismatch, valid)
    metrics.moments("ratio", raw, units)
    metrics.largest(m.IMPORTANCE_MAX, raw, units)
    metrics.mean_by_lag(m.MISMATCH_KL_AT_LAG, mismatch, valid, lag)
    metrics.mean_by_lag(m.RATIO_AT_LAG, raw, units, lag)
    if weights is not None:
        metrics.mean(m.IMPORTANCE_CAPPED, (weights != at_level(weighed)).float(), units)
        metrics.mean(m.IMPORTANCE_MEAN, weights, units)
        metrics.moments("weight", weights, units)
