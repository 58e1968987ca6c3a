"""Interface of every policy and its optional capabilities.

`Policy` lists the required methods, `PolicyModule` implements the common ones. The small protocols at the end
are optional and tested with `isinstance`; a flag that needs a missing one is refused.

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
from typing import Any, Literal, Protocol, Self, runtime_checkable

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
    """Inputs of the OpenVLA policies, on the policy's device: rows can be picked and stacked."""

    pixels: Tensor
    """``[B, H, W, 3]``, or ``[B, N, H, W, 3]`` where the policy looks at several pictures; uint8, any size:
    resizing and normalising happen on the device."""
    input_ids: Tensor
    """``[B, L]`` int64: the beginning-of-sequence token, padding, the prompt."""
    attention_mask: Tensor
    """``[B, L]`` int64, 1 = token, 0 = padding."""
    padded: bool = True
    """False: the mask is all ones, so attention needs none. Kept on the host: reading the mask waits for the
    device."""
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
    """The same decisions under the current weights, with gradient."""

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
        """Read a policy, in evaluation mode, everything trainable; raises CheckpointError if it does not fit.

        Args:
            folder: The part of --policy behind the @, a folder of `save`, or a checkpoint of a run.
            device: Where the weights go.
            settings: Of ``[policy.settings]`` or --policy-settings.
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
        """Yield the weights of a folder, adapters merged; any shapes, in the dtypes of the file.

        They are sharded like the policy's. Every learner rank must iterate over all: merging may be a
        collective.
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
        """Return the device of the weights."""
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
            Inputs of `act` and `evaluate`, opaque to all others.

        Raises:
            ConfigError: An input is missing or has another shape, or a task cannot be tokenised.
        """
        ...

    def act(self, inputs: Any, sampling: SamplingParams, seeds: Sequence[int]) -> ActResult:
        """Decide. Row b draws from its own stream ``seeds[b]``, independent of its row and neighbours.

        Logits may differ in the last digits with the number of rows: other sizes round differently.
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
            inputs: From `preprocess`.
            sample: From `act`, in the dtypes of `sample_arrays`; integers may come as int64.
            sampling: Of that `act`.
            critic_through_policy: The value's gradient reaches the trunk as well, not only the value head.
        """
        ...

    def parameter_groups(self, lr: float, value_lr: float) -> list[dict[str, Any]]:
        """Return optimizer groups ``{"name", "params", "lr"}`` of all that is trainable.

        The critic's is called `value`.
        """
        ...

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an update changes, by name."""
        ...

    def trainable_tensors(self) -> dict[str, Tensor]:
        """Return `trainable_parameters` without gradient, any shape and dtype; memory is shared with them."""
        ...

    def acting_tensors(self) -> dict[str, Tensor]:
        """Return `trainable_tensors` without the critic: the tensors that actors receive after an update."""
        ...

    def blocks(self) -> Iterable[nn.Module]:
        """Yield the units of sharding, recomputation and compilation, in the order in which they run.

        Children of one module (a list of layers) may share a unit of sharding: they run one after the other,
        and a pass that skips some of them does so on every rank.
        """
        ...


class PolicyModule(nn.Module):
    """Base of most policies; a subclass adds `load`, `save`, `preprocess`, `act` and `evaluate`."""

    critic_prefix = "value_head."
    """Prefix of the critic's parameter names."""

    @property
    def action_spec(self) -> ActionSpec:
        """Return 8 steps of 7 numbers."""
        return ActionSpec()

    @property
    def device(self) -> torch.device:
        """Return the device of the first weight."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the first weight."""
        return next(self.parameters()).dtype

    def saved_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and buffers by name."""
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
        """Return the parameters that an update changes, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def trainable_tensors(self) -> dict[str, Tensor]:
        """Return `trainable_parameters` without gradient; memory is shared with them."""
        return {name: p.detach() for name, p in self.trainable_parameters().items()}

    def acting_tensors(self) -> dict[str, Tensor]:
        """Return `trainable_tensors` without the critic."""
        tensors = self.trainable_tensors()
        return {name: t for name, t in tensors.items() if not name.startswith(self.critic_prefix)}

    def blocks(self) -> Iterable[nn.Module]:
        """Return no units: the whole policy is one."""
        return ()


# --- optional capabilities ----------------------------------------------------


@runtime_checkable
class HasCritic(Protocol):
    """A policy with values: needed by --algorithm.kind ppo."""

    @property
    def critic(self) -> str:
        """Return the unit of one value: none, decision or action."""
        ...

    def add_critic(self, level: str) -> None:
        """Add or replace the critic, with fresh weights; level decision: V = 1, action: V = C."""
        ...

    def drop_critic(self) -> None:
        """Remove the critic: actors and grpo need none."""
        ...

    def values(self, inputs: Any, *, critic_through_policy: bool = False) -> Tensor:
        """Compute the critic's values ``[B, V]`` float32 as in `evaluate`; raises ConfigError without one."""
        ...


@runtime_checkable
class LoraTargets(Protocol):
    """A policy that lists the layers of adapters: needed by --lora.rank."""

    def lora_layers(self, targets: str) -> list[str]:
        """Return the linear layers that get adapters, as in `named_modules`; targets: language or all."""
        ...


@runtime_checkable
class FixedShapeActing(Protocol):
    """A policy that can act in compiled graphs of one shape: needed by --imagination.compile."""

    def compile_acting(self, rows: int, tasks: Sequence[str]) -> None:
        """Compile `act` in place for batches of at most `rows` and these instructions."""
        ...


@runtime_checkable
class FixesPrompts(Protocol):
    """A policy whose numbers depend on the batch's longest prompt; for --imagination.fixed-shape."""

    def fix_prompts(self, tasks: Sequence[str]) -> None:
        """Give every batch from now on the shape of one with all `tasks`."""
        ...


@runtime_checkable
class CountsPromptTokens(Protocol):
    """A policy whose passes pad short instructions: the learner batches those of one length."""

    def prompt_tokens(self, task: str) -> int:
        """Count the tokens of an instruction's prompt."""
        ...


@runtime_checkable
class CountsActivations(Protocol):
    """A policy that estimates the memory of its passes, for `asyncrl doctor`."""

    def activation_bytes(
        self, rows: int, passes: Literal["acting", "checkpointed", "kept"], itemsize: int
    ) -> int:
        """Estimate the memory of passes over `rows` decisions.

        Args:
            rows: Decisions in one pass.
            passes: acting: forward. checkpointed, kept: forward and backward, with gradient checkpointing or
                not.
            itemsize: Bytes of a number.
        """
        ...


@runtime_checkable
class ChecksTraining(Protocol):
    """A policy that not every run in a world model can train."""

    def check_trainable(self) -> None:
        """Raise `ConfigError` if the world lacks inputs of the policy."""
        ...


@runtime_checkable
class SaysInputs(Protocol):
    """A policy that names its inputs; any other gets all that a simulator has."""

    @property
    def pictures(self) -> int:
        """Return the number of pictures, those of a simulator's first cameras."""
        ...

    @property
    def proprio_numbers(self) -> int:
        """Return the count of numbers of proprioception; 0: none."""
        ...
