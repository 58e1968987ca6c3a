"""Poses of the robot's hand: prediction from actions, motions between them, and their maps.

A pose is (x, y, z, quaternion x, y, z, w, gripper), in metres; a single arm is given twice. A trajectory map
shows each hand as a disc coloured by the gripper, over it its axes; a ray map has the camera's position and
the viewing direction of each latent pixel. Drawing never waits for the device.

Dimension letters: B slots, F frames, C steps per decision, A arms, S height and width of the map in pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from asyncrl.records import ACTION_DIM, POSE_DIM
from asyncrl.storage.untrusted import Typed

ARMS: Final = 2
MOTION_DIM: Final = 14  # Per arm: motion in x, y, z, turn in roll, pitch, yaw, and gripper.

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
class MotionStatistics(Typed):
    """Normalisation of motions: ``(motion - stride * mean) / (stride * std)``."""

    mean: tuple[float, ...] = _MEAN
    """``[12]`` of both arms, per recorded frame: metres and radians; the gripper is left as it is."""
    std: tuple[float, ...] = _STD
    stride: int = 3  # Recorded frames between two frames that the network sees

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.mean) == len(self.std) == len(_STD) or min(*self.std, self.stride) <= 0:
            raise ValueError("motions need 12 means, 12 deviations above 0 and a stride above 0")


class PoseModel(nn.Module):
    """Predicts the hand's next pose from an action and the present pose, both of one arm."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(ACTION_DIM + POSE_DIM, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, POSE_DIM),
        )
        self.abs_action_mean = nn.Buffer(torch.zeros(POSE_DIM))
        self.abs_action_std = nn.Buffer(torch.ones(POSE_DIM))

    def forward(self, action_B7: Tensor, pose_B8: Tensor) -> Tensor:
        """Predict the next pose ``[B, 8]`` float32, in metres; its quaternion need not have length 1."""
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
    """Normalised differences of poses."""

    def __init__(self, statistics: MotionStatistics) -> None:
        super().__init__()
        mean = torch.tensor(statistics.mean).view(ARMS, -1) * statistics.stride
        spread = torch.tensor(statistics.std).view(ARMS, -1) * statistics.stride
        self.mean, self.spread = (nn.Buffer(both, persistent=False) for both in (mean, spread))

    def forward(self, poses_BF8: Tensor, before_BF8: Tensor) -> Tensor:
        """Compute the normalised motions from the pose before each frame: ``[B, F, 14]``, the arm twice."""
        moved = poses_BF8[..., :3] - before_BF8[..., :3]
        turned = roll_pitch_yaw(poses_BF8[..., 3:7]) - roll_pitch_yaw(before_BF8[..., 3:7])
        turned = torch.remainder(turned + math.pi, 2 * math.pi) - math.pi
        both = torch.cat([moved, turned], dim=-1).unsqueeze(-2)  # [B, F, 1, 6]
        normalised = (both - self.mean) / self.spread
        gripper = poses_BF8[..., None, 7:].expand(*normalised.shape[:-1], 1)
        return torch.cat([normalised, gripper], dim=-1).flatten(-2)


CANVAS: Final = 50 / 255  # grey, in 0..1
RADIUS: Final = 50.0  # Of the disc, in pixels of a map of 256; in proportion in others.
LINE_WIDTH: Final = 8.0  # of the segments, in the same pixels
AXIS: Final = 0.1  # length of the hand's axes in metres
REACH: Final = 0.23  # From the pose's origin to the hand, along its z axis, in metres: of the published poses
_MAP_SIZE: Final = 256
_UNIT: Final = 1e-2  # tolerance of a quaternion's length
_NEAREST: Final = 1e-3  # smallest depth in metres that is drawn
# ColorBrewer's nine-class sequential palettes (Harrower and Brewer, 2003), from light to dark.
_GREENS: Final = "f7fcf5 e5f5e0 c7e9c0 a1d99b 74c476 41ab5d 238b45 006d2c 00441b"
_REDS: Final = "fff5f0 fee0d2 fcbba1 fc9272 fb6a4a ef3b2c cb181d a50f15 67000d"


@dataclass(frozen=True, kw_only=True)
class Camera(Typed):
    """A fixed camera without distortion that looks along its z axis, x to the right and y down."""

    focal: float = 64.0  # In pixels
    centre: float = 64.0  # Of the picture in both directions, in pixels
    size: int = 128  # Height and width of the picture for which `focal` and `centre` are meant
    position: tuple[float, float, float] = (0.3, 0.0, 0.6)  # In metres
    quaternion: tuple[float, float, float, float] = (-0.4332, 0.0, 0.9013, 0.0)
    """Rotation from the camera's axes to the world's, x, y, z, w. The defaults are LIBERO's in RLinf."""
    flipped: bool = True  # Turn maps by 180 degrees, as LIBERO's pictures are
    reach: float = REACH  # From the pose's origin to the drawn hand, along the hand's z axis, in metres

    def __post_init__(self) -> None:
        super().__post_init__()
        if abs(math.hypot(*self.quaternion) - 1) > _UNIT or min(self.focal, self.size) <= 0:
            raise ValueError("a camera needs a quaternion of length 1 and a positive focal length and size")


