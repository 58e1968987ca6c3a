"""Estimate the memory that an OpenSora world takes beside its weights, from its sizes alone.

What a slot remembers is small and exact. What a decision needs for a while is the keys and values of the
condition frames, exact too, and the largest tensors of a block. The decoder draws a fixed number of frames at
once: what it takes does not grow with the slots.
"""

from __future__ import annotations

from typing import Final

import torch

from asyncrl.records import CHUNK, SlotBytes
from asyncrl.worlds.opensora.autoencoder import FRAMES_AT_ONCE, VaeConfig
from asyncrl.worlds.opensora.state import OpenSoraState
from asyncrl.worlds.opensora.stdit3 import CONDITION, STDiT3Config

STATES: Final = 2
"""The state before a decision and the one after it."""
_BLOCK: Final = 8
"""Tensors of the model's width alive in a block beside the inner ones of the MLP. These two are chosen so
that a step of the published size takes what was measured: 117 MiB a slot."""
_INNER: Final = 4
"""Of the MLP's width: before and after the activation, and what it computes on the way."""
_DRAWING: Final = 4
"""Of the decoder's largest tensors, alive at the same time."""


def slot_bytes(size: STDiT3Config, vae: VaeConfig, image_size: int, dtype: torch.dtype) -> SlotBytes:
    """Estimate the bytes of slots.

    Args:
        size: Of the transformer.
        vae: Of the autoencoder.
        image_size: Height and width of the frames in pixels.
        dtype: Of the weights.
    """
    side = image_size // vae.spatial
    latents = torch.empty(1, vae.channels, CONDITION, side, side, device="meta")
    state = OpenSoraState(finite=torch.empty(1, dtype=torch.bool, device="meta"), latents=latents)
    tokens = (side // size.patch) ** 2
    frame = tokens * size.width * dtype.itemsize  # of one frame, a tensor of the model's width
    prefix = 2 * size.depth * CONDITION * frame
    block = CHUNK * frame * (_BLOCK + _INNER * size.mlp_ratio)
    pixels = CHUNK * 3 * image_size**2 * (2 * dtype.itemsize + torch.float32.itemsize)
    # The decoder's finest level begins with the channels of the next coarser one.
    drawing = _DRAWING * FRAMES_AT_ONCE * max(vae.widths[:2]) * image_size**2 * dtype.itemsize
    return SlotBytes(kept=STATES * state.bytes_per_slot, scratch=prefix + block + pixels, shared=drawing)
