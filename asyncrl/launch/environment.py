"""Loads, or only checks, what an actor acts in: world, reward model and start states, or a simulator.

Actors load them. The learner only checks them: names and shapes come from the headers of the files, so that
13 GB of world are not read by a process that never imagines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import WorldDefaults
from asyncrl.errors import AssetError, CheckpointError, ConfigError
from asyncrl.launch.conformance import try_environment
from asyncrl.launch.named_models import NamedModel, check_tasks, folder_part, named_reward, named_world
from asyncrl.launch.simulated import (
    SimulatedEnvironment,
    SimulatorFiles,
    build_simulator,
    check_simulator,
    refuse_simulator_settings,
    simulator_defaults,
)
from asyncrl.policies.interface import ChecksTraining, Policy
from asyncrl.records import ActionSpec, StartState
from asyncrl.registry import names_code
from asyncrl.replay.interface import EpisodeFormat
from asyncrl.rewards.interface import RewardModel
from asyncrl.storage import assets
from asyncrl.storage.assets import simulator_named
from asyncrl.worlds.interface import BringsDefaults, NeedsPose, World
from asyncrl.worlds.start_states import check_keyframes, check_pose, load_start_states


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What an actor imagines with, besides the policy."""

    world: World[Any]
    reward: RewardModel
    starts: list[StartState]

    def check_policy(self, policy: Policy) -> None:
        """Let the policy read every instruction, so that one it cannot read fails at the start."""
        check_tasks(policy, self.starts)


@dataclass(frozen=True, kw_only=True)
class EnvironmentFiles:
    """What an actor would imagine with: checked, not loaded."""

    folder: Path
    """Of the world."""
    starts: list[StartState]
    image_size: int
    """Height and width of the frames in pixels."""
    nbytes: int
    """Bytes of world and reward model once they are loaded."""
    action_spec: ActionSpec
    """Of the world."""
    world_version: int | None = None
    """None: known only when it is loaded."""

    def check_policy(self, policy: Policy) -> None:
        """Refuse a policy whose decisions the world cannot take, or that cannot read an instruction.

        Raises:
            ConfigError: They differ in steps per decision or numbers per step; the policy needs what a world
                cannot show it.
        """
        if isinstance(policy, ChecksTraining):
            policy.check_trainable()
        own, world = policy.action_spec, self.action_spec
        if own != world:
            raise ConfigError(
                f"--policy makes {own.chunk} steps of {own.dim} numbers per decision, but --world takes "
                f"{world.chunk} of {world.dim}. Choose a policy and a world that belong together."
            )
        check_tasks(policy, self.starts)

    @property
    def summary(self) -> str:
        """Describe the start states in a line."""
        size, tasks = self.image_size, _tasks(self.starts)
        return f"{len(self.starts)} start states with {len(tasks)} tasks, {size} x {size} pixels"

    def episode_format(self, policy: Policy, max_decisions: int) -> EpisodeFormat:
        """Say what all episodes have in common that are imagined with these models."""
        spec = policy.action_spec
        letters: dict[object, int] = {"C": spec.chunk, "A": spec.dim}
        tasks: dict[str, list[str]] = {}
        for state in self.starts:
            tasks.setdefault(state.name, []).append(state.task)
        return EpisodeFormat(
            image_size=self.image_size,
            action_spec=spec,
            sample={
                name: (array.dtype, tuple(letters.get(size, size) for size in array.shape[1:]))
                for name, array in policy.sample_arrays.items()
            },
            max_decisions=max_decisions,
            tasks=tasks,
            world_version=self.world_version,
        )


def check_environment(config: TrainConfig) -> EnvironmentFiles | SimulatorFiles:
    """Check what --world names: a simulator, or a world model as `check_world_model` does."""
    return check_simulator(config) if simulator_named(config.world) else check_world_model(config)


def build_environment(config: TrainConfig, device: torch.device) -> Environment | SimulatedEnvironment:
    """Build what --world names: a simulator, or a world model as `build_world_model` does."""
    return build_simulator(config) if simulator_named(config.world) else build_world_model(config, device)


