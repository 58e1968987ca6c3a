"""Predict where actions take the robot's hand, and say what moved from one pose to the next.

A pose is (x, y, z, quaternion x, y, z, w, gripper), in metres. The policy's actions are relative, and EVAC is
told absolute poses (in its maps) and differences of absolute poses (in its action tokens), so a small network
follows the hand from the pose at the start. EVAC knows two arms: a single one is given twice.

Dimension letters: B slots, F frames, C steps per decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from asyncrl.records import ACTION_DIM, POSE_DIM

ARMS: Final = 2
MOTION_DIM: Final = 14
"""Of two arms: motion in x, y, z, turn in roll, pitch, yaw, and gripper."""

# fmt: off
_MEAN: Final = (
    2.949e-5, -2.47e-9, -3.215e-5, -1.049e-4, 6.126e-6, 9.914e-5,
    2.521e-5, 2.386e-7, -3.654e-5, -1.170e-4, 9.653e-6, -1.260e-4,
)
_STD: Final = (
    8.946e-4, 1.1015e-3, 1.0238e-3, 1.0403e-2, 4.9354e-3, 1.0759e-2,
    9.436e-4, 1.3782e-3, 1.1819e-3, 7.5393e-3, 4.3203e-3, 8.1497e-3,
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class MotionStatistics:
    """How motions are normalised: ``(motion - stride * mean) / (stride * std)``."""

    mean: tuple[float, ...] = _MEAN
    """``[12]`` of both arms, per recorded frame: metres and radians; the gripper is left as it is."""
    std: tuple[float, ...] = _STD
    stride: int = 3
    """Recorded frames between two frames that the network sees."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: There are not 12 of each, a spread is not positive, or the stride is not.
        """
        if len(self.mean) != len(self.std) or len(self.mean) != MOTION_DIM - ARMS:
            raise ValueError(f"motion statistics need 12 numbers, got {len(self.mean)} and {len(self.std)}")
        if min(self.std) <= 0 or self.stride < 1:
            raise ValueError("the spread of motions and the stride must be positive")


class PoseModel(nn.Module):
    """Predicts the hand's next pose from an action and the present pose, both of one arm."""

    abs_action_mean: Tensor
    abs_action_std: Tensor

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(ACTION_DIM + POSE_DIM, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, POSE_DIM),
        )
        self.register_buffer("abs_action_mean", torch.zeros(POSE_DIM))
        self.register_buffer("abs_action_std", torch.ones(POSE_DIM))

    def forward(self, action_B7: Tensor, pose_B8: Tensor) -> Tensor:
        """Predict the next pose.

        Args:
            action_B7: ``[B, 7]`` float32, as the policy gave it.
            pose_B8: ``[B, 8]`` float32, metres.

        Returns:
            ``[B, 8]`` float32, metres; the quaternion need not have length 1.
        """
        normalised = (pose_B8 - self.abs_action_mean) / self.abs_action_std
        predicted = self.net(torch.cat([action_B7, normalised], dim=1))
        return predicted * self.abs_action_std + self.abs_action_mean

    def follow(self, actions_BC7: Tensor, pose_B8: Tensor) -> Tensor:
        """Predict the poses that actions lead to, one after the other: ``[B, C, 8]`` float32."""
        poses = []
        for action_B7 in actions_BC7.unbind(1):
            pose_B8 = self(action_B7, pose_B8)
            poses.append(pose_B8)
        return torch.stack(poses, dim=1)


def unit_quaternion(quaternion: Tensor) -> Tensor:
    """Return ``[..., 4]`` xyzw of length 1 (one of length 0 stays)."""
    return quaternion / quaternion.norm(dim=-1, keepdim=True).clamp(min=1e-6)


def rotation(quaternion: Tensor) -> Tensor:
    """Turn quaternions ``[..., 4]`` xyzw of any length into rotation matrices ``[..., 3, 3]``."""
    x, y, z, w = unit_quaternion(quaternion).unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)),
        (2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)),
        (2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def roll_pitch_yaw(quaternion: Tensor) -> Tensor:
    """Turn quaternions ``[..., 4]`` xyzw into angles ``[..., 3]`` about the fixed axes x, y, z, radians."""
    x, y, z, w = unit_quaternion(quaternion).unbind(-1)
    roll = torch.atan2(2 * (w * x + y * z), 1 - 2 * (x * x + y * y))
    pitch = torch.asin((2 * (w * y - z * x)).clamp(-1, 1))
    yaw = torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
    return torch.stack([roll, pitch, yaw], dim=-1)


class Motions(nn.Module):
    """Says what moved between poses, as EVAC is told it."""

    mean: Tensor
    spread: Tensor

    def __init__(self, statistics: MotionStatistics) -> None:
        super().__init__()
        mean = torch.tensor(statistics.mean).view(ARMS, -1) * statistics.stride
        spread = torch.tensor(statistics.std).view(ARMS, -1) * statistics.stride
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("spread", spread, persistent=False)

    def forward(self, poses_BF8: Tensor, before_BF8: Tensor) -> Tensor:
        """Compute the motions of an arm, normalised, once for each of EVAC's two arms.

        Args:
            poses_BF8: ``[B, F, 8]`` float32: pose at each frame.
            before_BF8: ``[B, F, 8]`` float32: pose at the frame before each.

        Returns:
            ``[B, F, 14]`` float32.
        """
        moved = poses_BF8[..., :3] - before_BF8[..., :3]
        turned = roll_pitch_yaw(poses_BF8[..., 3:7]) - roll_pitch_yaw(before_BF8[..., 3:7])
        turned = torch.remainder(turned + math.pi, 2 * math.pi) - math.pi
        both = torch.cat([moved, turned], dim=-1).unsqueeze(-2)  # [B, F, 1, 6]
        normalised = (both - self.mean) / self.spread
        gripper = poses_BF8[..., None, 7:].expand(*normalised.shape[:-1], 1)
        return torch.cat([normalised, gripper], dim=-1).flatten(-2)
