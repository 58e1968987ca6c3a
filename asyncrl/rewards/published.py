"""Recognise the published reward models by the names of their tensors, and read their sizes from the shapes.

    task_embedding.*              a LIBERO suite's tasks, by number (``taskemb_resnet_rm.pth``); rounded
    net.*, blocks with conv3      any task (``resnet_rm.pth``); rounded
    net.*, blocks with shortcut   any task, EVAC's: no biases in the blocks, a normed shortcut; not rounded

Rounded scores are 0 or 1, as RLinf trains with them. All published ones look at frames of 256 pixels.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from asyncrl.errors import CheckpointError
from asyncrl.rewards.libero_tasks import SUITES, suite_of
from asyncrl.rewards.resnet import RewardConfig
from asyncrl.storage.tensor_reader import TensorFiles

PUBLISHED: Final = ("resnet_rm.pth", "taskemb_resnet_rm.pth")
"""Looked at before other files."""
_EMBEDDING: Final = "task_embedding.weight"
_FUSION: Final = "fusion_layer.0.weight"
_STAGES: Final = ("0.0", "2.0.conv1", "3.0.conv1", "4.0.conv1")
"""Layers of the trunk whose channels are those of the four stages."""


def find_published(folder: Path) -> TensorFiles | None:
    """Open the published reward model in a folder; None: no file holds one.

    A file that is called as published is taken for one. Others are looked at for their tensors: what EVAC's
    is called is not agreed upon.

    Raises:
        CheckpointError: Several files hold one, or none does and one cannot be read.
    """
    for name in PUBLISHED:
        if (folder / name).is_file():
            return TensorFiles(folder / name)
    found: list[TensorFiles] = []
    unreadable: list[CheckpointError] = []
    for path in sorted(folder.glob("*.pth")):
        try:
            weights = TensorFiles(path)
        except CheckpointError as error:
            unreadable.append(error)
            continue
        if not absent_layers(weights.shapes):
            found.append(weights)
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds several reward models: {found[0].label} and {found[1].label}. Keep one of them."
        )
    if not found and unreadable:  # Perhaps it is the one that cannot be read.
        raise unreadable[0]
    return found[0] if found else None


def absent_layers(shapes: dict[str, torch.Size]) -> list[str]:
    """List the weights of the four stages that tensors of these names and shapes lack."""
    trunk = "visual_encoder" if _embeds(shapes) else "net"
    names = [f"{trunk}.{layer}.weight" for layer in _STAGES]
    return [name for name in names if len(shapes.get(name, ())) != 4]


def recognise(weights: TensorFiles, tasks: Collection[str]) -> tuple[RewardConfig, bool]:
    """Return size and tasks of the network in a file, and whether its scores are rounded.

    Args:
        weights: Of the file.
        tasks: Instructions of the start states: they say which suite a network with an embedding is of.

    Raises:
        CheckpointError: It is none of the published ones, or the tasks are not of one suite.
    """
    shapes = weights.shapes
    if absent := absent_layers(shapes):
        raise CheckpointError(
            f"{weights.label} is no reward model for world models: it lacks {absent[0]}. Its tensors begin "
            f"with {', '.join(sorted(shapes)[:3])}. Use resnet_rm.pth, taskemb_resnet_rm.pth, or EVAC's."
        )
    trunk = "visual_encoder" if _embeds(shapes) else "net"
    first, second, third, fourth = (shapes[f"{trunk}.{layer}.weight"][0] for layer in _STAGES)
    config = replace(RewardConfig.full(), widths=(first, second, third, fourth))
    if not _embeds(shapes):
        normed = any(".shortcut." in name for name in shapes)
        return replace(config, normed_shortcut=normed), not normed
    for name in (_EMBEDDING, _FUSION):
        if len(shapes.get(name, ())) != 2:
            raise CheckpointError(f"{weights.label} lacks {name}, a matrix. Download it again.")
    (count, embed_dim), suite = shapes[_EMBEDDING], SUITES[suite_of(tasks)]
    if count != len(suite):
        raise CheckpointError(
            f"{weights.label} knows {count} tasks, a LIBERO suite has {len(suite)}. Use the reward model of "
            "the suite that the start states are of."
        )
    return replace(config, tasks=suite, embed_dim=embed_dim, hidden_dim=shapes[_FUSION][0]), True


def _embeds(shapes: dict[str, torch.Size]) -> bool:
    return any(name.startswith(("task_embedding.", "visual_encoder.")) for name in shapes)
