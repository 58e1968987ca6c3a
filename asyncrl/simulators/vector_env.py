"""Play episodes in any `gymnasium.vector.VectorEnv` that shows a picture.

An environment of this kind steps all its places together, and depending on its mode resets by itself those
that ended. Neither shows here: a place whose episode ended waits for `reset`, and what happens in it
meanwhile is nobody's episode. So the three modes give the same episodes for the same starts and actions:

    DISABLED     an ended place may not be stepped: it is reset, with its own seed, before the others step
    NEXT_STEP    the step after the end resets it; that step, and all until `reset`, are ignored
    SAME_STEP    the step of the end resets it; what the episode ended with is in info["final_obs"]

Dimension letters:
    n  places addressed      P  places in all      H, W  picture size in pixels (equal)
    Q  numbers of state      A  numbers per action

Read the spaces of a gymnasium environment: which observation is the picture, how wide an action is.

Looks at spaces by their attributes and imports no gymnasium: who made an environment has imported it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, RunError
from asyncrl.simulators.interface import Seen, SimStart, SimulatorSpec, Stepped


class ActionBounds(NamedTuple):
    """Of a box of ``A`` numbers."""

    low: NDArray[np.float64]
    """``[A]``."""
    high: NDArray[np.float64]
    """``[A]``."""
    dtype: np.dtype[Any]


def leaves_of(space: Any, above: str = "") -> dict[str, Any]:
    """Return the spaces of an observation by path: ``sensors/rgb``; of one that is no Dict by ''."""
    inner = getattr(space, "spaces", None)
    if not isinstance(inner, Mapping):
        return {above: space}
    found: dict[str, Any] = {}
    for key, value in inner.items():
        found |= leaves_of(value, f"{above}/{key}" if above else str(key))
    return found


def value_at(observation: Any, path: str) -> Any:
    """Return the part of an observation that `leaves_of` calls `path`."""
    for key in path.split("/") if path else ():
        observation = observation[key]
    return observation


def find_picture(space: Any, image_key: str) -> tuple[str, int]:
    """Return path and side in pixels of the picture in an observation.

    Args:
        image_key: Path of the picture; empty: the only one that looks like a picture.
    """
    leaves = leaves_of(space)
    has = f"Its observation has {', '.join(_describe(path, leaf) for path, leaf in leaves.items())}."
    if image_key:
        if image_key not in leaves:
            raise ConfigError(f"image_key is {image_key!r}, which the environment does not show. {has}")
        if not _is_picture(leaves[image_key]):
            raise ConfigError(
                f"image_key is {image_key!r}, which is no picture: uint8 of [H, W, 3], with colours last, is "
                f"needed. {has} Turn it with gymnasium.wrappers.TransformObservation."
            )
        path = image_key
    else:
        pictures = [path for path, leaf in leaves.items() if _is_picture(leaf)]
        if not pictures:
            raise ConfigError(
                "The environment shows no picture: uint8 of [H, W, 3], with colours last, is needed. "
                f"{has} Add one with gymnasium.wrappers.AddRenderObservation, or turn one that is there with "
                "gymnasium.wrappers.TransformObservation."
            )
        if len(pictures) > 1:
            raise ConfigError(
                f"The environment shows several pictures: {', '.join(pictures)}. Say which one policies see: "
                f"VectorEnvSimulator(env, image_key={pictures[0]!r})."
            )
        (path,) = pictures
    height, width, _ = leaves[path].shape
    if height != width:
        raise ConfigError(
            f"The picture {path!r} has {height} x {width} pixels, but pictures must be square. Cut or resize "
            "it with gymnasium.wrappers.ResizeObservation or TransformObservation."
        )
    return path, height


def state_width(space: Any, state_key: str) -> int:
    """Return how many numbers the state called `state_key` has; 0 without a key."""
    if not state_key:
        return 0
    leaves = leaves_of(space)
    leaf = leaves.get(state_key)
    if leaf is None or not hasattr(leaf, "low") or _is_picture(leaf):
        raise ConfigError(
            f"state_key is {state_key!r}, which is no box of numbers here. The environment's observation "
            f"has {', '.join(_describe(path, found) for path, found in leaves.items())}."
        )
    return int(np.prod(leaf.shape))


def action_bounds(space: Any) -> ActionBounds:
    """Read the action space of one environment."""
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is None or high is None or len(space.shape) != 1 or not np.issubdtype(space.dtype, np.floating):
        raise ConfigError(
            f"The environment's actions are {space}, but policies choose a row of real numbers: a Box of "
            "shape (A,) with a float dtype. Turn them with gymnasium.wrappers.TransformAction."
        )
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ConfigError(
            f"The environment's actions have no finite bounds ({space}), so nobody can say how large an "
            "action is. Give them bounds with gymnasium.wrappers.TransformAction."
        )
    return ActionBounds(np.asarray(low, np.float64), np.asarray(high, np.float64), np.dtype(space.dtype))


def _is_picture(space: Any) -> bool:
    shape = getattr(space, "shape", None)
    return shape is not None and len(shape) == 3 and shape[-1] == 3 and space.dtype == np.uint8


def _describe(path: str, space: Any) -> str:
    dtype, shape = getattr(space, "dtype", None), getattr(space, "shape", None)
    return f"{path or 'one array'} ({dtype}{list(shape or ())})"


_MODES: Final = ("DISABLED", "NEXT_STEP", "SAME_STEP")


class VectorEnvSimulator:
    """The places of a vector environment, one for each of its environments.

    A success is what the environment says in ``info[success_key]``; in a step in which it says nothing, an
    episode that ended (`terminated`, not by its length) with a positive reward. Rewards are dense. An episode
    is truncated when the environment says so, or after `max_steps`.

    A place whose episode was begun must be in every `step` until it is over; one that is left out is stepped
    with the idle action, which ends its episode without a result.

    Args:
        env: Its resets must follow ``options["reset_mask"]``, as those of `SyncVectorEnv` and
            `AsyncVectorEnv` do, and its episodes from their seeds.
        image_key: Path of the picture in the observation, like ``sensors/rgb``: uint8 ``[H, W, 3]``, square.
            Empty: the only one that looks like one.
        task: The instruction of every episode; empty: each reset says its own.
        task_key: Where `info` of a reset says it; empty: under ``task``.
        state_key: Path of what policies are given as the robot's state, flattened. Empty: nothing.
        success_key: Where `info` of a step says whether the task is fulfilled.
        idle: ``[A]`` the action that moves nothing, for places without an episode. None: zeros, or the bound
            next to zero.
        max_steps: Steps until an episode is truncated; 0: ``max_episode_steps`` of the environment's
            registration.
        name: In starts and recordings; empty: the environment's registered name.

    Raises:
        ConfigError: The environment does not have what a policy needs, or an option does not fit it.
    """

    def __init__(
        self,
        env: Any,
        *,
        image_key: str = "",
        task: str = "",
        task_key: str = "",
        state_key: str = "",
        success_key: str = "success",
        idle: Sequence[float] | None = None,
        max_steps: int = 0,
        name: str = "",
    ) -> None:
        if task and task_key:
            raise ConfigError(
                f"task is {task!r} and task_key is {task_key!r}, but the instruction comes from one of them. "
                "Leave one out."
            )
        self._env, self._mode = env, _mode_of(env)
        space = env.single_observation_space
        self._image_key, size = find_picture(space, image_key)
        self._state_key, self._success_key = state_key, success_key
        self._task_key = "" if task else task_key or "task"
        self._bounds = action_bounds(env.single_action_space)
        self._idle = _idle_action(idle, self._bounds.low, self._bounds.high)
        places, width = int(env.num_envs), state_width(space, state_key)
        self._spec = SimulatorSpec(
            name=name or _registered_name(env),
            tasks=(_plain(task),) if task else (),
            trials=0,
            max_steps=max_steps or _registered_steps(env),
            image_size=size,
            state_dim=width,
            action_low=tuple(map(float, self._bounds.low)),
            action_high=tuple(map(float, self._bounds.high)),
            idle=tuple(map(float, self._idle)),
            reward="dense",
            places=places,
            lockstep=True,
        )
        self._playing = np.zeros(places, np.bool_)
        """Places with an episode under way."""
        self._must_reset = np.ones(places, np.bool_)
        """Places that the environment cannot step before it reset them."""
        self._steps = np.zeros(places, np.int64)
        self._seeds = np.zeros(places, np.int64)
        """Of each place's last episode."""
        self._images = np.zeros((places, size, size, 3), np.uint8)
        """What each place's episode showed last."""
        self._states = np.zeros((places, width), np.float32)
        self._shown: NDArray[np.uint8] | None = None
        """``[P, H, W, 3]`` what the environment itself showed last."""
        self._closed = False

    @property
    def spec(self) -> SimulatorSpec:
        """Return what is known of it."""
        return self._spec

    def reset(self, places: Sequence[int], starts: Sequence[SimStart]) -> Seen:
        """See `Simulator.reset`."""
        rows = list(places)
        for start in starts:
            if start.trial >= 0 or start.seed < 0:
                raise ConfigError(
                    f"The start {start.name!r} is a stored one, but {self._spec.name} has none: every seed "
                    "from 0 is a start."
                )
        self._seeds[rows] = [start.seed for start in starts]
        mask = self._must_reset.copy()
        mask[rows] = True
        observation, infos = self._reset_env(mask)
        self._note_seen(observation, rows)
        tasks = tuple(self._task_of(infos, row) for row in rows)
        self._playing[rows], self._steps[rows] = True, 0
        return self.look(rows)._replace(tasks=tasks)

    def step(self, places: Sequence[int], actions: NDArray[np.float32], *, draw: bool) -> Stepped:
        """See `Simulator.step`."""
        rows = list(places)
        self._check_actions(rows, actions)
        left_out = np.ones(len(self._playing), np.bool_)
        left_out[rows] = False
        self._playing[left_out] = False
        if self._must_reset.any():
            self._reset_env(self._must_reset.copy())
        batch = np.tile(self._idle, (len(self._playing), 1))
        batch[rows] = np.clip(actions, self._bounds.low, self._bounds.high)
        observation, *numbers, infos = self._env.step(batch.astype(self._bounds.dtype))
        all_rewards, all_terminated, all_truncated = map(_array, numbers)
        self._shown = self._pictures(observation)
        if self._mode == "DISABLED":
            self._must_reset = (all_terminated | all_truncated).astype(np.bool_)
        rewards = all_rewards[rows].astype(np.float32)
        if not np.isfinite(rewards).all():
            raise RunError(f"{self._spec.name} gave the rewards {rewards} in the places {rows}: not finite.")
        terminated, truncated = all_terminated[rows].astype(bool), all_truncated[rows].astype(bool)
        ended = [row for row, over in zip(rows, terminated | truncated, strict=True) if over]
        self._note_seen(observation, rows)
        if self._mode == "SAME_STEP":
            self._note_last(infos, ended)
        self._steps[rows] += 1
        truncated = (truncated | (self._steps[rows] >= self._spec.max_steps)) & ~terminated
        self._playing[rows] = ~(terminated | truncated)
        solved = terminated & (rewards > 0)
        success = np.array(
            [
                self._success_of(infos, row, row in ended, bool(other))
                for row, other in zip(rows, solved, strict=True)
            ],
            np.bool_,
        )
        return Stepped(self.look(rows) if draw else None, rewards, success, terminated, truncated)

    def look(self, places: Sequence[int]) -> Seen:
        """See `Simulator.look`."""
        rows = list(places)
        return Seen(self._images[rows][:, None].copy(), self._states[rows].copy())

    def close(self) -> None:
        """See `Simulator.close`."""
        if not self._closed:
            self._closed = True
            self._env.close()

    def _check_actions(self, rows: list[int], actions: NDArray[np.float32]) -> None:
        width = self._spec.action_dim
        if actions.shape != (len(rows), width) or not np.isfinite(actions).all():
            raise ValueError(f"actions must be finite [{len(rows)}, {width}], got shape {actions.shape}")
        if over := [row for row in rows if not self._playing[row]]:
            raise ValueError(f"places {over} have no episode under way: it ended, or was left out of a step")

    def _reset_env(self, mask: NDArray[np.bool_]) -> tuple[Any, Mapping[str, Any]]:
        """Reset the places of a mask ``[P]``, each with its seed; return observation and infos of all."""
        seeds = [int(seed) if masked else None for seed, masked in zip(self._seeds, mask, strict=True)]
        observation, infos = self._env.reset(seed=seeds, options={"reset_mask": mask.copy()})
        shown = self._pictures(observation)
        if self._shown is not None:
            kept = [int(i) for i in np.flatnonzero(~mask) if not np.array_equal(shown[i], self._shown[i])]
            if kept:
                raise RunError(
                    f"{self._spec.name} was asked to reset the places {np.flatnonzero(mask).tolist()}, but "
                    f"{kept} show something else now too. Its reset must follow options['reset_mask'], as "
                    "gymnasium.vector.SyncVectorEnv does it; else use one place: SyncVectorEnv([make])."
                )
        self._shown = shown
        self._must_reset &= ~mask
        return observation, infos

    def _pictures(self, observation: Any) -> NDArray[np.uint8]:
        """Copy the pictures of all places ``[P, H, W, 3]`` out of an observation."""
        return np.array(_array(value_at(observation, self._image_key)), np.uint8)

    def _note_seen(self, observation: Any, rows: list[int]) -> None:
        """Keep what places show."""
        self._images[rows] = _array(value_at(observation, self._image_key))[rows]
        if self._spec.state_dim:
            states = _array(value_at(observation, self._state_key))[rows]
            self._states[rows] = states.reshape(len(rows), -1)

    def _note_last(self, infos: Mapping[str, Any], ended: list[int]) -> None:
        """Keep what episodes showed at their end: with SAME_STEP the observation is the next one's first."""
        for row in ended:
            last = _row_of(infos, "final_obs", row)
            if last is None:
                raise RunError(
                    f"{self._spec.name} says autoreset_mode SAME_STEP, but info['final_obs'] does not have "
                    f"what the episode in place {row} ended with. Use NEXT_STEP or DISABLED."
                )
            self._images[row] = _array(value_at(last, self._image_key))
            if self._spec.state_dim:
                self._states[row] = _array(value_at(last, self._state_key)).reshape(-1)

    def _success_of(self, infos: Mapping[str, Any], row: int, ended: bool, otherwise: bool) -> bool:
        """Say whether the task is fulfilled in a place; `otherwise` where the environment does not say it."""
        if ended and self._mode == "SAME_STEP":
            infos = infos.get("final_info", {})
        said = _row_of(infos, self._success_key, row)
        return otherwise if said is None else bool(said)

    def _task_of(self, infos: Mapping[str, Any], row: int) -> str:
        """Return the instruction of the episode that was just begun in a place."""
        if not self._task_key:
            return self._spec.tasks[0]
        said = _row_of(infos, self._task_key, row)
        if not isinstance(said, str) or not _plain(said):
            names = [name for name in infos if not name.startswith("_")]
            raise ConfigError(
                f"After a reset of {self._spec.name}, info[{self._task_key!r}] is {said!r} in place {row}, "
                f"which is no instruction (info has: {', '.join(names) or 'nothing'}). Put one there, or say "
                "where it is (VectorEnvSimulator(env, task_key=...)), or give all one (task='push it')."
            )
        return _plain(said)


