"""Estimate the memory that one slot of a Wan world takes beside the weights, from its sizes alone.

What a slot remembers (`WanState`) has exact sizes: the caches of encoder and decoder are made on the meta
device. What a decision needs for a while is estimated from the largest picture-like tensor of the decoder,
which draws all latents of a window at once.
"""

from __future__ import annotations

from typing import Final, Literal

import torch

from asyncrl.records import CHUNK, SlotBytes
from asyncrl.worlds.wan.vae import WanVae, decode_step, encode_step

TENSORS_AT_ONCE: Final = 10
"""So many of the decoder's largest tensors were alive at the peak: from 50.0 GiB of an actor of 16 slots
(docs/measurements/run_speed.md), less its weights and states."""
STATES: Final = 2
"""The state before a decision and the one after it."""
_CONTEXT: Final = 4


@torch.no_grad()
def slot_bytes(vae: WanVae, image_size: int, context: Literal["frames", "latents"]) -> SlotBytes:
    """Estimate the bytes of one slot.

    Args:
        vae: The autoencoder on the meta device, in the dtype that it is used in.
        image_size: Height and width of the frames in pixels.
        context: See `ImaginationSettings`. With a distilled decoder the estimate is an upper bound.
    """

    def pixels(frames: int) -> torch.Tensor:
        return torch.empty(1, 3, frames, image_size, image_size, device="meta", dtype=vae.dtype)

    anchor, seen = encode_step(vae, pixels(1), None)
    memory, _ = encode_step(vae, pixels(_CONTEXT), seen)
    _, cache = decode_step(vae, anchor, None)
    if context == "latents":
        _, cache = decode_step(vae, memory, cache)
        seen = []
    state = [anchor.float(), memory.float(), *cache, *seen]
    frames = CHUNK + (_CONTEXT if context == "frames" else 0)
    # The decoder's last level has half the picture's height and width.
    largest = vae.size.decoder_base_dim * frames * (image_size // 2) ** 2 * vae.dtype.itemsize
    return SlotBytes(kept=STATES * sum(tensor.nbytes for tensor in state), scratch=TENSORS_AT_ONCE * largest)
