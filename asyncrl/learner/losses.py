"""Log-probs and advantages in, a loss with its diagnostics out. Pure functions of tensors.

Every sum is divided by a number that the caller gives, so that the losses of the micro-batches of a batch add
up to the loss of the batch, and so do their gradients.

Tensors are ``[D, C, A]``: decisions, steps per decision (8), action dimensions (7). Log-probs are in nats.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.learner.corrections import MAX_LOG_RATIO


class PolicyLoss(NamedTuple):
    """A clipped policy loss. Each field is a sum over valid tokens divided by the denominator."""

    loss: Tensor
    """[] what to minimise; the only field with a gradient."""
    clip_fraction: Tensor
    """[] share of tokens whose gradient the clip removed."""
    clipped_ratio: Tensor
    """[] current / proximal probability after clipping."""


def clipped_policy_loss(
    logprob: Tensor,
    logprob_proximal: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float,
) -> PolicyLoss:
    """Compute the decoupled PPO loss with an asymmetric clip, per token.

    ``L = sum over valid tokens of w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) / denominator`` with
    ``r = current / proximal`` and the importance weight ``w``. Sources: PPO, arXiv 1707.06347, equation 7;
    decoupled, arXiv 2110.00641; asymmetric, DAPO, arXiv 2503.14476.

    A token that top-k removed from the proximal or the current policy has a log-prob of minus infinity: it
    cannot be drawn any more and contributes nothing. Anything else that is not finite reaches the gradient,
    where `Update` finds it.

    Args:
        logprob: ``[D, C, A]`` float32 of the current policy, with gradient.
        logprob_proximal: ``[D, C, A]`` float32.
        advantages: ``[D, 1, 1]`` or ``[D, C, A]`` float32.
        weights: ``[D, C, A]`` float32, importance weights.
        mask: ``[D, C, A]`` bool. What is masked may hold anything.
        clip_low: The ratio is kept above ``1 - clip_low``.
        clip_high: The ratio is kept below ``1 + clip_high``.
        denominator: Number of valid tokens of the whole batch (token mean).

    Example:
        >>> half, one = torch.tensor([[[0.5]]]).log(), torch.ones(1, 1, 1)
        >>> loss = clipped_policy_loss(
        ...     half + 1, half, one, one, one.bool(), clip_low=0.2, clip_high=0.28, denominator=1
        ... )
        >>> loss.loss, loss.clip_fraction
        (tensor(-1.2800), tensor(1.))
    """
    logprob_proximal, advantages, weights = logprob_proximal.detach(), advantages.detach(), weights.detach()
    valid = mask & ~torch.isneginf(logprob_proximal) & ~torch.isneginf(logprob)
    # Kept finite: a ratio of infinity would turn the clip's zero gradient into NaN.
    ratio = torch.where(valid, logprob - logprob_proximal, 0.0).clamp(max=MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = weights * torch.maximum(-advantages * ratio, -advantages * clipped)
    removed = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return PolicyLoss(
        loss=torch.where(valid, loss, 0.0).sum() / denominator,
        clip_fraction=(valid & removed).sum() / denominator,
        clipped_ratio=torch.where(valid, clipped.detach(), 0.0).sum() / denominator,
    )
