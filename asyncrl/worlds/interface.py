"""The interface every world keeps, and what a world may offer beside it.

Dimension letters: B slots, C steps per decision, A numbers per step, H/W image size in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.config.imagination import ImaginationSettings, WorldDefaults
from asyncrl.records import ActionSpec, ModelSummary, SlotBytes, StartState

State = TypeVar("State", bound="WorldState")


class WorldState(Protocol):
    """What a world remembers about each of `B` slots. Row i belongs to slot i and to nobody else."""

    @property
    def finite(self) -> Tensor:
        """Say for which slots all that was drawn was finite: ``[B]`` bool on the state's device.

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
    """Imagines what the robot's actions lead to, one decision (C actions, C frames) at a time."""

    version: int
    """Which weights imagine; travels with every episode."""

    @classmethod
    def check(cls, folder: Path, settings: ImaginationSettings, **own: Any) -> ModelSummary:
        """Check, without loading any weight, that a folder holds a world that `load` can read.

        Raises:
            CheckpointError: A file is missing, cannot be read, or does not fit.
        """
        ...

    @classmethod
    def load(cls, folder: Path, device: torch.device, settings: ImaginationSettings, **own: Any) -> Self:
        """Read a world for inference.

        Args:
            folder: What --world names, or what stands behind its @.
            device: Where the weights go.
            settings: --imagination.*: what is not in this world's power is refused, not ignored.
            own: Of ``[world.settings]`` or --world-settings.

        Raises:
            CheckpointError: A file is missing or does not fit.
            ConfigError: A setting that this world cannot follow.
        """
        ...

    @property
    def image_size(self) -> int:
        """Return height and width of the frames in pixels."""
        ...

    @property
    def action_spec(self) -> ActionSpec:
        """Return the steps per decision and numbers per step that it takes; the policy's must equal it."""
        ...

    @property
    def device(self) -> torch.device:
        """Say where the weights are."""
        ...

    def modules(self) -> Mapping[str, nn.Module]:
        """Return its networks by name: what is moved to host memory while there is nothing to imagine."""
        ...

    def start(self, states: Sequence[StartState], *, decisions: int) -> State:
        """Open one slot per start state.

        Args:
            states: `B` start states whose frames ``[H, W, 3]`` uint8 are `image_size` pixels high and wide.
            decisions: That will be imagined from here at most: a world that remembers all of an episode has
                room for them.
        """
        ...

    def imagine(
        self, state: State, actions: Tensor | NDArray[np.float32], noise_seeds: Sequence[int]
    ) -> tuple[Tensor, State]:
        """Draw the C frames that C actions lead to. Never waits for the device.

        Args:
            state: What `start` or the last `imagine` returned; it is not changed.
            actions: ``[B, C, A]`` float32; action i produced frame i.
            noise_seeds: ``B`` seeds; row i depends on ``noise_seeds[i]`` only, not on its slot or neighbours;
                but for the last digits, in which the number of rows may show.

        Returns:
            Frames ``[B, C, H, W, 3]`` uint8, and the state after them.
        """
        ...


@runtime_checkable
class BringsDefaults(Protocol):
    """A world that says how its episodes are imagined where the user does not."""

    @classmethod
    def defaults(cls, folder: Path, settings: ImaginationSettings, **own: Any) -> WorldDefaults:
        """Say what a folder brings; reads no weights.

        Raises:
            CheckpointError: There is no world in the folder.
        """
        ...


@runtime_checkable
class NeedsPose(Protocol):
    """A world that says whether its start states must have a pose, `StartState.ee_pose`; others need none."""

    needs_pose: bool


@runtime_checkable
class CountsSlots(Protocol):
    """A world that knows what a slot takes: for `asyncrl doctor`."""

    @classmethod
    def slot_bytes(
        cls, folder: Path, settings: ImaginationSettings, *, decisions: int, **own: Any
    ) -> SlotBytes:
        """Estimate what slots take in episodes of at most `decisions` decisions; reads no weights."""
        ...


@runtime_checkable
class CompilesWorld(Protocol):
    """A world whose networks can be compiled: needed by --imagination.compile."""

    def compile(self, rows: int) -> Any:
        """Compile what takes the time, for decisions of `rows` slots; fewer are filled up."""
        ...
