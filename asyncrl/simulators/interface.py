"""The interface of every simulator: places in which episodes with true physics are played.

A simulator has one or more *places*, each with an episode of its own. Nothing resets by itself: a place whose
episode ended ignores actions until `reset`, and everything about an episode follows from its `SimStart`.

Dimension letters:
    n  places addressed      K  cameras      H, W  picture size in pixels (equal)
    Q  numbers of state      A  numbers per action
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.bounds import AtLeast, Bounded
from asyncrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SimulatorSpec:
    """What is known of a simulator before an episode is played. Plain values only: it travels as JSON."""

    name: str
    """Short, as in `SimStart.name`: ``libero_spatial``."""
    tasks: tuple[str, ...]
    """Instructions, lower case, without a full stop. Stored starts name them by their index (task id); where
    there are none, an episode says its own after the reset, and these are all that it may say. Empty: any."""
    trials: int
    """Stored starts of each task, numbered from 0; 0: every seed is a start."""
    max_steps: int
    """Steps until an episode is truncated."""
    image_size: int
    """Height and width of the pictures in pixels."""
    cameras: tuple[str, ...] = ("main",)
    """Names of the K cameras; the first is what models of one picture see."""
    state_dim: int = 0
    """``Q``: numbers of the robot's state, as published policies are given it."""
    poses: bool = False
    """Whether `Seen.poses` says where the hand is: some world models begin with it."""
    action_low: tuple[float, ...] = (-1.0,) * 7
    action_high: tuple[float, ...] = (1.0,) * 7
    """``A`` bounds; what lies outside is clipped."""
    idle: tuple[float, ...] = (0.0,) * 6 + (-1.0,)
    """``A`` numbers: the action that moves nothing and keeps the gripper open."""
    reward: Literal["success", "dense"] = "success"
    """`success`: 1 in the step that fulfils the task, else 0. `dense`: any numbers, at every step."""
    protocol: str = ""
    """What a number that was measured in it must be read with, in words: which scene, how many idle steps."""
    places: int = 1
    """Episodes that one object plays at once."""
    lockstep: bool = False
    """Whether all places can only be stepped together: then no place steps before all that play have an
    action."""

    @property
    def action_dim(self) -> int:
        """Return ``A``."""
        return len(self.idle)


@dataclass(frozen=True, kw_only=True)
class SimStart:
    """Where an episode begins. Everything about the episode but the actions follows from it."""

    name: str
    """Unique: ``libero_spatial/3/017`` for a stored start, ``tabletop/seed-1000123`` for a random one."""
    task: str
    """The instruction, lower case, without a full stop; empty: it is said by `Seen.tasks` after the reset."""
    task_id: int = -1
    """Index into `SimulatorSpec.tasks`; -1: there are no numbered tasks."""
    trial: int = -1
    """Which of the task's stored starts; -1: a random one, drawn from `seed`."""
    seed: int = 0


class Seen(NamedTuple):
    """What n places show."""

    images: NDArray[np.uint8]
    """``[n, K, H, W, 3]`` red-green-blue."""
    states: NDArray[np.float32]
    """``[n, Q]``."""
    tasks: tuple[str, ...] = ()
    """After a reset the n instructions, otherwise empty."""
    poses: NDArray[np.float32] | None = None
    """``[n, 8]`` where the hand is, as `hand_pose` returns it; None unless `SimulatorSpec.poses`."""


def hand_pose(
    position: NDArray[np.floating], quaternion: NDArray[np.floating], opened: float
) -> NDArray[np.float32]:
    """Say where a hand is, in the order of `records.POSE_DIM`.

    Args:
        position: ``[3]`` of the point between the fingers, in metres, in the simulator's world.
        quaternion: ``[4]`` x, y, z, w of length 1: from the hand's axes to the world's. Its sign is free, but
            must not jump between two steps.
        opened: How far the fingers are apart, from 0 to 1; clipped.

    Returns:
        ``[8]`` float32; the last number is the gripper as in actions, but as it is and not as it was told to
        be: -1 (open) to 1 (closed).

    Example:
        >>> hand_pose(np.array([0.5, 0.0, 0.2]), np.array([1.0, 0.0, 0.0, 0.0]), 0.75).tolist()
        [0.5, 0.0, 0.20000000298023224, 1.0, 0.0, 0.0, 0.0, -0.5]
    """
    gripper = 1.0 - 2.0 * min(max(opened, 0.0), 1.0)
    return np.concatenate([position, quaternion, [gripper]]).astype(np.float32)


class Stepped(NamedTuple):
    """What one step did in n places."""

    seen: Seen | None
    """What is seen after the action; None when nothing was to be drawn."""
    rewards: NDArray[np.float32]
    """``[n]``."""
    success: NDArray[np.bool_]
    """``[n]`` whether the task is fulfilled at this very moment. Not latched: a later step may undo it."""
    terminated: NDArray[np.bool_]
    """``[n]`` whether the episode cannot go on, by the simulator's own rules: what had to stand has fallen. A
    success that one can go on from is none: who plays decides whether it ends the episode."""
    truncated: NDArray[np.bool_]
    """``[n]`` whether it is over because `SimulatorSpec.max_steps` is reached."""


