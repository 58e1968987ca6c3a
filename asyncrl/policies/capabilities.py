"""What a policy may offer beside `interface.Policy`, each a small protocol, asked for with `isinstance`.

A flag that needs what a class lacks is refused. Dimension letters are those of `interface`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class HasCritic(Protocol):
    """A policy with values: needed by --algorithm.kind ppo."""

    @property
    def critic(self) -> str:
        """Say what has one value: none, decision or action."""
        ...

    def add_critic(self, level: str) -> None:
        """Add a critic with fresh random weights, or replace the one that is there.

        Args:
            level: decision: one value per decision, V = 1. action: one per step, V = C.
        """
        ...

    def drop_critic(self) -> None:
        """Take the critic away: actors need none, nor does grpo."""
        ...

    def values(self, inputs: Any, *, critic_through_policy: bool = False) -> Tensor:
        """Compute the critic's values ``[B, V]`` float32 with gradient, as in `evaluate`; needs no sample.

        Args:
            inputs: What `preprocess` gives.
            critic_through_policy: The gradient reaches the trunk as well, not only the value head.

        Raises:
            ConfigError: the policy has no critic now.
        """
        ...


@runtime_checkable
class LoraTargets(Protocol):
    """A policy that says where adapters go: needed by --lora.rank."""

    def lora_layers(self, targets: str) -> list[str]:
        """Return the names of the linear layers that get adapters, as in `named_modules`.

        Args:
            targets: language: those of the language model. all: of every part.
        """
        ...


@runtime_checkable
class FixedShapeActing(Protocol):
    """A policy that can act in compiled graphs of one shape: needed by --imagination.compile."""

    def compile_acting(self, rows: int, tasks: Sequence[str]) -> None:
        """Compile `act` in place.

        Args:
            rows: Largest batch from now on; smaller ones cost as much.
            tasks: All instructions that will come.
        """
        ...


@runtime_checkable
class FixesPrompts(Protocol):
    """A policy that computes otherwise beside a longer instruction, unless told of all of them.

    Asked by --imagination.fixed-shape.
    """

    def fix_prompts(self, tasks: Sequence[str]) -> None:
        """From now on give every batch the shape that one of all `tasks` has."""
        ...


@runtime_checkable
class CountsPromptTokens(Protocol):
    """A policy whose passes pad short instructions: the learner puts those of one length together."""

    def prompt_tokens(self, task: str) -> int:
        """Count the tokens of an instruction's prompt."""
        ...


@runtime_checkable
class CountsActivations(Protocol):
    """A policy that knows what its passes need beside the weights: for `asyncrl doctor`."""

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
        """Raise `ConfigError` when the world cannot show it what it looks at."""
        ...


@runtime_checkable
class SaysInputs(Protocol):
    """A policy that says what it looks at; any other is shown all that a simulator has."""

    @property
    def pictures(self) -> int:
        """Return how many pictures it reads: those of a simulator's first cameras."""
        ...

    @property
    def proprio_numbers(self) -> int:
        """Return how many numbers of proprioception it reads; 0: none."""
        ...
