"""Simulate `tabletop`, the shipped environment: put a cube on a plate, at any number of tables.

Simulate one table of `tabletop`: an arm, two cubes and two plates, one of each named by the instruction.

MuJoCo physics, drawn from primitives, no files. One step is 0.1 s. Lengths in metres, angles in radians.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.records import ACTION_DIM
from asyncrl.simulators.interface import Demonstrator, SimStart, SimulatorSpec, hand_pose
from asyncrl.simulators.one_by_one import OneByOne, Outcome
from asyncrl.simulators.rendering import Renderer, load_mujoco, require_backend
from asyncrl.simulators.tabletop import scene
from asyncrl.simulators.tabletop.expert import Expert
from asyncrl.simulators.tabletop.scene import (
    FINGER_TRAVEL,
    ROTATION,
    TASKS,
    TRANSLATION,
    rotation_matrix,
    skew_part,
)

PHYSICS_STEPS: Final = 20
"""Physics steps of 5 ms in one step."""
TOOL_LOW: Final = (0.30, -0.30, 0.010)
TOOL_HIGH: Final = (0.70, 0.30, 0.30)
"""The tool cannot be sent outside this box."""

_IK_EVERY = 5
_CUBES_LOW, _CUBES_HIGH = (0.41, -0.17), (0.61, 0.17)
_MAX_YAW = 0.25
_CLEARANCE = 0.115
"""Least distance between two objects at reset: the open fingers must fit between a plate and a cube."""
_NO_IMAGE = np.zeros((0, 0, 3), np.uint8)


@functools.cache
def _shared_renderer(size: int, supersample: int) -> Renderer:
    """Make one OpenGL context per process and picture size: every `Table` has the same geometry."""
    require_backend()
    return Renderer(_compile(size * supersample), size=size, supersample=supersample)


def _compile(render_size: int) -> Any:
    return load_mujoco().MjModel.from_xml_string(scene.build_xml(render_size))


class Table:
    """Put the named cube on the named plate. Deterministic: seed and actions decide everything.

    Args:
        image_size: Side of the picture in pixels, 16..512.
        render: False leaves the pictures out and needs no OpenGL.
        supersample: The picture is drawn this many times larger and averaged down.

    Raises:
        AssetError: Pictures are wanted and there is no OpenGL library.
    """

    def __init__(self, image_size: int, *, render: bool, supersample: int) -> None:
        self._renderer = _shared_renderer(image_size, supersample) if render else None
        self._mujoco = load_mujoco()
        self.model = _compile(image_size * supersample)
        self.data = self._mujoco.MjData(self.model)
        self.task = ""
        """The instruction, lower case, without a full stop."""
        self.success = False
        """Whether the task is fulfilled at this very moment."""
        self.cube = self.plate = 0
        """Which of the scene's cubes and plates the instruction names."""
        self._tool = self.model.site("tool").id
        self._jacobian = np.zeros((6, self.model.nv))
        self._goal_position = np.zeros(3)
        self._goal_rotation = np.eye(3)

    def reset(self, seed: int) -> None:
        """Lay out the scene of this seed."""
        rng = np.random.default_rng(seed)
        self._mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:7] = self.data.ctrl[:7] = scene.HOME
        self.data.qpos[7:9] = self.data.ctrl[7:9] = scene.FINGER_TRAVEL
        self._choose_task(rng)
        self._place_objects(rng)
        self._mujoco.mj_forward(self.model, self.data)
        self.success = self._is_success()

    def step(self, action: NDArray[np.floating]) -> None:
        """Carry out one action of 0.1 s.

        Args:
            action: ``[7]`` of any float dtype, (dx, dy, dz, droll, dpitch, dyaw, gripper), clipped to
                [-1, 1]. Translations scale with `TRANSLATION` and rotations, a rotation vector about the
                world axes, with `ROTATION`, both from the present tool pose; gripper > 0 closes the
                fingers, else they open.
        """
        clipped = np.clip(np.asarray(action, np.float64), -1, 1)
        if clipped.shape != (ACTION_DIM,) or not np.isfinite(clipped).all():
            raise ValueError(f"an action is {ACTION_DIM} finite numbers, got {action!r}")
        self._set_goal(clipped)
        self._advance()
        self.success = self._is_success()

    def picture(self) -> NDArray[np.uint8]:
        """Draw the table as it is: ``[H, W, 3]`` uint8, or ``[0, 0, 3]`` without rendering."""
        draw = self._renderer
        return _NO_IMAGE if draw is None else draw.draw(self.model, self.data, scene.CAMERA)

    @property
    def tool_position(self) -> NDArray[np.float64]:
        """Return the point between the finger tips: ``[3]`` float64, metres."""
        return self.data.site_xpos[self._tool].copy()

    @property
    def tool_rotation(self) -> NDArray[np.float64]:
        """Return the tool's axes in the world as columns: ``[3, 3]`` float64.

        The third points out of the hand.
        """
        return self.data.site_xmat[self._tool].reshape(3, 3).copy()

    @property
    def tool_quaternion(self) -> NDArray[np.float64]:
        """Return the same rotation as a quaternion x, y, z, w: ``[4]`` float64.

        It is the hand's, a product of the joints' turns: its sign does not jump.
        """
        hand = self.model.site_bodyid[self._tool]
        return np.roll(self.data.xquat[hand], -1)

    @property
    def finger_opening(self) -> float:
        """Return the distance between the fingers in metres, 0..0.08."""
        return float(self.data.qpos[7] + self.data.qpos[8])

    def cube_position(self, index: int) -> NDArray[np.float64]:
        """Return the centre of a cube of the scene: ``[3]`` float64, metres."""
        return self.data.qpos[9 + 7 * index : 12 + 7 * index].copy()

    def cube_yaw(self, index: int) -> float:
        """Return the direction of a cube's sides about the vertical: radians in [-pi/4, pi/4)."""
        matrix = self.data.body(f"cube{index}").xmat
        return float((np.arctan2(matrix[3], matrix[0]) + np.pi / 4) % (np.pi / 2) - np.pi / 4)

    def plate_position(self, index: int) -> NDArray[np.float64]:
        """Return the centre of a plate of the scene: ``[3]`` float64, metres."""
        return self.data.mocap_pos[index].copy()

    def _choose_task(self, rng: np.random.Generator) -> None:
        """Draw the colours of the scene and which of them the instruction names."""
        cubes = rng.permutation(list(scene.CUBE_COLOURS))[: scene.CUBES_IN_SCENE]
        plates = rng.permutation(list(scene.PLATE_COLOURS))[: scene.PLATES_IN_SCENE]
        for i, colour in enumerate(cubes):
            self.model.geom(f"cube{i}").rgba[:3] = np.fromstring(scene.CUBE_COLOURS[colour], sep=" ")
        for i, colour in enumerate(plates):
            self.model.geom(f"plate{i}").rgba[:3] = np.fromstring(scene.PLATE_COLOURS[colour], sep=" ")
        self.cube, self.plate = int(rng.integers(len(cubes))), int(rng.integers(len(plates)))
        self.task = f"put the {cubes[self.cube]} cube on the {plates[self.plate]} plate"
        assert self.task in TASKS

    def _place_objects(self, rng: np.random.Generator) -> None:
        """Scatter cubes and plates over the table, none closer to another than `_CLEARANCE`."""
        positions: list[NDArray[np.float64]] = []
        while len(positions) < scene.CUBES_IN_SCENE + scene.PLATES_IN_SCENE:
            position = rng.uniform(_CUBES_LOW, _CUBES_HIGH)
            if all(np.linalg.norm(position - other) > _CLEARANCE for other in positions):
                positions.append(position)
        for i in range(scene.CUBES_IN_SCENE):
            half_yaw = rng.uniform(-_MAX_YAW, _MAX_YAW) / 2
            pose = [*positions[i], scene.CUBE_HALF, np.cos(half_yaw), 0, 0, np.sin(half_yaw)]
            self.data.qpos[9 + 7 * i : 16 + 7 * i] = pose
        for i in range(scene.PLATES_IN_SCENE):
            self.data.mocap_pos[i] = [*positions[scene.CUBES_IN_SCENE + i], scene.PLATE_HEIGHT / 2]

    def _set_goal(self, action: NDArray[np.float64]) -> None:
        """Turn a clipped action into the tool pose and finger opening that the servos follow."""
        self._goal_position = np.clip(self.tool_position + action[:3] * TRANSLATION, TOOL_LOW, TOOL_HIGH)
        self._goal_rotation = rotation_matrix(action[3:6] * ROTATION) @ self.tool_rotation
        self.data.ctrl[7:9] = 0.0 if action[6] > 0 else scene.FINGER_TRAVEL

    def _advance(self) -> None:
        """Run the physics for one step, renewing the joint goals by inverse kinematics every `_IK_EVERY`."""
        for _ in range(PHYSICS_STEPS // _IK_EVERY):
            self.data.ctrl[:7] = self._joint_goal()
            self._mujoco.mj_step(self.model, self.data, _IK_EVERY)

    def _joint_goal(self) -> NDArray[np.float64]:
        """Compute joint angles ``[7]`` one damped-least-squares step towards the goal pose."""
        angles = self.data.qpos[:7]
        turn = self._goal_rotation @ self.data.site_xmat[self._tool].reshape(3, 3).T
        error = np.concatenate([self._goal_position - self.data.site_xpos[self._tool], skew_part(turn)])
        self._mujoco.mj_jacSite(self.model, self.data, self._jacobian[:3], self._jacobian[3:], self._tool)
        jacobian = self._jacobian[:, :7]
        damped_inverse = jacobian.T @ np.linalg.inv(jacobian @ jacobian.T + 1e-3 * np.eye(6))
        home = 0.05 * (np.asarray(scene.HOME) - angles)
        change = damped_inverse @ (error - jacobian @ home) + home
        limits = self.model.jnt_range[:7]
        return np.clip(angles + np.clip(change, -0.25, 0.25), limits[:, 0], limits[:, 1])

    def _is_success(self) -> bool:
        """Tell whether the named cube rests on the named plate and both fingers have let go of it."""
        offset = self.cube_position(self.cube) - self.plate_position(self.plate)
        speed = np.linalg.norm(self.data.qvel[9 + 6 * self.cube : 12 + 6 * self.cube])
        resting = abs(offset[2] - scene.PLATE_HEIGHT / 2 - scene.CUBE_HALF) < 0.006 and speed < 0.05
        return bool(resting and np.hypot(offset[0], offset[1]) < 0.045 and self.finger_opening > 0.065)


MAX_STEPS: Final = 48
"""An episode is truncated after 6 decisions of 8 steps."""
IMAGE_SIZE: Final = 64


class _TablePlace:
    """Plays episodes at one table."""

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
            poses=True,
            places=places,
        )

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
        table = self.places[place].table
        return lambda: expert.act(table)
