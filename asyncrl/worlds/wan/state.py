"""What the Wan world remembers about each slot: rows that can be picked, written and moved.

Dimension letters: B slots, Z latent channels, h/w latent size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asyncrl.devices.tensors import to_device
from asyncrl.worlds.wan.vae import Cache


@dataclass(kw_only=True)
class WanState:
    """Memory of `B` slots. Every tensor has the slots first and belongs to this state alone."""

    anchor: Tensor
    """``[B, Z, 1, h, w]`` float32 latent of the first frame."""
    memory: Tensor
    """``[B, Z, 1, h, w]`` float32 latent of the last four frames."""
    last_actions: Tensor
    """``[B, 4, 7]`` float32 actions that produced the last four frames."""
    finite: Tensor
    """``[B]`` bool: all latents and pixels so far were finite."""
    cache: Cache
    """What the decoder remembers: of the frames so far, or (memory in frames) of the first frame."""
    encoder_cache: Cache = field(default_factory=list)
    """What the encoder remembers of the first frame; empty when the memory is a latent."""

    def __len__(self) -> int:
        """Return the number of slots."""
        return self.anchor.shape[0]

    def _tensors(self) -> list[Tensor]:
        return [
            *(self.anchor, self.memory, self.last_actions, self.finite),
            *self.cache,
            *self.encoder_cache,
        ]

    def _like(self, tensors: list[Tensor]) -> WanState:
        anchor, memory, last_actions, finite, *both = tensors
        cut = len(self.cache)
        return WanState(
            anchor=anchor,
            memory=memory,
            last_actions=last_actions,
            finite=finite,
            cache=both[:cut],
            encoder_cache=both[cut:],
        )

    def select(self, indices: Sequence[int]) -> WanState:
        """Return a state of its own that holds copies of the rows `indices`, in that order."""
        rows = to_device(np.array(indices, np.int64), self.anchor.device)
        return self._like([tensor.index_select(0, rows) for tensor in self._tensors()])

    @torch.inference_mode()  # in place on tensors that may or may not have been made in inference mode
    def write_rows(self, indices: Sequence[int], other: WanState) -> WanState:
        """Write row k of `other` over row ``indices[k]``, in place, and return this state."""
        rows = to_device(np.array(indices, np.int64), self.anchor.device)
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.index_copy_(0, rows, theirs.to(mine))
        return self

    def to(self, device: torch.device | str) -> WanState:
        """Return this state on `device`."""
        return self._like([tensor.to(device) for tensor in self._tensors()])
