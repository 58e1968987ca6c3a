"""Judge the success of frames with ResNet reward models of any size.

Tensor names equal those of the published files (``resnet_rm.pth``, ``taskemb_resnet_rm.pth``, and the file of
RLinf's first EVAC environment, whose blocks are others).

Dimension letters: B slots, C frames per slot (8), N = B * C images, H/W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Size and tasks of a reward model."""

    widths: tuple[int, int, int, int]
    """Channels of the four stages."""
    tasks: tuple[str, ...]
    """Instructions it was fitted on, in the order of their ids; empty: one network for any task."""
    embed_dim: int
    """Channels of the task embedding (unused without tasks)."""
    hidden_dim: int
    """Width between trunk and probability (unused without tasks)."""
    image_size: int
    """Height and width of the frames in pixels."""
    normed_shortcut: bool = False
    """Blocks as in EVAC's reward model: `NormedBlock` and not `ResidualBlock`."""

    @classmethod
    def tiny(cls, tasks: Sequence[str], image_size: int = 64) -> RewardConfig:
        """Return the embedded size."""
        widths = (12, 24, 48, 96)
        return cls(widths=widths, tasks=tuple(tasks), embed_dim=16, hidden_dim=48, image_size=image_size)

    @classmethod
    def small(cls, tasks: Sequence[str], image_size: int = 128) -> RewardConfig:
        """Return a size of 0.7 million parameters."""
        widths = (16, 32, 64, 128)
        return cls(widths=widths, tasks=tuple(tasks), embed_dim=16, hidden_dim=64, image_size=image_size)

    @classmethod
    def full(cls, tasks: Sequence[str] = ()) -> RewardConfig:
        """Return the published size: 127 tensors without tasks, 130 with ten, 123 in EVAC's layout."""
        return cls(
            widths=(64, 128, 256, 512), tasks=tuple(tasks), embed_dim=64, hidden_dim=256, image_size=256
        )

    def check_tasks(self, tasks: Sequence[str]) -> None:
        """Check that the model can score `tasks`.

        Raises:
            ConfigError: It was not fitted on one of them.
        """
        if self.tasks and (unknown := sorted(set(tasks) - set(self.tasks))):
            raise ConfigError(
                f"the reward model does not know the task {unknown[0]!r}. It was fitted on: "
                f"{', '.join(repr(task) for task in self.tasks)}. "
                "Use --start-states of these tasks, or a --world whose reward model was fitted on yours."
            )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        same = stride == 1 and channels_in == channels
        self.conv3 = None if same else nn.Conv2d(channels_in, channels, 1, stride=stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, channels_in, h, w]`` to ``[N, channels, h / stride, w / stride]``, both float32."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + (x if self.conv3 is None else self.conv3(x)))


class NormedBlock(nn.Module):
    """Two 3x3 convolutions without biases beside a shortcut, which is normed where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            projection = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, channels_in, h, w]`` to ``[N, channels, h / stride, w / stride]``, both float32."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.shortcut(x))


def _trunk(config: RewardConfig) -> list[nn.Module]:
    widths, block = config.widths, NormedBlock if config.normed_shortcut else ResidualBlock
    stem = nn.Sequential(
        nn.Conv2d(3, widths[0], 7, stride=2, padding=3),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    stages = [nn.Sequential(block(widths[0], widths[0], 1), block(widths[0], widths[0], 1))]
    for before, width in pairwise(widths):
        stages.append(nn.Sequential(block(before, width, 2), block(width, width, 1)))
    return [stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten()]


class ResnetRewModel(nn.Module):
    """A ResNet-18 that looks at one frame."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__()
        self.net = nn.Sequential(*_trunk(config), nn.Linear(config.widths[-1], 1), nn.Sigmoid())

    def logits(self, images_N3HW: Tensor, task_ids_N: Tensor | None = None) -> Tensor:
        """Score images, whatever the task.

        Args:
            images_N3HW: ``[N, 3, H, W]`` float32 in [-1, 1].
            task_ids_N: Not looked at.

        Returns:
            ``[N]`` float32 log-odds of success.
        """
        return self.net[:-1](images_N3HW).squeeze(1)


class TaskEmbedResnetRewModel(nn.Module):
    """The same trunk beside an embedding of the task."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__()
        self.visual_encoder = nn.Sequential(*_trunk(config))
        self.task_embedding = nn.Embedding(len(config.tasks), config.embed_dim)
        self.fusion_layer = nn.Sequential(
            nn.Linear(config.widths[-1] + config.embed_dim, config.hidden_dim),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(config.hidden_dim, 1),
            nn.Sigmoid(),
        )

    def logits(self, images_N3HW: Tensor, task_ids_N: Tensor) -> Tensor:
        """Score images, each for its own task.

        Args:
            images_N3HW: ``[N, 3, H, W]`` float32 in [-1, 1].
            task_ids_N: ``[N]`` int64.

        Returns:
            ``[N]`` float32 log-odds of success.
        """
        seen = torch.cat([self.visual_encoder(images_N3HW), self.task_embedding(task_ids_N)], dim=1)
        return self.fusion_layer[:-1](seen).squeeze(1)


def build_network(config: RewardConfig) -> ResnetRewModel | TaskEmbedResnetRewModel:
    """Build the network `config` describes, with fresh weights."""
    return TaskEmbedResnetRewModel(config) if config.tasks else ResnetRewModel(config)
