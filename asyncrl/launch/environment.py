"""An actor's side of a run: world, reward model and start states, or a simulator; and the actor itself.

The learner only checks them, by the headers of the files: it never reads 13 GB of world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncrl.actors.actor import Actor
from asyncrl.actors.backend import split_slots
from asyncrl.actors.imagination import WorldBackend
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import WorldDefaults
from asyncrl.devices.offload import NO_OFFLOAD, OffloadedTensors
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.launch import named_models, simulated
from asyncrl.launch.simulated import SimulatorFiles, TrainingStarts, check_simulator
from asyncrl.observability import process_status
from asyncrl.policies.interface import Policy
from asyncrl.records import ActionSpec, StartState
from asyncrl.registry import names_code
from asyncrl.replay.interface import ActorPort, EpisodeFormat
from asyncrl.rewards.interface import RewardModel
from asyncrl.storage import assets
from asyncrl.storage.assets import simulator_named
from asyncrl.weights.interface import Receiver
from asyncrl.worlds.interface import World
from asyncrl.worlds.start_states import StartStateStream, check_elapsed, check_pose, load_start_states

if TYPE_CHECKING:
    from asyncrl.actors.play import SimulatorBackend


class Environment(NamedTuple):
    """World model, reward model and start states, loaded."""

    world: World[Any]
    reward: RewardModel
    starts: list[StartState]


@dataclass(frozen=True, kw_only=True)
class WorldFiles:
    """World model, reward model and start states, checked and not loaded."""

    starts: list[StartState]
    image_size: int  # height and width of frames
    nbytes: int  # of world and reward model once loaded
    action_spec: ActionSpec
    world_version: int | None = None  # None: known only when loaded

    def check_policy(self, policy: Policy) -> None:
        """Refuse a policy that does not fit the world, or cannot read an instruction."""
        if hasattr(policy, "check_trainable"):
            policy.check_trainable()
        own, world = policy.action_spec, self.action_spec
        if own != world:
            raise ConfigError(
                f"--policy makes {own.chunk} steps of {own.dim} numbers per decision, but --world takes "
                f"{world.chunk} of {world.dim}. Choose a policy and a world that belong together."
            )
        first = {state.task: state for state in self.starts}
        for task, state in first.items():  # Each once, so that one it cannot read fails at the start.
            policy.preprocess(state.frame[None], [task])

    @property
    def tasks(self) -> tuple[str, ...]:
        """All instructions of the start states, sorted."""
        return tasks_of(self.starts)

    def episode_format(self, policy: Policy, max_decisions: int) -> EpisodeFormat:
        """Return the shapes and names that all episodes of the run share."""
        tasks: dict[str, list[str]] = {}
        for state in self.starts:
            tasks.setdefault(state.name, []).append(state.task)
        return EpisodeFormat(
            image_size=self.image_size,
            action_spec=policy.action_spec,
            sample=simulated.sample_format(policy),
            max_decisions=max_decisions,
            tasks=tasks,
            world_version=self.world_version,
        )


def tasks_of(starts: Iterable[StartState]) -> tuple[str, ...]:
    """Return all instructions of start states, sorted."""
    return tuple(sorted({state.task for state in starts}))


def check_environment(config: TrainConfig) -> WorldFiles | SimulatorFiles:
    """Check the simulator or world model of --world."""
    return check_simulator(config) if simulator_named(config.world) else check_world_model(config)


def check_world_model(config: TrainConfig) -> WorldFiles:
    """Check that world, reward model and start states exist and fit each other; loads no weights."""
    simulated.refuse_idle(config)
    world, reward = _named(config)
    summary = world.check(config.imagination)
    starts = _starts(config, summary.image_size)
    check_elapsed(starts, config.actor.max_decisions)
    if getattr(world.kind, "needs_pose", False):
        for state in starts:
            check_pose(state)
    judge = reward.check(list(tasks_of(starts)))
    if judge.image_size not in (0, summary.image_size):
        raise CheckpointError(
            f"The world in {world.folder} draws {summary.image_size}-pixel frames, but its reward model "
            f"looks at {judge.image_size}. Fit it again: asyncrl fit reward --world {world.folder}."
        )
    return WorldFiles(
        starts=starts,
        image_size=summary.image_size,
        nbytes=summary.nbytes + judge.nbytes,
        action_spec=summary.action_spec,
        world_version=summary.version,
    )


def build_world_model(config: TrainConfig, device: torch.device) -> Environment:
    """Load world, reward and start states, after checking that they fit each other."""
    files = check_world_model(config)
    world, reward = _named(config)
    environment = Environment(
        world=world.load(device, config.imagination),
        reward=reward.load(device, list(files.tasks)),
        starts=files.starts,
    )
    if names_code(config.world) or names_code(config.reward):
        from asyncrl.launch.conformance import try_environment

        try_environment(environment.world, environment.reward, files.starts)
    return environment


def with_world_defaults(config: TrainConfig) -> tuple[TrainConfig, WorldDefaults]:
    """Fill settings that the user left open with the world's defaults; returns these too."""
    said, imagination = WorldDefaults(source="defaults"), config.imagination
    if simulator_named(config.world):
        spec = check_simulator(config).spec
        decisions = -(-spec.max_steps // named_models.policy_chunk(config))
        source = f"{spec.max_steps} steps of {spec.name}"
        said = WorldDefaults(source=source, max_decisions=decisions, simulated=True)
    else:
        world = named_models.named_world(config.world, config.world_settings)
        if hasattr(world.kind, "defaults"):
            said = world.kind.defaults(world.folder, imagination, **world.settings)
            if imagination.context == "auto":
                imagination = replace(imagination, context=said.context)
    actor = replace(config.actor, max_decisions=config.actor.max_decisions or said.max_decisions)
    return replace(config, imagination=imagination, actor=actor), said


def _named(config: TrainConfig) -> tuple[named_models.NamedModel, named_models.NamedModel]:
    world = named_models.named_world(config.world, config.world_settings)
    return world, named_models.named_reward(config.reward, world.folder, config.reward_settings)


def _starts(config: TrainConfig, size: int) -> list[StartState]:
    path = assets.start_states_path(config.start_states, named_models.folder_part(config.world))
    try:
        starts = load_start_states(path, keyframes=config.keyframes, image_size=size)
    except ConfigError as error:
        raise CheckpointError(f"--start-states {config.start_states}: {error}") from error
    wrong = next((state for state in starts if state.frame.shape[:2] != (size, size)), None)
    if wrong is not None:
        raise CheckpointError(
            f"Start state {wrong.name!r} of {path} has the shape {wrong.frame.shape}, "
            f"but --world {config.world} imagines {size} x {size}. Choose files that belong together."
        )
    return starts


# ---- the actor -----------------------------------------------------------------------------------


def open_backend(
    config: TrainConfig, policy: Policy
) -> tuple[WorldBackend[Any] | SimulatorBackend, StartStateStream | TrainingStarts]:
    """Return the policy's backend of world or simulators, which the caller closes, and its starts."""
    if simulator_named(config.world):
        files = check_simulator(config)
        return files.play(config, policy), TrainingStarts(files.spec, config.seed, config.simulator.starts)
    environment = build_world_model(config, policy.device)
    starts = StartStateStream(environment.starts, config.seed)
    return build_imagination(config, policy, environment), starts


def build_imagination(config: TrainConfig, policy: Any, environment: Environment) -> WorldBackend[Any]:
    """Join the models of an actor; compiled, or at a fixed shape, if so configured."""
    rows, world = rows_of_a_pass(config), environment.world
    if config.imagination.compile:
        process_status.describe("compiling the policy")
        policy.compile_acting(rows, tasks_of(environment.starts))
        process_status.describe("compiling the world")
        world.compile(rows)
    if config.imagination.fixed_shape and hasattr(policy, "fix_prompts"):
        policy.fix_prompts(tasks_of(environment.starts))
    return WorldBackend(
        policy,
        world,
        environment.reward,
        named_models.sampling_of(config),
        rule=replace(config.actor, success_frames=config.success_frames),
        device=policy.device,
        rows=rows if config.imagination.fixed_shape else 0,
    )


def rows_of_a_pass(config: TrainConfig) -> int:
    """Return the most rows that a pass of an actor's models has: the slots of its larger stage."""
    return max(map(len, split_slots(config.actor.slots, config.actor.pipeline_stages)))


def actor_offload(config: TrainConfig, backend: WorldBackend[Any] | SimulatorBackend) -> OffloadedTensors:
    """Return the offloading of an idle actor's models, whose host copies get new weights."""
    if not config.actor.offload:
        return NO_OFFLOAD
    policy, others = backend.policy, backend.models if isinstance(backend, WorldBackend) else []
    return offload_idle([policy, *others], lambda: policy.acting_tensors().values(), backend.device)


def offload_idle(
    models: Sequence[Any], changing: Callable[[], Iterable[Tensor]], device: torch.device
) -> OffloadedTensors:
    """Return the offloading of networks, worlds and reward models; only `changing` may be written to."""
    networks = [
        network
        for model in models
        for network in ([model] if isinstance(model, nn.Module) else model.modules().values())
    ]
    movable = [model for model in models if hasattr(model, "weights_moved")]
    return OffloadedTensors(
        lambda: (x for network in networks for x in (*network.parameters(), *network.buffers())),
        changing,
        {device},
        on_offload=lambda: [model.weights_moved() for model in movable],
    )


def build_actor(
    config: TrainConfig,
    name: str,
    backend: WorldBackend[Any] | SimulatorBackend,
    starts: StartStateStream | TrainingStarts,
    port: ActorPort,
    receiver: Receiver,
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
        offload=NO_OFFLOAD if config.inline else actor_offload(config, backend),
    )
