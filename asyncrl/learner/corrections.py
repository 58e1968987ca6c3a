"""Log-probs of three policies in, weights that correct for stale samples out. Pure functions of tensors.

behaviour  the policy that sampled the token (its log-prob travels with the episode)
proximal   the policy that the clipped ratio is taken against: the learner's at the start of the update
current    the policy that is being optimised

    kind        proximal policy                   importance weight w (multiplies the clipped loss)
    none        the learner's                     1: samples count as fresh
    naive       the behaviour policy              1: PPO's own ratio, current / behaviour, does the correction
    tis         the learner's, or log-linear      clip(proximal / behaviour, low, cap)
    mis         the learner's, or log-linear      proximal / behaviour inside [low, cap], 0 outside
    decoupled   the learner's, or log-linear      proximal / behaviour up to cap, 0 above
    vtrace      the learner's                     1: `advantages.vtrace` corrects advantages and targets

All weights are detached, and masked or vetoed samples stay in the denominator of the loss: they count as
"learn nothing from it", not as "never happened". Tensors are ``[D, C, A]``: decisions, steps per decision
(8), action dimensions (7), or units ``[D, U, V]`` of them (see `levels`). Log-probs are in nats.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from asyncrl.config.algorithm import CorrectionLevel, CorrectionSettings, Level
from asyncrl.errors import ConfigError
from asyncrl.learner.levels import reduce_to_level, sum_per_episode
from asyncrl.learner.losses import MAX_LOG_RATIO

WEIGHTED: Final = ("tis", "mis", "decoupled")
"""Kinds that multiply the loss by an importance weight."""


def log_ratio(logprob_numerator: Tensor, logprob_denominator: Tensor) -> Tensor:
    """Return ``log(p / q)``, detached and within plus and minus 20; any shape."""
    return (logprob_numerator - logprob_denominator).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(q || p) from samples of q, per sample: ``r - 1 - log r >= 0`` with ``r = p / q``.

    Source: J. Schulman, "Approximating KL divergence" (2020).

    Args:
        log_ratio: ``log p - log q`` of tokens that q sampled, any shape, nats.

    Example:
        >>> k3(torch.tensor([0.0, 1.0, -1.0]))
        tensor([0.0000, 0.7183, 0.3679])
    """
    return torch.expm1(log_ratio) - log_ratio


def truncated_weights(log_ratios: Tensor, *, low: float = 0.0, cap: float) -> Tensor:
    """``clip(r, low, cap)``: a bias for a bounded variance (truncated importance sampling, TIS).

    Sources: E. Ionides, "Truncated Importance Sampling" (2008); per token on a clipped loss, F. Yao et al.,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).

    Example:
        >>> truncated_weights(torch.tensor([0.5, 9.0]).log(), cap=2.0)
        tensor([0.5000, 2.0000])
    """
    return log_ratios.detach().clamp(max=MAX_LOG_RATIO).exp().clamp(low, cap)


def masked_weights(log_ratios: Tensor, *, low: float = 0.0, cap: float) -> Tensor:
    """``r`` inside ``[low, cap]``, 0 outside (masked importance sampling, MIS; per token IcePop).

    Sources: IcePop, in "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking
    Model", arXiv 2510.18855; with ``low = 0`` AReaL's decoupled objective, arXiv 2505.24298.

    Example:
        >>> masked_weights(torch.tensor([0.1, 0.5, 9.0]).log(), low=0.25, cap=2.0)
        tensor([0.0000, 0.5000, 0.0000])
    """
    ratios = log_ratios.detach().clamp(max=MAX_LOG_RATIO).exp()
    return torch.where((ratios >= low) & (ratios <= cap), ratios, 0.0)


def vetoed(log_ratios_DCA: Tensor, mask_DCA: Tensor, episode: Tensor, threshold: float) -> Tensor:
    """``[D]`` bool: decisions of an episode with a valid token whose ratio is below `threshold`."""
    below = (log_ratios_DCA.exp() < threshold) & mask_DCA
    return sum_per_episode(below.flatten(1).any(dim=1).float(), episode) > 0


