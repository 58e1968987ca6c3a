"""Checks and builds what --pace.every needs: where true episodes come from, and what a refit replaces."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from asyncrl import registry
from asyncrl.config.run import TrainConfig
from asyncrl.errors import AssetError, ConfigError
from asyncrl.evaluation.evaluate import check_fits
from asyncrl.evaluation.simulator_of_tasks import refuse_foreign_tasks, simulator_of_tasks
from asyncrl.fitting.recordings import read_part, recording_files
from asyncrl.launch.environment import (
    EnvironmentFiles,
    check_world_model,
    mines_keyframes,
    room_for_keyframes,
)
from asyncrl.launch.named_models import named_reward, named_world
from asyncrl.launch.simulated import SimulatorFiles
from asyncrl.pace.fitter import Fitter, WorldAt
from asyncrl.pace.refit import check_refittable
from asyncrl.pace.true_episodes import ArrivingRecordings, PlayedEpisodes, TrueEpisodes, unused_starts
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.records import CHUNK
from asyncrl.rewards.interface import RewardModel
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.worlds import mined_keyframes
from asyncrl.worlds.interface import RefreshesWorld, World

_NAME_ONE: Final = (
    "Name one: --pace.simulator NAME, or package.module:make; or --pace.recordings FOLDER where a robot's "
    "recordings arrive; or leave --pace.every out."
)


def refreshed_tensors(config: TrainConfig, world: World[Any], reward: RewardModel) -> dict[str, Tensor]:
    """Return the weights, by name, that a refit replaces; any shapes and dtypes.

    Raises:
        ConfigError: The world cannot be refreshed.
    """
    if not isinstance(world, RefreshesWorld):
        raise ConfigError(
            f"--pace.every is {config.pace.every}, but {type(world).__name__} has no refreshed(), which says "
            "what a refit replaces. Add the method (docs/pace.md), or leave --pace.every out."
        )
    parts: list[tuple[str, Mapping[str, nn.Module]]] = []
    if config.pace.world_steps:
        parts.append(("world", world.refreshed()))
    if config.pace.reward_steps:
        parts.append(("reward", reward.modules()))
    return {
        f"{part}.{name}.{key}": tensor
        for part, modules in parts
        for name, module in modules.items()
        for key, tensor in module.state_dict().items()
    }


def load_world(config: TrainConfig, at: WorldAt, device: torch.device) -> tuple[World[Any], RewardModel]:
    """Load a world of the run and its reward model as an actor does, uncompiled."""
    world = named_world(config.world, config.world_settings)
    reward = named_reward(config.reward, world.folder, config.reward_settings)
    tasks = _tasks(config)
    return (
        world.kind.load(at.folder, device, config.imagination, **world.settings),
        reward.kind.load(at.reward, device, tasks, **reward.settings),
    )


def tensors_of(config: TrainConfig, at: WorldAt, device: torch.device) -> dict[str, Tensor]:
    """Load what actors need to go on with a version: weights by name, and its key frames."""
    world, reward = load_world(config, at, device)
    tensors = refreshed_tensors(config, world, reward)
    starts = check_world_model(config).starts
    if (mined := room_for_keyframes(config, world, starts)) is not None:
        mined.fill(at.version, mined_keyframes.load(at.folder))
        tensors |= mined.tensors
    return tensors


def first_world(config: TrainConfig) -> WorldAt:
    """Return the world that --world and --reward name."""
    world = named_world(config.world, config.world_settings)
    reward = named_reward(config.reward, world.folder, config.reward_settings)
    version = world.kind.check(world.folder, config.imagination, **world.settings).version
    return WorldAt(folder=world.folder, reward=reward.folder, version=version or 0)


def check(config: TrainConfig, files: EnvironmentFiles | SimulatorFiles, policy: Policy) -> None:
    """Check that the rounds of --pace.every can be made, before anything starts.

    Raises:
        ConfigError: Says which flag cannot work, and what to do.
        AssetError: A library or recordings are not there.
    """
    settings, every = config.pace, f"--pace.every is {config.pace.every}"
    if isinstance(files, SimulatorFiles):
        raise ConfigError(
            f"{every}, but --world {config.world} is a simulator: it is the truth, and nothing is refitted. "
            "Leave --pace.every out."
        )
    if registry.names_code(config.world) or registry.names_code(config.reward):
        raise ConfigError(
            f"{every}, but --world or --reward is a class of your own, which asyncrl cannot fit. Leave "
            "--pace.every out."
        )
    first = first_world(config)
    check_refittable(first.folder, first.reward, settings)
    for flag, folders in (
        ("recordings", (settings.recordings,) if settings.recordings else ()),
        ("base", settings.base),
    ):
        for folder in folders:
            _check_recordings(flag, Path(folder), files)
    if not settings.recordings:
        source = simulator_source(config, files)
        spec = source.spec()
        try:
            refuse_foreign_tasks(_tasks_of(files), spec.tasks, source.name, _NAME_ONE)
            check_fits(policy, spec)
        except ConfigError as error:
            raise ConfigError(f"{every}, but {error}") from error
        wanted, drawn = (spec.image_size, spec.action_dim), (files.image_size, files.action_spec.dim)
        if wanted != drawn:
            raise ConfigError(
                f"{every}, but {spec.name} shows {wanted[0]} pixels and takes {wanted[1]} numbers, where "
                f"--world draws {drawn[0]} and takes {drawn[1]}: true and imagined episodes could not be "
                "compared. Name another --pace.simulator."
            )
        unused_starts(spec, episodes=settings.episodes, spent=settings.budget)


def _check_recordings(flag: str, folder: Path, files: EnvironmentFiles) -> None:
    """Check a folder of recordings; that of a robot may still be empty."""
    if flag == "recordings":
        if not folder.is_dir():
            raise ConfigError(
                f"--pace.recordings {folder} is no folder. Make it; recordings may arrive later."
            )
        return
    try:
        looks = read_part(recording_files(folder)[0]).looks
    except AssetError as error:
        raise ConfigError(f"--pace.base: {error}") from error
    found, wanted = (looks.height, looks.width, looks.action_dim), (files.image_size, files.action_spec.dim)
    if found != (wanted[0], *wanted):
        raise ConfigError(
            f"--pace.base {folder} has pictures of {looks.height} x {looks.width} and actions of "
            f"{looks.action_dim} numbers, but --world draws {wanted[0]} pixels and takes {wanted[1]}. Give "
            "recordings like those that it was fitted on."
        )


def simulator_source(config: TrainConfig, files: EnvironmentFiles) -> SimulatorSource:
    """Say in which simulator true episodes are played, each as long as an imagined one.

    Raises:
        ConfigError: None is known that has the tasks.
    """
    settings, tasks = config.pace, _tasks_of(files)
    name = settings.simulator or simulator_of_tasks(tasks)
    if not name:
        raise ConfigError(
            f"--pace.every is {settings.every}, but no built-in simulator has the tasks of the start states, "
            f"as {tasks[0]!r}. {_NAME_ONE}"
        )
    horizon = config.actor.max_decisions * files.action_spec.chunk if config.actor.max_decisions else 0
    source = SimulatorSource(name=name, settings=settings.simulator_settings, horizon=horizon)
    if getattr(registry.resolve("simulator", name), "any_image_size", False):
        source = source.with_(image_size=files.image_size)
    most = -(-settings.episodes // max(settings.workers, 1))
    return source.with_(places=max(1, min(source.usual_places(), most)))


def open_fitter(
    config: TrainConfig, files: EnvironmentFiles, run_dir: Path, device: torch.device, stack: ExitStack
) -> Fitter:
    """Join what makes the rounds of a run; `stack` ends its simulators.

    Args:
        config: Of the run, with the world's defaults put in.
        files: Of what it imagines with; passed `check`.
        run_dir: Of the run.
        device: Where the models go.
        stack: Closed when there are no more rounds.
    """
    source: TrueEpisodes
    if config.pace.recordings:
        source = ArrivingRecordings(Path(config.pace.recordings), run_dir)
    else:
        algorithm = config.algorithm
        pool = SimulatorPool(simulator_source(config, files), config.pace.workers, steps=CHUNK)
        stack.callback(pool.close)
        source = PlayedEpisodes(
            pool, SamplingParams(temperature=algorithm.temperature, top_k=algorithm.top_k)
        )
    return Fitter(
        config,
        run_dir,
        source,
        first_world(config),
        lambda at: load_world(config, at, device),
        device,
        mines=mines_keyframes(config),
    )


def _tasks(config: TrainConfig) -> list[str]:
    return _tasks_of(check_world_model(config))


def _tasks_of(files: EnvironmentFiles) -> list[str]:
    return sorted({state.task for state in files.starts})
