"""Read and write reward models: our own files, and the published ones.

Published are ``resnet_rm.pth`` (any task) and ``taskemb_resnet_rm.pth`` (one LIBERO suite); which of the two
networks a file holds is told by its tensors and not by its name. Their scores are rounded to 0 or 1 and count
as a success from 0.9, as RLinf trains with them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch

from asyncrl.errors import CheckpointError
from asyncrl.rewards.libero_tasks import SUITES, suite_of
from asyncrl.rewards.resnet import (
    ResnetRewModel,
    RewardConfig,
    RewardModel,
    TaskEmbedResnetRewModel,
    build_network,
)
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.tensor_reader import TensorFiles, check_fit, fill
from asyncrl.storage.tensor_writer import write_pth, write_tensors

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

    def load(self, *, device: torch.device | str = "cpu") -> RewardModel:
        """Load the model; float32, because rewards are not worth a rounding error."""
        self.check()
        network = self.build()
        fill(network, self.weights, dtype=torch.float32, device=device)
        network.requires_grad_(False)
        return RewardModel(network, self.config, rounded=self.rounded, device=device)


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
        config = RewardConfig(**{**raw, "widths": tuple(raw["widths"]), "tasks": tuple(raw["tasks"])})
    except (KeyError, TypeError) as error:
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


def load_reward(
    folder: Path, *, tasks: Collection[str] = (), device: torch.device | str = "cpu"
) -> RewardModel:
    """Load a reward model.

    Args:
        folder: See `open_reward`.
        tasks: Instructions of the start states; only a published model of one suite needs them.
        device: Where the weights go.

    Raises:
        CheckpointError: A file is missing or does not fit, or the tasks are not of one suite.
    """
    return open_reward(folder, tasks).load(device=device)


def save_reward(folder: Path, model: RewardModel) -> None:
    """Write ``reward.safetensors`` and ``reward.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, model.network.state_dict())
    content = {"format": FORMAT, "rounded": model.rounded, "config": asdict(model.config)}
    write_json(folder / "reward.json", content)


def export_reward(folder: Path, model: RewardModel) -> None:
    """Write ``resnet_rm.pth``, or ``taskemb_resnet_rm.pth`` for a model of a LIBERO suite.

    Raises:
        CheckpointError: The model was fitted on other tasks, or on images of another size.
    """
    config = model.config
    if (config.tasks and config.tasks not in SUITES.values()) or config.image_size != 256:
        raise CheckpointError(
            f"a reward model of {len(config.tasks)} tasks at {config.image_size} pixels cannot be written "
            "in the published layout, which always means a LIBERO suite and 256 pixels. Use save_reward."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_pth(folder / PUBLISHED[bool(config.tasks)], model.network.state_dict())
