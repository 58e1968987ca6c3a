"""Interface of every policy, its optional capabilities, and the data that goes in and out.

Dimension letters: B rows, L prompt tokens, H/W image size in pixels, C steps per decision, A numbers per
step, V values per decision (1, or C with one per step), N pictures per row, Q numbers of proprioception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.episode_layout import ArraySpec
from asyncrl.records import ActionSpec, SamplingParams


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """Inputs of the OpenVLA policies, on the policy's device: rows can be picked and stacked."""

    pixels: Tensor
    """``[B, H, W, 3]`` or ``[B, N, H, W, 3]`` uint8 of any size; resized and normalised on the device."""
    input_ids: Tensor
    """``[B, L]`` int64: the beginning-of-sequence token, padding, the prompt."""
    attention_mask: Tensor
    """``[B, L]`` int64, 1 = token, 0 = padding."""
    padded: bool = True
    """False: the mask is all ones. Kept on the host, because reading the mask waits for the device."""
    proprio: Tensor | None = None
    """``[B, Q]`` float32 in [-1, 1], the robot's own state; None where the policy does not see it."""


@dataclass(frozen=True, kw_only=True)
class ActResult:
    """One decision per row, without gradient."""

    actions: Tensor
    """``[B, C, A]`` float32 in the environment's units."""
    sample: Mapping[str, Tensor]
    """Arrays that `evaluate` needs again, by the names of `Policy.sample_arrays`; each ``[B, ...]``."""
    logprob: Tensor
    """``[B, C, A]`` float32, natural log of the probability (density) of the sample."""
    value: Tensor | None
    """``[B, V]`` float32 critic's estimates of the return; None without a critic."""
    entropy: Tensor
    """``[B, C, A]`` float32, nats."""


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """The same decisions under the current weights, with gradient; arrays as in `ActResult`."""

    logprob: Tensor
    entropy: Tensor
    value: Tensor | None


class Policy(nn.Module):
    """Base of every vision-language-action policy. Reductions over C and A belong to the loss."""

    critic_prefix = "value_head."
    """Prefix of the critic's parameter names."""

    @property
    def action_spec(self) -> ActionSpec:
        """Steps per decision (C) and numbers per step (A)."""
        return ActionSpec()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that it computes in."""
        return next(self.parameters()).dtype

    def saved_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the saved weights, adapters merged; every rank must iterate over all (a collective)."""
        yield from ((name, tensor.detach()) for name, tensor in self.state_dict().items())

    def parameter_groups(self, lr: float, value_lr: float) -> list[dict[str, Any]]:
        """Return optimizer groups ``{"name", "params", "lr"}``; the critic's is called `value`."""
        trainable = self.trainable_parameters()
        value = [p for name, p in trainable.items() if name.startswith(self.critic_prefix)]
        policy = [p for name, p in trainable.items() if not name.startswith(self.critic_prefix)]
        groups = [
            {"name": "policy", "params": policy, "lr": lr},
            {"name": "value", "params": value, "lr": value_lr},
        ]
        return [group for group in groups if group["params"]]

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an update changes, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def trainable_tensors(self) -> dict[str, Tensor]:
        """Return `trainable_parameters` without gradient; memory is shared with them."""
        return {name: p.detach() for name, p in self.trainable_parameters().items()}

    def acting_tensors(self) -> dict[str, Tensor]:
        """Return `trainable_tensors` without the critic: the tensors that actors receive after an update."""
        tensors = self.trainable_tensors()
        return {name: t for name, t in tensors.items() if not name.startswith(self.critic_prefix)}

    def blocks(self) -> Iterable[nn.Module]:
        """Yield the units of sharding, recomputation and compilation, in running order; none: one unit.

        Children of one module may share a unit: a pass that skips some of them does so on every rank.
        """
        return ()

    if TYPE_CHECKING:
        # ---- required of every subclass: `registry.REQUIRED` ----

        @classmethod
        def load(cls, folder: Path, device: torch.device, **settings: Any) -> Self:
            """Read a policy, in evaluation mode, everything trainable; raises CheckpointError if unreadable.

            Args:
                folder: The part of --policy after the @, a folder of `save`, or a checkpoint of a run.
                settings: From ``[policy.settings]`` or --policy-settings.
            """
            ...

        def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
            """Write a folder for `load`; `tensors`: whole `saved_tensors` if this object holds shards."""
            ...

        sample_arrays: Mapping[str, ArraySpec]
        """Dtype and shape of the arrays of `ActResult.sample`, by name; letters N (decisions), C, A."""

        @property
        def image_size(self) -> int:
            """Preferred height and width of pictures in pixels; others are resized."""
            ...

        def preprocess(
            self, frames: NDArray[np.uint8], tasks: Sequence[str], proprio: NDArray[np.floating] | None = None
        ) -> Any:
            """Turn frames and B instructions into inputs of `act` and `evaluate`, opaque to all others.

            Args:
                frames: ``[B, H, W, 3]`` or ``[B, N, H, W, 3]`` uint8; of N pictures it reads the first ones.
                proprio: ``[B, Q]`` in the environment's units, for policies that see it.

            Raises:
                ConfigError: An input is missing or has another shape, or a task cannot be tokenised.
            """
            ...

        def act(self, inputs: Any, sampling: SamplingParams, seeds: Sequence[int]) -> ActResult:
            """Decide; row b draws from ``seeds[b]`` alone. Last digits may vary with the number of rows."""
            ...

        def evaluate(
            self, inputs: Any, sample: Mapping[str, Tensor], sampling: SamplingParams
        ) -> EvaluateResult:
            """Compute log-probs of a sample with gradient; equal to those of `act` at equal weights.

            The gradient of a value reaches the value head alone.

            `sample`: from `act`, in the dtypes of `sample_arrays`; integers may come as int64.
            """
            ...

        # ---- optional: a flag that needs a missing one is refused ----

        @property
        def critic(self) -> str:
            """For --algorithm.kind ppo: unit of one value: none, decision or action."""
            ...

        def add_critic(self, level: str) -> None:
            """Add or replace the critic, with fresh weights; level decision: V = 1, action: V = C."""
            ...

        def drop_critic(self) -> None:
            """Remove the critic: actors and grpo need none."""
            ...

        def values(self, inputs: Any) -> Tensor:
            """Compute the critic's values ``[B, V]`` float32 as in `evaluate`."""
            ...

        def lora_layers(self, targets: str) -> list[str]:
            """For --lora.rank: names in `named_modules` of the layers with adapters, by --lora.targets."""
            ...

        def compile_acting(self, rows: int, tasks: Sequence[str]) -> None:
            """For --imagination.compile: compile `act` for at most `rows` rows and these instructions."""
            ...

        def fix_prompts(self, tasks: Sequence[str]) -> None:
            """For --imagination.fixed-shape: give every later batch the shape of one with all `tasks`."""
            ...

        def prompt_tokens(self, task: str) -> int:
            """Count the tokens of a prompt, by which the learner batches instructions."""
            ...

        def activation_bytes(
            self, rows: int, passes: Literal["acting", "checkpointed", "kept"], itemsize: int
        ) -> int:
            """For `asyncrl doctor`: estimate the memory of passes over `rows` decisions, in bytes.

            `passes`: acting: forward. checkpointed, kept: forward and backward, with checkpointing or not.
            """
            ...

        def check_trainable(self) -> None:
            """Raise ConfigError if a world model lacks inputs of the policy."""
            ...

        pictures: int
        """Number of pictures, of a simulator's first cameras; without it, all."""
        proprio_numbers: int
        """Numbers of proprioception; 0: none."""
