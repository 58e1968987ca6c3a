"""Scripted experts of three tasks of ManiSkill, which read the true state.

Lengths in metres; actions in our own convention (rotations right-handed, gripper -1 = open); quaternions as
ManiSkill has them, with the real part first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.simulators.interface import CLOSE, OPEN, Flaws, Phase, skew_part

Array = NDArray[np.float64]


def axis_angle(quaternion: Array) -> Array:
    """Turn a rotation ``[4]`` into its vector ``[3]``: axis times angle, at most pi."""
    w, vector = quaternion[0], quaternion[1:]
    if w < 0:  # The same rotation, the short way round.
        w, vector = -w, -vector
    length = float(np.linalg.norm(vector))
    return vector * (2 * np.arctan2(length, w) / length if length > 1e-9 else 2.0)


def matrix(quaternion: Array) -> Array:
    """Turn a rotation into its matrix ``[3, 3]``."""
    w, x, y, z = quaternion
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


TRANSLATION: Final = 0.1  # Metres of an action of 1.
ROTATION: Final = 0.1  # Radians of an action of 1.
HOVER: Final = 0.08  # Height above the cube at which the hand travels to it.
LIFT: Final = 0.05  # Height above the lower cube at which the upper one travels.
BEHIND: Final = 0.08  # Distance behind the cube from which it is pushed.
_DOWN: Final = np.diag([1.0, -1.0, -1.0])
_CLOSING_STEPS: Final = 3
_MISSED: Final = 0.03  # Distance between cube and tool in CARRY beyond which the cube is lost.
_PATIENCE: Final = 20  # Steps after which a phase ends in any case.


class SceneView:
    """An environment of ManiSkill, without wrappers and of one row, as arrays of float64."""

    def __init__(self, env: Any) -> None:
        self._env = env

    @property
    def tool(self) -> Array:
        """Point between the finger tips: ``[3]``."""
        return self._of(self._env.agent.tcp.pose.p)

    @property
    def tool_rotation(self) -> Array:
        """The tool's axes as columns: ``[3, 3]``."""
        return matrix(self._of(self._env.agent.tcp.pose.q))

    def position(self, thing: str) -> Array:
        """Return an object's position: ``[3]``."""
        return self._of(getattr(self._env, thing).pose.p)

    def yaw(self, thing: str) -> float:
        """Return the direction of a cube's sides about the vertical: radians in [-pi/4, pi/4)."""
        rotation = matrix(self._of(getattr(self._env, thing).pose.q))
        return float((np.arctan2(rotation[1, 0], rotation[0, 0]) + np.pi / 4) % (np.pi / 2) - np.pi / 4)

    def _of(self, values: Any) -> Array:
        return values[0].cpu().numpy().astype(np.float64)


