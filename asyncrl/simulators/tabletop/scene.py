"""One table of `tabletop`: an arm, two cubes and two plates, one of each named by the instruction.

One step is 0.1 s. Lengths are metres, angles radians, colours red-green-blue in [0, 1]. World axes: x points
away from the robot and towards the camera, y to the right in the picture, z up; the table top is z = 0.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.records import ACTION_DIM
from asyncrl.simulators.interface import skew_part
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

CUBES_IN_SCENE: Final = 2
PLATES_IN_SCENE: Final = 2
CUBE_HALF: Final = 0.023
PLATE_RADIUS: Final = 0.055
PLATE_HEIGHT: Final = 0.008
FINGER_TRAVEL: Final = 0.040  # Opening of each finger; a cube leaves 1.7 cm on either side.
TRANSLATION: Final = 0.06  # Metres per step at action 1.
ROTATION: Final = 0.25  # Radians per step at action 1.
HOME: Final = (0.0, 0.1743, 0.0, -2.3999, 0.0, 2.5742, 0.7854)  # Tool at (0.50, 0, 0.14), straight down.
CAMERA: Final = "front"

PHYSICS_STEPS: Final = 20  # Physics steps of 5 ms in one step.
TOOL_LOW: Final = (0.30, -0.30, 0.010)
TOOL_HIGH: Final = (0.70, 0.30, 0.30)  # The tool cannot be sent outside this box.

_IK_EVERY = 5
_CUBES_LOW, _CUBES_HIGH = (0.41, -0.17), (0.61, 0.17)
_MAX_YAW = 0.25
_CLEARANCE = 0.115  # Least distance of objects at reset: fingers must fit between plate and cube.
_NO_IMAGE = np.zeros((0, 0, 3), np.uint8)
_PLATE_CORE = 0.045  # Half side of the invisible square under the cube, which would tremble on a cylinder.
_SHELL = ".80 .81 .84 1"
_DARK = ".20 .21 .23 1"
_FINGER = ".15 1 1 1"


def build_xml(render_size: int) -> str:
    """Write the model as MJCF: bodies ``cube0..``, ``plate0..``, joints ``j1..j7 f1 f2``, the site ``tool``.

    `render_size` is the side of the off-screen buffer in pixels, the largest size of a picture.
    """
    cubes = "".join(
        f'<body name="cube{i}" pos="0 0 1"><freejoint name="cube{i}"/>'
        f'<geom name="cube{i}" class="cube" type="box" size="{CUBE_HALF} {CUBE_HALF} {CUBE_HALF}"/></body>'
        for i in range(CUBES_IN_SCENE)
    )
    plates = "".join(
        f'<body name="plate{i}" mocap="true">'
        f'<geom name="plate{i}" class="shell" type="cylinder" size="{PLATE_RADIUS} {PLATE_HEIGHT / 2}"/>'
        f'<geom type="box" size="{_PLATE_CORE} {_PLATE_CORE} {PLATE_HEIGHT / 2}" rgba="0 0 0 0"/></body>'
        for i in range(PLATES_IN_SCENE)
    )
    return f"""<mujoco model="tabletop">
