"""Turn logits into tokens and log-probs: the one distribution that acting and learning share.

Dimension letters:
    B  rows      K  tokens of one decision (56)      N  action bins (256)      D  width of the policy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.devices.tensors import to_device
from asyncrl.policies.interface import SamplingParams


class SampledTokens(NamedTuple):
    """Sampled tokens of a policy, on the device."""

    tokens: Tensor
    """``[B, K]`` int64 bins."""
    logprobs: Tensor
    """``[B, K, N]`` float32, of the distribution that was sampled."""
    hidden: Tensor
    """``[B, 1 or more, D]`` final hidden states; the first is at the last prompt token."""


def action_distribution(
    logits_BKN: Tensor, sampling: SamplingParams, taken_BK: Tensor | None = None
) -> Tensor:
    """Compute the log-probs that are sampled from: after temperature and top-k, in float32.

    Args:
        logits_BKN: ``[B, K, N]`` of the action bins, any float dtype.
        taken_BK: ``[B, K]`` integer tokens that stay possible below the `top_k` most likely: other weights or
            another kernel may rank them lower, and a ratio needs a finite number.

    Returns:
        ``[B, K, N]`` float32, at most 0; -inf where top-k forbids a bin.
    """
    logits_BKN = logits_BKN.float()
    if sampling.temperature == 0:
        return logits_BKN.log_softmax(dim=-1)
    logits_BKN = logits_BKN / sampling.temperature
    if 0 < sampling.top_k < logits_BKN.shape[-1]:
        allowed_BKN = torch.zeros_like(logits_BKN, dtype=torch.bool)
        allowed_BKN.scatter_(-1, logits_BKN.topk(sampling.top_k, dim=-1).indices, True)
        if taken_BK is not None:
            allowed_BKN.scatter_(-1, taken_BK.long().unsqueeze(-1), True)
        logits_BKN = logits_BKN.masked_fill(~allowed_BKN, float("-inf"))
    return logits_BKN.log_softmax(dim=-1)


def row_uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Draw ``[B, count]`` float64 in [0, 1) on the CPU; row b depends on ``seeds[b]`` alone."""
    streams = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.rand(count, generator=one, dtype=torch.float64) for one in streams])


def pick_tokens(logprobs_BKN: Tensor, uniforms_BK: Tensor) -> Tensor:
    """Invert the cumulative distribution: pick the first bin whose cumulated probability exceeds the uniform.

    Args:
        logprobs_BKN: ``[B, K, N]`` float32; a bin at -inf is never picked.
        uniforms_BK: ``[B, K]`` float64 in [0, 1), same device.
    """
    cumulated_BKN = logprobs_BKN.double().exp().cumsum(dim=-1)
    total_BK1 = cumulated_BKN[..., -1:]
    picked_BK = (cumulated_BKN <= uniforms_BK.unsqueeze(-1) * total_BK1).sum(dim=-1)
    last_possible_BK = (cumulated_BKN < total_BK1).sum(dim=-1)
    return torch.minimum(picked_BK, last_possible_BK)  # rounding must not reach behind the last possible bin


def uniforms_for(
    sampling: SamplingParams, seeds: Sequence[int], count: int, device: torch.device
) -> Tensor | None:
    """Draw `row_uniforms` and copy them without waiting: ``[B, count]`` float64; None at temperature 0."""
    if sampling.temperature == 0:
        return None
    return to_device(row_uniforms(seeds, count).numpy(), device)


def take_tokens(logprobs_BKN: Tensor, uniforms_BK: Tensor | None) -> Tensor:
    """Pick tokens ``[B, K]`` int64 by uniforms, or the most likely ones without."""
    return logprobs_BKN.argmax(dim=-1) if uniforms_BK is None else pick_tokens(logprobs_BKN, uniforms_BK)


def logprob_of(logprobs_BKN: Tensor, tokens_BK: Tensor) -> Tensor:
    """Look up the log-probs ``[B, K]`` float32 of the integer tokens ``[B, K]`` in ``[B, K, N]`` float32."""
    return logprobs_BKN.gather(-1, tokens_BK.long().unsqueeze(-1)).squeeze(-1)


def entropy_of(logprobs_BKN: Tensor) -> Tensor:
    """Compute the entropy ``[B, K]`` float32 in nats; impossible bins count nothing and pass no gradient."""
    finite_BKN = logprobs_BKN.masked_fill(logprobs_BKN == float("-inf"), 0.0)
    return -(logprobs_BKN.exp() * finite_BKN).sum(dim=-1)
