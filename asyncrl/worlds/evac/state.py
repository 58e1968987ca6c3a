"""What the EVAC world remembers about each slot: every frame of its episode, and where the hand was.

The network sees four earlier frames: three spread over the whole episode, its first frame among them, and the
last one. So nothing may be forgotten, and the memory is made for as many decisions as will come.

Dimension letters: B slots, N frames there is room for, P frames remembered, Z latent channels, h/w latent
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.devices.tensors import to_device
from asyncrl.errors import ConfigError


def memory_index(count_B: Tensor, remembered: int) -> Tensor:
    """Choose the frames that the network sees of an episode so far.

    An episode begins with `P` copies of its first frame, and they are counted: of ``n = count + P - 1``
    frames the network sees ``n * i // (P - 1)`` for i from 0 to P - 2, and the last one (EnerVerse-AC's
    sampler).

    Args:
        count_B: ``[B]`` int64 frames so far, the first one counted once; at least 1.
        remembered: ``P``, at least 2.

    Returns:
        ``[B, P]`` int64: their numbers, the first frame's being 0.

    Example:
        >>> memory_index(torch.tensor([1, 9]), 4).tolist()
        [[0, 0, 0, 0], [0, 1, 5, 8]]
    """
    copies = remembered - 1  # of the first frame, beside itself
    spread = torch.arange(copies, device=count_B.device) * (count_B[:, None] + copies) // copies - copies
    return torch.cat([spread.clamp(min=0), count_B[:, None] - 1], dim=1)


@dataclass(kw_only=True)
class EvacState:
    """Memory of `B` slots. Every tensor has the slots first and belongs to this state alone."""

    history: Tensor
    """``[B, N, Z, h, w]`` float32 latents of all frames so far; behind them zeros."""
    poses: Tensor
    """``[B, N, 8]`` float32 pose of the hand at each of them."""
    count: Tensor
    """``[B]`` int64 frames so far."""
    first: Tensor
    """``[B, H, W, 3]`` uint8: the first frame."""
    finite: Tensor
    """``[B]`` bool: all latents, pixels and poses so far were finite."""
    left: list[int]
    """Decisions that each slot has still room for; on the host, where asking does not wait."""

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.left)

    def _tensors(self) -> list[Tensor]:
        return [self.history, self.poses, self.count, self.first, self.finite]

    def _like(self, tensors: list[Tensor], left: list[int]) -> EvacState:
        history, poses, count, first, finite = tensors
        return EvacState(history=history, poses=poses, count=count, first=first, finite=finite, left=left)

    def select(self, indices: Sequence[int]) -> EvacState:
        """Return a state of its own that holds copies of the rows `indices`, in that order."""
        rows = to_device(np.array(indices, np.int64), self.count.device)
        left = [self.left[index] for index in indices]
        return self._like([tensor.index_select(0, rows) for tensor in self._tensors()], left)

    @torch.inference_mode()  # in place on tensors that may or may not have been made in inference mode
    def write_rows(self, indices: Sequence[int], other: EvacState) -> EvacState:
        """Write row k of `other` over row ``indices[k]``, in place, and return this state.

        Raises:
            ConfigError: The other state was made for another number of decisions.
        """
        if other.history.shape[1] != self.history.shape[1]:
            raise ConfigError(
                f"a state with room for {other.history.shape[1]} frames cannot go into one with room for "
                f"{self.history.shape[1]}. Start both with the same number of decisions."
            )
        rows = to_device(np.array(indices, np.int64), self.count.device)
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.index_copy_(0, rows, theirs.to(mine))
        for index, left in zip(indices, other.left, strict=True):
            self.left[index] = left
        return self

    def to(self, device: torch.device | str) -> EvacState:
        """Return this state on `device`."""
        return self._like([tensor.to(device) for tensor in self._tensors()], list(self.left))

    def remembered(self, frames: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the network sees of the episode so far.

        Args:
            frames: ``P``.

        Returns:
            Latents ``[B, P, Z, h, w]``, poses ``[B, P, 8]`` at them, and poses ``[B, P, 8]`` at the frames
            before each; in front of the first frame stands its own.
        """
        rows = torch.arange(len(self), device=self.count.device)[:, None]
        index = memory_index(self.count, frames)
        before = (index - 1).clamp(min=0)
        return self.history[rows, index], self.poses[rows, index], self.poses[rows, before]

    def last_pose(self) -> Tensor:
        """Return the pose ``[B, 8]`` float32 at the last frame."""
        rows = torch.arange(len(self), device=self.count.device)
        return self.poses[rows, self.count - 1]

    def check_room(self) -> None:
        """Check that another decision fits.

        Raises:
            ConfigError: A slot has had all its decisions.
        """
        if 0 in self.left:
            raise ConfigError(
                f"slot {self.left.index(0)} has imagined as many decisions as its memory was made for, and "
                "another one does not fit. Start with more decisions (--actor.max-decisions)."
            )

    def extended(self, latents: Tensor, poses: Tensor, finite: Tensor) -> EvacState:
        """Return a state of its own with the frames of a decision behind those there are.

        Args:
            latents: ``[B, C, Z, h, w]`` float32.
            poses: ``[B, C, 8]`` float32.
            finite: ``[B]`` bool: whether the new ones are.
        """
        rows = torch.arange(len(self), device=self.count.device)[:, None]
        places = self.count[:, None] + torch.arange(latents.shape[1], device=self.count.device)
        return EvacState(
            history=self.history.index_put((rows, places), latents),
            poses=self.poses.index_put((rows, places), poses),
            count=self.count + latents.shape[1],
            first=self.first.clone(),
            finite=self.finite & finite,
            left=[left - 1 for left in self.left],
        )
