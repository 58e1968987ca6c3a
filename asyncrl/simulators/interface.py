"""The interface of every simulator, and how one is built by its name on the command line.

A simulator has places, each of which plays its own episode with true physics. Nothing
resets by itself, and everything about an episode follows from its `SimStart` and the actions.

Letters: n places addressed, K cameras, H W picture size in pixels (equal), Q numbers of state, A numbers per
action.
"""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from asyncrl import registry
from asyncrl.config.bounds import AtLeast, Bounded
from asyncrl.errors import ConfigError
from asyncrl.facts import check_instruction, check_instructions
from asyncrl.storage.untrusted import Typed


@dataclass(frozen=True, kw_only=True)
class SimulatorSpec(Typed):
    """Properties of a simulator, known before an episode is played. Plain values: it travels as JSON."""

    name: str
    """Short, as in `SimStart.name`: ``libero_spatial``."""
    tasks: tuple[str, ...]
    """Instructions, kept in their normal form (`facts.plain_task`), by task id; without stored starts: all
    that `Seen.tasks` may hold, empty: any."""
    trials: int
    """Stored starts of each task, numbered from 0; 0: every seed is a start."""
    max_steps: int
    """Steps until an episode is truncated."""
    image_size: int
    """Height and width of the pictures in pixels."""
    cameras: tuple[str, ...] = ("main",)
    """Names of the K cameras; models of one picture see the first."""
    state_dim: int = 0
    """``Q``: numbers of the robot's state, as published policies expect it."""
    poses: bool = False
    """True if `Seen.poses` is filled, which some world models need."""
    action_low: tuple[float, ...] = (-1.0,) * 7
    action_high: tuple[float, ...] = (1.0,) * 7
    """``A`` bounds, to which actions are clipped."""
    idle: tuple[float, ...] = (0.0,) * 6 + (-1.0,)
    """``A`` numbers: the action that moves nothing and keeps the gripper open."""
    reward: Literal["success", "dense"] = "success"
    """`success`: 1 in the step that fulfils the task, else 0. `dense`: any numbers, at every step."""
    protocol: str = ""
    """Conditions of measurements, in words: the scene, the number of idle steps."""
    places: int = 1
    """Episodes that one object plays at once."""
    lockstep: bool = False
    """True if the places can only be stepped together, once all that play have an action."""

    def __post_init__(self) -> None:
        tasks = check_instructions(self.tasks, f"spec.tasks of the simulator {self.name}")
        object.__setattr__(self, "tasks", tasks)
        try:
            super().__post_init__()
            low, high = self.action_low, self.action_high
            if not self.idle or not 0 < len(low) == len(high) or any(map(operator.gt, low, high)):
                raise ValueError(f"action_low {low}, action_high {high} and idle {self.idle} do not fit")
            if min(self.max_steps, self.places, len(self.cameras)) < 1:
                raise ValueError("max_steps, places and cameras must be at least 1")
        except ValueError as error:
            raise ConfigError(f"spec of the simulator {self.name}: {error}. Correct its class.") from error

    @property
    def action_dim(self) -> int:
        """``A``."""
        return len(self.idle)


@dataclass(frozen=True, kw_only=True)
class SimStart:
    """Start of an episode."""

    name: str
    """Unique: ``libero_spatial/3/017`` for a stored start, ``tabletop/seed-1000123`` for a random one."""
    task: str
    """The instruction, kept in its normal form; empty: see `Seen.tasks` after the reset."""
    task_id: int = -1
    """Index into `SimulatorSpec.tasks`; -1 without stored starts."""
    trial: int = -1
    """Number among the task's stored starts; -1: a random start, drawn from `seed`."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task != "":
            object.__setattr__(self, "task", check_instruction(self.task, f"start {self.name}"))


class Seen(NamedTuple):
    """Observations of n places."""

    images: NDArray[np.uint8]
    """``[n, K, H, W, 3]`` red-green-blue."""
    states: NDArray[np.float32]
    """``[n, Q]``."""
    tasks: tuple[str, ...] = ()
    """After a reset the n instructions, otherwise empty."""
    poses: NDArray[np.float32] | None = None
    """``[n, 8]`` of `hand_pose`; None unless `SimulatorSpec.poses`."""


def hand_pose(
    position: NDArray[np.floating], quaternion: NDArray[np.floating], opened: float
) -> NDArray[np.float32]:
    """Return a hand's position, orientation and gripper as ``[8]`` float32; the gripper is -1 (open) to 1.

    Args:
        position: ``[3]`` of the point between the fingers, in metres, in the simulator's world.
        quaternion: ``[4]`` x, y, z, w, from the hand's axes to the world's; its sign must not jump.
        opened: Distance of the fingers, from 0 to 1; clipped.

    >>> hand_pose(np.array([0.5, 0.0, 0.2]), np.array([1.0, 0.0, 0.0, 0.0]), 0.75).tolist()
    [0.5, 0.0, 0.20000000298023224, 1.0, 0.0, 0.0, 0.0, -0.5]
    """
    gripper = 1.0 - 2.0 * min(max(opened, 0.0), 1.0)
    return np.concatenate([position, quaternion, [gripper]]).astype(np.float32)


def skew_part(rotation: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute axis times sine ``[3]`` of a rotation matrix ``[3, 3]``: for small angles, its vector."""
    r = rotation
    return 0.5 * np.array([r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]])


