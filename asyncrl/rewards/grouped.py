"""The six reward models of LIBERO-Long: each knows the tasks of one group, and judges their frames alone.

The published folder has them in ``group_1`` to ``group_6``, each a network with the embedding of all ten
tasks; which group a task belongs to is `LONG_GROUPS`. A group's folder may hold several ``N.pth``; as
published, the largest number counts. The folders lie beside the world's files or in one folder there.

Dimension letters: B slots, C frames per slot, H/W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.devices.tensors import to_device
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.records import ModelSummary
from asyncrl.rewards.files import RewardFiles, published_files
from asyncrl.rewards.kinds import GROUPS, group_folders
from asyncrl.rewards.libero_tasks import LONG, LONG_GROUPS, SUITES, suite_of
from asyncrl.rewards.model import ResNetReward, refuse_settings
from asyncrl.storage.tensor_reader import TensorFiles


class GroupedReward:
    """Scores frames with the network that knows their task."""

    def __init__(self, models: Mapping[str, ResNetReward]) -> None:
        """Join the networks.

        Args:
            models: By the name of their group, all of `GROUPS`, on one device.
        """
        self.models = dict(models)
        self._group = {
            task: GROUPS[number - 1] for task, number in zip(SUITES[LONG], LONG_GROUPS, strict=True)
        }

    @classmethod
    def check(cls, folder: Path, tasks: Sequence[str], **own: Any) -> ModelSummary:
        """Check files and tasks without loading weights. See `interface.RewardModel.check`."""
        refuse_settings(own)
        files = open_groups(folder, tasks)
        size = max(one.config.image_size for one in files.values())
        return ModelSummary(image_size=size, nbytes=sum(one.check() for one in files.values()))

    @classmethod
    def load(cls, folder: Path, device: torch.device, tasks: Sequence[str], **own: Any) -> GroupedReward:
        """Read the six networks. See `interface.RewardModel.load`."""
        refuse_settings(own)
        return cls(
            {
                group: ResNetReward(one.network(device), one.config, rounded=one.rounded, device=device)
                for group, one in open_groups(folder, tasks).items()
            }
        )

    @property
    def image_size(self) -> int:
        """Height and width of the frames in pixels."""
        return self.models[GROUPS[0]].image_size

    def modules(self) -> dict[str, nn.Module]:
        """The six networks. See `interface.RewardModel.modules`."""
        return {group: model.network for group, model in self.models.items()}

    def to(self, device: torch.device | str) -> GroupedReward:
        """Move the weights to `device` and return this model."""
        for model in self.models.values():
            model.to(device)
        return self

    def score(self, frames: Tensor, tasks: Sequence[str]) -> Tensor:
        """Score every frame with the network of its task. Never waits for the device.

        Args:
            frames: ``[B, C, H, W, 3]`` uint8 at the models' image size.
            tasks: ``B`` instructions of LIBERO-Long.

        Returns:
            ``[B, C]`` float32: 0 or 1.

        Raises:
            ConfigError: An unknown task, or frames of another size.
        """
        if len(tasks) != len(frames):
            raise ConfigError(f"the reward model was given {len(frames)} slots and {len(tasks)} tasks.")
        # Which rows belong together is known on the host, so nothing is asked of the device.
        frames, rows = frames.to(self.models[GROUPS[0]].device), dict[str, list[int]]()
        for row, task in enumerate(tasks):
            rows.setdefault(self._group_of(task), []).append(row)
        scores = torch.zeros(frames.shape[:2], dtype=torch.float32, device=frames.device)
        for group, taken in rows.items():
            index = to_device(np.array(taken, np.int64), frames.device)
            found = self.models[group].score(frames.index_select(0, index), [tasks[row] for row in taken])
            scores.index_copy_(0, index, found)
        return scores

    def _group_of(self, task: str) -> str:
        if task not in self._group:
            raise ConfigError(
                f"the reward models of LIBERO-Long do not know the task {task!r}. They know: "
                f"{', '.join(map(repr, self._group))}. Use --start-states of these tasks."
            )
        return self._group[task]


def open_groups(folder: Path, tasks: Sequence[str]) -> dict[str, RewardFiles]:
    """Read what the six files say about their networks, without their numbers.

    Args:
        folder: See `group_folders`.
        tasks: Instructions of the start states.

    Raises:
        CheckpointError: A group is missing or is no network with an embedding of ten tasks, or the tasks are
            not those of LIBERO-Long.
    """
    place = group_folders(folder)
    if place is None:
        raise CheckpointError(
            f"{folder} holds no {GROUPS[0]} to {GROUPS[-1]}, the reward models of LIBERO-Long. Download them "
            "beside the world."
        )
    if (suite := suite_of(tasks)) != LONG:
        raise CheckpointError(
            f"{place} holds the reward models of {LONG}, and the start states are of {suite}. Use "
            "--start-states of LIBERO-Long, or --world of their suite."
        )
    files = {group: published_files(TensorFiles(_newest(place / group)), tasks) for group in GROUPS}
    for group, one in files.items():
        if not one.config.tasks:
            raise CheckpointError(
                f"{one.weights.label} lacks task_embedding.weight: it is no network of {group}, whose tasks "
                "are told by their numbers. Download it again."
            )
    return files


def _newest(folder: Path) -> Path:
    """The one ``*.pth`` of a group, or of several that are called by numbers the largest."""
    files = sorted(folder.glob("*.pth")) if folder.is_dir() else []
    numbered = {int(path.stem): path for path in files if path.stem.isdecimal()}
    if len(files) == 1:
        return files[0]
    if files and len(numbered) == len(files):
        return numbered[max(numbered)]
    seen = ", ".join(path.name for path in files) or "none"
    raise CheckpointError(
        f"{folder} should hold one reward model (*.pth), or several called by numbers, of which the largest "
        f"counts; it holds {seen}. All of {GROUPS[0]} to {GROUPS[-1]} are needed: download them again."
    )
