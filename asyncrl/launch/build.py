"""Chooses what an actor and a learner rank move to host memory while they have nothing to do.

Builds an actor of a run: its models with what they act in, compiled where that is wanted, and its loop.

Builds the learner of a run: the update, the loop around it, what compiles before the first batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.actors.actor import Actor
from asyncrl.actors.backend import Backend, StartStream
from asyncrl.actors.imagination import EndRule, Imagination
from asyncrl.actors.play import SimulatorBackend
from asyncrl.actors.slots import split_slots
from asyncrl.config.loading import to_json
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import EvaluationSettings
from asyncrl.devices.offload import NO_OFFLOAD, HoldsAddresses, IdleOffload, OffloadedTensors
from asyncrl.launch.environment import Environment
from asyncrl.launch.learner_start import LearnerStart, check_compilable
from asyncrl.launch.named_models import as_module, build_reference
from asyncrl.launch.placement import only_learns
from asyncrl.launch.simulated import SimulatedEnvironment
from asyncrl.learner.early_compile import EarlyCompile, ObservationShapes, fix_sizes, has_known_sizes
from asyncrl.learner.forward import Reference
from asyncrl.learner.learner import Learner, LoopSettings, WriteRow
from asyncrl.learner.metrics import Throughput
from asyncrl.learner.progress import OnEstimate
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.update import Update
from asyncrl.learner.weight_export import ActingWeights, copy_policy
from asyncrl.observability import process_status
from asyncrl.observability.metrics_system import GROUPS_READY
from asyncrl.policies.acceleration import compile_blocks
from asyncrl.policies.interface import FixedShapeActing, FixesPrompts, Policy, SamplingParams
from asyncrl.replay.interface import ActorPort, LearnerPort
from asyncrl.storage import checkpoint
from asyncrl.weights.interface import Publisher, Receiver
from asyncrl.worlds.interface import CompilesWorld
from asyncrl.worlds.start_states import StartStateStream


def actor_offload(config: TrainConfig, backend: Imagination[Any] | SimulatorBackend) -> IdleOffload:
    """Offload an idle actor's models. What the receivers hold stays; new weights reach the copy."""
    if not config.actor.offload:
        return NO_OFFLOAD
    policy = backend.policy
    others = backend.models if isinstance(backend, Imagination) else []
    models = [as_module(policy), *(module for other in others for module in other.modules().values())]
    movable = [model for model in (policy, *others) if isinstance(model, HoldsAddresses)]
    return IdleOffload(
        OffloadedTensors(
            partial(_tensors_of, models),
            lambda: policy.acting_tensors().values(),
            backend.devices,
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


def build_acting(
    config: TrainConfig, policy: Policy, environment: Environment | SimulatedEnvironment
) -> Imagination[Any] | SimulatorBackend:
    """Join the models of an actor with what they act in; close it when the actor is done."""
    if isinstance(environment, SimulatedEnvironment):
        return environment.play(config, policy, together=config.inline)
    return build_imagination(config, policy, environment)


def starts_of(config: TrainConfig, environment: Environment | SimulatedEnvironment) -> StartStream:
    """Return where the episodes of the run begin."""
    if isinstance(environment, SimulatedEnvironment):
        return environment.starts
    return StartStateStream(environment.starts, config.seed, config.keyframe_share)


def build_imagination(config: TrainConfig, policy: Policy, environment: Environment) -> Imagination[Any]:
    """Join the models of an actor, compiled and at a fixed shape if that is wanted."""
    sampling = SamplingParams(temperature=config.algorithm.temperature, top_k=config.algorithm.top_k)
    if config.imagination.compile:
        _compile(config, policy, environment)
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
        ),
        policy_device=policy.device,
        world_device=environment.world.device,
        rows=rows_of_a_pass(config) if config.imagination.fixed_shape else 0,
    )


def rows_of_a_pass(config: TrainConfig) -> int:
    """Return the most rows that a pass of an actor's models has: the slots of its larger stage."""
    return max(map(len, split_slots(config.actor.slots, config.actor.pipeline_stages)))