class Stepped(NamedTuple):
    """Results of one step in n places."""

    seen: Seen | None
    """Observations after the action; None if nothing was to be drawn."""
    rewards: NDArray[np.float32]
    """``[n]``."""
    success: NDArray[np.bool_]
    """``[n]`` True where the task is fulfilled after this step. Not latched: a later step may undo it."""
    terminated: NDArray[np.bool_]
    """``[n]`` True where the episode cannot go on: an object has fallen. A success is no termination."""
    truncated: NDArray[np.bool_]
    """``[n]`` True where `SimulatorSpec.max_steps` is reached."""


class Simulator(Protocol):
    """Places with true physics and true success.

    Built by calling its class, or a function of the user's, with ``places=`` (at least 1) and ``image_size=``
    in pixels (0: its own size), ``horizon=`` (steps until truncation) if --horizon is set, and the keywords
    of --simulator-settings.

    Optional attributes of the class: ``most_places = 1`` if it can have no more; ``usual_places = 4``,
    the default number; ``any_image_size = True`` if it has no official picture size; and a class method
    ``describe`` with the same arguments, which returns the spec without building a scene.
    """

    @property
    def spec(self) -> SimulatorSpec:
        """Its properties."""
        ...

    def reset(self, places: Sequence[int], starts: Sequence[SimStart]) -> Seen:
        """Begin one episode in each of n different places, by starts of its spec."""
        ...

    def step(self, places: Sequence[int], actions: NDArray[np.float32], *, draw: bool) -> Stepped:
        """Carry out one action in each of n different places with running episodes; in lockstep, in all.

        Args:
            actions: ``[n, A]`` float32, finite.
            draw: False leaves `Stepped.seen` out; nothing else depends on it.
        """
        ...

    def look(self, places: Sequence[int]) -> Seen:
        """Return the observations of n places, without a step."""
        ...

    def close(self) -> None:
        """Free the scenes. May be called again."""
        ...


@dataclass(frozen=True, kw_only=True)
class Demonstrator(Bounded, section="expert."):
    """Quality of the scripted expert. All draws are made once per episode, from the episode's seed."""

    noise: tuple[float, float] = (0.0, 0.0)
    """Least and most noise on each action: its standard deviation, in units of the action range."""
    offset: tuple[float, float] = (0.0, 0.0)
    """Constant error of the grasp position in metres (x, y): a badly calibrated demonstrator."""
    retry: bool = False
    """True: reach again after a missed grasp."""
    spread: Annotated[float, AtLeast(0, "it is a deviation.", "Use 0.")] = 0.0
    """Standard deviation of a further grasp error in metres, drawn per episode."""
    place_offset: tuple[float, float] = (0.0, 0.0)
    """Constant error of where the object is set down, in metres (x, y)."""
    place_spread: Annotated[float, AtLeast(0, "it is a deviation.", "Use 0.")] = 0.0
    """Standard deviation of a further such error in metres, drawn per episode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.noise
        if not 0 <= low <= high:
            raise ConfigError(
                f"--expert.noise {low:g} {high:g}: it is drawn between these two deviations, the smaller one "
                "first. Use 0.0 0.2."
            )


OPEN, CLOSE = -1.0, 1.0  # Commands of the gripper


class Phase(Enum):
    """Phases of a scripted expert's episode, in their order; some experts leave some out."""

    REACH = auto()
    SINK = auto()
    GRASP = auto()
    LIFT = auto()
    CARRY = auto()
    LOWER = auto()
    RELEASE = auto()
    WITHDRAW = auto()


class Flaws:
    """The flaws of one episode's expert: all draws but the noise are made here."""

    def __init__(self, settings: Demonstrator, rng: np.random.Generator) -> None:
        self._rng = rng
        self._noise = float(rng.uniform(*settings.noise))
        # [3] metres (x, y, and 0 upwards) by which the grasp and the set-down miss.
        self.grasp = np.append(settings.offset + rng.normal(0.0, 1.0, 2) * settings.spread, 0.0)
        self.place = np.append(settings.place_offset + rng.normal(0.0, 1.0, 2) * settings.place_spread, 0.0)
        self.retry = settings.retry

    def noise(self) -> NDArray[np.float64]:
        """Draw the noise ``[6]`` of an action's motion."""
        return self._rng.normal(0.0, 1.0, 6) * self._noise


@runtime_checkable
class HasExpert(Protocol):
    """A simulator with a demonstrator: for `asyncrl collect` and `asyncrl evaluate expert`."""

    def expert(
        self, place: int, settings: Demonstrator, rng: np.random.Generator
    ) -> Callable[[], NDArray[np.float32]]:
        """Return a function that chooses the next action ``[A]`` float32 of the episode that was just reset.

        It is called before each `step` and may see the true state. Flaws without a meaning here are ignored.
        """
        ...


