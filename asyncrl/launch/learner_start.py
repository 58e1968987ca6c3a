"""Finds what the learner of a run begins with: models that fit each other, then the run's folder.

Whatever cannot work raises before a process is started or a folder is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.evaluation.evaluate import simulator_of_tasks
from asyncrl.launch.conformance import try_policy
from asyncrl.launch.environment import EnvironmentFiles, check_environment
from asyncrl.launch.named_models import build_learning_policy, named_policy, named_world
from asyncrl.launch.simulated import SimulatorFiles
from asyncrl.learner.early_compile import ObservationShapes, observation_shapes
from asyncrl.learner.recipe import build_recipe
from asyncrl.policies.interface import Policy
from asyncrl.registry import names_code
from asyncrl.replay.interface import NEW_RUN, RunStart
from asyncrl.replay.store import read_meta
from asyncrl.storage import checkpoint, run_folder
from asyncrl.storage.assets import simulator_named
from asyncrl.storage.run_folder import check_folder
from asyncrl.storage.run_owner import RunIdentity, RunLock


@dataclass(frozen=True, kw_only=True)
class LearnerStart:
    """What the learner begins with."""

    policy: Policy
    run_dir: Path
    identity: RunIdentity
    """Of this start of the run."""
    lock: RunLock
    """Keeps everybody else out of the run's folder."""
    version: int
    """0, or that of the checkpoint."""
    checkpoint: Path | None
    """Where a resumed run goes on."""
    replay: RunStart = NEW_RUN
    """What the replay is told."""
    simulator: str = ""
    """That has the tasks of the run; empty: none is known."""
    shown: ObservationShapes | None = None
    """What decisions of the run look at; None: it is not known."""


def load_models(
    config: TrainConfig, device: torch.device
) -> tuple[Policy, EnvironmentFiles | SimulatorFiles]:
    """Load the policy of a run to `device`, and check that all its models are there and fit each other.

    Raises:
        ConfigError: Something is missing or does not fit.
    """
    build_recipe(config.algorithm, config.correction, config.critic)
    if config.imagination.compile and not simulator_named(config.world):
        world = named_world(config.world, config.world_settings)
        check_compilable(named_policy(config.policy, config.policy_settings).kind, world.kind)
    environment = check_environment(config)
    policy = build_learning_policy(config, device)
    environment.check_policy(policy)
    if names_code(config.policy) and isinstance(environment, EnvironmentFiles):
        try_policy(policy, environment.starts)
    if config.evaluate_every:
        from asyncrl.launch import evaluator  # It needs simulators, which are not imported without cause.

        evaluator.plan(config, environment, policy)
    return policy, environment


def start_run(
    config: TrainConfig, policy: Policy, files: EnvironmentFiles | SimulatorFiles, again: Path | None = None
) -> LearnerStart:
    """Make or find the run's folder."""
    if again is not None and checkpoint.latest(again) is not None:
        config, again = replace(config, run_dir=str(again), resume=True), None
    elif again is not None:
        config = replace(config, resume=False)
    if config.resume:
        check_folder(found := run_folder.locate(config))
        if (found / run_folder.REPLAY / "replay.json").exists():
            read_meta(found / run_folder.REPLAY)
    run = run_folder.claim(config, again)
    folder, version, ledger = None, 0, None
    if config.resume:
        folder = checkpoint.latest(run.path)
        assert folder is not None  # The run folder was found by its checkpoints.
        ledger = checkpoint.verify(folder)
        version = int(folder.name.rpartition("_")[2])
    episodes = files.episode_format(policy, config.actor.max_decisions)
    return LearnerStart(
        policy=policy,
        run_dir=run.path,
        identity=run.identity,
        lock=run.lock,
        version=version,
        checkpoint=folder,
        replay=RunStart(episodes=episodes, ledger=ledger),
        simulator=_simulator_of(config, files),
        shown=observation_shapes(episodes),
    )


def _simulator_of(config: TrainConfig, files: EnvironmentFiles | SimulatorFiles) -> str:
    own = config.evaluation.simulator or simulator_named(config.world)
    if own or isinstance(files, SimulatorFiles):
        return own
    return simulator_of_tasks({state.task for state in files.starts})


def check_compilable(policy: type, world: type) -> None:
    """Refuse --imagination.compile where a class lacks what it needs."""
    for kind, method in ((policy, "compile_acting"), (world, "compile")):
        if not hasattr(kind, method):
            raise ConfigError(
                f"--imagination.compile is set, but {kind.__name__} has no {method}. Leave the flag out, or "
                "add the method."
            )
