"""Demonstrate the tasks of `tabletop` by a script that knows the simulator's true state.

It reaches over the named cube while sinking into a funnel, closes, carries over the named plate, lets go and
withdraws. It can be made worse by action noise, by constant offsets of where it grasps and where it sets
down (a miscalibrated demonstrator) and by errors of both drawn anew each episode. Lengths in metres.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.simulators.tabletop.scene import (
    CUBE_HALF,
    PLATE_HEIGHT,
    PLATE_RADIUS,
    ROTATION,
    TRANSLATION,
    rotation_matrix,
    skew_part,
)

HOVER: Final = 0.07
"""Height above the grasp at which the hand travels to the cube."""
LIFT: Final = 0.06
"""Height above the plate at which the cube travels."""
GAIN: Final = 0.42
"""Share of the remaining way that one action asks for: calm motion that a policy can copy."""
CLOSE: Final = 1.0
OPEN: Final = -1.0
_DOWN = np.diag([1.0, -1.0, -1.0])
_GRASP_HEIGHT = 0.020
_CLOSING_STEPS = 2
_RELEASE_STEPS = 2
_PATIENCE = 18
"""Steps of reaching or carrying after which the expert goes on regardless."""


class _Phase(Enum):
    REACH = auto()
    GRASP = auto()
    CARRY = auto()
    RELEASE = auto()
    WITHDRAW = auto()


class TableState(Protocol):
    """What the expert knows of the simulator."""

    cube: int
    plate: int
    cube_position: Callable[[int], NDArray[np.float64]]
    cube_yaw: Callable[[int], float]
    plate_position: Callable[[int], NDArray[np.float64]]

    @property
    def tool_position(self) -> NDArray[np.float64]:
        """See `Tabletop.tool_position`."""
        ...

    @property
    def tool_rotation(self) -> NDArray[np.float64]:
        """See `Tabletop.tool_rotation`."""
        ...

    @property
    def finger_opening(self) -> float:
        """See `Tabletop.finger_opening`."""
        ...


class Expert:
    """Acts on privileged state. One object serves one episode at a time; call `start` at each reset.

    Args:
        noise: Standard deviation of the Gaussian noise on an action's six motion numbers, before clipping.
        grasp_offset: ``(x, y)`` metres by which every grasp misses the cube's centre.
        rng: Source of the noise and of the grasp error.
        grasp_error: Standard deviation in metres of a further ``(x, y)`` miss, drawn by `start`.
        place_offset: ``(x, y)`` metres by which the cube is set down beside the plate's centre.
        place_error: Standard deviation in metres of a further ``(x, y)`` error of the same, drawn by `start`.
        retry: Reach again after an empty grasp or a dropped cube. Otherwise it carries on with nothing.
    """

    def __init__(
        self,
        noise: float,
        grasp_offset: tuple[float, float],
        rng: np.random.Generator,
        *,
        grasp_error: float = 0.0,
        place_offset: tuple[float, float] = (0.0, 0.0),
        place_error: float = 0.0,
        retry: bool = False,
    ) -> None:
        self._noise, self._rng, self._retry = noise, rng, retry
        self._offset, self._place_offset = np.asarray(grasp_offset), np.asarray(place_offset)
        self._grasp_error, self._place_error = grasp_error, place_error
        self.start()

    def start(self) -> None:
        """Forget the last episode and draw the errors of the next one."""
        self._miss = self._offset + self._rng.normal(0.0, 1.0, 2) * self._grasp_error
        self._misplace = self._place_offset + self._rng.normal(0.0, 1.0, 2) * self._place_error
        self._enter(_Phase.REACH)

    def act(self, table: TableState) -> NDArray[np.float32]:
        """Choose the next action.

        Returns:
            ``[7]`` float32 in [-1, 1]: proportional to the remaining way, gripper exactly -1 or 1.
        """
        self._change_phase(table)
        self._steps += 1
        action = np.zeros(7)
        action[:3] = GAIN * (self._target(table) - table.tool_position) / TRANSLATION
        action[3:6] = GAIN * self._turn(table) / ROTATION
        action[:6] += self._rng.normal(0.0, 1.0, 6) * self._noise
        action[6] = CLOSE if self._phase in (_Phase.GRASP, _Phase.CARRY) else OPEN
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def _enter(self, phase: _Phase) -> None:
        self._phase, self._steps = phase, 0

    def _change_phase(self, table: TableState) -> None:
        """Move on when the present phase has reached its end, or has run out of patience."""
        if self._phase is _Phase.REACH:
            error = table.tool_position - self._grasp_point(table)
            if (np.hypot(*error[:2]) < 0.012 and abs(error[2]) < 0.012) or self._steps >= _PATIENCE:
                self._enter(_Phase.GRASP)
        elif self._phase is _Phase.GRASP and self._steps >= _CLOSING_STEPS:
            self._enter(_Phase.CARRY)
        elif self._phase is _Phase.CARRY:
            if self._retry and not self._holds(table):
                self._enter(_Phase.REACH)
            else:
                above = self._cargo(table) - self._put_point(table)
                if (np.hypot(*above[:2]) < 0.018 and above[2] < 0.008) or self._steps >= _PATIENCE:
                    self._enter(_Phase.RELEASE)
                    self._held_at = table.tool_position
        elif self._phase is _Phase.RELEASE and self._steps >= _RELEASE_STEPS:
            self._enter(_Phase.WITHDRAW)

    def _target(self, table: TableState) -> NDArray[np.float64]:
        """Compute the tool's target ``[3]``. Far from the goal it keeps its height; near it, it sinks."""
        if self._phase is _Phase.REACH:
            return _funnel(table.tool_position, self._grasp_point(table), HOVER, slope=2.5)
        if self._phase is _Phase.GRASP:
            return self._grasp_point(table)
        if self._phase is _Phase.CARRY:
            cargo = self._cargo(table)
            way = _funnel(cargo, self._put_point(table), LIFT, slope=2.0) - cargo
            way[:2] *= _share_sideways(cargo, self._put_point(table))
            return table.tool_position + way
        if self._phase is _Phase.WITHDRAW:
            return np.array([*self._held_at[:2], 0.13])
        return self._held_at

    def _turn(self, table: TableState) -> NDArray[np.float64]:
        """Compute the rotation ``[3]`` that sets the hand upright and, before the grasp, along the cube."""
        yaw = table.cube_yaw(table.cube)
        if self._phase is not _Phase.REACH:
            axes = table.tool_rotation
            yaw = float(np.arctan2(axes[1, 0], axes[0, 0]))
        wanted = rotation_matrix(np.array([0.0, 0.0, yaw])) @ _DOWN
        return skew_part(wanted @ table.tool_rotation.T)

    def _grasp_point(self, table: TableState) -> NDArray[np.float64]:
        cube = table.cube_position(table.cube)
        return np.array([*(cube[:2] + self._miss), cube[2] - CUBE_HALF + _GRASP_HEIGHT])

    def _put_point(self, table: TableState) -> NDArray[np.float64]:
        """Compute where the cargo's centre is to be when the fingers open: ``[3]``, just above the plate."""
        plate = table.plate_position(table.plate)
        return np.array([*(plate[:2] + self._misplace), PLATE_HEIGHT + CUBE_HALF + 0.003])

    def _cargo(self, table: TableState) -> NDArray[np.float64]:
        """Return what to bring over the plate, ``[3]``: the cube when it is held, else the tool itself."""
        return table.cube_position(table.cube) if self._holds(table) else table.tool_position

    def _holds(self, table: TableState) -> bool:
        near = np.linalg.norm(table.cube_position(table.cube) - table.tool_position) < 0.05
        return bool(near and table.finger_opening > 1.5 * CUBE_HALF)


def _funnel(
    now: NDArray[np.float64], goal: NDArray[np.float64], height: float, *, slope: float
) -> NDArray[np.float64]:
    """Return the goal ``[3]``, raised by up to `height` while `now` is sideways of it by more than 12 mm."""
    sideways = float(np.hypot(*(goal - now)[:2]))
    return goal + np.array([0.0, 0.0, np.clip(slope * (sideways - 0.012), 0.0, height)])


def _share_sideways(cargo: NDArray[np.float64], goal: NDArray[np.float64]) -> float:
    """Compute the share of the sideways way to go: little while the cargo is low."""
    if np.hypot(*(goal - cargo)[:2]) < PLATE_RADIUS:
        return 1.0
    return float(np.clip((cargo[2] - CUBE_HALF) / (2 * CUBE_HALF), 0.1, 1.0))