class Simulator(Protocol):
    """Places with true physics and true success.

    Built by calling its class, or a function of the user's, with ``places=`` (at least 1) and ``image_size=``
    in pixels (0: its own size), ``horizon=`` (steps until truncation) where --horizon is set, and the
    keywords of --simulator-settings.

    A class may say more: ``most_places = 1`` when it can only have so many (more are refused with a
    `ConfigError`); ``usual_places = 4`` when so many are best where nobody says another number;
    ``any_image_size = True`` when it has no official picture; and a class method ``describe``
    with the same arguments, which returns the spec without building a scene.
    """

    @property
    def spec(self) -> SimulatorSpec:
        """Return what is known of it."""
        ...

    def reset(self, places: Sequence[int], starts: Sequence[SimStart]) -> Seen:
        """Begin one episode in each of n different places; the others are left as they are.

        Raises:
            ConfigError: A start that the simulator does not have.
        """
        ...

    def step(self, places: Sequence[int], actions: NDArray[np.float32], *, draw: bool) -> Stepped:
        """Carry out one action in each of n different places whose episodes are not over.

        Args:
            places: Those to step. With `SimulatorSpec.lockstep` all that play.
            actions: ``[n, A]`` float32, finite.
            draw: Whether pictures are wanted; nothing else depends on it.
        """
        ...

    def look(self, places: Sequence[int]) -> Seen:
        """Show what n places look like now, without a step."""
        ...

    def close(self) -> None:
        """Free what it holds. May be called again."""
        ...


@dataclass(frozen=True, kw_only=True)
class Demonstrator(Bounded):
    """How good the scripted expert is. All draws are made once per episode, from the episode's seed."""

    SECTION: ClassVar[str] = "expert."

    noise: tuple[float, float] = (0.0, 0.0)
    """Standard deviation of the noise on each action is drawn between these, in units of the action range."""
    offset: tuple[float, float] = (0.0, 0.0)
    """Constant error of the grasp position in metres (x, y): a badly calibrated demonstrator."""
    retry: bool = False
    """Whether it reaches again after a missed grasp."""
    spread: Annotated[float, AtLeast(0, "it is a deviation.", "Use 0.")] = 0.0
    """Standard deviation of a further grasp error in metres, drawn per episode."""
    place_offset: tuple[float, float] = (0.0, 0.0)
    """Constant error of where the object is set down, in metres (x, y)."""
    place_spread: Annotated[float, AtLeast(0, "it is a deviation.", "Use 0.")] = 0.0
    """Standard deviation of a further error of the same in metres, drawn per episode."""
    extra_decisions: Annotated[int, AtLeast(0, "it counts decisions.", "Use 1.", highest=10_000)] = 1
    """Decisions recorded after the task is solved."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.noise
        if not 0 <= low <= high:
            raise ConfigError(
                f"--expert.noise {low:g} {high:g}: it is drawn between these two deviations, the smaller one "
                "first. Use 0.0 0.2."
            )


@runtime_checkable
class HasExpert(Protocol):
    """A simulator that can show how a task is done: `asyncrl collect` and `evaluate --policy expert`."""

    def expert(
        self, place: int, settings: Demonstrator, rng: np.random.Generator
    ) -> Callable[[], NDArray[np.float32]]:
        """Return what chooses the next action of the episode that was just reset; it may see the true state.

        Args:
            place: Where the episode is played.
            settings: How good it shall be; what has no meaning here is ignored.
            rng: Source of all its randomness.

        Returns:
            A function that gives ``[A]`` float32 in the units of `Simulator.step`, called before each `step`.
        """
        ...


def stored_start(spec: SimulatorSpec, task_id: int, trial: int) -> SimStart:
    """Return a stored start of a simulator that has some.

    Example:
        >>> spec = SimulatorSpec(name="suite", tasks=("open it",), trials=50, max_steps=9, image_size=64)
        >>> stored_start(spec, 0, 7).name
        'suite/0/007'
    """
    return SimStart(
        name=f"{spec.name}/{task_id}/{trial:03d}",
        task=spec.tasks[task_id],
        task_id=task_id,
        trial=trial,
        seed=task_id * max(spec.trials, 1) + trial,
    )


def random_start(spec: SimulatorSpec, seed: int) -> SimStart:
    """Return the start that belongs to a seed. Tasks with stored starts take turns by the seed.

    Example:
        >>> spec = SimulatorSpec(name="table", tasks=("a", "b"), trials=0, max_steps=9, image_size=64)
        >>> random_start(spec, 12).name
        'table/seed-12'
    """
    if not spec.trials:
        task = spec.tasks[0] if len(spec.tasks) == 1 else ""
        return SimStart(name=f"{spec.name}/seed-{seed}", task=task, seed=seed)
    task_id = seed % len(spec.tasks)
    return SimStart(
        name=f"{spec.name}/{task_id}/seed-{seed}", task=spec.tasks[task_id], task_id=task_id, seed=seed
    )
