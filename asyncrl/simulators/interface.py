"""The interface of every simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What is seen after a reset or a step."""

    image: NDArray[np.uint8]
    """``[H, W, 3]`` red-green-blue; ``[0, 0, 3]`` when the simulator does not render."""
    task: str
    """The instruction, lower case, without a full stop."""
    success: bool
    """Whether the task is fulfilled at this very moment. Not latched: a later step may undo it."""


class Simulator(Protocol):
    """One environment with true physics and true success. Its class is called with ``image_size=`` in pixels.

    Action i produces observation i: `step` returns what is seen after the action.
    """

    @property
    def tasks(self) -> Sequence[str]:
        """All instructions that episodes may have."""
        ...

    @property
    def max_steps(self) -> int:
        """Steps after which an episode is truncated. The caller counts; `step` may be called further."""
        ...

    @property
    def image_size(self) -> int:
        """Side of the square picture in pixels."""
        ...

    def reset(self, seed: int) -> Observation:
        """Begin the episode that belongs to this seed; everything about it follows from the seed."""
        ...

    def step(self, action: NDArray[np.floating]) -> Observation:
        """Carry out one action.

        Args:
            action: ``[7]`` = (dx, dy, dz, droll, dpitch, dyaw, gripper), each clipped to [-1, 1].
                Translations and rotations are relative to the present tool pose; gripper > 0 closes.
        """
        ...
