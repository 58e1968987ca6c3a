"""The interface of every reward model.

Dimension letters: B slots, C frames per slot, H/W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from asyncrl.records import ModelSummary


class RewardModel(Protocol):
    """Judges frames: how probable is it that the task is fulfilled in each."""

    @classmethod
    def check(cls, folder: Path, tasks: Sequence[str], **own: Any) -> ModelSummary:
        """Check, without loading any weight, that a folder holds a model of these tasks that `load` can read.

        Raises:
            CheckpointError: A file is missing, cannot be read, or does not fit.
            ConfigError: It does not know a task.
        """
        ...

    @classmethod
    def load(cls, folder: Path, device: torch.device, tasks: Sequence[str], **own: Any) -> Self:
        """Read a model for inference.

        Args:
            folder: The world's folder, or what stands behind the @ of --reward.
            device: Where the weights go: the world's.
            tasks: Instructions of the start states.
            own: Of ``[reward.settings]`` or --reward-settings.

        Raises:
            CheckpointError: A file is missing or does not fit.
        """
        ...

    @property
    def image_size(self) -> int:
        """Return height and width of the frames in pixels; 0: any."""
        ...

    def modules(self) -> Mapping[str, nn.Module]:
        """Return its networks by name: what is moved to host memory while there is nothing to imagine."""
        ...

    def score(self, frames: Tensor, tasks: Sequence[str]) -> Tensor:
        """Score every frame. Never waits for the device.

        Args:
            frames: ``[B, C, H, W, 3]`` uint8.
            tasks: ``B`` instructions.

        Returns:
            ``[B, C]`` float32 probability of success, in [0, 1].

        Raises:
            ConfigError: An unknown task, or frames of another size.
        """
        ...
