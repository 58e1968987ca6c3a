"""Read and write reward models: our own files, and the published ones.

Which of the published networks a file holds is told by its tensors (`published`) and not by its name. The six
that judge LIBERO-Long together are put together in `grouped`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from asyncrl.errors import CheckpointError
from asyncrl.rewards.kinds import GROUPS, group_folders
from asyncrl.rewards.published import PUBLISHED, find_published, recognise
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
        folder: Holds ``reward.json``, or a file with a published network.
        tasks: Instructions of the start states; a published model of a suite needs them to know which.

    Raises:
        CheckpointError: A file is missing or cannot be read, or the tasks are not of one suite.
    """
    if (folder / "reward.json").is_file():
        return _open_ours(folder)
    weights = find_published(folder)
    if weights is None:
        raise CheckpointError(
            f"{folder} holds no readable reward model (looked for reward.json, {', '.join(PUBLISHED)}, "
            "another *.pth with the tensors of one, and group_1 to group_6). Fit one with "
            "`asyncrl fit reward`, download it beside the world, or set another --world."
        )
    return published_files(weights, tasks)


def published_files(weights: TensorFiles, tasks: Collection[str]) -> RewardFiles:
    """Read from the tensors of a published file which network it holds, and how large.

    Raises:
        CheckpointError: It is none of the published ones, or the tasks are not of one suite.
    """
    config, rounded = recognise(weights, tasks)
    return RewardFiles(weights=weights, config=config, rounded=rounded)


def reward_parts(folder: Path) -> list[Path]:
    """Name the files, and the folders of groups, that the reward model in a folder is read from.

    Returns:
        Those of ours where both lie there; none: there is no reward model.

    Raises:
        CheckpointError: There are several, or one cannot be read.
    """
    if (folder / "reward.json").is_file():
        return [folder / "reward.json", folder / WEIGHTS]
    if (place := group_folders(folder)) is not None:
        return [place / group for group in GROUPS]
    found = find_published(folder)
    return found.paths if found is not None else []


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
