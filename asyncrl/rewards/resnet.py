"""ResNet reward models of any size: their network, and the judges that a run names.

Tensor names equal the published ones. Letters: B slots, C frames per slot (8), N = B * C images, H/W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.devices.tensors import to_device, to_signed
from asyncrl.errors import ConfigError
from asyncrl.records import ModelSummary
from asyncrl.rewards.files import FORMAT, WEIGHTS, RewardConfig, RewardFiles, open_reward
from asyncrl.rewards.libero_tasks import GROUPS, LONG, LONG_GROUPS, SUITES
from asyncrl.storage.atomic import write_json
from asyncrl.storage.tensor_files import check_fit, fill, write_tensors


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; a normed block has no biases, and a norm in its shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int, *, normed: bool) -> None:
        super().__init__()
        biased = not normed
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=biased)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=biased)
        self.conv3: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            projection = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=biased)
            if normed:
                self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))
            else:
                self.conv3 = projection
        self.bn1 = nn.BatchNorm2d(channels)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, channels_in, h, w]`` to ``[N, channels, h / stride, w / stride]``, both float32."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        shortcut = getattr(self, "shortcut", self.conv3)
        return functional.relu(y + (x if shortcut is None else shortcut(x)))


class RewardNetwork(nn.Module):
    """A ResNet-18 that looks at one frame, and at an embedding of the task if it knows tasks."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__()
        widths, block = config.widths, partial(ResidualBlock, normed=config.normed_shortcut)
        stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 7, stride=2, padding=3),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages = [
            nn.Sequential(block(before, width, stride), block(width, width, 1))
            for stride, before, width in ((1, widths[0], widths[0]), *((2, *two) for two in pairwise(widths)))
        ]
        trunk = [stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        if not config.tasks:
            self.net = nn.Sequential(*trunk, nn.Linear(widths[-1], 1), nn.Sigmoid())
            return
        self.visual_encoder = nn.Sequential(*trunk)
        self.task_embedding = nn.Embedding(len(config.tasks), config.embed_dim)
        self.fusion_layer = nn.Sequential(
            nn.Linear(widths[-1] + config.embed_dim, config.hidden_dim),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(config.hidden_dim, 1),
            nn.Sigmoid(),
        )

    def logits(self, images_N3HW: Tensor, task_ids_N: Tensor) -> Tensor:
        """Return the log-odds of success ``[N]`` of images in [-1, 1], each for its own task (if any)."""
        if hasattr(self, "net"):
            return self.net[:-1](images_N3HW).squeeze(1)
        seen = torch.cat([self.visual_encoder(images_N3HW), self.task_embedding(task_ids_N)], dim=1)
        return self.fusion_layer[:-1](seen).squeeze(1)


class ResNetReward:
    """Scores frames. Batch normalisation always uses its running statistics here."""

    def __init__(
        self,
        network: RewardNetwork,
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
        """Check files and tasks without loading weights."""
        found = _open(folder, tasks, own).values()
        nbytes = sum(tensor.nbytes for files in found for tensor in _network(files).state_dict().values())
        return ModelSummary(image_size=max(files.config.image_size for files in found), nbytes=nbytes)

    @classmethod
    def load(
        cls, folder: Path, device: torch.device, tasks: Sequence[str], **own: Any
    ) -> ResNetReward | GroupedReward:
        """Read ours or a published model; those of LIBERO-Long become a `GroupedReward`."""
        models = {}
        for group, files in _open(folder, tasks, own).items():
            network = _network(files).requires_grad_(False)
            # In float32: rewards are not worth a rounding error.
            fill(network, files.weights, dtype=torch.float32, device=device)
            models[group] = ResNetReward(network, files.config, rounded=files.rounded, device=device)
        return models.get("") or GroupedReward(models)

    @property
    def image_size(self) -> int:
        """Height and width of the frames in pixels."""
        return self.config.image_size

    def modules(self) -> dict[str, nn.Module]:
        """Return the network."""
        return {"network": self.network}

    def task_ids(self, tasks: Sequence[str]) -> Tensor:
        """Look up ``[B]`` int64 ids of instructions (zeros for a model of any task)."""
        self.config.check_tasks(tasks)
        return to_device(np.array([self._ids.get(task, 0) for task in tasks], np.int64), self.device)

    @torch.no_grad()
    def score(self, frames: Tensor, tasks: Sequence[str]) -> Tensor:
        """Score every frame on its own; see `RewardModel.score`. Exactly 0 or 1 when `rounded`."""
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


class GroupedReward:
    """Scores frames of LIBERO-Long with the network of their task's group."""

    def __init__(self, models: Mapping[str, ResNetReward]) -> None:
        self.models = dict(models)
        self._group = {
            task: GROUPS[number - 1] for task, number in zip(SUITES[LONG], LONG_GROUPS, strict=True)
        }

    @property
    def image_size(self) -> int:
        """Height and width of the frames in pixels."""
        return self.models[GROUPS[0]].image_size

    def modules(self) -> dict[str, nn.Module]:
        """Return the six networks."""
        return {group: model.network for group, model in self.models.items()}

    def score(self, frames: Tensor, tasks: Sequence[str]) -> Tensor:
        """Score every frame with the network of its task; see `RewardModel.score`."""
        # Rows are grouped on the host, so nothing waits for the device.
        frames, rows = frames.to(self.models[GROUPS[0]].device), dict[str, list[int]]()
        for row, task in enumerate(tasks):
            # An unknown task is refused by any network.
            rows.setdefault(self._group.get(task, GROUPS[0]), []).append(row)
        scores = torch.zeros(frames.shape[:2], dtype=torch.float32, device=frames.device)
        for group, members in rows.items():
            index = to_device(np.array(members, np.int64), frames.device)
            group_tasks = [tasks[row] for row in members]
            scores.index_copy_(0, index, self.models[group].score(frames.index_select(0, index), group_tasks))
        return scores


def _open(folder: Path, tasks: Sequence[str], own: Mapping[str, Any]) -> dict[str, RewardFiles]:
    if own:
        raise ConfigError(f"--reward-settings has {', '.join(own)}, but this reward model takes none.")
    found = open_reward(folder, tasks)
    for files in found.values():
        files.config.check_tasks(tasks)
    return found


def _network(files: RewardFiles) -> RewardNetwork:
    """Build the network of some files on the meta device, and check that it fits them."""
    with torch.device("meta"):
        network = RewardNetwork(files.config)
    check_fit(network, files.weights, unused=False)
    return network


def save_reward(folder: Path, model: ResNetReward) -> None:
    """Write ``reward.safetensors`` and ``reward.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, model.network.state_dict())
    content = {"format": FORMAT, "rounded": model.rounded, "config": asdict(model.config)}
    write_json(folder / "reward.json", content)
