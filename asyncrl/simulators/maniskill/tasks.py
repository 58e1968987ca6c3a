"""The tasks of ManiSkill 3.0.1 that can be played offline, and what a policy is told to do in each.

Left out are those without a success of their own (MS-*, TableTopFreeDraw, UnitreeG1Stand) and those whose
models are downloaded (YCB, PartNet, AI2-THOR, RoboCasa, AnymalC, widowxai).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

WIDOWX: Final = "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"
"""How published policies of put_on_plate_25 move the arm: metres and radians."""


@dataclass(frozen=True, kw_only=True)
class ManiSkillTask:
    """What is known of a task of ManiSkill."""

    environment: str
    """ManiSkill's own name."""
    instruction: str
    """Lower case, without a full stop; empty: each episode says its own."""
    control: str = "pd_ee_delta_pose"
    """Name of ManiSkill's controller."""
    robot: Literal["gripper", "stick", "hand"] = "gripper"
    """Arms whose last number opens a gripper; one that holds a stick; anything else, moved joint by joint."""
    camera: str = "base_camera"
    wrist: str = ""
    """Camera on the hand; empty: the robot has none."""
    grasped: str = ""
    """Where info says that the object is held; empty: nowhere, then no shaped reward."""
    reconfigures: bool = False
    """Whether every reset builds another scene, which a batched simulation cannot do for one place."""
    published: bool = False
    """Whether published policies exist: then pictures, signs and reward are as these expect them."""


def _arm(environment: str, instruction: str, *, wrist: bool = False, grasped: str = "") -> ManiSkillTask:
    return ManiSkillTask(
        environment=environment,
        instruction=instruction,
        wrist="hand_camera" if wrist else "",
        grasped=grasped,
    )


def _stick(environment: str, instruction: str) -> ManiSkillTask:
    return ManiSkillTask(environment=environment, instruction=instruction, robot="stick")


def _hand(environment: str, instruction: str, *, grasped: str = "") -> ManiSkillTask:
    return ManiSkillTask(
        environment=environment,
        instruction=instruction,
        control="pd_joint_delta_pos",
        robot="hand",
        grasped=grasped,
    )


def _published(environment: str) -> ManiSkillTask:
    return ManiSkillTask(
        environment=environment,
        instruction="",
        control=WIDOWX,
        camera="3rd_view_camera",
        grasped="is_src_obj_grasped",
        published=True,
    )


TASKS: Final = MappingProxyType(
    {
        "pick_cube": _arm("PickCube-v1", "move the red cube to the green ball", grasped="is_grasped"),
        "push_cube": _arm("PushCube-v1", "push the cube onto the target"),
        "pull_cube": _arm("PullCube-v1", "pull the cube onto the target"),
        "pull_cube_tool": _arm("PullCubeTool-v1", "pull the cube closer with the hook"),
        "poke_cube": _arm(
            "PokeCube-v1", "poke the cube onto the target with the peg", grasped="is_peg_grasped"
        ),
        "stack_cube": _arm(
            "StackCube-v1", "put the red cube on the green cube", wrist=True, grasped="is_cubeA_grasped"
        ),
        "stack_pyramid": _arm(
            "StackPyramid-v1",
            "put the red cube beside the green cube and the blue cube on top of both",
            wrist=True,
        ),
        "lift_peg_upright": _arm("LiftPegUpright-v1", "stand the peg upright"),
        "peg_insertion_side": ManiSkillTask(
            environment="PegInsertionSide-v1",
            instruction="insert the orange end of the peg into the hole of the box",
            wrist="hand_camera",
            reconfigures=True,
        ),
        "plug_charger": _arm("PlugCharger-v1", "plug the charger into the receptacle", wrist=True),
        "place_sphere": _arm("PlaceSphere-v1", "put the ball into the bin", grasped="is_obj_grasped"),
        "roll_ball": _arm("RollBall-v1", "roll the ball onto the target"),
        "assemble_board": _arm("FMBAssembly1Easy-v1", "put the bridge onto the board"),
        "push_t": _stick("PushT-v1", "push the t onto the target"),
        "draw_triangle": _stick("DrawTriangle-v1", "draw over the triangle"),
        "two_robot_pick_cube": _arm(
            "TwoRobotPickCube-v1", "hand the cube over and move it to the green ball"
        ),
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
        "put_on_plate_25_vision": _published("PutOnPlateInScene25VisionImage-v1"),
        "put_on_plate_25_semantic": _published("PutOnPlateInScene25Instruct-v1"),
        "put_on_plate_25_position": _published("PutOnPlateInScene25Position-v1"),
    }
)
"""By the part of a simulator's name behind ``maniskill_``."""
