"""Count what an EVAC world computes, from its sizes alone."""

from __future__ import annotations

import torch
from torch import nn

from asyncrl.records import CHUNK
from asyncrl.worlds.evac.autoencoder import decode_frames, encode_frames
from asyncrl.worlds.evac.conditions import EvacNetworks
from asyncrl.worlds.evac.config import EvacConfig
from asyncrl.worlds.work import Stage, WorldWork, count_flops


def decision_work(config: EvacConfig, *, steps: int, guided: bool = False) -> WorldWork:
    """Count the FLOPs of one slot.

    Args:
        config: Sizes.
        steps: Network calls per decision.
        guided: Whether every call has a second row without conditions.
    """
    with torch.device("meta"):
        networks = EvacNetworks.build(config)
    for network in networks.by_name().values():
        nn.Module.to(network, "meta").requires_grad_(False)  # Constants that were computed are elsewhere.
    side, size, scale = config.image_size, config.latent_size, config.autoencoder.scale
    frames, unet = config.history + CHUNK, config.unet

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta")

    def pictures(count: int) -> torch.Tensor:
        return empty(count, 3, side, side)

    with torch.no_grad():
        image = networks.image_resampler(networks.image_encoder(pictures(1)))
        actions = networks.action_resampler(empty(frames, 1, config.action_resampler.inputs))
    rest = (empty(1), torch.zeros(1, dtype=torch.int64, device="meta"))
    call = count_flops(
        lambda: networks.unet(
            empty(1, unet.in_channels, frames, size, size), empty(1, frames), image, actions[None], *rest
        )
    )
    told = count_flops(lambda: networks.image_resampler(networks.image_encoder(pictures(1))))
    drawn = empty(CHUNK, config.autoencoder.latent, size, size)
    maps = count_flops(lambda: encode_frames(networks.autoencoder, pictures(CHUNK), scale))
    return WorldWork(
        decision=(
            Stage(name="evac conditions", flops=told),
            Stage(name="frame encode", flops=maps),
            Stage(name="evac denoise", flops=call * (2 if guided else 1), calls=steps),
            Stage(
                name="frame decode",
                flops=count_flops(lambda: decode_frames(networks.autoencoder, drawn, scale)),
            ),
        ),
        opening=(
            Stage(
                name="frame encode",
                flops=count_flops(lambda: encode_frames(networks.autoencoder, pictures(1), scale)),
            ),
        ),
    )
