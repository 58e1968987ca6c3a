"""Describe the scene of `tabletop` as MJCF, and its geometry. Pure functions: no files, no mujoco.

Lengths are metres, angles radians, colours red-green-blue in [0, 1]. World axes: x points away from the robot
and towards the camera, y to the right in the picture, z up; the table top is z = 0.

The arm has the joint frames of a Franka Panda, drawn with capsules. Its wrist and hand are slimmer than the
real ones, so that a grasp can be seen in a picture of 64 x 64 pixels.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

CUBE_COLOURS: Final[dict[str, str]] = {"red": ".88 .10 .08", "green": ".10 .62 .14", "blue": ".10 .26 .90"}
PLATE_COLOURS: Final[dict[str, str]] = {
    "yellow": ".95 .80 .08",
    "purple": ".58 .20 .70",
    "white": ".95 .95 .95",
}
TASKS: Final[tuple[str, ...]] = tuple(
    f"put the {cube} cube on the {plate} plate" for cube in CUBE_COLOURS for plate in PLATE_COLOURS
)
"""Every instruction. The position in this tuple is the task id, for ever."""

CUBES_IN_SCENE: Final = 2
PLATES_IN_SCENE: Final = 2
CUBE_HALF: Final = 0.023
PLATE_RADIUS: Final = 0.055
PLATE_HEIGHT: Final = 0.008
FINGER_TRAVEL: Final = 0.040
"""How far each finger opens. The cube leaves 1.7 cm on either side: the lateral error a grasp can bear."""
TRANSLATION: Final = 0.06
"""Metres per step at action 1."""
ROTATION: Final = 0.25
"""Radians per step at action 1."""
HOME: Final = (0.0, 0.1743, 0.0, -2.3999, 0.0, 2.5742, 0.7854)
"""Joint angles at reset: the tool at (0.50, 0, 0.14), pointing straight down."""
CAMERA: Final = "front"

_PLATE_CORE = 0.045
"""Half side of the invisible square that carries the cube: on a cylinder, a box would tremble."""
_SHELL = ".80 .81 .84 1"
_DARK = ".20 .21 .23 1"
_FINGER = ".15 1 1 1"


def build_xml(render_size: int) -> str:
    """Write the whole model as MJCF.

    Args:
        render_size: Side of the off-screen buffer in pixels; the picture cannot be larger.

    Returns:
        One `<mujoco>` element: bodies ``cube0..``, ``plate0..``, joints ``j1..j7 f1 f2``, the site ``tool``.
        The cubes and plates get their colours and places at reset.
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
    """Write seven links, innermost last, with the frames and joint ranges of a Franka Panda."""
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
    """Write a flat palm and two fingers that slide along the tool's y axis; the tool point is between."""
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


def rotation_matrix(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the rotation about an axis by the axis' length in radians (Rodrigues' formula).

    Args:
        vector: ``[3]`` float64.

    Returns:
        ``[3, 3]`` float64.
    """
    angle = float(np.linalg.norm(vector))
    if angle < 1e-9:
        return np.eye(3)
    x, y, z = vector / angle
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * (cross @ cross)


def skew_part(rotation: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the axis times the sine of the angle of a rotation: the rotation vector, for small angles.

    Args:
        rotation: ``[3, 3]`` float64.

    Returns:
        ``[3]`` float64.
    """
    r = rotation
    return 0.5 * np.array([r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]])
