"""Simulate `tabletop`, the shipped environment: put a cube on a plate, at any number of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import Demonstrator, Seen, SimStart, SimulatorSpec, Stepped
from asyncrl.simulators.tabletop.expert import Expert
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.simulators.tabletop.table import Table

MAX_STEPS: Final = 48
"""An episode is truncated after 6 decisions of 8 steps."""
IMAGE_SIZE: Final = 64


class Tabletop:
    """`Table`s beside each other. Deterministic: a start's seed and the actions decide everything.

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
    """It has no official picture: a policy is shown the size it likes best."""

    def __init__(
        self,
        *,
        places: int = 1,
        image_size: int = 0,
        horizon: int = 0,
        render: bool = True,
        supersample: int = 3,
    ) -> None:
        self.spec = self.describe(places=places, image_size=image_size, horizon=horizon, render=render)
        drawn = self.spec.image_size or IMAGE_SIZE
        self.tables = [Table(drawn, render=render, supersample=supersample) for _ in range(places)]
        self._steps = [0] * places

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
        """Say what it is, without a scene. The arguments are those of the class."""
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
            places=places,
        )

    def reset(self, places: Sequence[int], starts: Sequence[SimStart]) -> Seen:
        """Lay out the scenes of the starts' seeds. See `Simulator.reset`."""
        for place, start in zip(places, starts, strict=True):
            if start.trial >= 0:
                raise ConfigError(f"{start.name} is a stored start, but tabletop's starts are seeds.")
            self.tables[place].reset(start.seed)
            self._steps[place] = 0
        seen = self.look(places)
        return Seen(seen.images, seen.states, tuple(self.tables[place].task for place in places))

    def step(self, places: Sequence[int], actions: NDArray[np.float32], *, draw: bool) -> Stepped:
        """Carry out one action of 0.1 s at each table; see `Table.step`, and `Simulator.step`."""
        for place, action in zip(places, actions, strict=True):
            self.tables[place].step(action)
            self._steps[place] += 1
        success = np.array([self.tables[place].success for place in places])
        return Stepped(
            seen=self.look(places) if draw else None,
            rewards=success.astype(np.float32),
            success=success,
            terminated=np.zeros(len(places), np.bool_),
            truncated=np.array([self._steps[place] >= self.spec.max_steps for place in places]),
        )

    def look(self, places: Sequence[int]) -> Seen:
        """Draw the tables as they are. See `Simulator.look`."""
        images = np.stack([self.tables[place].picture() for place in places])
        return Seen(images[:, None], np.zeros((len(places), 0), np.float32))

    def close(self) -> None:
        """Do nothing: the OpenGL context is shared by the process."""

    def expert(
        self, place: int, settings: Demonstrator, rng: np.random.Generator
    ) -> Callable[[], NDArray[np.float32]]:
        """Return what chooses the next action from the true state. See `HasExpert.expert`."""
        expert = Expert(
            noise=float(rng.uniform(*settings.noise)),
            grasp_offset=settings.offset,
            grasp_error=settings.spread,
            place_offset=settings.place_offset,
            place_error=settings.place_spread,
            retry=settings.retry,
            rng=rng,
        )
        table = self.tables[place]
        return lambda: expert.act(table)
