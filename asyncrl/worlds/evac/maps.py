"""Draw what EVAC sees of geometry: the hand in the camera's picture, and the camera's rays.

A trajectory map shows each arm's hand on a dark canvas: a disc coloured by the gripper, over it the hand's
three axes as segments, red, green and blue. Every pixel is coloured by its distance to the disc's centre and
to the segments, so that drawing is tensor arithmetic and nothing waits for the device. A ray map says for
each latent pixel where the camera is and where it looks through that pixel.

Dimension letters: B slots, F frames, A arms, S height and width of the map in pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from asyncrl.worlds.evac.poses import ARMS, rotation

CANVAS: Final = 50 / 255
"""Grey of the canvas, in 0..1."""
RADIUS: Final = 50.0
"""Of the disc, in pixels of a map of 256; in proportion in others."""
LINE_WIDTH: Final = 8.0
"""Of the segments, in the same pixels."""
AXIS: Final = 0.1
"""Length of the hand's axes in metres."""
REACH: Final = 0.23
"""From the pose's origin to the hand, along its z axis, in metres: of the published poses."""
_MAP_SIZE: Final = 256
_UNIT: Final = 1e-2
"""What the length of a quaternion may differ from 1."""
_NEAREST: Final = 1e-3
"""Depth in metres from which on something is drawn."""
# ColorBrewer's nine-class sequential palettes (Harrower and Brewer, 2003), from light to dark.
_GREENS: Final = "f7fcf5 e5f5e0 c7e9c0 a1d99b 74c476 41ab5d 238b45 006d2c 00441b"
_REDS: Final = "fff5f0 fee0d2 fcbba1 fc9272 fb6a4a ef3b2c cb181d a50f15 67000d"


@dataclass(frozen=True, kw_only=True)
class Camera:
    """A fixed camera without distortion that looks along its z axis, x to the right and y down."""

    focal: float = 64.0
    """In pixels."""
    centre: float = 64.0
    """Of the picture in both directions, in pixels."""
    size: int = 128
    """Height and width of the picture for which `focal` and `centre` are meant."""
    position: tuple[float, float, float] = (0.3, 0.0, 0.6)
    """In metres."""
    quaternion: tuple[float, float, float, float] = (-0.4332, 0.0, 0.9013, 0.0)
    """Rotation from the camera's axes to the world's, x, y, z, w. The defaults are LIBERO's in RLinf."""
    flipped: bool = True
    """Whether maps are turned by 180 degrees, as LIBERO's pictures are."""
    reach: float = REACH
    """From the pose's origin to what is drawn, along the hand's z axis, in metres."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: A size is not positive, a vector has another length, a number is not finite, or the
                quaternion does not have the length 1.
        """
        numbers = (self.focal, self.centre, *self.position, *self.quaternion, self.reach)
        if not all(map(math.isfinite, numbers)) or abs(math.hypot(*self.quaternion) - 1) > _UNIT:
            raise ValueError("a camera needs finite numbers and a quaternion of length 1")
        if min(self.focal, self.size) <= 0 or len(self.position) != 3 or len(self.quaternion) != 4:
            raise ValueError("a camera needs a positive focal length and size, 3 and 4 numbers of its pose")


class MapDrawer(nn.Module):
    """Draws the maps of one camera."""

    palettes: Tensor
    from_world: Tensor
    position: Tensor
    places: Tensor
    axis_colours: Tensor
    canvas: Tensor
    rays: Tensor

    def __init__(self, camera: Camera, size: int, latent_size: int) -> None:
        """Prepare.

        Args:
            camera: Whose picture it is.
            size: ``S``.
            latent_size: Height and width of the ray map.
        """
        super().__init__()
        self.camera = camera
        self.size = size
        to_world = rotation(torch.tensor(camera.quaternion, dtype=torch.float64))
        buffers = {
            "palettes": torch.tensor([_palette(_GREENS), _palette(_REDS)]),  # left arm, right arm
            "from_world": to_world.T.float(),
            "position": torch.tensor(camera.position),
            "places": torch.arange(size, dtype=torch.float32),
            "axis_colours": torch.eye(3),
            "canvas": torch.full((3, 1, 1), CANVAS),
            "rays": _ray_map(camera, to_world, latent_size),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, poses_BF8: Tensor) -> Tensor:
        """Draw trajectory maps of one arm, which stands for both.

        Args:
            poses_BF8: ``[B, F, 8]`` float32, metres; gripper in -1 (open) to 1.

        Returns:
            ``[B, F, 3, S, S]`` float32 in [-1, 1].
        """
        drawn = self.canvas.expand(*poses_BF8.shape[:2], 3, self.size, self.size)
        for arm in range(ARMS):
            drawn = self._draw(drawn, poses_BF8, self.palettes[arm])
        return drawn * 2 - 1

    def _draw(self, drawn_BF3SS: Tensor, poses_BF8: Tensor, palette_K3: Tensor) -> Tensor:
        """Draw one arm's hand over what is there."""
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
    """Interpolate colours ``[..., 3]`` at ``[...]`` in [0, 1]; no index depends on the numbers."""
    count = len(palette_K3)
    places = torch.arange(count, device=share.device)
    weights = (1 - (share.unsqueeze(-1) * (count - 1) - places).abs()).clamp(min=0)
    return weights @ palette_K3


def _palette(text: str) -> list[list[float]]:
    return [[int(word[i : i + 2], 16) / 255 for i in (0, 2, 4)] for word in text.split()]


def _ray_map(camera: Camera, to_world: Tensor, size: int) -> Tensor:
    """Compute ``[6, size, size]`` float32: direction of length 1 through each pixel's centre, then origin.

    Directions are in the world's axes, origins in metres.
    """
    scale = size / camera.size
    centres = (torch.arange(size, dtype=torch.float64) + 0.5 - camera.centre * scale) / (camera.focal * scale)
    v, u = torch.meshgrid(centres, centres, indexing="ij")
    local = torch.stack([u, v, torch.ones_like(u)])
    world = torch.einsum("ij,jvu->ivu", to_world, local / local.norm(dim=0, keepdim=True))
    origin = torch.tensor(camera.position, dtype=torch.float64)[:, None, None].expand(-1, size, size)
    return torch.cat([world, origin]).float()
