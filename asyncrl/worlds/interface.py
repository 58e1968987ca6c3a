"""The interface of worlds.

Dimension letters: B slots, C steps per decision, A numbers per step, H/W image size in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.config.sections import ImaginationSettings, WorldDefaults
from asyncrl.facts import check_pictures
from asyncrl.records import ActionSpec, ModelSummary, SlotBytes, StartState

State = TypeVar("State", bound="WorldState")


def imagine(
    world: World[State], state: State, actions: Tensor | NDArray[np.float32], noise_seeds: Sequence[int]
) -> tuple[Tensor, State]:
    """Call `World.imagine`, and refuse frames of another shape or dtype."""
    frames, state = world.imagine(state, actions, noise_seeds)
    shape = (len(noise_seeds), actions.shape[1], world.image_size, world.image_size, 3)
    check_pictures(frames, shape, "frames of --world, by imagine(),")
    return frames, state


class WorldState(Protocol):
    """Memory of `B` slots of a world; row i belongs to slot i."""

    @property
    def finite(self) -> Tensor:
        """``[B]`` bool on the state's device: all values drawn so far were finite (frames are uint8)."""
        ...

    def __len__(self) -> int: ...

    def select(self: State, indices: Sequence[int]) -> State:
        """Return a new state with copies of the rows `indices`, in that order."""
        ...

    def write_rows(self: State, indices: Sequence[int], other: State) -> State:
        """Write row k of `other` over row ``indices[k]`` of this state, in place, and return this state."""
        ...


class World(Protocol[State]):
    """Imagines the outcome of the robot's actions, one decision (C actions, C frames) at a time."""

    version: int
    """Version of the weights; travels with every episode."""

    @classmethod
    def check(cls, folder: Path, settings: ImaginationSettings, **own: Any) -> ModelSummary:
        """Check, without loading any weight, that `load` can read a folder."""
        ...

    @classmethod
    def load(cls, folder: Path, device: torch.device, settings: ImaginationSettings, **own: Any) -> Self:
        """Read a world for inference.

        Args:
            folder: Value of --world, after any @.
            settings: --imagination.*; unsupported ones are refused.
            own: From ``[world.settings]`` or --world-settings.
        """
        ...

    @property
    def image_size(self) -> int:
        """Return height and width of the frames in pixels."""
        ...

    @property
    def action_spec(self) -> ActionSpec:
        """Return steps per decision and numbers per step; the policy's must be equal."""
        ...

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        ...

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the networks by name: they are moved to host memory while nothing is imagined."""
        ...

    def start(self, states: Sequence[StartState], *, decisions: int) -> State:
        """Open one slot per start state.

        Args:
            states: `B` start states whose frames ``[H, W, 3]`` uint8 are `image_size` pixels high and wide.
            decisions: Largest number of decisions from here, for worlds that remember a whole episode.
        """
        ...

    def imagine(
        self, state: State, actions: Tensor | NDArray[np.float32], noise_seeds: Sequence[int]
    ) -> tuple[Tensor, State]:
        """Draw the C frames that C actions lead to. Never waits for the device.

        Args:
            state: Returned by `start` or the last `imagine`; it is not changed.
            actions: ``[B, C, A]`` float32; action i produced frame i.
            noise_seeds: ``B`` seeds; row i depends on ``noise_seeds[i]`` only, not on its slot or neighbours,
                except for last digits that depend on the number of rows.

        Returns frames ``[B, C, H, W, 3]`` uint8, and the state after them.
        """
        ...

    if TYPE_CHECKING:
        # Optional: defaults hold without them, or a flag that needs one is refused.

        needs_pose: bool
        """True if start states need a pose, `StartState.ee_pose`."""

        @classmethod
        def defaults(cls, folder: Path, settings: ImaginationSettings, **own: Any) -> WorldDefaults:
            """Return a folder's defaults for episode settings; reads no weights."""
            ...

        @classmethod
        def slot_bytes(
            cls, folder: Path, settings: ImaginationSettings, *, decisions: int, **own: Any
        ) -> SlotBytes:
            """Estimate the memory of slots in episodes of at most `decisions` decisions; reads no weights."""
            ...

        def compile(self, rows: int) -> Any:
            """For --imagination.compile: compile for decisions of `rows` slots; fewer are padded."""
            ...
