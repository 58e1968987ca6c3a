"""`tabletop`, the shipped simulator: put a cube on a plate, at any number of tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import Demonstrator, SimStart, SimulatorSpec, hand_pose
from asyncrl.simulators.one_by_one import OneByOne, Outcome
from asyncrl.simulators.tabletop.expert import Expert
from asyncrl.simulators.tabletop.scene import FINGER_TRAVEL, TASKS, Table

MAX_STEPS: Final = 48
"""An episode is truncated after 6 decisions of 8 steps."""
IMAGE_SIZE: Final = 64


class _TablePlace:
    def __init__(self, table: Table) -> None:
        self.table = table

    def reset(self, start: SimStart) -> str:
        if start.trial >= 0:
            raise ConfigError(f"{start.name} is a stored start, but tabletop's starts are seeds.")
        self.table.reset(start.seed)
        return self.table.task

    def step(self, action: NDArray[np.float32]) -> Outcome:
        self.table.step(action)
        return Outcome(self.table.success)

    def look(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        return self.table.picture()[None], np.zeros(0, np.float32)

    def pose(self) -> NDArray[np.float32]:
        opened = self.table.finger_opening / (2 * FINGER_TRAVEL)
        return hand_pose(self.table.tool_position, self.table.tool_quaternion, opened)


class Tabletop(OneByOne[_TablePlace]):
    """Independent `Table`s.

    Args:
        places: Tables, at least 1.
        image_size: Side of the picture in pixels, 16..512; 0: 64.
        horizon: Steps until an episode is truncated; 0: `MAX_STEPS`.
        render: False leaves the pictures out (all are ``[0, 0, 3]``) and needs no OpenGL.
        supersample: The picture is drawn this many times larger and averaged down.

    Raises:
        ConfigError: The picture size is out of range.
        AssetError: Pictures are wanted and there is no OpenGL library.
    """

    any_image_size = True

    def __init__(
        self,
        *,
        places: int = 1,
        image_size: int = 0,
        horizon: int = 0,
        render: bool = True,
        supersample: int = 3,
    ) -> None:
        spec = self.describe(places=places, image_size=image_size, horizon=horizon, render=render)
        size = spec.image_size or IMAGE_SIZE
        tables = [Table(size, render=render, supersample=supersample) for _ in range(places)]
        super().__init__(spec, [_TablePlace(table) for table in tables])

    @classmethod
    def describe(
        cls,
        *,
        places: int = 1,
        image_size: int = 0,
        horizon: int = 0,
        render: bool = True,
        supersample: int = 3,
    ) -> SimulatorSpec:
        """Return the spec without a scene; arguments of the class."""
        size = image_size or IMAGE_SIZE
        if not 16 <= size <= 512:
            raise ConfigError(
                f"image_size is {image_size}, but tabletop draws pictures of 16 to 512 pixels. Use 64."
            )
        return SimulatorSpec(
            name="tabletop",
            tasks=tuple(TASKS),
            trials=0,
            max_steps=horizon or MAX_STEPS,
            image_size=size if render else 0,
            poses=True,
            places=places,
        )

    def expert(
        self, place: int, settings: Demonstrator, rng: np.random.Generator
    ) -> Callable[[], NDArray[np.float32]]:
        """Return the scripted expert; see `HasExpert.expert`."""
        return Expert(self.places[place].table, settings, rng).act
