"""Work out what EVAC's network is told before it draws: tokens of actions and of the first picture, and maps.

All of it is the same at every step of the sampler, so it is worked out once per decision, on the device.

Dimension letters: B slots, C steps, P frames remembered, F = P + C frames of the window, Z latent channels,
h/w latent size, I image tokens, T tokens of an action, K their width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

import torch
from torch import Tensor, nn

from asyncrl.devices.tensors import to_signed
from asyncrl.worlds.evac.autoencoder import build_autoencoder
from asyncrl.worlds.evac.config import EvacConfig
from asyncrl.worlds.evac.image_tokens import ImageEncoder
from asyncrl.worlds.evac.maps import MapDrawer
from asyncrl.worlds.evac.poses import Motions, PoseModel
from asyncrl.worlds.evac.resampler import Resampler
from asyncrl.worlds.evac.state import EvacState
from asyncrl.worlds.evac.unet import EvacUNet


@dataclass(frozen=True, kw_only=True)
class EvacNetworks:
    """The networks of a world; their weights are what its files hold."""

    unet: EvacUNet
    autoencoder: nn.Module
    image_encoder: ImageEncoder
    image_resampler: Resampler
    action_resampler: Resampler
    pose_model: PoseModel

    @classmethod
    def build(cls, config: EvacConfig) -> EvacNetworks:
        """Make the networks of a size, with random weights."""
        return cls(
            unet=EvacUNet(config.unet),
            autoencoder=build_autoencoder(config.autoencoder),
            image_encoder=ImageEncoder(config.image_encoder),
            image_resampler=Resampler(config.image_resampler),
            action_resampler=Resampler(config.action_resampler),
            pose_model=PoseModel(config.pose_hidden),
        )

    def by_name(self) -> dict[str, nn.Module]:
        """Return them by name, in the order of their files."""
        return {name: getattr(self, name) for name in NETWORKS}


NETWORKS: Final = tuple(field.name for field in fields(EvacNetworks))
"""Names of the networks, in the order of their files."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the network is told in a decision."""

    history: Tensor
    """``[B, Z, P, h, w]`` float32 clean latents of earlier frames, which stay in front of the new ones."""
    channels: Tensor
    """``[B, 2 Z + 7, F, h, w]`` float32: condition image, mask, trajectory map, rays, in this order."""
    image: Tensor
    """``[B, I, K]`` tokens of the episode's first picture, which is the window's first too."""
    actions: Tensor
    """``[B, F, T, K]`` tokens of the action that made each frame."""
    poses: Tensor
    """``[B, C, 8]`` float32 poses of the hand at the new frames."""


class Geometry(nn.Module):
    """What has no weights: motions of the hand, and maps."""

    def __init__(self, config: EvacConfig) -> None:
        super().__init__()
        self.motions = Motions(config.motions)
        self.drawer = MapDrawer(config.camera, config.image_size, config.latent_size)


def conditions_of(
    networks: EvacNetworks,
    geometry: Geometry,
    state: EvacState,
    actions_BC7: Tensor,
    *,
    remembered: int,
    encode: Callable[[Tensor], Tensor],
) -> Conditions:
    """Work out the conditions of a decision.

    The condition image of a frame that is remembered is that frame, with a mask of 1; of a new frame it is
    the last frame, with a mask of 0. Frames that are remembered have an empty trajectory map of zeros.

    Args:
        networks: Of the world.
        geometry: Of the world.
        state: Of ``B`` slots.
        actions_BC7: ``[B, C, 7]`` float32 on the device.
        remembered: ``P``.
        encode: Turns maps ``[N, 3, H, W]`` into latents ``[N, Z, h, w]`` float32.
    """
    history_BPZhw, poses_BP8, before_BP8 = state.remembered(remembered)
    last_B8 = state.last_pose()
    poses_BC8 = networks.pose_model.follow(actions_BC7, last_B8)
    before_BC8 = torch.cat([last_B8[:, None], poses_BC8[:, :-1]], dim=1)
    motions_BF14 = geometry.motions(
        torch.cat([poses_BP8, poses_BC8], dim=1), torch.cat([before_BP8, before_BC8], dim=1)
    )
    pictures_B3HW = to_signed(state.first).permute(0, 3, 1, 2)
    maps_BCZhw = encode(geometry.drawer(poses_BC8).flatten(0, 1)).unflatten(0, poses_BC8.shape[:2])
    return Conditions(
        history=history_BPZhw.transpose(1, 2),
        channels=condition_channels(history_BPZhw, maps_BCZhw, geometry.drawer.rays),
        image=networks.image_resampler(networks.image_encoder(pictures_B3HW)),
        actions=action_tokens(networks.action_resampler, motions_BF14),
        poses=poses_BC8,
    )


def action_tokens(resampler: Resampler, motions_BF14: Tensor) -> Tensor:
    """Make the tokens ``[B, F, T, K]`` of each frame's motion ``[B, F, 14]``."""
    tokens = resampler(motions_BF14.flatten(0, 1).unsqueeze(1))
    return tokens.unflatten(0, motions_BF14.shape[:2])


def condition_channels(history_BPZhw: Tensor, maps_BCZhw: Tensor, rays_6hw: Tensor) -> Tensor:
    """Put together what the network sees beside the noisy latents.

    Args:
        history_BPZhw: ``[B, P, Z, h, w]`` float32 clean latents of earlier frames.
        maps_BCZhw: ``[B, C, Z, h, w]`` float32 latents of the new frames' trajectory maps.
        rays_6hw: ``[6, h, w]`` float32.

    Returns:
        ``[B, 2 Z + 7, F, h, w]`` float32: see `Conditions.channels`.
    """
    batch, known, _, height, width = history_BPZhw.shape
    new = maps_BCZhw.shape[1]
    image = torch.cat([history_BPZhw, history_BPZhw[:, -1:].expand(-1, new, -1, -1, -1)], dim=1)
    mask = torch.cat([torch.ones_like(image[:, :known, :1]), torch.zeros_like(image[:, known:, :1])], dim=1)
    maps = torch.cat([torch.zeros_like(history_BPZhw), maps_BCZhw], dim=1)
    rays = rays_6hw.expand(batch, known + new, 6, height, width)
    return torch.cat([image, mask, maps, rays], dim=2).transpose(1, 2)
