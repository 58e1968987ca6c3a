"""Count what a Wan world computes, from its sizes alone."""

from __future__ import annotations

from typing import Literal

import torch

from asyncrl.config.imagination import Precision
from asyncrl.devices.float8 import float8_flops
from asyncrl.records import CHUNK
from asyncrl.worlds.wan.tiny_decoder import Decoder, FullDecoder, TinyDecoder
from asyncrl.worlds.wan.transformer import ActionWanTransformer
from asyncrl.worlds.wan.vae import WanVae, decode_step, encode_step
from asyncrl.worlds.work import Stage, WorldWork, count_flops

_CONTEXT, _WINDOW, _NEW = 4, 4, 2
"""Frames that are encoded again; latents that the transformer sees, and those that a decision makes."""


def decision_work(
    transformer: ActionWanTransformer,
    vae: WanVae,
    *,
    image_size: int,
    context: Literal["frames", "latents"],
    steps: int,
    tiny_decoder: TinyDecoder | None = None,
    precision: Precision = "stored",
) -> WorldWork:
    """Count the FLOPs of one slot.

    Args:
        transformer: On the meta device.
        vae: On the meta device.
        image_size: Height and width of the frames in pixels.
        context: See `ImaginationSettings`.
        steps: Network calls per decision.
        tiny_decoder: The distilled decoder on the meta device; None: the full one draws.
        precision: See `ImaginationSettings`. The transformer itself is not rounded.
    """

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(1, *shape, device="meta")

    def pixels(frames: int) -> torch.Tensor:
        return empty(3, frames, image_size, image_size)

    decoder: Decoder = tiny_decoder or FullDecoder(vae)
    anchor, seen = encode_step(vae, pixels(1), None)
    _, cache = decoder.decode(anchor, None)
    channels, side = transformer.size.channels, anchor.shape[-1]
    drawn = _NEW + (context == "frames")  # The published path draws the memory latent again.
    decode = count_flops(lambda: decoder.decode(empty(channels, drawn, side, side), cache))
    encode = count_flops(lambda: encode_step(vae, pixels(_CONTEXT), seen))

    def denoise() -> torch.Tensor:
        return transformer(
            empty(channels, _WINDOW, side, side),
            torch.zeros(1, _WINDOW, device="meta"),
            empty(1 + _CONTEXT + CHUNK, transformer.size.action_dim),
        )

    rounded = transformer.blocks if precision == "float8" else ()
    again = (Stage(name="wan encode", flops=encode),) if context == "frames" else ()
    draw = "wan decode" if tiny_decoder is None else "wan tiny decode"
    first = encode + count_flops(lambda: encode_step(vae, pixels(1), None))
    seen_first = count_flops(lambda: decode_step(vae, anchor, None))
    return WorldWork(
        decision=(
            *again,
            Stage(
                name="wan denoise",
                flops=count_flops(denoise),
                float8=float8_flops(denoise, rounded),
                calls=steps,
            ),
            Stage(name=draw, flops=decode),
        ),
        opening=(Stage(name="wan encode", flops=first), Stage(name="wan decode", flops=seen_first)),
    )
