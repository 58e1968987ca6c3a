"""The interface of every simulator, and what one may offer beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.bounds import AtLeast, Bounded


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What is seen after a reset or a step."""

    image: NDArray[np.uint8]
    """``[H, W, 3]`` red-green-blue; ``[0, 0, 3]`` when the simulator does not render."""
    task: str
    """The instruction, lower case, without a full stop."""
    success: bool
    """Whether the task is fulfilled at this very moment. Not latched: a later step may undo it."""


@dataclass(frozen=True, kw_only=True)
class Demonstrator(Bounded):
    """How good the scripted expert is. All draws are made once per episode, from the episode's seed."""

    SECTION: ClassVar[str] = "expert."

    noise: tuple[float, float] = (0.0, 0.0)
    """Standard deviation of the noise on each action is drawn between these, in units of the action range."""
    offset: tuple[float, float] = (0.0, 0.0)
    """Constant error of the grasp position in metres (x, y): a badly calibrated demonstrator."""
    retry: bool = False
    """Whether it reaches again after a missed grasp."""
    spread: Annotated[float, AtLeast(0, "it is a deviation.", "Use 0.")] = 0.0
    """Standard deviation of a further grasp error in metres, drawn per episode."""
    place_offset: tuple[float, float] = (0.0, 0.0)
    """Constant error of where the cube is set down, in metres (x, y)."""
    place_spread: Annotated[float, AtLeast(0, "it is a deviation.", "Use 0.")] = 0.0
    """Standard deviation of a further error of the same in metres, drawn per episode."""
    extra_decisions: Annotated[int, AtLeast(0, "it counts decisions.", "Use 1.", highest=10_000)] = 1
    """Decisions recorded after the task is solved."""


class Simulator(Protocol):
    """One environment with true physics and true success.

    Its class is called with ``image_size=`` in pixels and the keywords of --simulator-settings.
    Action i produces observation i: `step` returns what is seen after the action.
    """

    @property
    def tasks(self) -> Sequence[str]:
        """Return all instructions that episodes may have."""
        ...

    @property
    def max_steps(self) -> int:
        """Return the steps until an episode is truncated. The caller counts; `step` may be called further."""
        ...

    @property
    def image_size(self) -> int:
        """Return the side of the square picture in pixels."""
        ...

    def reset(self, seed: int) -> Observation:
        """Begin the episode that belongs to this seed; everything about it follows from the seed."""
        ...

    def step(self, action: NDArray[np.floating]) -> Observation:
        """Carry out one action.

        Args:
            action: ``[A]`` float32 in the units of the policy. The built-in one: ``[7]`` = (dx, dy, dz,
                droll, dpitch, dyaw, gripper), each clipped to [-1, 1]; translations and rotations are
                relative to the present tool pose; gripper > 0 closes.
        """
        ...


@runtime_checkable
class HasExpert(Protocol):
    """A simulator that can show how a task is done: needed by `asyncrl collect` without --policy."""

    def expert(self, settings: Demonstrator, rng: np.random.Generator) -> Callable[[], NDArray[np.float32]]:
        """Return what chooses the next action of the episode that was just reset; it may see the true state.

        Args:
            settings: How good it shall be; what has no meaning here is ignored.
            rng: Source of all its randomness.

        Returns:
            A function that gives ``[A]`` float32 in the units of `Simulator.step`, called before each `step`.
        """
        ...
