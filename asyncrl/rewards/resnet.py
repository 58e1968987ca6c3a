"""ResNet reward models of any size: their files, ours and published ones.

The published networks are distinguished by the names of their tensors, and their sizes read from the shapes:

    task_embedding.*              a LIBERO suite's tasks, by number (``taskemb_resnet_rm.pth``); rounded
    net.*, blocks with conv3      any task (``resnet_rm.pth``); rounded
    net.*, blocks with shortcut   any task, EVAC's: no biases in the blocks, a normed shortcut; not rounded

Rounded scores are 0 or 1, as in RLinf's training. All published ones take frames of 256 pixels. LIBERO-Long
has six networks, ``group_1`` to ``group_6``; of several ``N.pth`` in a group, the largest number counts.
Letters: B slots, C frames per slot (8), N = B * C images, H/W pixels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.devices.tensors import to_device, to_signed
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.facts import check_instructions
from asyncrl.records import ModelSummary
from asyncrl.simulators.libero.tasks import INSTRUCTIONS
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.tensor_files import TensorFiles, check_fit, fill, write_tensors
from asyncrl.storage.untrusted import Typed, check_types, files_in

FORMAT: Final = "asyncrl-reward-1"
WEIGHTS: Final = "reward.safetensors"
PUBLISHED: Final = ("resnet_rm.pth", "taskemb_resnet_rm.pth")
"""Taken for reward models by their names; other files by their tensors."""
_EMBEDDING: Final = "task_embedding.weight"
_FUSION: Final = "fusion_layer.0.weight"
_STAGES: Final = ("0.0", "2.0.conv1", "3.0.conv1", "4.0.conv1")
"""Layers of the trunk whose channels are those of the four stages."""
LONG: Final = "libero_10"
GROUPS: Final = tuple(f"group_{number}" for number in range(1, 7))  # Folders of LIBERO-Long's networks
LONG_GROUPS: Final = (5, 2, 1, 1, 1, 3, 4, 4, 6, 2)  # Group number of each task of LIBERO-Long, by id.


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Typed):
    """Size and tasks of a reward model."""

    widths: tuple[int, int, int, int]  # Channels of the four stages
    tasks: tuple[str, ...]  # Instructions in the order of their ids; empty: one network for any task
    embed_dim: int  # Channels of the task embedding (unused without tasks)
    hidden_dim: int  # Width between trunk and probability (unused without tasks)
    image_size: int
    normed_shortcut: bool = False  # Blocks as in EVAC's reward model, without biases

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", check_instructions(self.tasks, "tasks of the reward model"))
        super().__post_init__()

    @classmethod
    def tiny(cls, tasks: Sequence[str], image_size: int = 64) -> RewardConfig:
        """Return the shipped size."""
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
        widths = (64, 128, 256, 512)
        return cls(widths=widths, tasks=tuple(tasks), embed_dim=64, hidden_dim=256, image_size=256)

    def check_tasks(self, tasks: Sequence[str]) -> None:
        """Check that the model was fitted on `tasks`."""
        if self.tasks and (unknown := sorted(set(tasks) - set(self.tasks))):
            raise ConfigError(
                f"the reward model does not know the task {unknown[0]!r}. It was fitted on: "
                f"{', '.join(repr(task) for task in self.tasks)}. "
                "Use --start-states of these tasks, or a --world whose reward model was fitted on yours."
            )


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
            task: GROUPS[number - 1] for task, number in zip(INSTRUCTIONS[LONG], LONG_GROUPS, strict=True)
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


# ---- files ----


@dataclass(frozen=True, kw_only=True)
class RewardFiles:
    """A reward model on disk, without its weights."""

    weights: TensorFiles
    config: RewardConfig
    rounded: bool


def open_reward(folder: Path, tasks: Collection[str] = ()) -> dict[str, RewardFiles]:
    """Read the descriptions of a folder's networks: by group for LIBERO-Long, else one under ''."""
    if (folder / "reward.json").is_file():
        return {"": _open_own(folder)}
    if (place := _find_groups(folder)) is None:
        return {"": _recognised(_find_published(folder), tasks)}
    if (suite := suite_of(tasks)) != LONG:
        raise CheckpointError(
            f"{place} holds the reward models of {LONG}, and the start states are of {suite}. Use "
            "--start-states of LIBERO-Long, or --world of their suite."
        )
    files = {group: _recognised(TensorFiles(_newest(place / group)), tasks) for group in GROUPS}
    for group, one in files.items():
        if not one.config.tasks:
            raise CheckpointError(
                f"{one.weights.label} lacks task_embedding.weight: it is no network of {group}, whose tasks "
                "are distinguished by their numbers. Download it again."
            )
    return files


