"""Read and write reward models: our own files, and the published ones.

Published are ``resnet_rm.pth`` (any task) and ``taskemb_resnet_rm.pth`` (one LIBERO suite); which of the two
networks a file holds is told by its tensors and not by its name. Their scores are rounded to 0 or 1 and count
as a success from 0.9, as RLinf trains with them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from asyncrl.errors import CheckpointError
from asyncrl.rewards.libero_tasks import SUITES, suite_of
from asyncrl.rewards.resnet import (
    ResnetRewModel,
    RewardConfig,
    TaskEmbedResnetRewModel,
    build_network,
)
from asyncrl.storage.atomic import read_json
from asyncrl.storage.bounded_json import check_sizes
from asyncrl.storage.tensor_reader import TensorFiles, check_fit, fill

FORMAT: Final = "asyncrl-reward-1"
WEIGHTS: Final = "reward.safetensors"
PUBLISHED: Final = ("resnet_rm.pth", "taskemb_resnet_rm.pth")


@dataclass(frozen=True, kw_only=True)
class RewardFiles:
    """A reward model on disk: everything about it but the numbers."""

    weights: TensorFiles
    config: RewardConfig
    rounded: bool

    def build(self) -> ResnetRewModel | TaskEmbedResnetRewModel:
        """Build the network without memory for its weights (on the meta device)."""
        with torch.device("meta"):
            return build_network(self.config)

    def check(self) -> int:
        """Check that all tensors are there and fit; return the bytes of the loaded model.

        Raises:
            CheckpointError: A tensor is missing, has the wrong shape, or is unknown.
        """
        network = self.build()
        check_fit(network, self.weights, unused=False)
        return sum(tensor.nbytes for tensor in network.state_dict().values())

    def network(self, device: torch.device | str) -> ResnetRewModel | TaskEmbedResnetRewModel:
        """Load the network; float32, because rewards are not worth a rounding error."""
        self.check()
        network = self.build()
        fill(network, self.weights, dtype=torch.float32, device=device)
        return network.requires_grad_(False)


def open_reward(folder: Path, tasks: Collection[str] = ()) -> RewardFiles:
    """Read what a folder says about its reward model, without its numbers.

    Args:
        folder: Holds ``reward.json``, ``resnet_rm.pth`` or ``taskemb_resnet_rm.pth``.
        tasks: Instructions of the start states; a published model of a suite needs them to know which.

    Raises:
        CheckpointError: A file is missing or cannot be read, or the tasks are not of one suite.
    """
    if (folder / "reward.json").is_file():
        return _open_ours(folder)
    for name in PUBLISHED:
        if (folder / name).is_file():
            return _open_published(folder / name, tasks)
    raise CheckpointError(
        f"{folder} holds no readable reward model (looked for reward.json, {', '.join(PUBLISHED)}). Fit one "
        "with `asyncrl fit reward`, download it beside the world, or set another --world."
    )


def _open_ours(folder: Path) -> RewardFiles:
    content = read_json(folder / "reward.json")
    try:
        raw = content["config"]
        check_sizes(raw)
        config = RewardConfig(**{**raw, "widths": tuple(raw["widths"]), "tasks": tuple(raw["tasks"])})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'reward.json'} is incomplete ({error}). Fit the reward model again."
        ) from error
    return RewardFiles(
        weights=TensorFiles(folder / WEIGHTS), config=config, rounded=bool(content.get("rounded"))
    )


def _open_published(path: Path, tasks: Collection[str]) -> RewardFiles:
    weights = TensorFiles(path)
    shapes = weights.shapes
    embedding, fusion = (shapes.get(f"{name}.weight") for name in ("task_embedding", "fusion_layer.0"))
    trunk = "net" if embedding is None else "visual_encoder"
    stem = [f"{trunk}.0.0.weight", *(f"{trunk}.{stage}.0.conv1.weight" for stage in (2, 3, 4))]
    if absent := [name for name in stem if not shapes.get(name)]:
        raise CheckpointError(
            f"{path} is no reward model for world models: it lacks {absent[0]}. Its tensors begin with "
            f"{', '.join(sorted(shapes)[:3])}. Use resnet_rm.pth or taskemb_resnet_rm.pth."
        )
    first, second, third, fourth = (shapes[name][0] for name in stem)
    config = replace(RewardConfig.full(), widths=(first, second, third, fourth))
    if embedding is not None and fusion is not None:
        suite = SUITES[suite_of(tasks)]
        if embedding[0] != len(suite):
            raise CheckpointError(
                f"{path} knows {embedding[0]} tasks, a LIBERO suite has {len(suite)}. Use the reward model "
                "of the suite that the start states are of."
            )
        config = replace(config, tasks=suite, embed_dim=embedding[1], hidden_dim=fusion[0])
    return RewardFiles(weights=weights, config=config, rounded=True)
