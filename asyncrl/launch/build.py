"""Builds the parts of a run from its `TrainConfig`: imagination, actor, learner. All is checked here.

Whatever cannot work raises before a process is started or a folder is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.actors.acting import Acting, Starts
from asyncrl.actors.actor import Actor
from asyncrl.actors.imagination import EndRule, Imagination
from asyncrl.actors.pipeline import split_slots
from asyncrl.actors.play import Play
from asyncrl.config.loading import to_json
from asyncrl.config.run import EvaluationSettings, TrainConfig
from asyncrl.devices.offload import NO_OFFLOAD, HoldsAddresses, IdleOffload, OffloadedTensors
from asyncrl.errors import ConfigError
from asyncrl.evaluation.simulator_of_tasks import simulator_of_tasks
from asyncrl.launch.conformance import try_policy
from asyncrl.launch.environment import Environment, EnvironmentFiles, check_environment
from asyncrl.launch.named_models import named_policy, named_world
from asyncrl.launch.placement import Placement, only_learns, pick_device
from asyncrl.launch.policies import as_module, build_learning_policy, build_reference
from asyncrl.launch.second_world import load_second_world
from asyncrl.launch.simulated import SimulatedEnvironment, SimulatorFiles, simulator_named
from asyncrl.learner.early_compile import EarlyCompile
from asyncrl.learner.learner import Learner
from asyncrl.learner.loop import Log, LoopSettings
from asyncrl.learner.placeholders import Shown, has_known_sizes, shown_of
from asyncrl.learner.progress import Told
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.recipe import build_recipe
from asyncrl.learner.reference import Reference
from asyncrl.learner.throughput import Throughput
from asyncrl.learner.update import Update
from asyncrl.learner.weight_export import ActingWeights, copy_policy
from asyncrl.observability import process_status
from asyncrl.observability.metrics_replay import GROUPS_READY
from asyncrl.pace import rounds
from asyncrl.policies.interface import (
    FixedShapeActing,
    FixesPrompts,
    Policy,
    SamplingParams,
)
from asyncrl.registry import names_code
from asyncrl.replay.admission import EpisodeFormat
from asyncrl.replay.interface import ActorPort, LearnerPort
from asyncrl.replay.run_start import NEW_RUN, RunStart
from asyncrl.replay.store import read_meta
from asyncrl.storage import checkpoint, run_folder
from asyncrl.storage.checksums import Checksum
from asyncrl.storage.folder_check import check_folder
from asyncrl.storage.run_identity import RunIdentity
from asyncrl.storage.run_lock import RunLock
from asyncrl.weights.interface import Publisher, Receiver
from asyncrl.worlds.interface import CompilesWorld, World
from asyncrl.worlds.start_states import StartStateStream


def actor_offload(config: TrainConfig, acting: Imagination[Any] | Play) -> IdleOffload:
    """Offload an idle actor's models. What the receivers hold stays; new weights reach the copy."""
    if not config.actor.offload:
        return NO_OFFLOAD
    policy = acting.policy
    others = acting.models if isinstance(acting, Imagination) else []
    refreshed = acting.refreshed_weights if isinstance(acting, Imagination) else {}
    models = [as_module(policy), *(module for other in others for module in other.modules().values())]
    movable = [model for model in (policy, *others) if isinstance(model, HoldsAddresses)]
    return IdleOffload(
        OffloadedTensors(
            partial(_tensors_of, models),
            lambda: [*policy.acting_tensors().values(), *refreshed.values()],
            acting.devices,
            on_offload=lambda: [model.weights_moved() for model in movable],
        )
    )


def learner_offload(config: TrainConfig, update: Update) -> IdleOffload:
    """Offload, while it waits, this rank's part of weights, gradient and optimizer state."""
    if not config.learner.offload:
        return NO_OFFLOAD
    reference = getattr(update.reference, "policy", None)
    models = [model for model in (update.policy, reference) if isinstance(model, nn.Module)]
    movable = [model for model in models if isinstance(model, HoldsAddresses)]
    return IdleOffload(
        OffloadedTensors(
            partial(_tensors_of, models),
            partial(_training_tensors, update),
            {update.device},
            on_offload=lambda: [model.weights_moved() for model in movable],
        )
    )


