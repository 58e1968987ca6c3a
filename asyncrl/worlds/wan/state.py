"""What the Wan world remembers about each slot.

Dimension letters: B slots, Z latent channels, h/w latent size, A numbers per action.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from asyncrl.worlds.slots import TensorState
from asyncrl.worlds.wan.vae import Cache


@dataclass(frozen=True, kw_only=True)
class WanState(TensorState):
    """Memory of `B` slots; `finite` is about latents and pixels."""

    anchor: Tensor
    """``[B, Z, 1, h, w]`` float32 latent of the first frame."""
    memory: Tensor
    """``[B, Z, 1, h, w]`` float32 latent of the last four frames."""
    last_actions: Tensor
    """``[B, 4, A]`` float32 actions that produced the last four frames."""
    cache: Cache
    """What the decoder remembers: of the frames so far, or (memory in frames) of the first frame."""
    encoder_cache: Cache = field(default_factory=list)
    """What the encoder remembers of the first frame; empty when the memory is a latent."""