def suite_of(tasks: Collection[str]) -> str:
    """Return the name of the suite that all `tasks` belong to."""
    homes = {task: name for name, instructions in INSTRUCTIONS.items() for task in instructions}
    if unknown := sorted(set(tasks) - homes.keys()):
        raise CheckpointError(
            f"the reward model was fitted on tasks of one LIBERO suite, and {unknown[0]!r} is an instruction "
            f"of none ({', '.join(INSTRUCTIONS)}). Use --start-states of one suite, with its exact "
            "instructions."
        )
    suites = sorted({homes[task] for task in tasks})
    if len(suites) != 1:
        raise CheckpointError(
            "the reward model was fitted on tasks of one LIBERO suite, and the start states are of "
            f"{' and '.join(suites) or 'none'}. Use --start-states of the suite of --world."
        )
    return suites[0]


def _open_own(folder: Path) -> RewardFiles:
    content = read_json(folder / "reward.json")
    try:
        raw, about = content["config"], {"rounded": False} | content
        check_types(about, {"rounded": bool})
        config = RewardConfig(**{**raw, "widths": tuple(raw["widths"])})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'reward.json'} is incomplete ({error}). Fit the reward model again."
        ) from error
    return RewardFiles(weights=TensorFiles(folder / WEIGHTS), config=config, rounded=about["rounded"])


def _find_groups(folder: Path) -> Path | None:
    below = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    places = [place for place in (folder, *below) if any((place / group).is_dir() for group in GROUPS)]
    if len(places) > 1:
        raise CheckpointError(
            f"{folder} holds the reward models of LIBERO-Long twice, in {places[0]} and in {places[1]}. Keep "
            "one."
        )
    return places[0] if places else None


def _newest(folder: Path) -> Path:
    files = files_in(folder, ".pth")
    if files and all(path.stem.isdecimal() for path in files):
        return max(files, key=lambda path: int(path.stem))
    if len(files) == 1:
        return files[0]
    seen = ", ".join(path.name for path in files) or "none"
    raise CheckpointError(
        f"{folder} should hold one reward model (*.pth), or several called by numbers, of which the largest "
        f"counts; it holds {seen}. All of {GROUPS[0]} to {GROUPS[-1]} are needed: download them again."
    )


def _find_published(folder: Path) -> TensorFiles:
    for name in PUBLISHED:
        if (folder / name).is_file():
            return TensorFiles(folder / name)
    models = [file for file in map(TensorFiles, files_in(folder, ".pth")) if not _absent_layers(file.shapes)]
    if len(models) == 1:
        return models[0]
    if models:
        both = f"{models[0].label} and {models[1].label}"
        raise CheckpointError(f"{folder} holds several reward models: {both}. Keep one of them.")
    raise CheckpointError(
        f"{folder} holds no readable reward model (looked for reward.json, {', '.join(PUBLISHED)}, "
        "another *.pth with the tensors of one, and group_1 to group_6). Fit one with "
        "`asyncrl fit reward`, download it next to the world, or set another --world."
    )


def _recognised(weights: TensorFiles, tasks: Collection[str]) -> RewardFiles:
    shapes = weights.shapes
    stages, embeds = _stage_weights(shapes)
    if absent := _absent_layers(shapes):
        raise CheckpointError(
            f"{weights.label} is no reward model for world models: it lacks {absent[0]}. Its tensors begin "
            f"with {', '.join(sorted(shapes)[:3])}. Use resnet_rm.pth, taskemb_resnet_rm.pth, or EVAC's."
        )
    first, second, third, fourth = (shapes[name][0] for name in stages)
    config = replace(RewardConfig.full(), widths=(first, second, third, fourth))
    if not embeds:
        normed = any(".shortcut." in name for name in shapes)
        config = replace(config, normed_shortcut=normed)
        return RewardFiles(weights=weights, config=config, rounded=not normed)
    suite, embed_dim, hidden_dim = INSTRUCTIONS[suite_of(tasks)], shapes[_EMBEDDING][1], shapes[_FUSION][0]
    config = replace(config, tasks=suite, embed_dim=embed_dim, hidden_dim=hidden_dim)
    return RewardFiles(weights=weights, config=config, rounded=True)


def _stage_weights(shapes: Mapping[str, torch.Size]) -> tuple[list[str], bool]:
    # True with a network that embeds tasks.
    embeds = any(name.startswith(("task_embedding.", "visual_encoder.")) for name in shapes)
    trunk = "visual_encoder" if embeds else "net"
    return [f"{trunk}.{layer}.weight" for layer in _STAGES], embeds


def _absent_layers(shapes: Mapping[str, torch.Size]) -> list[str]:
    stages, embeds = _stage_weights(shapes)
    axes = dict.fromkeys(stages, 4) | ({_EMBEDDING: 2, _FUSION: 2} if embeds else {})
    return [name for name, count in axes.items() if len(shapes.get(name, ())) != count]


def _open(folder: Path, tasks: Sequence[str], own: Mapping[str, Any]) -> dict[str, RewardFiles]:
    if own:
        raise ConfigError(f"--reward-settings has {', '.join(own)}, but this reward model takes none.")
    found = open_reward(folder, tasks)
    for files in found.values():
        files.config.check_tasks(tasks)
    return found


def _network(files: RewardFiles) -> RewardNetwork:
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
