"""Settings in, what an actor imagines with out: world, reward model and start states that fit each other.

Actors load them. The learner only checks them: names and shapes come from the headers of the files, so that
13 GB of world are not read by a process that never imagines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.config.run import TrainConfig
from asyncrl.errors import AssetError, CheckpointError
from asyncrl.records import StartState
from asyncrl.rewards.files import RewardFiles, open_reward
from asyncrl.rewards.resnet import RewardModel
from asyncrl.storage import asset_paths
from asyncrl.worlds.start_states import load_start_states
from asyncrl.worlds.wan.files import WorldFiles, open_world
from asyncrl.worlds.wan.world import WanWorld


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What an actor imagines with, besides the policy."""

    world: WanWorld
    reward: RewardModel
    starts: list[StartState]


@dataclass(frozen=True, kw_only=True)
class EnvironmentFiles:
    """What an actor would imagine with: checked, not loaded."""

    folder: Path
    """Of the world and the reward model."""
    starts: list[StartState]
    image_size: int
    """Height and width of the frames in pixels."""
    nbytes: int
    """Bytes of world and reward model once they are loaded."""


def check_environment(config: TrainConfig) -> EnvironmentFiles:
    """Check that world, reward model and start states are there and fit each other, without loading weights.

    Raises:
        CheckpointError: A file is missing, cannot be read, or does not fit the others.
    """
    folder, world, reward, starts = _open(config)
    nbytes = world.check(config.imagination) + reward.check()
    return EnvironmentFiles(folder=folder, starts=starts, image_size=world.image_size, nbytes=nbytes)


def build_environment(config: TrainConfig, device: torch.device) -> Environment:
    """Load world, reward and start states and check that they fit each other.

    Raises:
        CheckpointError: A file is missing, cannot be read, or does not fit the others.
    """
    _, world, reward, starts = _open(config)
    return Environment(
        world=world.load(device=device, settings=config.imagination),
        reward=reward.load(device=device),
        starts=starts,
    )


def _open(config: TrainConfig) -> tuple[Path, WorldFiles, RewardFiles, list[StartState]]:
    folder = asset_paths.world_folder(config.world)
    world = open_world(folder)
    size = world.image_size
    place = asset_paths.start_states_path(config.start_states, config.world)
    try:
        starts = load_start_states(place, keyframes=config.keyframes, image_size=size)
    except AssetError as error:
        raise CheckpointError(f"--start-states {config.start_states}: {error}") from error
    tasks = sorted({state.task for state in starts})
    reward = open_reward(folder, tasks)
    if reward.config.image_size != size:
        raise CheckpointError(
            f"The world in {folder} draws {size}-pixel frames, but its reward model looks at "
            f"{reward.config.image_size}. Fit the reward model again: asyncrl fit reward --world {folder}."
        )
    wrong = next((state for state in starts if state.frame.shape[:2] != (size, size)), None)
    if wrong is not None:
        raise CheckpointError(
            f"Start state {wrong.name!r} of {place} has the shape {wrong.frame.shape}, "
            f"but --world {config.world} imagines {size} x {size}. Choose files that belong together."
        )
    reward.config.check_tasks(tasks)
    return folder, world, reward, starts
