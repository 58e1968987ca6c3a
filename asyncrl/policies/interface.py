"""What every policy offers, and the records at its border: frames and tasks in, tokens and log-probs out.

Dimension letters:
    B  rows (observations)           L  prompt tokens
    H, W  image size in pixels       C = 8 steps per decision      A = 7 action dimensions
    V  values per decision: 1 (value head of level chunk) or C (action)
    N  pictures per row              Q  numbers of proprioception
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How action tokens are chosen. It travels with every episode: log-probs mean nothing without it."""

    temperature: float
    """Logits are divided by this. 0 takes the most likely token (for evaluation only: the log-prob that is
    reported is then the one at temperature 1 without top-k)."""
    top_k: int = 0
    """Only the `top_k` most likely tokens can be sampled; 0 means all of them."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"The sampling temperature is {self.temperature}, but it divides the logits: it must "
                "be finite and not negative. Use 1.0 for the policy as is, more to explore, "
                "0 for the most likely action."
            )
        if self.top_k < 0:
            raise ConfigError(
                f"top_k is {self.top_k}, but it counts tokens and cannot be negative. Use 0 for all 256."
            )


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """What a policy looks at. Tensors only, on the policy's device: rows can be picked and stacked."""

    pixels: Tensor
    """``[B, H, W, 3]``, or ``[B, N, H, W, 3]`` where the policy looks at several pictures; uint8, any size:
    resizing and normalising happen on the device."""
    input_ids: Tensor
    """``[B, L]`` int64: the beginning-of-sequence token, padding, the prompt."""
    attention_mask: Tensor
    """``[B, L]`` int64, 1 = token, 0 = padding."""
    padded: bool = True
    """False: the mask is all ones, so attention needs none. Known on the host, because looking at the mask
    would wait for the device."""
    proprio: Tensor | None = None
    """``[B, Q]`` float32 in [-1, 1], the robot's own state; None where the policy does not see it."""


@dataclass(frozen=True, kw_only=True)
class ActResult:
    """One decision per row, without gradient."""

    actions: Tensor
    """``[B, C, A]`` float32 in the environment's units: what the world receives."""
    tokens: Tensor
    """``[B, C, A]`` int32 action bins, 0..255 (see `action_tokens`)."""
    logprob: Tensor
    """``[B, C, A]`` float32, natural log of the probability each token was sampled with."""
    value: Tensor | None
    """``[B, V]`` float32 critic's estimates of the return; None without a value head."""
    entropy: Tensor
    """``[B, C, A]`` float32, nats."""


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """The same decisions seen by the current weights, with gradient."""

    logprob: Tensor
    """``[B, C, A]`` float32, natural log."""
    entropy: Tensor
    """``[B, C, A]`` float32, nats."""
    value: Tensor | None
    """``[B, V]`` float32; None without a value head."""


class Policy(Protocol):
    """A vision-language-action policy. Reductions over C and A belong to the loss, not here."""

    def preprocess(
        self, frames: NDArray[np.uint8], tasks: Sequence[str], proprio: NDArray[np.floating] | None = None
    ) -> PolicyInputs:
        """Turn frames and B instructions into inputs on the policy's device.

        Args:
            frames: ``[B, H, W, 3]`` (one picture per row) or ``[B, N, H, W, 3]``, uint8.
            tasks: B instructions.
            proprio: ``[B, Q]`` in the environment's units, for policies that see it.

        Raises:
            ConfigError: Something that the policy needs is missing or has another shape.
        """
        ...

    def act(self, inputs: PolicyInputs, sampling: SamplingParams, seeds: Sequence[int]) -> ActResult:
        """Decide. Row b draws from its own stream ``seeds[b]``, whatever its place and neighbours."""
        ...

    def evaluate(
        self,
        inputs: PolicyInputs,
        tokens: Tensor,
        sampling: SamplingParams,
        *,
        critic_through_policy: bool = False,
    ) -> EvaluateResult:
        """Log-probs of given tokens ``[B, C, A]`` with gradient; equal to those of `act` at equal weights.

        With `critic_through_policy` the value's gradient reaches the trunk as well, not only the value head.
        """
        ...

    def values(self, inputs: PolicyInputs, *, critic_through_policy: bool = False) -> Tensor:
        """Critic's values ``[B, V]`` float32 with gradient, as in `evaluate`; needs no tokens.

        Raises:
            ConfigError: the policy has no value head.
        """
        ...

    def decode(self, tokens: Tensor) -> Tensor:
        """Turn bins ``[..., A]`` into float32 actions ``[..., A]`` in the environment's units."""
        ...

    def parameter_groups(self, lr: float, value_lr: float) -> list[dict[str, Any]]:
        """Optimizer groups of everything trainable; the value head has its own learning rate."""
        ...

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """What an update changes, by name."""
        ...

    def trainable_tensors(self) -> dict[str, Tensor]:
        """The same without gradient. The tensors share memory with the parameters."""
        ...

    def acting_tensors(self) -> dict[str, Tensor]:
        """What actors need after an update, by name: `trainable_tensors` without the value head."""
        ...
