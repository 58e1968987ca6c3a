"""Losses per unit: the built-in objectives, the critic's loss and the KL penalty.

A unit has one probability ratio. The loss to minimise is the sum over units of `aggregation_weights` times
loss, so micro-batches and ranks add up to the batch. All but the current log-probs (nats) are detached.

    token      ``[D, C, A]``   every number of an action
    action     ``[D, C, 1]``   the A numbers of a step: its log-prob is their sum
    decision   ``[D, 1, 1]``   the C * A numbers of a decision

D decisions, C steps per decision, A numbers per step, U, V units, K values of a decision: 1, or C.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

import torch
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionLevel, Level
from asyncrl.learner.interface import UnitLoss

Aggregation = Literal["token_mean", "length_normalised", "constant"]
MAX_LOG_RATIO: Final = 20.0  # Bound of log-ratios, so that their exponential stays finite in float32
_SUMMED: Final[dict[str, tuple[int, ...]]] = {"token": (), "action": (2,), "decision": (1, 2)}


# --- units ---


def summed(values_DCA: Tensor, mask_DCA: Tensor, level: Level, *, mean: bool = False) -> Tensor:
    """Sum, or average, valid numbers by unit: ``[D, C, A]`` to ``[D, U, V]``."""
    values_DCA = torch.where(mask_DCA, values_DCA, 0.0)  # Masked numbers may be NaN.
    if level == "token":
        return values_DCA
    total = values_DCA.sum(dim=_SUMMED[level], keepdim=True)
    return total / mask_DCA.sum(dim=_SUMMED[level], keepdim=True).clamp(min=1) if mean else total


def valid_units(mask_DCA: Tensor, level: Level) -> Tensor:
    """Mark the units with a valid number: ``[D, C, A]`` bool to ``[D, U, V]`` bool."""
    if level == "token":
        return mask_DCA
    actions_DC1 = mask_DCA.any(dim=2, keepdim=True)
    return actions_DC1 if level == "action" else actions_DC1.any(dim=1, keepdim=True)


def has_advantage(advantages: Tensor) -> Tensor:
    """Mark the decisions with an advantage that is not 0, ``[D]`` bool."""
    return (advantages != 0).flatten(1).any(dim=1)


def sum_per_episode(values_D: Tensor, episode: Tensor) -> Tensor:
    """Return for each decision the sum over its episode (``[D]`` int64 indices): ``[D]``."""
    total = values_D.new_zeros(int(episode.max()) + 1 if len(episode) else 0)
    return total.index_add_(0, episode, values_D)[episode]


def reduce_to_level(
    values_DCA: Tensor, mask_DCA: Tensor, level: CorrectionLevel, episode: Tensor, *, mean: bool = False
) -> Tensor:
    """Sum as `summed`; level ``episode`` sums whole episodes (indices `episode` ``[D]``): ``[D, 1, 1]``."""
    if level != "episode":
        return summed(values_DCA, mask_DCA, level, mean=mean)
    total = sum_per_episode(torch.where(mask_DCA, values_DCA, 0.0).flatten(1).sum(dim=1), episode)
    if mean:
        total = total / sum_per_episode(mask_DCA.flatten(1).sum(dim=1).to(total.dtype), episode).clamp(min=1)
    return total[:, None, None]


def log_ratio(logprob_numerator: Tensor, logprob_denominator: Tensor) -> Tensor:
    """Return ``log(p / q)``, detached and clamped to `MAX_LOG_RATIO`."""
    return (logprob_numerator - logprob_denominator).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# --- objectives ---


class ClippedObjective:
    """PPO's clipped ratio; see `clipped_loss`."""

    GEOMETRIC: ClassVar[bool] = False  # The ratio of a unit is the geometric mean of its token ratios

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.settings = settings

    def loss(self, logprob: Tensor, proximal: Tensor, mask: Tensor, advantages: Tensor) -> UnitLoss:
        """Compute `clipped_loss`."""
        return clipped_loss(
            summed(logprob - proximal, mask, self.settings.level, mean=self.GEOMETRIC),
            advantages,
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
            dual_clip=self.settings.dual_clip,
        )


class GspoObjective(ClippedObjective):
    """GSPO: the clipped geometric mean of the ratios of a decision."""

    GEOMETRIC: ClassVar[bool] = True


class CispoObjective:
    """CISPO: the ratio is clipped, but every token keeps its gradient; see `cispo_loss`."""

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.settings = settings

    def loss(self, logprob: Tensor, proximal: Tensor, mask: Tensor, advantages: Tensor) -> UnitLoss:
        """Compute `cispo_loss`."""
        return cispo_loss(
            summed(logprob, mask, self.settings.level),
            summed(logprob - proximal, mask, self.settings.level),
            advantages,
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
        )


