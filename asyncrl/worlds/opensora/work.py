"""Count what an OpenSora world computes, from its sizes alone."""

from __future__ import annotations

import torch

from asyncrl.config.imagination import Precision
from asyncrl.devices.float8 import float8_flops
from asyncrl.records import CHUNK
from asyncrl.worlds.opensora.autoencoder import FrameVae
from asyncrl.worlds.opensora.layers import KeysValues
from asyncrl.worlds.opensora.stdit3 import CONDITION, STDiT3
from asyncrl.worlds.work import Stage, WorldWork, count_flops


def decision_work(
    transformer: STDiT3,
    vae: FrameVae,
    *,
    image_size: int,
    steps: int,
    precision: Precision = "stored",
) -> WorldWork:
    """Count the FLOPs of one slot.

    Args:
        transformer: On the meta device.
        vae: On the meta device.
        image_size: Height and width of the frames in pixels.
        steps: Network calls per decision.
        precision: See `ImaginationSettings`. The transformer itself is not rounded.
    """
    side = image_size // vae.size.spatial
    channels = transformer.size.channels

    def latents(frames: int) -> torch.Tensor:
        return torch.empty(1, channels, frames, side, side, device="meta")

    pixels = torch.empty(CONDITION, 3, image_size, image_size, device="meta")
    times, actions = (
        torch.empty(1, *rest, device="meta") for rest in ((), (CHUNK, transformer.size.action_dim))
    )

    def see() -> list[KeysValues]:
        return transformer.prefix(latents(CONDITION))

    with torch.no_grad():
        prefix = see()

    def step() -> torch.Tensor:
        return transformer.step(latents(CHUNK), times, actions, prefix)

    blocks = (transformer.spatial_blocks, transformer.temporal_blocks)
    rounded = blocks if precision == "float8" else ()
    return WorldWork(
        decision=(
            Stage(name="opensora denoise", flops=count_flops(see), float8=float8_flops(see, rounded)),
            Stage(
                name="opensora denoise",
                flops=count_flops(step),
                float8=float8_flops(step, rounded),
                calls=steps,
            ),
            Stage(
                name="frame decode",
                flops=count_flops(lambda: vae.decode(latents(CHUNK).transpose(1, 2).flatten(0, 1))),
            ),
        ),
        opening=(Stage(name="frame encode", flops=count_flops(lambda: vae.encode(pixels))),),
    )
