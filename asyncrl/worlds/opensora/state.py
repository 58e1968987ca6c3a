"""What the OpenSora world remembers about each slot.

Dimension letters: B slots, Z latent channels, h/w latent size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from asyncrl.worlds.slots import TensorState


@dataclass(frozen=True, kw_only=True)
class OpenSoraState(TensorState):
    """The last four frames of `B` slots, as latents: they were never pixels, but for those of the start."""

    latents: Tensor
    """``[B, Z, 4, h, w]`` float32, scaled; the oldest first."""