def _tensors_of(models: Iterable[nn.Module]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()
        yield from model.buffers()


def _training_tensors(update: Update) -> Iterator[Tensor]:
    """What an update changes: weights, their gradient, the optimizer's state."""
    for parameter in update.policy.trainable_parameters().values():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
        yield from (
            x for x in update.optimizer.state.get(parameter, {}).values() if isinstance(x, torch.Tensor)
        )


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
    notes: tuple[str, ...] = ()
    """Lines about the checkpoint, for the console."""
    simulator: str = ""
    """That has the tasks of the run; empty: none is known."""
    shown: Shown | None = None
    """What decisions of the run look at; None: it is not known."""


def transport_of(config: TrainConfig, placement: Placement, here: range) -> str:
    """Choose what carries the weights on rank 0's host; every rank there comes to the same answer.

    Args:
        config: Of the run.
        placement: Of the run.
        here: Ranks of that host. Actors of others fetch the weights over the network.
    """
    if config.weights.transport != "auto":
        return config.weights.transport
    learner = pick_device(config.device, placement.learners[0])
    actors = [pick_device(config.device, rank) for rank in placement.actors if rank in here]
    if learner.type == "cpu":
        return "gloo"
    if set(actors) == {learner}:
        return "cuda_ipc"
    # NCCL takes one process of a group per GPU. Other learner ranks may share it: they are in another group.
    remote = [actor for actor in actors if actor != learner]
    if len(set(remote)) < len(remote):
        return "gloo"  # Two actors on a GPU that is not the learner's: through host memory.
    return "nccl" if len(remote) == len(actors) else "nccl+ipc"


def build_acting(
    config: TrainConfig, policy: Policy, environment: Environment | SimulatedEnvironment
) -> Imagination[Any] | Play:
    """Join the models of an actor with what they act in; close it when the actor is done.

    Raises:
        ConfigError: See `build_imagination`, `SimulatedEnvironment.play`.
        AssetError, RunError: A simulator cannot be built.
    """
    if isinstance(environment, SimulatedEnvironment):
        return environment.play(config, policy, together=config.inline)
    return build_imagination(config, policy, environment)


def starts_of(config: TrainConfig, environment: Environment | SimulatedEnvironment) -> Starts:
    """Return where the episodes of the run begin."""
    if isinstance(environment, SimulatedEnvironment):
        return environment.starts
    return StartStateStream(environment.starts, config.seed, config.keyframe_share, environment.mined)


def build_imagination(config: TrainConfig, policy: Policy, environment: Environment) -> Imagination[Any]:
    """Join the models of an actor, compiled and at a fixed shape if that is wanted.

    Raises:
        ConfigError: --imagination.compile is set, and a model cannot be compiled; --guard.world does not fit.
        CheckpointError: --guard.world cannot be read.
    """
    sampling = SamplingParams(temperature=config.algorithm.temperature, top_k=config.algorithm.top_k)
    second = None
    if config.guard.world:
        second = load_second_world(config, environment.world, environment.starts[0])
    if config.imagination.compile:
        _compile(config, policy, environment, second)
    if config.imagination.fixed_shape and isinstance(policy, FixesPrompts):
        policy.fix_prompts(tasks_of(environment))
    return Imagination(
        policy,
        environment.world,
        environment.reward,
        sampling,
        rule=EndRule(
            max_decisions=config.actor.max_decisions,
            threshold=config.actor.success_threshold,
            success_frames=config.success_frames,
            rewards_score=config.guard.kind == "probability",
        ),
        policy_device=policy.device,
        world_device=environment.world.device,
        rows=rows_of_a_pass(config) if config.imagination.fixed_shape else 0,
        refreshed=_refreshed(config, environment),
        mined=environment.mined,
        repeats=config.guard.repeats,
        second=second,
    )


def _refreshed(config: TrainConfig, environment: Environment) -> dict[str, Tensor] | None:
    if not config.pace.every:
        return None
    from asyncrl.launch import refits  # It needs simulators and fits, which are not imported without cause.

    return refits.refreshed_tensors(config, environment.world, environment.reward)


def rows_of_a_pass(config: TrainConfig) -> int:
    """Return the most rows that a pass of an actor's models has: the slots of its larger stage."""
    return max(map(len, split_slots(config.actor.slots, config.actor.pipeline_stages)))


def tasks_of(environment: Environment) -> list[str]:
    """Return all instructions that the start states have, in the order of letters."""
    return sorted({state.task for state in environment.starts})


def _compile(
    config: TrainConfig, policy: Policy, environment: Environment, second: World[Any] | None
) -> None:
    world = environment.world
    check_compilable(type(policy), type(world))
    assert isinstance(policy, FixedShapeActing)
    assert isinstance(world, CompilesWorld)
    rows = rows_of_a_pass(config)
    process_status.describe("compiling the policy")
    policy.compile_acting(rows, tasks_of(environment))
    process_status.describe("compiling the world")
    world.compile(rows)
    if isinstance(second, CompilesWorld):  # As is the first one, which is of its class.
        second.compile(rows)


def check_compilable(policy: type, world: type) -> None:
    """Refuse --imagination.compile where a class lacks what it needs.

    Raises:
        ConfigError: `FixedShapeActing.compile_acting` or `CompilesWorld.compile` is not there.
    """
    for kind, method in ((policy, "compile_acting"), (world, "compile")):
        if not hasattr(kind, method):
            raise ConfigError(
                f"--imagination.compile is set, but {kind.__name__} has no {method}. Leave the flag out, or "
                "add the method."
            )


def build_actor(
    config: TrainConfig,
    name: str,
    acting: Acting,
    starts: Starts,
    port: ActorPort,
    receiver: Receiver,
    offload: IdleOffload = NO_OFFLOAD,
    worlds: Receiver | None = None,
    first_world: int = 0,
) -> Actor:
    """Join the parts of the actor `name`: in a process of its own, joined from another host, or inline."""
    return Actor(
        name,
        acting,
        starts,
        port,
        receiver,
        config.actor,
        group_size=config.algorithm.group_size,
        run_seed=config.seed,
        startup_timeout=config.startup_timeout,
        hang_timeout=config.hang_timeout,
        offload=offload,
        worlds=worlds,
        first_world=first_world,
        repeats_successes=config.guard.repeats,
    )


def loop_settings(config: TrainConfig) -> LoopSettings:
    """Numbers of the learner's loop."""
    return LoopSettings(
        updates=config.updates,
        checkpoint_every=config.checkpoint_every,
        evaluate_every=config.evaluate_every,
        refit_every=config.pace.every,
        batch_timeout=config.batch_timeout,
        hang_timeout=config.hang_timeout,
        batches_ahead=config.max_lag + 1,
        first_weights_deadline=first_weights_deadline(config),
        weighted=config.guard.repeats,
        config_hash=config_hash(config),
    )


def first_weights_deadline(config: TrainConfig) -> float:
    """Seconds the first actor has to take the first version; one that must join first may come late."""
    return max(config.startup_timeout, config.batch_timeout if only_learns(config.placement) else 0.0)


def config_hash(config: TrainConfig) -> str:
    """Identify the settings that decide what is learned: not where the run lies, nor how long it is."""
    same = replace(config, run_dir="", updates=1, resume=False, evaluate_every=0)
    same = replace(same, evaluation=EvaluationSettings())
    return hashlib.sha256(to_json(same).encode()).hexdigest()[:16]


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
        from asyncrl.launch import evaluation  # It needs simulators, which are not imported without cause.

        evaluation.plan(config, environment, policy)
    if config.pace.every:
        from asyncrl.launch import refits

        refits.check(config, environment, policy)
    return policy, environment


def prepare(config: TrainConfig, device: torch.device, again: Path | None = None) -> LearnerStart:
    """Check that all models load and fit, then make or find the run's folder (`start_run`)."""
    policy, files = load_models(config, device)
    return start_run(config, policy, files, again)


def start_run(
    config: TrainConfig, policy: Policy, files: EnvironmentFiles | SimulatorFiles, again: Path | None = None
) -> LearnerStart:
    """Make or find the run's folder.

    Args:
        config: Of the run.
        policy: Of the learner, from `load_models`.
        files: What the actors act in, from there too.
        again: Folder of a run that died; it goes on there, also when it had no checkpoint yet.

    Raises:
        ConfigError: There is a run in the folder, or none to resume.
    """
    if again is not None and run_folder.has_checkpoint(again):
        config, again = replace(config, run_dir=str(again), resume=True), None
    elif again is not None:
        config = replace(config, resume=False)
    if config.resume:
        check_folder(found := run_folder.locate(config))
        if (found / run_folder.REPLAY / "replay.json").exists():
            read_meta(found / run_folder.REPLAY)
        _require_its_world(config, found)
    run = run_folder.claim(config, again)
    folder, version, ledger, notes = None, 0, None, ()
    if config.resume:
        folder = checkpoint.latest(run.path)
        assert folder is not None  # The run folder was found by its checkpoints.
        verified = checkpoint.verify(folder)
        version = int(folder.name.rpartition("_")[2])
        ledger, notes = verified.ledger, verified.notes
    rounds.cut_after(run.path, version)
    episodes = files.episode_format(policy, config.actor.max_decisions)
    episodes = replace(episodes, weighted=config.guard.repeats)
    return LearnerStart(
        policy=policy,
        run_dir=run.path,
        identity=run.identity,
        lock=run.lock,
        version=version,
        checkpoint=folder,
        replay=run_start(config, run.path, episodes, ledger),
        notes=notes,
        simulator=_simulator_of(config, files),
        shown=shown_of(episodes),
    )


def run_start(
    config: TrainConfig, run_dir: Path, episodes: EpisodeFormat, ledger: Checksum | None
) -> RunStart:
    """Say what the replay has to know, where each round that is still to come may bring a newer world.

    Args:
        config: Of the run.
        run_dir: Its folder, without the rounds that a resume forgets.
        episodes: Of the world that --world names.
        ledger: See `RunStart`.
    """
    newest = episodes.world_version
    if config.pace.every and newest is not None:
        newest = rounds.newest_world(run_dir) or newest
        episodes = replace(episodes, world_version=newest + config.updates // config.pace.every)
    known = newest if newest is not None and newest >= 0 else None  # A simulator's is below 0.
    return RunStart(episodes=episodes, ledger=ledger, newest_world=known)


def _require_its_world(config: TrainConfig, run_dir: Path) -> None:
    """Refuse to go on in the world that a run began with, when it has refitted that one since.

    Raises:
        ConfigError: It would, as --pace.every is 0 now.
    """
    version = max(checkpoint.kept(run_dir), default=0)
    folder = rounds.world_at(run_dir, version + 1)
    if folder is None or config.pace.every:
        return
    if Path(config.world).absolute() != folder.absolute():
        raise ConfigError(
            f"--pace.every is 0, but this run has refitted its world, and would go back to --world "
            f"{config.world}. Leave --pace.every as it was, or say --world {folder}."
        )


def _simulator_of(config: TrainConfig, files: EnvironmentFiles | SimulatorFiles) -> str:
    own = config.evaluation.simulator or simulator_named(config.world)
    if own or isinstance(files, SimulatorFiles):
        return own
    return simulator_of_tasks({state.task for state in files.starts})


def build_update(
    config: TrainConfig,
    policy: Policy,
    *,
    ranks: LearnerRanks | None = None,
    reference: Reference | None = None,
) -> Update:
    """Build what updates the policy, over its (already sharded) parameters.

    Args:
        config: Of the run.
        policy: With a value head when the algorithm is ppo.
        ranks: The learner ranks; None: this one alone.
        reference: Policy that the KL penalty is about.
    """
    return Update(
        policy,
        config.algorithm,
        config.correction,
        config.critic,
        config.optimizer,
        updates=config.updates,
        max_decisions=config.actor.max_decisions,
        trust_region=config.trust_region,
        seed=config.seed,
        ranks=ranks,
        reference=reference,
    )


def _early_compile(
    config: TrainConfig,
    update: Update,
    shown: Shown | None,
    stop_requested: Callable[[], bool],
    port: LearnerPort,
) -> EarlyCompile | None:
    """Build what compiles before the first batch; None where it has nothing to do, or cannot."""
    wanted = config.learner.compile and config.learner.compile_early
    in_the_way = config.inline or config.learner.offload  # See the setting.
    if not wanted or in_the_way or shown is None or not has_known_sizes(update.policy):
        return None
    if not any(True for _ in update.policy.blocks()):
        return None

    def batch_ready() -> bool:
        """Whether rank 0 could be given a batch now; other ranks do not ask."""
        if update.ranks.rank > 0:
            return False
        return port.status().get(GROUPS_READY, 0.0) >= config.algorithm.groups_per_update

    return EarlyCompile(
        update,
        shown,
        SamplingParams(temperature=config.algorithm.temperature, top_k=config.algorithm.top_k),
        stop_requested,
        batch_ready=batch_ready,
        hang_timeout=config.hang_timeout,
    )


def build_learner(
    config: TrainConfig,
    start: LearnerStart,
    port: LearnerPort,
    publisher: Publisher,
    log: Log,
    ranks: LearnerRanks,
    *,
    types: Mapping[str, torch.dtype],
    checkpoints: checkpoint.Checkpoints,
    stop_requested: Callable[[], bool],
    tell_estimate: Told,
) -> Learner:
    """Build the learner and, when the run resumes, bring it to where the checkpoint stopped.

    Args:
        config: Of the run.
        start: Its policy is already spread over the `ranks`.
        port: The replay.
        publisher: The weight channel.
        log: For the metrics.
        ranks: The learner ranks.
        types: In which the actors hold the weights (`acting_types`).
        checkpoints: Shared by the ranks.
        stop_requested: Whether the run shall end.
        tell_estimate: Hears how long a batch and an update take.

    Raises:
        CheckpointError: The checkpoint does not fit the policy.
    """
    reference = build_reference(config, start.policy, start.policy.device)
    acting = ActingWeights(start.policy, types)
    update = build_update(config, start.policy, ranks=ranks, reference=reference)
    early = _early_compile(config, update, start.shown, stop_requested, port)
    learner = Learner(
        update,
        port,
        publisher,
        log,
        checkpoints,
        loop_settings(config),
        copy_policy=partial(copy_policy, start.policy, ranks),
        acting_tensors=lambda: acting,
        throughput=Throughput(
            start.policy,
            ranks,
            micro_batch=config.algorithm.micro_batch,
            precision=config.learner.precision,
            adapters=config.lora.rank > 0,
        ),
        offload=learner_offload(config, update),
        stop_requested=stop_requested,
        tell_estimate=tell_estimate,
        compile_early=early or (lambda version: {}),
    )
    if start.checkpoint is not None:
        learner.restore(start.checkpoint)
    return learner