class MapDrawer(nn.Module):
    """Draws the maps of one camera."""

    def __init__(self, camera: Camera, size: int, latent_size: int) -> None:
        super().__init__()
        self.camera = camera
        self.size = size
        to_world = rotation(torch.tensor(camera.quaternion, dtype=torch.float64))
        constant = partial(nn.Buffer, persistent=False)
        self.palettes = constant(torch.tensor([_palette(_GREENS), _palette(_REDS)]))  # left arm, right arm
        self.from_world = constant(to_world.T.float())
        self.position = constant(torch.tensor(camera.position))
        self.places = constant(torch.arange(size, dtype=torch.float32))
        self.axis_colours = constant(torch.eye(3))
        self.canvas = constant(torch.full((3, 1, 1), CANVAS))
        self.rays = constant(_ray_map(camera, to_world, latent_size))

    def forward(self, poses_BF8: Tensor) -> Tensor:
        """Draw trajectory maps ``[B, F, 3, S, S]`` in [-1, 1] of an arm ``[B, F, 8]``, used for both."""
        drawn = self.canvas.expand(*poses_BF8.shape[:2], 3, self.size, self.size)
        for arm in range(ARMS):
            drawn = self._draw(drawn, poses_BF8, self.palettes[arm])
        return drawn * 2 - 1

    def _draw(self, drawn_BF3SS: Tensor, poses_BF8: Tensor, palette_K3: Tensor) -> Tensor:
        pixel = self.size / _MAP_SIZE
        axes = rotation(poses_BF8[..., 3:7]).transpose(-1, -2)  # [B, F, axis, 3]
        hand = poses_BF8[..., None, :3] + self.camera.reach * axes[..., 2:, :]
        points, depths = self._project(torch.cat([hand, hand + AXIS * axes], dim=-2))
        seen = depths[..., :1] > _NEAREST
        u = self.places - points[..., :1, :1]  # [B, F, 1, S]
        v = self.places - points[..., :1, 1:]
        squared = (u**2)[..., None, :] + (v**2)[..., :, None]  # [B, F, 1, S, S]
        disc = (squared <= (RADIUS * pixel) ** 2) & seen[..., None, None]
        colour = _looked_up(palette_K3, poses_BF8[..., 7].clamp(-1, 1) / 2 + 0.5)
        drawn_BF3SS = torch.where(disc, colour[..., None, None], drawn_BF3SS)
        for axis in range(3):
            along = points[..., axis + 1, :] - points[..., 0, :]  # [B, F, 2]
            du, dv = along[..., 0, None, None], along[..., 1, None, None]
            share = (u * du)[..., 0, None, :] + (v * dv)[..., 0, :, None]  # [B, F, S, S]
            share = (share / (du**2 + dv**2).clamp(min=1e-12)).clamp(0, 1)
            across = (u[..., 0, None, :] - share * du) ** 2 + (v[..., 0, :, None] - share * dv) ** 2
            visible = (seen[..., 0] & (depths[..., axis + 1] > _NEAREST))[..., None, None]
            line = (across <= (LINE_WIDTH / 2 * pixel) ** 2) & visible
            colour = self.axis_colours[axis, :, None, None]
            drawn_BF3SS = torch.where(line[:, :, None], colour, drawn_BF3SS)
        return drawn_BF3SS

    def _project(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Project ``[..., 3]`` metres: pixels ``[..., 2]`` (u, v) of the map, and depths ``[...]``."""
        camera, scale = self.camera, self.size / self.camera.size
        local = (points - self.position) @ self.from_world.T
        depths = local[..., 2]
        flat = local[..., :2] / depths.clamp(min=_NEAREST).unsqueeze(-1)
        pixels = (camera.focal * flat + camera.centre) * scale
        return (self.size - 1 - pixels if camera.flipped else pixels), depths


def _looked_up(palette_K3: Tensor, share: Tensor) -> Tensor:
    """Interpolate colours ``[..., 3]`` at ``[...]`` in [0, 1], without data-dependent indices."""
    count = len(palette_K3)
    places = torch.arange(count, device=share.device)
    weights = (1 - (share.unsqueeze(-1) * (count - 1) - places).abs()).clamp(min=0)
    return weights @ palette_K3


def _palette(text: str) -> list[list[float]]:
    return [[int(word[i : i + 2], 16) / 255 for i in (0, 2, 4)] for word in text.split()]


def _ray_map(camera: Camera, to_world: Tensor, size: int) -> Tensor:
    scale = size / camera.size
    centres = (torch.arange(size, dtype=torch.float64) + 0.5 - camera.centre * scale) / (camera.focal * scale)
    v, u = torch.meshgrid(centres, centres, indexing="ij")
    local = torch.stack([u, v, torch.ones_like(u)])
    world = torch.einsum("ij,jvu->ivu", to_world, local / local.norm(dim=0, keepdim=True))
    origin = torch.tensor(camera.position, dtype=torch.float64)[:, None, None].expand(-1, size, size)
    return torch.cat([world, origin]).float()
