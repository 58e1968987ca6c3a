"""Checks, or builds, a simulator that --world names: the other kind of place that an actor acts in.

Episodes of a run begin at random starts that no
evaluation ever plays, in an order that follows from --seed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final

import numpy as np

from asyncrl import registry
from asyncrl.actors.play import SimulatorBackend
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import SimulatorSettings, WorldDefaults
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.evaluation.evaluate import check_fits
from asyncrl.launch.named_models import policy_chunk
from asyncrl.policies.interface import Policy, SamplingParams, SaysInputs
from asyncrl.replay.interface import ENDLESS, EpisodeFormat, SimulatorFormat
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import SimStart, SimulatorSpec, random_start, stored_start
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import HELD_OUT
from asyncrl.storage.assets import SIMULATOR_ALIASES, simulator_named

EVALUATED_TRIALS: Final = 50
"""Stored starts of each task, from the first on, that evaluations play."""


@dataclass(frozen=True, kw_only=True)
class SimulatorFiles:
    """What actors would play in: looked at, not built."""

    name: str
    """As set."""
    source: SimulatorSource
    """Of every worker."""
    spec: SimulatorSpec
    nbytes: int = 0
    """Nothing of it is loaded to a device of the policy's."""

    @property
    def image_size(self) -> int:
        """Return height and width of the pictures in pixels."""
        return self.spec.image_size

    @property
    def summary(self) -> str:
        """Describe it in a line."""
        spec, where = self.spec, "seeds" if not self.spec.trials else f"{self.spec.trials} stored starts each"
        return (
            f"simulator {spec.name}: {len(spec.tasks)} tasks ({where}), {len(spec.cameras)} cameras of "
            f"{spec.image_size} x {spec.image_size} pixels, {spec.state_dim} numbers of state, at most "
            f"{spec.max_steps} steps"
        )

    def check_policy(self, policy: Policy) -> None:
        """Refuse a policy that cannot play, or that cannot read one of the tasks.

        Raises:
            ConfigError: Its actions have another width, or it needs a camera, a state or words that are not
                there.
        """
        try:
            check_fits(policy, self.spec)
        except ConfigError as error:
            raise _about_world(error) from error
        cameras, shows_state = inputs_of(policy, self.spec)
        pictures = np.zeros((1, cameras, self.image_size, self.image_size, 3), np.uint8)
        states = [np.zeros((1, self.spec.state_dim), np.float32)] if shows_state else []
        for task in self.spec.tasks:
            policy.preprocess(pictures if cameras > 1 else pictures[:, 0], [task], *states)

    def episode_format(self, policy: Policy, max_decisions: int) -> EpisodeFormat:
        """Say what all episodes have in common that the policy plays here."""
        spec, (cameras, shows_state) = policy.action_spec, inputs_of(policy, self.spec)
        letters: dict[object, int] = {"C": spec.chunk, "A": spec.dim}
        return EpisodeFormat(
            image_size=sized_for(self.source, policy).spec().image_size,
            action_spec=spec,
            sample={
                name: (array.dtype, tuple(letters.get(size, size) for size in array.shape[1:]))
                for name, array in policy.sample_arrays.items()
            },
            max_decisions=max_decisions,
            world_version=-1,
            simulator=SimulatorFormat(
                name=self.spec.name,
                tasks=self.spec.tasks,
                more_cameras=cameras - 1,
                state_dim=self.spec.state_dim if shows_state else 0,
                reward=self.spec.reward,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class SimulatedEnvironment:
    """What an actor plays in, besides the policy. Its workers are started by `play`."""

    files: SimulatorFiles
    starts: TrainingStarts
    workers: int

    def check_policy(self, policy: Policy) -> None:
        """See `SimulatorFiles.check_policy`."""
        self.files.check_policy(policy)

    def play(self, config: TrainConfig, policy: Policy, *, together: bool) -> SimulatorBackend:
        """Start the workers and join them with the policy."""
        process = multiprocessing.current_process()
        if process.daemon:  # It may have no children, for they would be left behind; its workers end with it.
            process.daemon = False
        source = sized_for(self.files.source, policy)
        try:
            pool = SimulatorPool(source, self.workers, steps=policy.action_spec.chunk)
        except AsyncRLError as error:
            raise _about_world(error) from error
        cameras, shows_state = inputs_of(policy, pool.spec)
        if pool.spec.lockstep and config.actor.pipeline_stages > 1:
            pool.close()
            raise ConfigError(
                f"--actor.pipeline-stages is {config.actor.pipeline_stages}, but --world {config.world} "
                "steps all its places together, so one half would wait for the other. Use "
                "--actor.pipeline-stages 1."
            )
        return SimulatorBackend(
            policy,
            pool,
            SamplingParams(temperature=config.algorithm.temperature, top_k=config.algorithm.top_k),
            max_decisions=config.actor.max_decisions,
            cameras=cameras,
            shows_state=shows_state,
            together=together,
            patience=config.hang_timeout,
            policy_device=policy.device,
        )


def inputs_of(policy: Policy, spec: SimulatorSpec) -> tuple[int, bool]:
    """Return how many cameras a policy is shown, and whether the state: what it says, else all there is."""
    if isinstance(policy, SaysInputs):
        return min(policy.pictures, len(spec.cameras)), policy.proprio_numbers > 0
    return len(spec.cameras), spec.state_dim > 0


def sized_for(source: SimulatorSource, policy: Policy) -> SimulatorSource:
    """Have a simulator without an official picture draw the size that the policy is best shown."""
    kind = registry.resolve("simulator", source.name)
    if source.image_size or not getattr(kind, "any_image_size", False):
        return source
    return source.with_(image_size=policy.image_size)


def check_simulator(config: TrainConfig) -> SimulatorFiles:
    """Describe the simulator of --world; builds a scene only if its class cannot describe itself."""
    refuse_idle(config)
    name, settings = simulator_named(config.world), config.simulator
    workers = max(settings.workers, 1)
    places = -(-config.actor.slots // workers)
    most = getattr(registry.resolve("simulator", name), "most_places", places)
    if places > most:
        raise ConfigError(
            f"--actor.slots is {config.actor.slots} in {workers} workers, but --world {config.world} can "
            f"have {most} in each at most. Use --simulator.workers {-(-config.actor.slots // most)}, or "
            "fewer slots."
        )
    source = SimulatorSource(
        name=name,
        settings=config.world_settings,
        places=places,
        image_size=settings.image_size,
        horizon=settings.horizon,
    )
    try:
        spec = source.spec()
    except AsyncRLError as error:
        raise _about_world(error) from error
    TrainingStarts(spec, config.seed, settings.starts)  # Refuses starts that are not there.
    return SimulatorFiles(name=config.world, source=source, spec=spec)


def build_simulator(config: TrainConfig) -> SimulatedEnvironment:
    """Prepare what an actor plays in; see `check_simulator` for what it raises."""
    files = check_simulator(config)
    starts = TrainingStarts(files.spec, config.seed, config.simulator.starts)
    workers = min(config.simulator.workers, config.actor.slots)  # More would have nothing to do.
    return SimulatedEnvironment(files=files, starts=starts, workers=workers)


def simulator_defaults(config: TrainConfig) -> WorldDefaults:
    """Say how many decisions an episode can have: as many as the simulator's horizon has room for."""
    files = check_simulator(config)
    decisions = -(-files.spec.max_steps // policy_chunk(config))
    return WorldDefaults(
        source=f"{files.spec.max_steps} steps of {files.spec.name}", max_decisions=decisions, simulated=True
    )


def refuse_idle(config: TrainConfig) -> None:
    """Refuse settings of world models, which would do nothing in a simulator."""
    default, changed = TrainConfig(), list[tuple[str, str]]()
    for field in fields(config.imagination):
        if getattr(config.imagination, field.name) != getattr(default.imagination, field.name):
            changed.append((f"imagination.{field.name}", "there is no world model that imagines"))
    for name, why in (
        ("reward", "a simulator says itself what succeeds"),
        ("reward_settings", "a simulator says itself what succeeds"),
        ("start_states", "its starts are its own (--simulator.starts)"),
        ("keyframes", "its starts are its own (--simulator.starts)"),
        ("keyframe_share", "its starts are its own (--simulator.starts)"),
    ):
        if getattr(config, name) != getattr(default, name):
            changed.append((name, why))
    for name in ("success_threshold", "success_frames"):
        if getattr(config.actor, name) != getattr(default.actor, name):
            changed.append((f"actor.{name}", "there is no reward model whose scores are read"))
    if config.guard.kind != "none":
        changed.append(("guard.kind", "its successes are true"))
    if "world=" in config.placement or config.placement == "hybrid":
        changed.append(("placement", "it gives a device to a world model"))
    if changed:
        flag = changed[0][0].replace("_", "-")
        raise ConfigError(
            f"--{flag} is set, but --world {config.world} is a simulator: {changed[0][1]}. Leave it out, or "
            f"choose a world model; a folder called so is written ./{config.world}."
        )


def refuse_simulator_settings(config: TrainConfig) -> None:
    """Refuse settings of simulators where --world is a world model."""
    default = SimulatorSettings()
    for field in fields(default):
        if getattr(config.simulator, field.name) != getattr(default, field.name):
            raise ConfigError(
                f"--simulator.{field.name.replace('_', '-')} is set, but --world {config.world} is a world "
                "model, in which nothing is simulated. Leave it out, or name a simulator: "
                f"{', '.join(SIMULATOR_ALIASES)}, libero_spatial ..."
            )


class TrainingStarts:
    """An endless stream of starts, element n a function of the seed and n only. A `StartStream` of actors.

    The tasks of a simulator with numbered tasks come once each, in random order, then again in another.
    """

    def __init__(self, spec: SimulatorSpec, seed: int, kind: str) -> None:
        """Choose the starts."""
        self.spec, self.seed, self.kind = spec, seed, kind
        if kind == "random":
            return
        if not spec.trials:
            raise ConfigError(
                f"--simulator.starts is {kind}, but in {spec.name} every seed is a start: none are stored. "
                "Use random."
            )
        if kind == "stored" and spec.trials <= EVALUATED_TRIALS:
            raise ConfigError(
                f"--simulator.starts is stored, but the {spec.trials} stored starts of each task of "
                f"{spec.name} are those that evaluations play: success there would say nothing of new ones. "
                "Use random, or --simulator.starts evaluation to train on them all the same."
            )

    def __getitem__(self, n: int) -> SimStart:
        """Return where the episodes of grant `n` begin."""
        tasks = len(self.spec.tasks) if self.spec.trials else 1
        turn, place = divmod(n, tasks)
        task = _shuffled(tasks, self.seed, turn)[place]
        drawn = np.random.default_rng([self.seed, n, 1])
        if self.kind == "random":
            seed = int(drawn.integers(HELD_OUT // tasks)) * tasks + task
            return random_start(self.spec, seed)
        first = EVALUATED_TRIALS if self.kind == "stored" else 0
        return stored_start(self.spec, task, int(drawn.integers(first, self.spec.trials)))

    def left(self, quarantined: Collection[str]) -> int:
        """Say that there are always others."""
        return ENDLESS


@lru_cache(maxsize=8)
def _shuffled(count: int, seed: int, turn: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, turn]).permutation(count).tolist())


def _about_world(error: AsyncRLError) -> Any:
    """Write an error about --simulator as one about --world, which named it."""
    text = str(error).replace("--simulator-settings", "--world-settings").replace("--simulator ", "--world ")
    return type(error)(text.replace("--horizon", "--simulator.horizon"))
