"""The ResNet reward models that a run names: the networks with their files.

Dimension letters: B slots, C frames per slot, H/W pixels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.devices.tensors import to_device, to_signed
from asyncrl.errors import ConfigError
from asyncrl.records import ModelSummary
from asyncrl.rewards.files import FORMAT, WEIGHTS, RewardFiles, open_reward
from asyncrl.rewards.resnet import ResnetRewModel, RewardConfig, TaskEmbedResnetRewModel
from asyncrl.storage.atomic import write_json
from asyncrl.storage.tensor_writer import write_tensors


class ResNetReward:
    """Scores frames. Batch normalisation always uses its running statistics here."""

    def __init__(
        self,
        network: ResnetRewModel | TaskEmbedResnetRewModel,
        config: RewardConfig,
        *,
        rounded: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.network = network.to(device).eval()
        self.config = config
        self.rounded = rounded
        """Round probabilities to 0 or 1, as training with most published checkpoints does."""
        self.device = torch.device(device)
        self._ids = {task: i for i, task in enumerate(config.tasks)}

    @classmethod
    def check(cls, folder: Path, tasks: Sequence[str], **own: Any) -> ModelSummary:
        """Check files and tasks without loading weights. See `interface.RewardModel.check`."""
        refuse_settings(own)
        files = open_reward(folder, tasks)
        files.config.check_tasks(tasks)
        return ModelSummary(image_size=files.config.image_size, nbytes=files.check())

    @classmethod
    def load(cls, folder: Path, device: torch.device, tasks: Sequence[str], **own: Any) -> ResNetReward:
        """Read ours or a published model. See `interface.RewardModel.load`."""
        refuse_settings(own)
        return _opened(open_reward(folder, tasks), device)

    @property
    def image_size(self) -> int:
        """Height and width of the frames in pixels."""
        return self.config.image_size

    def modules(self) -> dict[str, nn.Module]:
        """The network. See `interface.RewardModel.modules`."""
        return {"network": self.network}

    def to(self, device: torch.device | str) -> ResNetReward:
        """Move the weights to `device` and return this model."""
        self.network.to(device)
        self.device = torch.device(device)
        return self

    def task_ids(self, tasks: Sequence[str]) -> Tensor:
        """Look up ``[B]`` int64 ids of instructions (zeros for a model of any task).

        Raises:
            ConfigError: The model was not fitted on one of them.
        """
        self.config.check_tasks(tasks)
        ids = [self._ids.get(task, 0) for task in tasks]
        return to_device(np.array(ids, np.int64), self.device)

    @torch.no_grad()
    def score(self, frames: Tensor, tasks: Sequence[str]) -> Tensor:
        """Score every frame on its own.

        Args:
            frames: ``[B, C, H, W, 3]`` uint8 at the model's image size.
            tasks: ``B`` instructions.

        Returns:
            ``[B, C]`` float32 probability of success; exactly 0 or 1 when `rounded`.

        Raises:
            ConfigError: An unknown task, or frames of another size.
        """
        batch, count, height, width, _ = frames.shape
        if height != self.config.image_size or width != self.config.image_size or batch != len(tasks):
            raise ConfigError(
                f"the reward model looks at {self.config.image_size}-pixel frames with one task per slot; it "
                f"was given frames {list(frames.shape)} and {len(tasks)} tasks. Choose a --world whose "
                "reward model was fitted on its frames."
            )
        images = to_signed(frames.to(self.device).flatten(0, 1).permute(0, 3, 1, 2))
        logits_N = self.network.logits(images, self.task_ids(tasks).repeat_interleave(count))
        probability = logits_N.float().sigmoid().unflatten(0, (batch, count))
        return probability.round() if self.rounded else probability


def load_reward(
    folder: Path, *, tasks: Collection[str] = (), device: torch.device | str = "cpu"
) -> ResNetReward:
    """Load a reward model.

    Args:
        folder: See `open_reward`.
        tasks: Instructions of the start states; only a published model of one suite needs them.
        device: Where the weights go.

    Raises:
        CheckpointError: A file is missing or does not fit, or the tasks are not of one suite.
    """
    return _opened(open_reward(folder, tasks), device)


def save_reward(folder: Path, model: ResNetReward) -> None:
    """Write ``reward.safetensors`` and ``reward.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, model.network.state_dict())
    content = {"format": FORMAT, "rounded": model.rounded, "config": asdict(model.config)}
    write_json(folder / "reward.json", content)


def _opened(files: RewardFiles, device: torch.device | str) -> ResNetReward:
    return ResNetReward(files.network(device), files.config, rounded=files.rounded, device=device)


def refuse_settings(own: Mapping[str, Any]) -> None:
    """Refuse settings of --reward-settings: a ResNet takes none.

    Raises:
        ConfigError: There are some.
    """
    if own:
        raise ConfigError(f"--reward-settings has {', '.join(own)}, but this reward model takes none.")