def finite_ratio(log_ratio: Tensor) -> Tensor:
    """Compute ``exp`` so that it stays finite: infinity would turn the clip's zero gradient into NaN."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def clipped_loss(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> UnitLoss:
    """Compute PPO's clipped loss: ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``, arXiv 1707.06347.

    With `dual_clip` ``c > 1``, it is at most ``-A c`` where A < 0, arXiv 1912.09729. Separate widths: DAPO,
    arXiv 2503.14476. Times an importance weight it is decoupled PPO, arXiv 2110.00641; with geometric-mean
    ratios of whole sequences GSPO, arXiv 2507.18071. `log_ratio` ``[D, U, V]`` is current against proximal.
    """
    advantages = advantages.detach()
    ratio = finite_ratio(log_ratio)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    dual_clipped = torch.zeros_like(clipped)
    if dual_clip:
        limit = -advantages * dual_clip
        dual_clipped = (advantages < 0) & (loss > limit)
        loss = torch.where(dual_clipped, limit, loss)
    return UnitLoss(loss, clipped.expand_as(ratio), dual_clipped.expand_as(ratio), clipped_ratio.detach())


def cispo_loss(
    logprob: Tensor, log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> UnitLoss:
    """Compute CISPO's ``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi``, arXiv 2506.13585, equation 4.

    The clip cuts the weight, never the gradient. Inputs are ``[D, U, V]`` float32.
    """
    ratio = finite_ratio(log_ratio.detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * advantages.detach() * logprob
    return UnitLoss(loss, weight != ratio, torch.zeros_like(ratio, dtype=torch.bool), weight)


# --- critic, KL, aggregation ---


def value_loss(
    values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float = 0.0, huber: float = 10.0
) -> tuple[Tensor, Tensor]:
    """Compute the critic's Huber loss, the larger of plain and clipped, and True where the clip decided it.

    ``h(e) = e^2 / 2`` for ``|e| <= huber``, else ``huber (|e| - huber / 2)``; clipped values are
    ``V_old + clamp(V - V_old, -clip, clip)`` (OpenAI baselines' PPO2).
    """
    old_values, targets = old_values.detach(), targets.detach()
    plain = torch.nn.functional.huber_loss(values, targets, reduction="none", delta=huber)
    if not clip:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    clipped = torch.nn.functional.huber_loss(clipped_values, targets, reduction="none", delta=huber)
    return torch.maximum(plain, clipped), clipped > plain


def kl_penalty(logprob: Tensor, logprob_reference: Tensor) -> Tensor:
    """Estimate KL(current || reference) per unit from samples of the current policy, in nats.

    ``k2 = d^2 / 2`` with ``d = log current - log reference`` (J. Schulman, 2020). Only its gradient,
    ``d grad log pi``, is that of the divergence: k1's is zero on average, k3's is KL(reference || current)'s.
    Beyond `MAX_LOG_RATIO`, the gradient keeps that size (P. Huber, 1964): it neither explodes nor vanishes.
    """
    reference = logprob_reference.detach()
    return torch.nn.functional.huber_loss(logprob, reference, reduction="none", delta=MAX_LOG_RATIO)


def aggregation_weights(
    mask: Tensor, episode: Tensor, aggregation: Aggregation, *, units: float, episodes: float, max_units: int
) -> Tensor:
    """Return each unit's weight in the loss, ``[D, U, V]`` float32, 0 where the mask is False.

    token_mean         ``1 / units``                    every unit counts the same
    length_normalised  ``1 / (episodes n_e)``           every episode counts the same: RLinf's mean over
                                                        ``episodes max_units`` of ``loss max_units / n_e``
    constant           ``1 / (episodes max_units)``     no bias by length: Dr. GRPO, arXiv 2503.20783

    with ``n_e`` the number of valid units of episode e, `units` and `episodes` of the whole batch over all
    ranks, and `max_units` those of the longest possible episode. All of an episode is on one rank.
    """
    weights = mask.float()
    if not len(episode):  # This rank has no episode of the minibatch.
        return weights
    if aggregation == "token_mean":
        return weights / max(units, 1.0)
    if aggregation == "constant":
        return weights / (episodes * max_units)
    per_decision = weights.flatten(1).sum(dim=1)
    total = torch.zeros(int(episode.max()) + 1, device=mask.device).index_add_(0, episode, per_decision)
    return weights / (episodes * total[episode].clamp(min=1.0))[:, None, None]