def tasks_of(environment: Environment) -> list[str]:
    """Return all instructions that the start states have, in the order of letters."""
    return sorted({state.task for state in environment.starts})


def _compile(config: TrainConfig, policy: Policy, environment: Environment) -> None:
    world = environment.world
    check_compilable(type(policy), type(world))
    assert isinstance(policy, FixedShapeActing)
    assert isinstance(world, CompilesWorld)
    rows = rows_of_a_pass(config)
    process_status.describe("compiling the policy")
    policy.compile_acting(rows, tasks_of(environment))
    process_status.describe("compiling the world")
    world.compile(rows)


def build_actor(
    config: TrainConfig,
    name: str,
    backend: Backend,
    starts: StartStream,
    port: ActorPort,
    receiver: Receiver,
    offload: IdleOffload = NO_OFFLOAD,
) -> Actor:
    """Join the parts of the actor `name`: in a process of its own, joined from another host, or inline."""
    return Actor(
        name,
        backend,
        starts,
        port,
        receiver,
        config.actor,
        group_size=config.algorithm.group_size,
        run_seed=config.seed,
        startup_timeout=config.startup_timeout,
        hang_timeout=config.hang_timeout,
        offload=offload,
    )


def build_learner(
    config: TrainConfig,
    start: LearnerStart,
    port: LearnerPort,
    publisher: Publisher,
    write_row: WriteRow,
    ranks: LearnerRanks,
    *,
    types: Mapping[str, torch.dtype],
    checkpoints: checkpoint.Checkpoints,
    stop_requested: Callable[[], bool],
    on_estimate: OnEstimate,
) -> Learner:
    """Build the learner and, when the run resumes, bring it to where the checkpoint stopped."""
    reference = build_reference(config, start.policy, start.policy.device)
    acting = ActingWeights(start.policy, types)
    update = build_update(config, start.policy, ranks=ranks, reference=reference)
    if config.learner.compile:
        compile_learning(update, start.shown)
    early = _early_compile(config, update, start.shown, stop_requested, port)
    learner = Learner(
        update,
        port,
        publisher,
        write_row,
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
        on_estimate=on_estimate,
        compile_early=early or (lambda version: {}),
    )
    if start.checkpoint is not None:
        learner.restore(start.checkpoint)
    return learner


def build_update(
    config: TrainConfig,
    policy: Policy,
    *,
    ranks: LearnerRanks | None = None,
    reference: Reference | None = None,
) -> Update:
    """Build what updates the policy, over its (already sharded) parameters.

    Args:
        ranks: The learner ranks; None: this one alone.
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


def compile_learning(update: Update, shown: ObservationShapes | None) -> None:
    """Compile the layers of an update's policy, at their first calls.

    For one size where all instructions are known and the policy can pad them alike, for any size elsewhere:
    then there are several graphs, which take minutes instead of half of one.
    """
    policy: object = update.policy
    if shown is None or not isinstance(policy, FixesPrompts):
        compile_blocks(update.policy)
        return
    policy.fix_prompts(shown.tasks)
    fix_sizes(update)
    compile_blocks(update.policy, dynamic=False)


def _early_compile(
    config: TrainConfig,
    update: Update,
    shown: ObservationShapes | None,
    stop_requested: Callable[[], bool],
    port: LearnerPort,
) -> EarlyCompile | None:
    """Build what compiles before the first batch; None where it has nothing to do, or cannot."""
    wanted = config.learner.compile and config.learner.compile_early
    in_the_way = config.inline or config.learner.offload  # See the setting.
    known = update.forward.small_size > 0 and has_known_sizes(update.policy)
    if not wanted or in_the_way or shown is None or not known:
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


def loop_settings(config: TrainConfig) -> LoopSettings:
    """Numbers of the learner's loop."""
    return LoopSettings(
        updates=config.updates,
        checkpoint_every=config.checkpoint_every,
        evaluate_every=config.evaluate_every,
        batch_timeout=config.batch_timeout,
        hang_timeout=config.hang_timeout,
        batches_ahead=config.max_lag + 1,
        first_weights_deadline=first_weights_deadline(config),
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
