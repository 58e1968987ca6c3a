"""Find reward models on disk and read their sizes: ours, and the published ones.

The published networks are distinguished by the names of their tensors, and their sizes read from the shapes:

    task_embedding.*              a LIBERO suite's tasks, by number (``taskemb_resnet_rm.pth``); rounded
    net.*, blocks with conv3      any task (``resnet_rm.pth``); rounded
    net.*, blocks with shortcut   any task, EVAC's: no biases in the blocks, a normed shortcut; not rounded

Rounded scores are 0 or 1, as in RLinf's training. All published ones take frames of 256 pixels. LIBERO-Long
has six networks, ``group_1`` to ``group_6``; of several ``N.pth`` in a group the largest number counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.rewards.libero_tasks import GROUPS, LONG, SUITES, suite_of
from asyncrl.storage.atomic import read_json
from asyncrl.storage.tensor_files import TensorFiles
from asyncrl.storage.untrusted import check_sizes

FORMAT: Final = "asyncrl-reward-1"
WEIGHTS: Final = "reward.safetensors"
PUBLISHED: Final = ("resnet_rm.pth", "taskemb_resnet_rm.pth")
"""Taken for reward models by their names; other files by their tensors."""
_EMBEDDING: Final = "task_embedding.weight"
_FUSION: Final = "fusion_layer.0.weight"
_STAGES: Final = ("0.0", "2.0.conv1", "3.0.conv1", "4.0.conv1")
"""Layers of the trunk whose channels are those of the four stages."""


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
    normed_shortcut: bool = False
    """Blocks as in EVAC's reward model, without biases."""

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


@dataclass(frozen=True, kw_only=True)
class RewardFiles:
    """A reward model on disk: everything about it but the numbers."""

    weights: TensorFiles
    config: RewardConfig
    rounded: bool


def open_reward(folder: Path, tasks: Collection[str] = ()) -> dict[str, RewardFiles]:
    """Read the descriptions of a folder's networks: by group those of LIBERO-Long, else one, by ''."""
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
                "are told by their numbers. Download it again."
            )
    return files


def _open_own(folder: Path) -> RewardFiles:
    content = read_json(folder / "reward.json")
    try:
        raw = content["config"]
        check_sizes(raw)
        config = RewardConfig(**{**raw, "widths": tuple(raw["widths"]), "tasks": tuple(raw["tasks"])})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'reward.json'} is incomplete ({error}). Fit the reward model again."
        ) from error
    rounded = bool(content.get("rounded"))
    return RewardFiles(weights=TensorFiles(folder / WEIGHTS), config=config, rounded=rounded)


def _find_groups(folder: Path) -> Path | None:
    """Find the parent of ``group_1`` to ``group_6``: `folder` or one below it."""
    below = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    places = [place for place in (folder, *below) if any((place / group).is_dir() for group in GROUPS)]
    if len(places) > 1:
        raise CheckpointError(
            f"{folder} holds the reward models of LIBERO-Long twice, in {places[0]} and in {places[1]}. Keep "
            "one."
        )
    return places[0] if places else None


def _newest(folder: Path) -> Path:
    """Return a group's network: the only ``*.pth``, or of several called by numbers the largest."""
    files = sorted(folder.glob("*.pth"))
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
    models: list[TensorFiles] = []
    unreadable: CheckpointError | None = None
    for path in sorted(folder.glob("*.pth")):
        try:
            weights = TensorFiles(path)
        except CheckpointError as error:
            unreadable = unreadable or error
            continue
        if not _absent_layers(weights.shapes):
            models.append(weights)
    if len(models) == 1:
        return models[0]
    if models:
        both = f"{models[0].label} and {models[1].label}"
        raise CheckpointError(f"{folder} holds several reward models: {both}. Keep one of them.")
    raise unreadable or CheckpointError(
        f"{folder} holds no readable reward model (looked for reward.json, {', '.join(PUBLISHED)}, "
        "another *.pth with the tensors of one, and group_1 to group_6). Fit one with "
        "`asyncrl fit reward`, download it beside the world, or set another --world."
    )


def _recognised(weights: TensorFiles, tasks: Collection[str]) -> RewardFiles:
    shapes = weights.shapes
    if absent := _absent_layers(shapes):
        raise CheckpointError(
            f"{weights.label} is no reward model for world models: it lacks {absent[0]}. Its tensors begin "
            f"with {', '.join(sorted(shapes)[:3])}. Use resnet_rm.pth, taskemb_resnet_rm.pth, or EVAC's."
        )
    first, second, third, fourth = (shapes[name][0] for name in _stage_weights(shapes))
    config = replace(RewardConfig.full(), widths=(first, second, third, fourth))
    if not _embeds(shapes):
        normed = any(".shortcut." in name for name in shapes)
        config = replace(config, normed_shortcut=normed)
        return RewardFiles(weights=weights, config=config, rounded=not normed)
    suite, embed_dim, hidden_dim = SUITES[suite_of(tasks)], shapes[_EMBEDDING][1], shapes[_FUSION][0]
    config = replace(config, tasks=suite, embed_dim=embed_dim, hidden_dim=hidden_dim)
    return RewardFiles(weights=weights, config=config, rounded=True)


def _stage_weights(shapes: Mapping[str, torch.Size]) -> list[str]:
    trunk = "visual_encoder" if _embeds(shapes) else "net"
    return [f"{trunk}.{layer}.weight" for layer in _STAGES]


def _embeds(shapes: Mapping[str, torch.Size]) -> bool:
    return any(name.startswith(("task_embedding.", "visual_encoder.")) for name in shapes)


def _absent_layers(shapes: Mapping[str, torch.Size]) -> list[str]:
    axes = dict.fromkeys(_stage_weights(shapes), 4)
    if _embeds(shapes):
        axes |= {_EMBEDDING: 2, _FUSION: 2}
    return [name for name, count in axes.items() if len(shapes.get(name, ())) != count]
