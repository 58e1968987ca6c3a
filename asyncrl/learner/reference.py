"""Computes log-probs of given decisions by the policy the run began with, for the KL penalty.

Dimension letters used in this file:
    B  rows      C  steps per decision      A  numbers per step
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.policies.interface import Policy, PolicyInputs, SamplingParams
from asyncrl.policies.lora import adapters_disabled, has_lora


class Reference(Protocol):
    """Does not change while the policy learns."""

    def logprob(self, inputs: PolicyInputs, sample: Mapping[str, Tensor], sampling: SamplingParams) -> Tensor:
        """Compute the log-probs of a sample, without gradient.

        Args:
            inputs: Of ``B`` rows; what the policy's `preprocess` gives.
            sample: See `Policy.evaluate`; each ``[B, ...]``.

        Returns:
            ``[B, C, A]`` float32, nats.
        """
        ...


class FrozenReference:
    """A second policy object, for full fine-tuning."""

    def __init__(self, policy: Policy) -> None:
        """Freeze the policy; it must not share weights with the one that learns."""
        self.policy = policy
        if isinstance(policy, nn.Module):
            policy.requires_grad_(False).eval()

    @torch.no_grad()
    def logprob(self, inputs: PolicyInputs, sample: Mapping[str, Tensor], sampling: SamplingParams) -> Tensor:
        """Compute log-probs by the second policy. See `Reference.logprob`."""
        return self.policy.evaluate(inputs, sample, sampling).logprob


class AdapterFreeReference:
    """The policy that learns, with its adapters disabled: no second copy of the weights."""

    def __init__(self, policy: Any) -> None:
        """Take the learning policy.

        Raises:
            ConfigError: it has no adapters, so that it would be compared with itself.
        """
        if not has_lora(policy):
            raise ConfigError(
                "The policy has no adapters, so the policy without adapters is the one that learns and the "
                "KL penalty would be zero. Set --lora.rank, or load the reference as a second policy."
            )
        self.policy = policy

    @torch.no_grad()
    def logprob(self, inputs: PolicyInputs, sample: Mapping[str, Tensor], sampling: SamplingParams) -> Tensor:
        """Compute log-probs with the adapters disabled. See `Reference.logprob`."""
        with adapters_disabled(self.policy):
            return self.policy.evaluate(inputs, sample, sampling).logprob