def check_world_model(config: TrainConfig) -> EnvironmentFiles:
    """Check that world, reward model and start states exist and fit each other; loads no weights."""
    refuse_simulator_settings(config)
    world, reward = _named(config)
    summary = world.kind.check(world.folder, config.imagination, **world.settings)
    starts = _starts(config, summary.image_size)
    check_keyframes(starts, share=config.keyframe_share, max_decisions=config.actor.max_decisions)
    if isinstance(world.kind, NeedsPose) and world.kind.needs_pose:
        for state in starts:
            check_pose(state)
    judge = reward.kind.check(reward.folder, _tasks(starts), **reward.settings)
    if judge.image_size not in (0, summary.image_size):
        raise CheckpointError(
            f"The world in {world.folder} draws {summary.image_size}-pixel frames, but its reward model "
            f"looks at {judge.image_size}. Fit it again: asyncrl fit reward --world {world.folder}."
        )
    return EnvironmentFiles(
        folder=world.folder,
        starts=starts,
        image_size=summary.image_size,
        nbytes=summary.nbytes + judge.nbytes,
        action_spec=summary.action_spec,
        world_version=summary.version,
    )


def build_world_model(config: TrainConfig, device: torch.device) -> Environment:
    """Load world, reward and start states, after checking that they fit each other.

    Raises:
        CheckpointError: A file is missing, cannot be read, or does not fit the others.
        ConfigError: A class or a setting cannot work.
    """
    starts = check_world_model(config).starts
    world, reward = _named(config)
    loaded = world.kind.load(world.folder, device, config.imagination, **world.settings)
    environment = Environment(
        world=loaded,
        reward=reward.kind.load(reward.folder, device, _tasks(starts), **reward.settings),
        starts=starts,
    )
    if names_code(config.world) or names_code(config.reward):
        try_environment(environment.world, environment.reward, starts)
    return environment


def with_world_defaults(config: TrainConfig) -> tuple[TrainConfig, WorldDefaults]:
    """Put what the world says in place of what the user left open.

    Returns:
        Settings with a length of episodes and, where the world says it, a context; and what the world says.

    Raises:
        CheckpointError: There is no world under that name.
        ConfigError: There is no such class.
    """
    if simulator_named(config.world):
        said = simulator_defaults(config)
        decisions = config.actor.max_decisions or said.max_decisions
        return replace(config, actor=replace(config.actor, max_decisions=decisions)), said
    world = named_world(config.world, config.world_settings)
    said, imagination, actor = WorldDefaults(source="defaults"), config.imagination, config.actor
    if isinstance(world.kind, BringsDefaults):
        said = world.kind.defaults(world.folder, imagination, **world.settings)
        if imagination.context == "auto":
            imagination = replace(imagination, context=said.context)
    if not actor.max_decisions:
        actor = replace(actor, max_decisions=said.max_decisions)
    return replace(config, imagination=imagination, actor=actor), said


def _named(config: TrainConfig) -> tuple[NamedModel, NamedModel]:
    world = named_world(config.world, config.world_settings)
    return world, named_reward(config.reward, world.folder, config.reward_settings)


def _tasks(starts: Sequence[StartState]) -> list[str]:
    return sorted({state.task for state in starts})


def _starts(config: TrainConfig, size: int) -> list[StartState]:
    path = assets.start_states_path(config.start_states, folder_part(config.world))
    try:
        starts = load_start_states(path, keyframes=config.keyframes, image_size=size)
    except AssetError as error:
        raise CheckpointError(f"--start-states {config.start_states}: {error}") from error
    wrong = next((state for state in starts if state.frame.shape[:2] != (size, size)), None)
    if wrong is not None:
        raise CheckpointError(
            f"Start state {wrong.name!r} of {path} has the shape {wrong.frame.shape}, "
            f"but --world {config.world} imagines {size} x {size}. Choose files that belong together."
        )
    return starts