class PickExpert:
    """Takes a cube to a goal: reach over it, sink, close, carry; to stack, come from above and let go.

    `goal`: returns the goal of the cube's middle ``[3]``; called at every step.
    """

    def __init__(
        self, scene: SceneView, cube: str, goal: Callable[[], Array], *, stack: bool, flaws: Flaws
    ) -> None:
        self._scene, self._cube, self._goal, self._stack, self._flaws = scene, cube, goal, stack, flaws
        self._begin(Phase.REACH)

    def __call__(self) -> Array:
        """Choose the next action ``[7]``."""
        self._advance()
        self._steps += 1
        tool, grip = self._scene.tool, CLOSE
        if self._phase in (Phase.REACH, Phase.SINK):
            above = np.array([0, 0, HOVER if self._phase is Phase.REACH else 0])
            target, grip = self._grasp_point() + above, OPEN
        elif self._phase is Phase.LIFT:
            target = np.array([*tool[:2], self._goal()[2] + LIFT])
        elif self._phase is Phase.CARRY:
            target = tool + self._carry()
        else:
            target, grip = tool, OPEN if self._phase is Phase.RELEASE else CLOSE
        return _noisy(self._flaws, [*_motion(target - tool, TRANSLATION), *self._turn()], grip)

    def _begin(self, phase: Phase) -> None:
        self._phase, self._steps = phase, 0

    def _advance(self) -> None:
        scene, way = self._scene, self._grasp_point() - self._scene.tool
        late = self._steps > _PATIENCE
        if self._phase is Phase.REACH and (np.hypot(*way[:2]) < 0.012 or late):
            self._begin(Phase.SINK)
        elif self._phase is Phase.SINK and (np.linalg.norm(way) < 0.008 or late):
            self._begin(Phase.GRASP)
        elif self._phase is Phase.GRASP and self._steps > _CLOSING_STEPS:
            self._begin(Phase.LIFT if self._stack else Phase.CARRY)
        elif self._phase is Phase.LIFT and (abs(self._goal()[2] + LIFT - scene.tool[2]) < 0.02 or late):
            self._begin(Phase.CARRY)
        elif self._phase is Phase.CARRY:
            allowed = _MISSED + float(np.linalg.norm(self._flaws.grasp))
            missed = np.linalg.norm(scene.position(self._cube) - scene.tool) > allowed
            left = self._left()
            rests = np.hypot(*left[:2]) < 0.008 and abs(left[2]) < 0.004
            if missed and self._flaws.retry:
                self._begin(Phase.REACH)
            elif self._stack and (rests or late):
                self._begin(Phase.RELEASE)

    def _grasp_point(self) -> Array:
        return self._scene.position(self._cube) + self._flaws.grasp

    def _left(self) -> Array:
        return self._goal() + self._flaws.place - self._scene.position(self._cube)

    def _carry(self) -> Array:
        left = self._left()
        if self._stack and np.hypot(*left[:2]) >= 0.008:  # Onto another one only from straight above.
            return left + np.array([0, 0, 0.03])
        return left

    def _turn(self) -> Array:
        if self._phase not in (Phase.REACH, Phase.SINK):
            return np.zeros(3)
        yaw = self._scene.yaw(self._cube)
        about = np.array([[np.cos(yaw), -np.sin(yaw), 0], [np.sin(yaw), np.cos(yaw), 0], [0, 0, 1]])
        return _motion(skew_part(about @ _DOWN @ self._scene.tool_rotation.T), ROTATION)


class PushExpert:
    """Pushes a cube along x to the target: behind it with closed fingers, then through it.

    `Flaws.grasp` is the error of where it pushes, `Flaws.place` of where it stops.
    """

    def __init__(self, scene: SceneView, flaws: Flaws) -> None:
        self._scene, self._flaws, self._behind, self._steps = scene, flaws, False, 0

    def __call__(self) -> Array:
        """Choose the next action ``[7]``."""
        tool, cube = self._scene.tool, self._scene.position("obj")
        start = cube + self._flaws.grasp - [BEHIND, 0, 0]
        self._steps += 1
        if not self._behind:
            self._behind = bool(np.linalg.norm(start - tool) < 0.015) or self._steps > _PATIENCE
        missed = abs(cube[1] - tool[1]) > _MISSED + abs(self._flaws.grasp[1])
        if missed and self._behind and self._flaws.retry:
            self._behind, self._steps = False, 0
        target = start
        if self._behind:
            goal = self._scene.position("goal_region") + self._flaws.place
            target = np.array([goal[0], cube[1] + self._flaws.grasp[1], cube[2]])
        return _noisy(self._flaws, [*_motion(target - tool, TRANSLATION), 0, 0, 0], CLOSE)


def _noisy(flaws: Flaws, motion: Sequence[float], grip: float) -> Array:
    return np.array([*np.clip(np.asarray(motion) + flaws.noise(), -1, 1), grip])


def _motion(way: Array, unit: float) -> Array:
    return np.clip(way / unit, -1, 1)


_ON_TOP: Final = np.array([0, 0, 0.04])  # The cubes are 4 cm high.
EXPERTS: Final[dict[str, Callable[[SceneView, Flaws], Callable[[], Array]]]] = {
    "pick_cube": lambda scene, flaws: PickExpert(
        scene, "cube", lambda: scene.position("goal_site"), stack=False, flaws=flaws
    ),
    "stack_cube": lambda scene, flaws: PickExpert(
        scene, "cubeA", lambda: scene.position("cubeB") + _ON_TOP, stack=True, flaws=flaws
    ),
    "push_cube": PushExpert,
}  # By task.