def stored_start(spec: SimulatorSpec, task_id: int, trial: int) -> SimStart:
    """Return a stored start of a simulator that has some."""
    return SimStart(
        name=f"{spec.name}/{task_id}/{trial:03d}",
        task=spec.tasks[task_id],
        task_id=task_id,
        trial=trial,
        seed=task_id * max(spec.trials, 1) + trial,
    )


def random_start(spec: SimulatorSpec, seed: int) -> SimStart:
    """Return the random start of a seed; with stored starts, the seed also selects the task."""
    if not spec.trials:
        task = spec.tasks[0] if len(spec.tasks) == 1 else ""
        return SimStart(name=f"{spec.name}/seed-{seed}", task=task, seed=seed)
    task_id = seed % len(spec.tasks)
    return SimStart(
        name=f"{spec.name}/{task_id}/seed-{seed}", task=spec.tasks[task_id], task_id=task_id, seed=seed
    )


def check_settings(settings: object) -> None:
    """Raise ConfigError for settings of a wrong type or value; ints must be from 0 to 100,000."""
    for name, kind in typing.get_type_hints(type(settings)).items():
        value, choices, wanted = getattr(settings, name), typing.get_args(kind), ""
        if choices and value not in choices:
            wanted = f"one of: {', '.join(filter(None, choices))}"
        elif kind is bool and type(value) is not bool:
            wanted = "true or false"
        elif kind is int and not (type(value) is int and 0 <= value <= 100_000):
            wanted = "a whole number from 0 on"
        if wanted:
            raise ConfigError(f"--simulator-settings {name}={value} cannot be. Use {wanted}.")


def check_step(
    places: Sequence[int], actions: NDArray[np.float32], width: int, playing: NDArray[np.bool_]
) -> None:
    """Raise `ValueError` for actions that are ragged or not finite, and for places without an episode."""
    if actions.shape != (len(places), width) or not np.isfinite(actions).all():
        raise ValueError(f"actions must be finite [{len(places)}, {width}], got shape {actions.shape}")
    if over := [place for place in places if not playing[place]]:
        raise ValueError(f"places {over} have no episode under way: it ended, or was left out of a step")


@dataclass(frozen=True, kw_only=True)
class SimulatorSource:
    """Name and settings of a simulator; plain values, which worker processes receive."""

    name: str
    """Short name, or 'package.module:Class' (or function) of the user."""
    settings: tuple[str, ...] = ()  # Keywords, as 'key=value' texts.
    places: int = 1
    image_size: int = 0  # Side of the pictures in pixels; 0: the simulator's own.
    horizon: int = 0  # Steps until an episode is truncated; 0: the simulator's own.

    def with_(self, **changes: Any) -> SimulatorSource:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def build(self) -> Simulator:
        """Build the simulator."""
        built = self._call(registry.resolve("simulator", self.name))
        needs = ("spec", "reset", "step", "look", "close")
        if not (lacking := [name for name in needs if not hasattr(built, name)]):
            return built
        # Without an import: the maker of a vector environment has imported gymnasium.
        kinds = [f"{kind.__module__}.{kind.__name__}" for kind in type(built).__mro__]
        if any(name.startswith("gymnasium.vector.") and name.endswith(".VectorEnv") for name in kinds):
            return resolve_name("asyncrl.simulators.vector_env:VectorEnvSimulator")(built)
        raise ConfigError(
            f"--simulator {self.name} made a {type(built).__name__}, which is no simulator (it lacks "
            f"{', '.join(lacking)}) and no gymnasium.vector.VectorEnv. See docs/extending.md."
        )

    def spec(self) -> SimulatorSpec:
        """Return the spec, without building a scene if the class has `describe`. Raises as `build`."""
        kind = registry.resolve("simulator", self.name)
        if hasattr(kind, "describe"):
            return self._call(kind.describe)
        simulator = self.with_(places=min(self.places, 2)).build()  # Whether they step together, two show.
        try:
            return replace(simulator.spec, places=self.places)
        finally:
            simulator.close()

    def usual_places(self) -> int:
        """Return the default number of places of one object: its class's, else 16."""
        kind = registry.resolve("simulator", self.name)
        return min(getattr(kind, "usual_places", 16), getattr(kind, "most_places", 16))

    def may_have_expert(self) -> bool:
        """True if the class has an `expert`, or a function makes the simulator: then only a worker knows."""
        kind = registry.resolve("simulator", self.name)
        return not isinstance(kind, type) or hasattr(kind, "expert")

    def _call(self, function: Any) -> Any:
        keywords = registry.keywords("--simulator-settings", self.settings)
        if self.horizon:
            keywords["horizon"] = self.horizon
        try:
            return function(places=self.places, image_size=self.image_size, **keywords)
        except TypeError as error:
            raise ConfigError(
                f"--simulator {self.name} cannot be built: {error}. It is called with places, image_size, "
                "horizon where --horizon is set, and the keywords of --simulator-settings."
            ) from error
