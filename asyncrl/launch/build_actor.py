"""Builds an actor of a run: its models with what they act in, compiled where that is wanted, and its loop."""

from __future__ import annotations

from typing import Any

from asyncrl.actors.acting import Acting, Starts
from asyncrl.actors.actor import Actor
from asyncrl.actors.imagination import EndRule, Imagination
from asyncrl.actors.play import Play
from asyncrl.actors.slots import split_slots
from asyncrl.config.run import TrainConfig
from asyncrl.devices.offload import NO_OFFLOAD, IdleOffload
from asyncrl.errors import ConfigError
from asyncrl.launch.environment import Environment
from asyncrl.launch.simulated import SimulatedEnvironment
from asyncrl.observability import process_status
from asyncrl.policies.interface import FixedShapeActing, FixesPrompts, Policy, SamplingParams
from asyncrl.replay.interface import ActorPort
from asyncrl.weights.interface import Receiver
from asyncrl.worlds.interface import CompilesWorld
from asyncrl.worlds.start_states import StartStateStream


def build_acting(
    config: TrainConfig, policy: Policy, environment: Environment | SimulatedEnvironment
) -> Imagination[Any] | Play:
    """Join the models of an actor with what they act in; close it when the actor is done."""
    if isinstance(environment, SimulatedEnvironment):
        return environment.play(config, policy, together=config.inline)
    return build_imagination(config, policy, environment)


def starts_of(config: TrainConfig, environment: Environment | SimulatedEnvironment) -> Starts:
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


def check_compilable(policy: type, world: type) -> None:
    """Refuse --imagination.compile where a class lacks what it needs."""
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
    )
