"""The tasks of ManiSkill 3.0.1 that can be played offline, and the import of ManiSkill and SAPIEN.

Left out are those without a success of their own (MS-*, TableTopFreeDraw, UnitreeG1Stand) and those whose
models are downloaded (YCB, PartNet, AI2-THOR, RoboCasa, AnymalC, widowxai).
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import warnings
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Final, Literal

from asyncrl.errors import AssetError, ConfigError

WIDOWX: Final = "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"  # m, rad; published policies.


@dataclass(frozen=True)
class ManiSkillTask:
    """A task of ManiSkill."""

    environment: str  # ManiSkill's own name.
    instruction: str = ""  # Lower case, without a full stop; empty: each episode has its own.
    _: KW_ONLY
    control: str = "pd_ee_delta_pose"  # Name of ManiSkill's controller.
    robot: Literal["gripper", "stick", "hand"] = "gripper"
    """`gripper`: arms whose last number opens a gripper; `stick`: an arm with a stick; `hand`: joints."""
    camera: str = "base_camera"
    wrist: str = ""  # Camera on the hand; empty: none.
    grasped: str = ""  # Key of info, true while the object is held; empty: none, no shaped reward.
    published: bool = False  # True if published policies exist: they fix pictures, signs and reward.


_WRIST: Final = "hand_camera"
_arm: Final = ManiSkillTask
_stick: Final = partial(ManiSkillTask, robot="stick")
_hand: Final = partial(ManiSkillTask, control="pd_joint_delta_pos", robot="hand")
_published: Final = partial(
    ManiSkillTask, control=WIDOWX, camera="3rd_view_camera", grasped="is_src_obj_grasped", published=True
)
TASKS: Final = {
    "pick_cube": _arm("PickCube-v1", "move the red cube to the green ball", grasped="is_grasped"),
    "push_cube": _arm("PushCube-v1", "push the cube onto the target"),
    "pull_cube": _arm("PullCube-v1", "pull the cube onto the target"),
    "pull_cube_tool": _arm("PullCubeTool-v1", "pull the cube closer with the hook"),
    "poke_cube": _arm("PokeCube-v1", "poke the cube onto the target with the peg", grasped="is_peg_grasped"),
    "stack_cube": _arm(
        "StackCube-v1", "put the red cube on the green cube", wrist=_WRIST, grasped="is_cubeA_grasped"
    ),
    "stack_pyramid": _arm(
        "StackPyramid-v1",
        "put the red cube beside the green cube and the blue cube on top of both",
        wrist=_WRIST,
    ),
    "lift_peg_upright": _arm("LiftPegUpright-v1", "stand the peg upright"),
    "peg_insertion_side": _arm(
        "PegInsertionSide-v1", "insert the orange end of the peg into the hole of the box", wrist=_WRIST
    ),
    "plug_charger": _arm("PlugCharger-v1", "plug the charger into the receptacle", wrist=_WRIST),
    "place_sphere": _arm("PlaceSphere-v1", "put the ball into the bin", grasped="is_obj_grasped"),
    "roll_ball": _arm("RollBall-v1", "roll the ball onto the target"),
    "assemble_board": _arm("FMBAssembly1Easy-v1", "put the bridge onto the board"),
    "push_t": _stick("PushT-v1", "push the t onto the target"),
    "draw_triangle": _stick("DrawTriangle-v1", "draw over the triangle"),
    "two_robot_pick_cube": _arm("TwoRobotPickCube-v1", "hand the cube over and move it to the green ball"),
    "two_robot_stack_cube": _arm(
        "TwoRobotStackCube-v1", "put the green cube on the target and the blue cube on top of it"
    ),
    "place_apple_in_bowl": _hand(
        "UnitreeG1PlaceAppleInBowl-v1", "put the apple into the bowl", grasped="is_grasped"
    ),
    "transport_box": _hand(
        "UnitreeG1TransportBox-v1", "carry the box to the other table", grasped="box_grasped"
    ),
    **{f"rotate_valve_{i}": _hand(f"RotateValveLevel{i}-v1", "turn the valve") for i in range(5)},
    **{
        f"rotate_in_hand_{i}": _hand(
            f"RotateSingleObjectInHandLevel{i}-v1", "turn the object in the hand without dropping it"
        )
        for i in range(2)
    },
    **{
        f"rotate_cube_{i}": _hand(
            f"TriFingerRotateCubeLevel{i}-v1", "move the cube to where the goal cube is, turned like it"
        )
        for i in range(5)
    },
    "put_on_plate_25": _published("PutOnPlateInScene25Main-v3"),
    "put_on_plate_25_vision_image": _published("PutOnPlateInScene25VisionImage-v1"),
    "put_on_plate_25_instruct": _published("PutOnPlateInScene25Instruct-v1"),
    "put_on_plate_25_position": _published("PutOnPlateInScene25Position-v1"),
}  # By the simulator's name without maniskill_.


def load_maniskill(name: str, task: ManiSkillTask, module: str) -> Any:
    """Import ManiSkill and return gymnasium, where the environment is registered."""
    require_device()
    logging.getLogger("mani_skill").setLevel(logging.ERROR)  # It warns of how its own tasks are written.
    _import("mani_skill.envs")
    gym, missing = _import("gymnasium"), []
    if task.published:
        root = _import("mani_skill").ASSET_DIR
        folders = (root / "tasks" / "bridge_v2_real2sim_dataset", root / "robots" / "widowx")
        missing = [str(folder) for folder in folders if not folder.is_dir()]
    if module and not missing:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"--simulator-settings module={module} cannot be imported: {error}. Put its folder on "
                "PYTHONPATH."
            ) from error
    if task.environment not in gym.registry:
        missing.append(
            f"a module that registers {task.environment} with ManiSkill (--simulator-settings module=...)"
        )
    if missing:
        raise AssetError(
            f"{name} is not part of mani-skill and lacks: {'; '.join(missing)}. docs/maniskill.md."
        )
    return gym


def make_environment(gym: Any, environment: str, settings: dict[str, Any]) -> Any:
    """Make an environment of one row, without wrappers, whose pictures hide nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = gym.make(environment, num_envs=1, **settings).unwrapped
    # ManiSkill keeps what is to be hidden in a list of the class, across environments.
    made._hidden_objects.clear()
    made._hidden_objects = []
    return made