def log_linear_proximal(logprob: Tensor, logprob_behaviour: Tensor, lag: Tensor) -> Tensor:
    """Interpolate the proximal log-probs instead of computing them: ``mu + alpha (pi - mu)``, detached.

    ``alpha = (v_proximal - v_behaviour) / (v_current - v_behaviour)`` with ``v_current = v_proximal + 1``,
    so ``lag / (lag + 1)``: fresh samples are their own proximal policy. Source: A-3PO, arXiv 2512.06547.

    Args:
        logprob: ``[D, C, A]`` float32 of the current policy.
        logprob_behaviour: ``[D, C, A]`` float32.
        lag: ``[D]`` int64, learner's version minus the version that sampled the decision.

    Example:
        >>> now, then = torch.full((1, 1, 1), -1.0), torch.full((1, 1, 1), -3.0)
        >>> log_linear_proximal(now, then, torch.tensor([1])).item()
        -2.0
    """
    alpha = (lag / (lag + 1)).to(logprob.dtype)[:, None, None]
    return (logprob_behaviour + alpha * (logprob - logprob_behaviour)).detach()


def importance_weights(
    settings: CorrectionSettings,
    log_ratios_DCA: Tensor,
    mask_DCA: Tensor,
    episode: Tensor,
    level: Level,
) -> Tensor:
    """Weights of the correction that the settings name.

    Args:
        settings: Kind, level, limits and veto.
        log_ratios_DCA: ``[D, C, A]`` float32, `log_ratio` of proximal against behaviour policy.
        mask_DCA: ``[D, C, A]`` bool.
        episode: ``[D]`` int64; on episode level, or with a veto, all decisions of an episode must be there.
        level: The objective's, for a correction whose level is ``auto``.

    Returns:
        float32, detached; ``[D, C, A]``, ``[D, C, 1]`` or ``[D, 1, 1]`` by the correction's level.
    """
    if settings.kind not in WEIGHTED:
        return torch.ones_like(log_ratios_DCA[:, :1, :1])
    own = correction_level(settings, level)
    log_ratios = reduce_to_level(log_ratios_DCA, mask_DCA, own, episode, mean=settings.geometric)
    if settings.kind == "tis":
        weights = truncated_weights(log_ratios, low=settings.min_weight, cap=settings.max_weight)
    else:
        low = settings.min_weight if settings.kind == "mis" else 0.0
        weights = masked_weights(log_ratios, low=low, cap=settings.max_weight)
    if settings.veto:
        dropped = vetoed(log_ratios_DCA, mask_DCA, episode, settings.veto)
        weights = torch.where(dropped[:, None, None], 0.0, weights)
    return weights


def correction_level(settings: CorrectionSettings, level: Level) -> CorrectionLevel:
    """What has one importance weight."""
    return level if settings.level == "auto" else settings.level


def whole_episodes(settings: CorrectionSettings) -> bool:
    """Whether the weights need the log-probs of all decisions of an episode at once."""
    weighted = settings.kind in WEIGHTED and (settings.level == "episode" or settings.veto > 0)
    return weighted or settings.kind == "vtrace"


def check_needs(settings: CorrectionSettings, *, critic: bool, behaviour: bool) -> None:
    """Refuse a correction that lacks what it needs.

    Args:
        settings: The correction.
        critic: Whether the policy has a value head that is trained.
        behaviour: Whether the episodes hold the log-probs they were sampled with.

    Raises:
        ConfigError: V-trace without a critic, or anything but `none` without behaviour log-probs.
    """
    if settings.kind == "vtrace" and not critic:
        raise ConfigError(
            "--correction.kind is vtrace, but the policy has no critic whose values it could correct. Use "
            "--algorithm.kind ppo, or --correction.kind tis."
        )
    if settings.kind != "none" and not behaviour:
        raise ConfigError(
            f"--correction.kind is {settings.kind}, but the episodes hold no log-probs of the policy that "
            "sampled them (NaN). Imagine them again with this version, or use --correction.kind none."
        )
