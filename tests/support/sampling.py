"""Sampling as the policies do it, in one call."""

from collections.abc import Sequence

from torch import Tensor

from asyncrl.policies.action_tokens import take_tokens, uniforms_for
from asyncrl.policies.interface import SamplingParams


def choose_tokens(logprobs_BKN: Tensor, sampling: SamplingParams, seeds: Sequence[int]) -> Tensor:
    """Sample (or, at temperature 0, take the most likely) tokens: ``[B, K]`` int64."""
    uniforms_BK = uniforms_for(sampling, seeds, logprobs_BKN.shape[1], logprobs_BKN.device)
    return take_tokens(logprobs_BKN, uniforms_BK)
