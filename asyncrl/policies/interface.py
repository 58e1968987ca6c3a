"""The interface of every policy, and the records at its border.

`Policy` is what a run needs; `capabilities` are what a class may offer beside it. `PolicyModule` has what
most of them share.

Dimension letters:
    B  rows (observations)           L  prompt tokens
    H, W  image size in pixels       C  steps per decision      A  numbers per step (`ActionSpec`)
    V  values per decision: 1, or C with one per step
    N  pictures per row              Q  numbers of proprioception
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.episode_layout import ArraySpec
from asyncrl.errors import ConfigError
from asyncrl.records import ActionSpec


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
    sample: Mapping[str, Tensor]
    """What `evaluate` must be shown again, by the names of `Policy.sample_arrays`; each ``[B, ...]``."""
    logprob: Tensor
    """``[B, C, A]`` float32, natural log of the probability (density) of what was sampled."""
    value: Tensor | None
    """``[B, V]`` float32 critic's estimates of the return; None without a critic."""
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
    """``[B, V]`` float32; None without a critic."""


@runtime_checkable
class Policy(Protocol):
    """A vision-language-action policy, an `nn.Module`. Reductions over C and A belong to the loss."""

    @classmethod
    def load(cls, folder: Path, device: torch.device, **settings: Any) -> Self:
        """Read a policy, in evaluation mode, everything trainable.

        Args:
            folder: What stands behind the @ of --policy, a folder of `save`, or a checkpoint of a run.
            device: Where the weights go.
            settings: Of ``[policy.settings]`` or --policy-settings.

        Raises:
            CheckpointError: A file is missing or does not fit.
        """
        ...

    def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write a folder that `load` reads.

        Args:
            folder: Created when missing.
            tensors: All of `saved_tensors` by name, any shape and dtype, each whole, where this object holds
                only a part of them (sharding).
        """
        ...

    def saved_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the weights that a folder holds, adapters merged; any shapes, in the dtypes of the file.

        They are sharded where the policy's are. One at a time, and every learner rank takes every one:
        merging may be a computation of all ranks.
        """
        ...

    @property
    def action_spec(self) -> ActionSpec:
        """Return the steps per decision (C) and the numbers per step (A)."""
        ...

    @property
    def sample_arrays(self) -> Mapping[str, ArraySpec]:
        """Return dtype and shape of the arrays of `ActResult.sample`, by name, in the order of files.

        The letters of a shape are N (decisions), C and A.
        """
        ...

    @property
    def image_size(self) -> int:
        """Return height and width in pixels of the pictures it is best shown; others are resized."""
        ...

    @property
    def device(self) -> torch.device:
        """Say where the weights are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that it computes in."""
        ...

    def preprocess(
        self, frames: NDArray[np.uint8], tasks: Sequence[str], proprio: NDArray[np.floating] | None = None
    ) -> Any:
        """Turn frames and B instructions into inputs on the policy's device.

        Args:
            frames: ``[B, H, W, 3]`` (one picture per row) or ``[B, N, H, W, 3]``, uint8; of N pictures it
                reads the first as many as it needs.
            tasks: B instructions.
            proprio: ``[B, Q]``, any float dtype, in the environment's units, for policies that see it.

        Returns:
            What `act` and `evaluate` take. Nobody else looks into it.

        Raises:
            ConfigError: Something that the policy needs is missing or has another shape, or it cannot read a
                task.
        """
        ...

    def act(self, inputs: Any, sampling: SamplingParams, seeds: Sequence[int]) -> ActResult:
        """Decide. Row b draws from its own stream ``seeds[b]``, whatever its row and neighbours.

        What it draws from may differ in the last digits when the number of rows does: matrix products of
        other sizes round differently.

        Args:
            inputs: What `preprocess` gives.
            sampling: How to sample.
            seeds: One per row.

        Returns:
            Actions, log-probs and entropies ``[B, C, A]``, values ``[B, V]``; float32, without gradient.
        """
        ...

    def evaluate(
        self,
        inputs: Any,
        sample: Mapping[str, Tensor],
        sampling: SamplingParams,
        *,
        critic_through_policy: bool = False,
    ) -> EvaluateResult:
        """Compute log-probs of a given sample with gradient; equal to those of `act` at equal weights.

        Args:
            inputs: What `preprocess` gives.
            sample: As `act` returned it, each ``[B, ...]`` in the dtypes of `sample_arrays`; integers may
                come as int64.
            sampling: What it was sampled with.
            critic_through_policy: The value's gradient reaches the trunk as well, not only the value head.

        Returns:
            Log-probs and entropies ``[B, C, A]`` in nats, values ``[B, V]``; float32, with gradient.
        """
        ...

    def parameter_groups(self, lr: float, value_lr: float) -> list[dict[str, Any]]:
        """Return optimizer groups ``{"name", "params", "lr"}`` of all that is trainable.

        The critic's is called `value`.
        """
        ...

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return what an update changes, by name."""
        ...

    def trainable_tensors(self) -> dict[str, Tensor]:
        """Return `trainable_parameters` without gradient, any shape and dtype; memory is shared with them."""
        ...

    def acting_tensors(self) -> dict[str, Tensor]:
        """Return what actors need after an update: `trainable_tensors` without the critic.

        By name, any shapes, in the dtypes of the parameters.
        """
        ...

    def blocks(self) -> Iterable[nn.Module]:
        """Yield what is sharded, recomputed and compiled piece by piece, in the order in which it runs.

        Children of one module (a list of layers) may share a unit of sharding: they run one after the other,
        and a pass that leaves some of them out does so on every rank.
        """
        ...


class PolicyModule(nn.Module):
    """What most policies share; a subclass adds `load`, `save`, `preprocess`, `act` and `evaluate`."""

    critic_prefix = "value_head."
    """Names of parameters that begin so are the critic's."""

    @property
    def action_spec(self) -> ActionSpec:
        """See `Policy.action_spec`: 8 steps of 7 numbers."""
        return ActionSpec()

    @property
    def device(self) -> torch.device:
        """Say where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the first weight."""
        return next(self.parameters()).dtype

    def saved_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and buffers by name. See `Policy.saved_tensors`."""
        yield from ((name, tensor.detach()) for name, tensor in self.state_dict().items())

    def parameter_groups(self, lr: float, value_lr: float) -> list[dict[str, Any]]:
        """Return optimizer groups: `policy` at `lr`, the critic (`value`) at `value_lr`."""
        trainable = self.trainable_parameters()
        value = [p for name, p in trainable.items() if name.startswith(self.critic_prefix)]
        policy = [p for name, p in trainable.items() if not name.startswith(self.critic_prefix)]
        groups = [
            {"name": "policy", "params": policy, "lr": lr},
            {"name": "value", "params": value, "lr": value_lr},
        ]
        return [group for group in groups if group["params"]]

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return what an update changes, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def trainable_tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters without gradient. See `Policy.trainable_tensors`."""
        return {name: p.detach() for name, p in self.trainable_parameters().items()}

    def acting_tensors(self) -> dict[str, Tensor]:
        """Return `trainable_tensors` without the critic. See `Policy.acting_tensors`."""
        tensors = self.trainable_tensors()
        return {name: t for name, t in tensors.items() if not name.startswith(self.critic_prefix)}

    def blocks(self) -> Iterable[nn.Module]:
        """Return no units: the whole policy is one."""
        return ()
