"""The interface every world keeps: start states and actions in, frames out.

Dimension letters: B slots, H/W image size in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.records import StartState

State = TypeVar("State", bound="WorldState")


class WorldState(Protocol):
    """What a world remembers about each of `B` slots. Row i belongs to slot i and to nobody else."""

    @property
    def finite(self) -> Tensor:
        """``[B]`` bool on the state's device: False where something drawn for the slot was not finite.

        Frames cannot tell: they are uint8, whatever they were made of.
        """
        ...

    def __len__(self) -> int:
        """Return the number of slots."""
        ...

    def select(self: State, indices: Sequence[int]) -> State:
        """Return a state of its own that holds copies of the rows `indices`, in that order."""
        ...

    def write_rows(self: State, indices: Sequence[int], other: State) -> State:
        """Write row k of `other` over row ``indices[k]`` of this state, in place, and return this state."""
        ...

    def to(self: State, device: torch.device | str) -> State:
        """Return this state on `device`."""
        ...


class World(Protocol[State]):
    """Imagines what the robot's actions lead to, one decision (8 actions, 8 frames) at a time."""

    version: int
    """Which weights imagine; travels with every episode."""

    @property
    def image_size(self) -> int:
        """Height and width of the frames in pixels."""
        ...

    def start(self, states: Sequence[StartState]) -> State:
        """Open one slot per start state.

        Args:
            states: `B` start states whose frames are `image_size` pixels high and wide.
        """
        ...

    def imagine(
        self, state: State, actions: Tensor | NDArray[np.float32], noise_seeds: Sequence[int]
    ) -> tuple[Tensor, State]:
        """Draw the 8 frames that 8 actions lead to.

        Args:
            state: What `start` or the last `imagine` returned; it is not changed.
            actions: ``[B, 8, 7]`` float32; action i produced frame i.
            noise_seeds: ``B`` seeds; row i depends on ``noise_seeds[i]`` only, not on its slot or neighbours.

        Returns:
            Frames ``[B, 8, H, W, 3]`` uint8, and the state after them.
        """
        ...