<compiler angle="radian"/>
<option timestep=".005" integrator="implicitfast" cone="elliptic" impratio="5"/>
<visual><quality offsamples="0" shadowsize="0" numslices="12" numstacks="4" numquads="1"/>
<headlight ambient=".5 .5 .5" diffuse=".35 .35 .35" specular="0 0 0"/>
<map znear=".05" zfar="10"/><global offwidth="{render_size}" offheight="{render_size}"/></visual>
<default>
<geom solref=".01 1" solimp=".95 .99 .001" condim="4"/>
<default class="pad"><geom type="box" friction="1.5 .01 .0001"/></default>
<default class="shell"><geom contype="0" conaffinity="0" mass="0"/></default>
<default class="cube"><geom mass=".15" friction="1 .01 .0001"/></default>
</default>
<worldbody>
<light pos=".4 .3 1.5" dir="0 -.2 -1" castshadow="false" diffuse=".35 .35 .35" specular="0 0 0"/>
<camera name="{CAMERA}" pos="1.06 0 .645" xyaxes="0 1 0 -.766 0 .643" fovy="33"/>
<geom type="box" size="1 1.5 .02" pos=".5 0 -.02" rgba=".38 .36 .35 1"/>
<body name="base"><geom class="shell" type="capsule" fromto="0 0 0 0 0 .25" size=".065" rgba="{_SHELL}"/>
{_arm()}</body>
{cubes}{plates}
</worldbody>
<actuator>{_actuators()}</actuator>
</mujoco>"""


def _arm() -> str:
    """Wrist and hand are slimmer than a Franka Panda's, to show the grasp in a picture of 64 x 64 pixels."""
    # name, position, quaternion, joint range, [(capsule from-to, radius, colour)]
    links = [
        ("1", "0 0 .333", "1 0 0 0", "-2.89 2.89", [("0 0 -.15 0 0 0", ".06", _SHELL)]),
        ("2", "0 0 0", "1 -1 0 0", "-1.76 1.76", [("0 0 0 0 -.19 0", ".06", _SHELL)]),
        ("3", "0 -.316 0", "1 1 0 0", "-2.89 2.89", [("0 0 -.12 0 0 0", ".055", _SHELL)]),
        ("4", ".0825 0 0", "1 1 0 0", "-3.07 -.07", [("0 0 0 -.0825 .1 0", ".05", _DARK)]),
        ("5", "-.0825 .384 0", "1 -1 0 0", "-2.89 2.89", [("0 0 -.25 0 0 0", ".04", _SHELL)]),
        ("6", "0 0 0", "1 1 0 0", "-.01 3.75", [("0 0 0 .088 0 0", ".03", _SHELL)]),
        ("7", ".088 0 0", "1 1 0 0", "-2.89 2.89", [("0 0 0 0 0 .11", ".02", _SHELL)]),
    ]
    inner = _hand()
    for name, pos, quat, joint_range, capsules in reversed(links):
        shells = "".join(
            f'<geom class="shell" type="capsule" fromto="{ends}" size="{radius}" rgba="{colour}"/>'
            for ends, radius, colour in capsules
        )
        inner = (
            f'<body name="link{name}" gravcomp="1" pos="{pos}" quat="{quat}">'
            f'<joint name="j{name}" axis="0 0 1" range="{joint_range}" damping="1" armature="0.1"/>'
            f'<inertial pos="0 0 0" mass="2" diaginertia=".02 .02 .02"/>{shells}{inner}</body>'
        )
    return inner


def _hand() -> str:
    fingers = "".join(
        f'<body name="finger{name}" gravcomp="1" pos="0 0 .0584">'
        f'<joint name="f{name}" type="slide" axis="0 {side} 0" range="0 {FINGER_TRAVEL}" damping="20"/>'
        '<inertial pos="0 0 0" mass=".05" diaginertia="1e-4 1e-4 1e-4"/>'
        f'<geom class="pad" size=".004 .007 .028" pos="0 {side * 0.007} .027" rgba="{_FINGER}"/></body>'
        for name, side in (("1", 1), ("2", -1))
    )
    return (
        '<body name="hand" gravcomp="1" pos="0 0 .107" quat="0.9238795 0 0 -0.3826834">'
        '<inertial pos="0 0 .03" mass=".7" diaginertia=".001 .002 .001"/>'
        f'<geom class="shell" type="box" size=".014 .05 .012" pos="0 0 .048" rgba="{_DARK}"/>'
        f'<site name="tool" pos="0 0 .1034"/>{fingers}</body>'
    )


def _actuators() -> str:
    """Write position servos: seven for the arm (Nm/rad, limit in Nm), two for the fingers (N/m, N)."""
    stiffness = (600, 600, 450, 450, 240, 240, 150)
    limits = (15, 15, 15, 15, 6, 6, 6)
    arm = "".join(
        f'<position joint="j{i}" kp="{kp}" kv="{kp / 12}" forcerange="-{limit} {limit}"/>'
        for i, kp, limit in zip(range(1, 8), stiffness, limits, strict=True)
    )
    fingers = "".join(
        f'<position joint="f{i}" kp="600" kv="20" ctrlrange="0 {FINGER_TRAVEL}" forcerange="-30 30"/>'
        for i in (1, 2)
    )
    return arm + fingers


@functools.cache
def _shared_renderer(size: int, supersample: int) -> Renderer:
    """Make one OpenGL context per process and picture size: every `Table` has the same geometry."""
    require_backend()
    renderer = Renderer(
        _compile(size * supersample),
        [CAMERA],
        size=size,
        supersample=supersample,
        most_shapes=100,
        without=("SHADOW", "REFLECTION", "SKYBOX"),
    )
    renderer.option.sitegroup[:] = 0
    return renderer


def _compile(render_size: int) -> Any:
    return load_mujoco().MjModel.from_xml_string(build_xml(render_size))


