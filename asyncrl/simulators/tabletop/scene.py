"""One table of `tabletop`: an arm, two cubes and two plates, one of each named by the instruction.

``table.xml`` is its model: bodies ``cube0..``, ``plate0..``, joints ``j1..j7 f1 f2``, the site ``tool``. One
step is 0.1 s. Lengths are metres, angles radians, colours red-green-blue in [0, 1]. World axes: x points away
from the robot and towards the camera, y to the right in the picture, z up; the table top is z = 0.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.simulators.interface import SimStart, hand_pose, skew_part
from asyncrl.simulators.one_by_one import Outcome
from asyncrl.simulators.rendering import Renderer, load_mujoco, require_backend

CUBE_COLOURS: Final[dict[str, str]] = {"red": ".88 .10 .08", "green": ".10 .62 .14", "blue": ".10 .26 .90"}
PLATE_COLOURS: Final[dict[str, str]] = {
    "yellow": ".95 .80 .08",
    "purple": ".58 .20 .70",
    "white": ".95 .95 .95",
}
TASKS: Final[tuple[str, ...]] = tuple(
    f"put the {cube} cube on the {plate} plate" for cube in CUBE_COLOURS for plate in PLATE_COLOURS
)  # The position is the task id, for ever.

IN_SCENE: Final = 2  # Cubes, and plates.
CUBE_HALF: Final = 0.023
PLATE_RADIUS: Final = 0.055
PLATE_HEIGHT: Final = 0.008
FINGER_TRAVEL: Final = 0.040  # Opening of each finger; a cube leaves 1.7 cm on either side.
TRANSLATION: Final = 0.06  # Metres per step at action 1.
ROTATION: Final = 0.25  # Radians per step at action 1.
HOME: Final = (0.0, 0.1743, 0.0, -2.3999, 0.0, 2.5742, 0.7854)  # Tool at (0.50, 0, 0.14), straight down.
CAMERA: Final = "front"
SUPERSAMPLE: Final = 3  # Pictures are drawn so many times larger and averaged down.

PHYSICS_STEPS: Final = 20  # Physics steps of 5 ms in one step.
TOOL_LOW: Final = (0.30, -0.30, 0.010)
TOOL_HIGH: Final = (0.70, 0.30, 0.30)  # The tool cannot be sent outside this box.

_IK_EVERY = 5
_CUBES_LOW, _CUBES_HIGH = (0.41, -0.17), (0.61, 0.17)
_MAX_YAW = 0.25
_CLEARANCE = 0.115  # Least distance of objects at reset: fingers must fit between plate and cube.


@functools.cache
def _shared_renderer(size: int) -> Renderer:
    # One OpenGL context per process and picture size: every `Table` has the same geometry.
    require_backend()
    model = _load_model()
    model.vis.global_.offwidth = model.vis.global_.offheight = size * SUPERSAMPLE
    renderer = Renderer(
        model,
        [CAMERA],
        size=size,
        supersample=SUPERSAMPLE,
        most_shapes=100,
        without=("SHADOW", "REFLECTION", "SKYBOX"),
    )
    renderer.option.sitegroup[:] = 0
    return renderer


def _load_model() -> Any:
    return load_mujoco().MjModel.from_xml_path(str(Path(__file__).with_name("table.xml")))


class Table:
    """Put the named cube on the named plate. Deterministic: seed and actions decide everything."""

    def __init__(self, image_size: int, *, render: bool) -> None:
        self._renderer = _shared_renderer(image_size) if render else None
        self._mujoco = load_mujoco()
        self.model = _load_model()
        self.data = self._mujoco.MjData(self.model)
        self.task = ""  # The instruction, lower case, without a full stop.
        self.success = False
        self.cube = self.plate = 0  # Indices of those that the instruction names.
        self._tool = self.model.site("tool").id
        self._jacobian = np.zeros((6, self.model.nv))
        self._goal_position = np.zeros(3)
        self._goal_rotation = np.eye(3)

    def reset(self, start: SimStart) -> str:
        """Lay out the scene of the start's seed; return the instruction."""
        rng = np.random.default_rng(start.seed)
        self._mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:7] = self.data.ctrl[:7] = HOME
        self.data.qpos[7:9] = self.data.ctrl[7:9] = FINGER_TRAVEL
        self._choose_task(rng)
        self._place_objects(rng)
        self._mujoco.mj_forward(self.model, self.data)
        self.success = self._is_success()
        return self.task

    def step(self, action: NDArray[np.floating]) -> Outcome:
        """Carry out one action of 0.1 s.

        `action`: ``[7]`` (dx, dy, dz, droll, dpitch, dyaw, gripper) in [-1, 1]: from the tool's pose, in
        `TRANSLATION` and, about the world's axes, `ROTATION`; gripper > 0 closes.
        """
        move = np.asarray(action, np.float64)
        self._goal_position = np.clip(self.tool_position + move[:3] * TRANSLATION, TOOL_LOW, TOOL_HIGH)
        self._goal_rotation = rotation_matrix(move[3:6] * ROTATION) @ self.tool_rotation
        self.data.ctrl[7:9] = 0.0 if move[6] > 0 else FINGER_TRAVEL
        for _ in range(PHYSICS_STEPS // _IK_EVERY):
            self.data.ctrl[:7] = self._joint_goal()
            self._mujoco.mj_step(self.model, self.data, _IK_EVERY)
        self.success = self._is_success()
        return Outcome(self.success)

    def look(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Draw the table as it is: ``[1, H, W, 3]``, ``[1, 0, 0, 3]`` without rendering; it has no state."""
        state = np.zeros(0, np.float32)
        if self._renderer is None:
            return np.zeros((1, 0, 0, 3), np.uint8), state
        self._renderer.note(self.model, self.data)
        return self._renderer.draw(), state

    def pose(self) -> NDArray[np.float32]:
        """Return the `hand_pose` ``[8]`` of the tool."""
        # The hand's rotation, a product of the joints' turns: its sign does not jump.
        quaternion = np.roll(self.data.xquat[self.model.site_bodyid[self._tool]], -1)
        return hand_pose(self.tool_position, quaternion, self.finger_opening / (2 * FINGER_TRAVEL))

    @property
    def tool_position(self) -> NDArray[np.float64]:
        """Point between the finger tips: ``[3]`` float64."""
        return self.data.site_xpos[self._tool].copy()

    @property
    def tool_rotation(self) -> NDArray[np.float64]:
        """The tool's axes in the world as columns, the third out of the hand: ``[3, 3]`` float64."""
        return self.data.site_xmat[self._tool].reshape(3, 3).copy()

    @property
    def finger_opening(self) -> float:
        """Distance between the fingers, 0..0.08."""
        return float(self.data.qpos[7] + self.data.qpos[8])

    def cube_position(self, index: int) -> NDArray[np.float64]:
        """Return the centre of a cube: ``[3]`` float64."""
        return self.data.qpos[9 + 7 * index : 12 + 7 * index].copy()

    def cube_yaw(self, index: int) -> float:
        """Return the direction of a cube's sides about the vertical: radians in [-pi/4, pi/4)."""
        matrix = self.data.body(f"cube{index}").xmat
        return float((np.arctan2(matrix[3], matrix[0]) + np.pi / 4) % (np.pi / 2) - np.pi / 4)

    def plate_position(self, index: int) -> NDArray[np.float64]:
        """Return the centre of a plate: ``[3]`` float64."""
        return self.data.mocap_pos[index].copy()

    def _choose_task(self, rng: np.random.Generator) -> None:
        cubes = rng.permutation(list(CUBE_COLOURS))[:IN_SCENE]
        plates = rng.permutation(list(PLATE_COLOURS))[:IN_SCENE]
        for i, colour in enumerate(cubes):
            self.model.geom(f"cube{i}").rgba[:3] = np.fromstring(CUBE_COLOURS[colour], sep=" ")
        for i, colour in enumerate(plates):
            self.model.geom(f"plate{i}").rgba[:3] = np.fromstring(PLATE_COLOURS[colour], sep=" ")
        self.cube, self.plate = int(rng.integers(len(cubes))), int(rng.integers(len(plates)))
        self.task = f"put the {cubes[self.cube]} cube on the {plates[self.plate]} plate"
        assert self.task in TASKS

    def _place_objects(self, rng: np.random.Generator) -> None:
        positions: list[NDArray[np.float64]] = []
        while len(positions) < 2 * IN_SCENE:
            position = rng.uniform(_CUBES_LOW, _CUBES_HIGH)
            if all(np.linalg.norm(position - other) > _CLEARANCE for other in positions):
                positions.append(position)
        for i in range(IN_SCENE):
            half_yaw = rng.uniform(-_MAX_YAW, _MAX_YAW) / 2
            pose = [*positions[i], CUBE_HALF, np.cos(half_yaw), 0, 0, np.sin(half_yaw)]
            self.data.qpos[9 + 7 * i : 16 + 7 * i] = pose
        for i in range(IN_SCENE):
            self.data.mocap_pos[i] = [*positions[IN_SCENE + i], PLATE_HEIGHT / 2]

    def _joint_goal(self) -> NDArray[np.float64]:
        """Compute joint angles ``[7]`` one damped-least-squares step towards the goal pose."""
        angles = self.data.qpos[:7]
        turn = self._goal_rotation @ self.data.site_xmat[self._tool].reshape(3, 3).T
        error = np.concatenate([self._goal_position - self.data.site_xpos[self._tool], skew_part(turn)])
        self._mujoco.mj_jacSite(self.model, self.data, self._jacobian[:3], self._jacobian[3:], self._tool)
        jacobian = self._jacobian[:, :7]
        damped_inverse = jacobian.T @ np.linalg.inv(jacobian @ jacobian.T + 1e-3 * np.eye(6))
        home = 0.05 * (np.asarray(HOME) - angles)
        change = damped_inverse @ (error - jacobian @ home) + home
        limits = self.model.jnt_range[:7]
        return np.clip(angles + np.clip(change, -0.25, 0.25), limits[:, 0], limits[:, 1])

    def _is_success(self) -> bool:
        # The named cube rests on the named plate, and both fingers have let go of it.
        offset = self.cube_position(self.cube) - self.plate_position(self.plate)
        speed = np.linalg.norm(self.data.qvel[9 + 6 * self.cube : 12 + 6 * self.cube])
        resting = abs(offset[2] - PLATE_HEIGHT / 2 - CUBE_HALF) < 0.006 and speed < 0.05
        return bool(resting and np.hypot(offset[0], offset[1]) < 0.045 and self.finger_opening > 0.065)


def rotation_matrix(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the matrix ``[3, 3]`` of a rotation vector ``[3]`` in radians (Rodrigues' formula)."""
    angle = float(np.linalg.norm(vector))
    if angle < 1e-9:
        return np.eye(3)
    x, y, z = vector / angle
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * (cross @ cross)
