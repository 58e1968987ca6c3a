"""A simulator that --world names: checked, and played in by actors.

Episodes of a run begin at starts that no evaluation plays, in an order that follows from --seed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asyncrl import registry
from asyncrl.config.run import TrainConfig
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launch.named_models import sampling_of
from asyncrl.observability.logger import flat
from asyncrl.policies.interface import Policy
from asyncrl.records import StartState
from asyncrl.replay.interface import ENDLESS, EpisodeFormat, SimulatorFormat
from asyncrl.simulators.interface import SimStart, SimulatorSource, SimulatorSpec, random_start, stored_start
from asyncrl.storage.assets import SIMULATOR_ALIASES, simulator_named
from asyncrl.worlds.start_states import start_state_at

if TYPE_CHECKING:
    from asyncrl.actors.play import SimulatorBackend


@dataclass(frozen=True, kw_only=True)
class SimulatorFiles:
    """The simulator of a run: described, not built. `play` starts its workers."""

    source: SimulatorSource
    spec: SimulatorSpec
    nbytes: int = 0  # nothing is loaded to a device
    starts: tuple[StartState, ...] = ()
    tasks: tuple[str, ...] = ()  # instructions of `starts`

    @property
    def image_size(self) -> int:
        """Height and width of the pictures in pixels."""
        return self.spec.image_size

    def check_policy(self, policy: Policy) -> None:
        """Refuse a policy that cannot play here, or cannot read one of the tasks."""
        from asyncrl.evaluation.success_rate import check_fits

        with _about_world():
            check_fits(policy, self.spec)

    def episode_format(self, policy: Policy, max_decisions: int) -> EpisodeFormat:
        """Return the shapes and names that all episodes of the run share."""
        cameras, shows_state = inputs_of(policy, self.spec)
        return EpisodeFormat(
            image_size=sized_for(self.source, policy).spec().image_size,
            action_spec=policy.action_spec,
            sample=sample_format(policy),
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

    def play(self, config: TrainConfig, policy: Policy) -> SimulatorBackend:
        """Start the workers and join them with the policy."""
        from asyncrl.actors.play import SimulatorBackend
        from asyncrl.simulators.pool import SimulatorPool

        process = multiprocessing.current_process()
        if process.daemon:  # It may have no children, for they would be left behind; its workers end with it.
            process.daemon = False
        workers = min(config.simulator.workers, config.actor.slots)  # More would have nothing to do.
        with _about_world():
            source = sized_for(self.source, policy)
            pool = SimulatorPool(source, workers)
        cameras, shows_state = inputs_of(policy, pool.spec)
        return SimulatorBackend(
            policy,
            pool,
            sampling_of(config),
            max_decisions=config.actor.max_decisions,
            cameras=cameras,
            shows_state=shows_state,
            together=config.inline,
            patience=config.hang_timeout,
            device=policy.device,
        )


def sample_format(policy: Policy) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Return dtype and shape per decision of the arrays of a policy's sample."""
    letters: dict[object, int] = {"C": policy.action_spec.chunk, "A": policy.action_spec.dim}
    return {
        name: (array.dtype, tuple(letters.get(size, size) for size in array.shape[1:]))
        for name, array in policy.sample_arrays.items()
    }


def inputs_of(policy: Policy, spec: SimulatorSpec) -> tuple[int, bool]:
    """Return the number of cameras that a policy sees, and True if it sees the state (default: all)."""
    if hasattr(policy, "pictures"):
        return min(policy.pictures, len(spec.cameras)), policy.proprio_numbers > 0
    return len(spec.cameras), spec.state_dim > 0


def sized_for(source: SimulatorSource, policy: Policy) -> SimulatorSource:
    """Set the policy's image size if the simulator has no official one."""
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
    with _about_world():
        spec = source.spec()
    if spec.lockstep and config.actor.pipeline_stages > 1:
        raise ConfigError(
            f"--actor.pipeline-stages is {config.actor.pipeline_stages}, but --world {config.world} steps "
            "all its places together: one half would wait for the other. Use --actor.pipeline-stages 1."
        )
    TrainingStarts(spec, config.seed, settings.starts)  # Refuses starts that are not there.
    return SimulatorFiles(source=source, spec=spec)


_IDLE_IN_SIMULATORS: Final = (
    ("there is no world model that imagines", ("imagination",)),
    ("a simulator decides itself what succeeds", ("reward", "reward-settings", "guard.kind")),
    ("its starts are its own (--simulator.starts)", ("start-states", "keyframes")),
    ("there is no reward model whose scores are read", ("actor.success-threshold", "actor.success-frames")),
)
_IDLE_IN_WORLDS: Final = (("nothing is simulated in it", ("simulator",)),)


def refuse_idle(config: TrainConfig) -> None:
    """Refuse settings that do nothing in --world: those of world models in a simulator, and the reverse."""
    kind, idle = "a world model", _IDLE_IN_WORLDS
    instead = f"name a simulator: {', '.join(SIMULATOR_ALIASES)}, libero_spatial ..."
    if simulator_named(config.world):
        kind, idle = "a simulator", _IDLE_IN_SIMULATORS
        instead = f"choose a world model; a folder called so is written ./{config.world}"
    default = flat(asdict(TrainConfig()))
    for flag, value in flat(asdict(config)).items():
        why = next((why for why, names in idle if {flag, flag.partition(".")[0]} & {*names}), "")
        if flag == "simulator.workers" and config.evaluate_every:
            continue  # The evaluator's too.
        if why and value != default[flag]:
            raise ConfigError(
                f"--{flag} is set, but --world {config.world} is {kind}: {why}. Leave it out, or {instead}."
            )


class TrainingStarts:
    """An endless stream of starts: element n depends on the seed and n only. A `StartStream` of actors.

    Numbered tasks come once each in random order, then once each in another order, and so on.
    """

    def __init__(self, spec: SimulatorSpec, seed: int, kind: str) -> None:
        self.spec, self.seed, self.kind = spec, seed, kind
        if kind == "evaluation" and not spec.trials:
            raise ConfigError(
                f"--simulator.starts is evaluation, but in {spec.name} every seed is a start: none are "
                "stored. Use random."
            )

    def __getitem__(self, n: int) -> SimStart:
        from asyncrl.simulators.rollout import HELD_OUT

        tasks = len(self.spec.tasks) if self.spec.trials else 1
        task = start_state_at(range(tasks), self.seed, n)
        drawn = np.random.default_rng([self.seed, n, 1])
        if self.kind == "random":
            seed = int(drawn.integers(HELD_OUT // tasks)) * tasks + task
            return random_start(self.spec, seed)
        return stored_start(self.spec, task, int(drawn.integers(self.spec.trials)))

    def left(self, quarantined: Collection[str]) -> int:
        """Return ENDLESS: starts never run out."""
        return ENDLESS


@contextmanager
def _about_world() -> Iterator[None]:
    """Raise errors about --simulator as errors about --world, which named it."""
    try:
        yield
    except AsyncRLError as error:
        text = str(error).replace("--simulator-settings", "--world-settings")
        text = text.replace("--simulator ", "--world ").replace("--horizon", "--simulator.horizon")
        raise type(error)(text) from error
