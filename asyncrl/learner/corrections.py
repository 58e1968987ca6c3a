"""Log-probs of three policies in, weights that correct for stale samples out. Pure functions of tensors.

behaviour  the policy that sampled the token (its log-prob travels with the episode)
proximal   the learner's policy at the start of the update
current    the policy that is being optimised

Tensors are ``[D, C, A]``: decisions, steps per decision (8), action dimensions (7). Log-probs are in nats.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

Correction = Literal["none", "tis"]

MAX_LOG_RATIO: Final = 20.0
"""Log-ratios are kept within plus and minus this, so that their exponential stays finite in float32."""


class ImportanceStats(NamedTuple):
    """How far the samples are from the proximal policy, over the valid tokens."""

    mean: Tensor
    """[] mean weight after truncation."""
    largest: Tensor
    """[] largest ratio before truncation."""
    capped: Tensor
    """[] share of tokens whose weight was cut."""
    effective_sample_size: Tensor
    """[] ``(sum w)^2 / (n sum w^2)`` of the weights in use, in (0, 1]; 1 means that all count the same."""
    mismatch_kl: Tensor
    """[] KL(behaviour || proximal), k3 estimate, nats per token; about 0 at lag 0."""


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


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the places where `mask` is True; 0 when there is none. What is masked may be NaN."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def truncated_importance_weights(logprob_proximal: Tensor, logprob_behaviour: Tensor, cap: float) -> Tensor:
    """Weight each token by ``min(proximal / behaviour, cap)`` (truncated importance sampling).

    With these weights an expectation over stale samples becomes one over samples of the proximal policy,
    apart from the truncation, which trades a bias for a bounded variance. Sources: decoupled objective, arXiv
    2110.00641; with stale language-model samples, arXiv 2505.24298.

    Args:
        logprob_proximal: ``[D, C, A]`` float32.
        logprob_behaviour: ``[D, C, A]`` float32.
        cap: Largest weight, at least 1.

    Returns:
        ``[D, C, A]`` float32 in (0, cap], detached.

    Example:
        >>> proximal, behaviour = torch.tensor([0.2, 0.9]), torch.tensor([0.4, 0.1])
        >>> truncated_importance_weights(proximal.log(), behaviour.log(), cap=2.0)
        tensor([0.5000, 2.0000])
    """
    return log_ratio(logprob_proximal, logprob_behaviour).exp().clamp(max=cap)


def importance_weights(
    correction: Correction, logprob_proximal: Tensor, logprob_behaviour: Tensor, cap: float
) -> Tensor:
    """Weights of the correction with that name: `tis` as above; `none` takes samples as fresh, weight 1."""
    if correction == "none":
        return torch.ones_like(logprob_behaviour)
    return truncated_importance_weights(logprob_proximal, logprob_behaviour, cap)


def importance_stats(
    weights: Tensor, logprob_proximal: Tensor, logprob_behaviour: Tensor, mask: Tensor, cap: float
) -> ImportanceStats:
    """Describe the weights of a whole batch.

    Args:
        weights: ``[D, C, A]`` what `importance_weights` returned.
        logprob_proximal: ``[D, C, A]`` float32.
        logprob_behaviour: ``[D, C, A]`` float32.
        mask: ``[D, C, A]`` bool, at least one True.
        cap: Where the weights were cut; infinite when they were not.
    """
    log_ratios, valid_weights = log_ratio(logprob_proximal, logprob_behaviour)[mask], weights[mask]
    ratios, square = log_ratios.exp(), valid_weights.square().sum()
    return ImportanceStats(
        mean=valid_weights.mean(),
        largest=ratios.max(),
        capped=(ratios > cap).float().mean(),
        effective_sample_size=valid_weights.sum().square() / (valid_weights.numel() * square),
        mismatch_kl=k3(log_ratios).mean(),
    )