class Table:
    """Put the named cube on the named plate. Deterministic: seed and actions decide everything."""

    def __init__(self, image_size: int, *, render: bool, supersample: int) -> None:
        self._renderer = _shared_renderer(image_size, supersample) if render else None
        self._mujoco = load_mujoco()
        self.model = _compile(image_size * supersample)
        self.data = self._mujoco.MjData(self.model)
        self.task = ""  # The instruction, lower case, without a full stop.
        self.success = False
        self.cube = self.plate = 0  # Indices of those that the instruction names.
        self._tool = self.model.site("tool").id
        self._jacobian = np.zeros((6, self.model.nv))
        self._goal_position = np.zeros(3)
        self._goal_rotation = np.eye(3)

    def reset(self, seed: int) -> None:
        """Lay out the scene of this seed."""
        rng = np.random.default_rng(seed)
        self._mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:7] = self.data.ctrl[:7] = HOME
        self.data.qpos[7:9] = self.data.ctrl[7:9] = FINGER_TRAVEL
        self._choose_task(rng)
        self._place_objects(rng)
        self._mujoco.mj_forward(self.model, self.data)
        self.success = self._is_success()

    def step(self, action: NDArray[np.floating]) -> None:
        """Carry out one action of 0.1 s.

        Args:
            action: ``[7]`` floats (dx, dy, dz, droll, dpitch, dyaw, gripper), clipped to [-1, 1]: from the
                tool's pose, in `TRANSLATION` and, about the world's axes, `ROTATION`; gripper > 0 closes.
        """
        clipped = np.clip(np.asarray(action, np.float64), -1, 1)
        if clipped.shape != (ACTION_DIM,) or not np.isfinite(clipped).all():
            raise ValueError(f"an action is {ACTION_DIM} finite numbers, got {action!r}")
        self._set_goal(clipped)
        self._advance()
        self.success = self._is_success()

    def picture(self) -> NDArray[np.uint8]:
        """Draw the table as it is: ``[H, W, 3]`` uint8, or ``[0, 0, 3]`` without rendering."""
        if self._renderer is None:
            return _NO_IMAGE
        self._renderer.note(self.model, self.data)
        return self._renderer.draw()[0]

    @property
    def tool_position(self) -> NDArray[np.float64]:
        """Point between the finger tips: ``[3]`` float64."""
        return self.data.site_xpos[self._tool].copy()

    @property
    def tool_rotation(self) -> NDArray[np.float64]:
        """The tool's axes in the world as columns, the third out of the hand: ``[3, 3]`` float64."""
        return self.data.site_xmat[self._tool].reshape(3, 3).copy()

    @property
    def tool_quaternion(self) -> NDArray[np.float64]:
        """The same rotation as a quaternion x, y, z, w: ``[4]`` float64."""
        # The hand's, a product of the joints' turns: its sign does not jump.
        return np.roll(self.data.xquat[self.model.site_bodyid[self._tool]], -1)

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
        cubes = rng.permutation(list(CUBE_COLOURS))[:CUBES_IN_SCENE]
        plates = rng.permutation(list(PLATE_COLOURS))[:PLATES_IN_SCENE]
        for i, colour in enumerate(cubes):
            self.model.geom(f"cube{i}").rgba[:3] = np.fromstring(CUBE_COLOURS[colour], sep=" ")
        for i, colour in enumerate(plates):
            self.model.geom(f"plate{i}").rgba[:3] = np.fromstring(PLATE_COLOURS[colour], sep=" ")
        self.cube, self.plate = int(rng.integers(len(cubes))), int(rng.integers(len(plates)))
        self.task = f"put the {cubes[self.cube]} cube on the {plates[self.plate]} plate"
        assert self.task in TASKS

    def _place_objects(self, rng: np.random.Generator) -> None:
        positions: list[NDArray[np.float64]] = []
        while len(positions) < CUBES_IN_SCENE + PLATES_IN_SCENE:
            position = rng.uniform(_CUBES_LOW, _CUBES_HIGH)
            if all(np.linalg.norm(position - other) > _CLEARANCE for other in positions):
                positions.append(position)
        for i in range(CUBES_IN_SCENE):
            half_yaw = rng.uniform(-_MAX_YAW, _MAX_YAW) / 2
            pose = [*positions[i], CUBE_HALF, np.cos(half_yaw), 0, 0, np.sin(half_yaw)]
            self.data.qpos[9 + 7 * i : 16 + 7 * i] = pose
        for i in range(PLATES_IN_SCENE):
            self.data.mocap_pos[i] = [*positions[CUBES_IN_SCENE + i], PLATE_HEIGHT / 2]

    def _set_goal(self, action: NDArray[np.float64]) -> None:
        self._goal_position = np.clip(self.tool_position + action[:3] * TRANSLATION, TOOL_LOW, TOOL_HIGH)
        self._goal_rotation = rotation_matrix(action[3:6] * ROTATION) @ self.tool_rotation
        self.data.ctrl[7:9] = 0.0 if action[6] > 0 else FINGER_TRAVEL

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
        home = 0.05 * (np.asarray(HOME) - angles)
        change = damped_inverse @ (error - jacobian @ home) + home
        limits = self.model.jnt_range[:7]
        return np.clip(angles + np.clip(change, -0.25, 0.25), limits[:, 0], limits[:, 1])

    def _is_success(self) -> bool:
        """True if the named cube rests on the named plate and both fingers have let go of it."""
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