def _array(values: Any) -> NDArray[Any]:
    """Return numbers as an array of numpy, also those of a tensor on a device."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def _row_of(infos: Mapping[str, Any], key: str, row: int) -> Any:
    """Return what info says of one place, or None. Beside a key there may be a mask of places, ``_key``."""
    if key not in infos or not bool(_array(infos.get(f"_{key}", np.ones(row + 1, np.bool_)))[row]):
        return None
    values = infos[key]
    if isinstance(values, Mapping):  # Some keep what ended as one observation of all places.
        return {name: _row_of(values, name, row) for name in values}
    return values[row]


def _plain(task: str) -> str:
    return task.strip().rstrip(".").lower()


def _mode_of(env: Any) -> str:
    mode = getattr(env.metadata.get("autoreset_mode"), "name", "")
    if mode not in _MODES:
        raise ConfigError(
            f"{type(env).__name__} does not say when it resets by itself. Set metadata['autoreset_mode'] to "
            f"one of gymnasium.vector.AutoresetMode: {', '.join(_MODES)}."
        )
    return mode


def _registration(env: Any) -> Any:
    """Return gymnasium's registration of the environments, or None: made without `gymnasium.make`."""
    if env.spec is not None or not hasattr(env, "get_attr"):
        return env.spec
    return next(iter(env.get_attr("spec")), None)


def _registered_name(env: Any) -> str:
    registration = _registration(env)
    return "vector_env" if registration is None else registration.id.replace("/", "_")


def _registered_steps(env: Any) -> int:
    steps = getattr(_registration(env), "max_episode_steps", None)
    if not steps:
        raise ConfigError(
            "The environment does not say after how many steps an episode is truncated. Say it: "
            "VectorEnvSimulator(env, max_steps=200)."
        )
    return int(steps)


def _idle_action(
    idle: Sequence[float] | None, low: NDArray[np.float64], high: NDArray[np.float64]
) -> NDArray[np.float64]:
    if idle is None:
        return np.clip(np.zeros(len(low)), low, high)
    action = np.asarray(idle, np.float64)
    if action.shape != low.shape or not ((action >= low) & (action <= high)).all():
        raise ConfigError(
            f"idle is {list(idle)}, but an action is {len(low)} numbers between {low.tolist()} and "
            f"{high.tolist()}."
        )
    return action
