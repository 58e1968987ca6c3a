"""`tabletop`, the shipped simulator: put a cube on a plate, at any number of tables; and its expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import CLOSE, OPEN, Demonstrator, Flaws, Phase, SimulatorSpec, skew_part
from asyncrl.simulators.one_by_one import OneByOne
from asyncrl.simulators.tabletop import scene
from asyncrl.simulators.tabletop.scene import CUBE_HALF, Table, rotation_matrix

MAX_STEPS: Final = 48  # An episode is truncated after 6 decisions of 8 steps.
IMAGE_SIZE: Final = 64
HOVER: Final = 0.07  # Height above the grasp at which the hand travels to the cube.
LIFT: Final = 0.06  # Height above the plate at which the cube travels.
GAIN: Final = 0.42  # Share of the remaining way per action: calm motion that a policy can copy.
_DOWN = np.diag([1.0, -1.0, -1.0])
_GRASP_HEIGHT = 0.020
_CLOSING_STEPS = 2
_RELEASE_STEPS = 2
_PATIENCE = 18  # Steps after which reaching or carrying ends in any case.


class TableExpert:
    """The scripted expert of one episode that was just reset, which reads the true state. Lengths in metres.

    It reaches over the named cube while sinking into a funnel, closes, carries over the named plate, lets go
    and withdraws.
    """

    def __init__(self, table: Table, settings: Demonstrator, rng: np.random.Generator) -> None:
        self._table, self._flaws = table, Flaws(settings, rng)
        self._enter(Phase.REACH)

    def act(self) -> NDArray[np.float32]:
        """Choose the next action ``[7]`` float32 in [-1, 1]; the gripper is exactly -1 or 1."""
        self._change_phase()
        self._steps += 1
        action = np.zeros(7)
        action[:3] = GAIN * (self._target() - self._table.tool_position) / scene.TRANSLATION
        action[3:6] = GAIN * self._turn() / scene.ROTATION
        action[:6] += self._flaws.noise()
        action[6] = CLOSE if self._phase in (Phase.GRASP, Phase.CARRY) else OPEN
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def _enter(self, phase: Phase) -> None:
        self._phase, self._steps = phase, 0

    def _change_phase(self) -> None:
        table = self._table
        if self._phase is Phase.REACH:
            error = table.tool_position - self._grasp_point()
            if (np.hypot(*error[:2]) < 0.012 and abs(error[2]) < 0.012) or self._steps >= _PATIENCE:
                self._enter(Phase.GRASP)
        elif self._phase is Phase.GRASP and self._steps >= _CLOSING_STEPS:
            self._enter(Phase.CARRY)
        elif self._phase is Phase.CARRY:
            if self._flaws.retry and not self._holds():
                self._enter(Phase.REACH)
            else:
                above = self._cargo() - self._put_point()
                if (np.hypot(*above[:2]) < 0.018 and above[2] < 0.008) or self._steps >= _PATIENCE:
                    self._enter(Phase.RELEASE)
                    self._held_at = table.tool_position
        elif self._phase is Phase.RELEASE and self._steps >= _RELEASE_STEPS:
            self._enter(Phase.WITHDRAW)

    def _target(self) -> NDArray[np.float64]:
        table = self._table
        if self._phase is Phase.REACH:
            return _funnel(table.tool_position, self._grasp_point(), HOVER, slope=2.5)
        if self._phase is Phase.GRASP:
            return self._grasp_point()
        if self._phase is Phase.CARRY:
            cargo = self._cargo()
            goal = self._put_point()
            way = _funnel(cargo, goal, LIFT, slope=2.0) - cargo
            if np.hypot(*(goal - cargo)[:2]) >= scene.PLATE_RADIUS:  # While it is low, little sideways.
                way[:2] *= np.clip((cargo[2] - CUBE_HALF) / (2 * CUBE_HALF), 0.1, 1.0)
            return table.tool_position + way
        if self._phase is Phase.WITHDRAW:
            return np.array([*self._held_at[:2], 0.13])
        return self._held_at

    def _turn(self) -> NDArray[np.float64]:
        table = self._table
        yaw = table.cube_yaw(table.cube)
        if self._phase is not Phase.REACH:
            axes = table.tool_rotation
            yaw = float(np.arctan2(axes[1, 0], axes[0, 0]))
        wanted = rotation_matrix(np.array([0.0, 0.0, yaw])) @ _DOWN
        return skew_part(wanted @ table.tool_rotation.T)

    def _grasp_point(self) -> NDArray[np.float64]:
        cube = self._table.cube_position(self._table.cube)
        return np.array([*(cube[:2] + self._flaws.grasp[:2]), cube[2] - CUBE_HALF + _GRASP_HEIGHT])

    def _put_point(self) -> NDArray[np.float64]:
        plate = self._table.plate_position(self._table.plate)
        return np.array([*(plate[:2] + self._flaws.place[:2]), scene.PLATE_HEIGHT + CUBE_HALF + 0.003])

    def _cargo(self) -> NDArray[np.float64]:
        table = self._table
        return table.cube_position(table.cube) if self._holds() else table.tool_position

    def _holds(self) -> bool:
        table = self._table
        near = np.linalg.norm(table.cube_position(table.cube) - table.tool_position) < 0.05
        return bool(near and table.finger_opening > 1.5 * CUBE_HALF)


def _funnel(
    now: NDArray[np.float64], goal: NDArray[np.float64], height: float, *, slope: float
) -> NDArray[np.float64]:
    # Raised by up to `height` while `now` is sideways of the goal by more than 12 mm.
    sideways = float(np.hypot(*(goal - now)[:2]))
    return goal + np.array([0.0, 0.0, np.clip(slope * (sideways - 0.012), 0.0, height)])


class Tabletop(OneByOne[Table]):
    """Independent `Table`s.

    Args:
        image_size: Side of the picture in pixels, 16..512; 0: 64.
        horizon: Steps until an episode is truncated; 0: `MAX_STEPS`.
        render: False leaves the pictures out (all are ``[0, 0, 3]``) and needs no OpenGL.
    """

    any_image_size = True

    def __init__(self, *, places: int = 1, render: bool = True, **sizes: int) -> None:
        spec = self.describe(places=places, render=render, **sizes)
        side = sizes.get("image_size") or IMAGE_SIZE
        tables = [Table(side, render=render) for _ in range(places)]
        super().__init__(spec, tables)

    @classmethod
    def describe(
        cls, *, places: int = 1, image_size: int = 0, horizon: int = 0, render: bool = True
    ) -> SimulatorSpec:
        """Return the spec, without building a scene."""
        size = image_size or IMAGE_SIZE
        if not 16 <= size <= 512:
            raise ConfigError(
                f"image_size is {image_size}, but tabletop draws pictures of 16 to 512 pixels. Use 64."
            )
        return SimulatorSpec(
            name="tabletop",
            tasks=tuple(scene.TASKS),
            trials=0,
            max_steps=horizon or MAX_STEPS,
            image_size=size if render else 0,
            poses=True,
            places=places,
        )

    def expert(
        self, place: int, settings: Demonstrator, rng: np.random.Generator
    ) -> Callable[[], NDArray[np.float32]]:
        """Return the scripted expert."""
        return TableExpert(self.places[place], settings, rng).act