def reward_mode(name: str, environment: str, reward: str) -> str:
    """Return ManiSkill's name of the reward."""
    registered = importlib.import_module("mani_skill.utils.registration").REGISTERED_ENVS
    modes = registered[environment].cls.SUPPORTED_REWARD_MODES
    if reward == "dense":
        if "normalized_dense" not in modes:
            raise ConfigError(f"--simulator-settings reward=dense: {name} has none. Use reward=success.")
        return "normalized_dense"
    return "none" if "none" in modes else "sparse"


def renderer() -> str:
    """Return ManiSkill's name of the renderer: the GPU if it can draw."""
    try:
        return "gpu" if load_sapien().Device("cuda").can_render() else "cpu"
    except RuntimeError:  # It finds no such device.
        return "cpu"


PIP: Final = "pip install 'asyncrl[maniskill]'"
_REMEDY: Final = (
    "Install the GPU vendor's driver with its Vulkan part (in containers: NVIDIA_DRIVER_CAPABILITIES=all), "
    "or Mesa 24 or newer to draw on the CPU (`apt-get install mesa-vulkan-drivers`, on Debian 12 from "
    "bookworm-backports): docs/maniskill.md."
)
_RAY_TRACING: Final = "SAPIEN_DISABLE_RAY_TRACING"


def _import(name: str) -> Any:
    try:  # SAPIEN brings a Vulkan loader of its own, and warns of it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise AssetError(
            f"ManiSkill's simulators need the package {error.name}, which is not installed. Install the "
            f"extra: {PIP}"
        ) from error


def load_sapien() -> Any:
    """Import SAPIEN."""
    _import("sapien.render")
    return _import("sapien")


def require_device() -> str:
    """Return the name of the device that SAPIEN draws with."""
    sapien = load_sapien()
    try:
        summary = sapien.render.get_device_summary()
    except RuntimeError as error:
        raise AssetError(
            f"There is no Vulkan device here ({error}), and ManiSkill needs one even where nothing is drawn. "
            f"{_REMEDY}"
        ) from error
    devices = devices_of(summary)
    for name, supported in devices:
        if supported:
            return name
    names = ", ".join(name for name, _ in devices) or "none at all"
    ruled_out = f" {_RAY_TRACING} is set, which rules out CPU devices: unset it."
    unset = ruled_out if _RAY_TRACING in os.environ else ""
    raise AssetError(f"SAPIEN can use no Vulkan device here (there is: {names}).{unset} {_REMEDY}")


def devices_of(summary: str) -> list[tuple[str, bool]]:
    r"""Read names of devices from SAPIEN's summary, with True if it supports them.

    >>> devices_of("GPU: llvmpipe (LLVM 15)\n  Supported: 1\n  Present:   0\n")
    [('llvmpipe (LLVM 15)', True)]
    """
    pairs = re.findall(r"^GPU:\s*(.*?)\s*$\s*^\s*Supported:\s*(\d)", summary, re.M)
    return [(name, flag == "1") for name, flag in pairs]
