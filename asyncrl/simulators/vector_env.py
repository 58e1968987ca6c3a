"""Play episodes in any `gymnasium.vector.VectorEnv` with a picture. Imports no gymnasium.

Such an environment steps all its places together, and may reset ended ones by itself. Here an ended place
waits for `reset`, so the modes of automatic reset give the same episodes for the same starts and actions:

    DISABLED     an ended place may not be stepped: it is reset, with its own seed, before the others step
    NEXT_STEP    the step after the end resets it; that step, and all until `reset`, are ignored
    SAME_STEP    the step of the end resets it; the last observation is in info["final_obs"]

Letters: n places addressed, P in all, H W picture size in pixels (equal), Q numbers of state, A per action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, RunError
from asyncrl.facts import check_array, check_instruction, check_pictures, check_verdicts
from asyncrl.simulators.interface import Seen, SimStart, SimulatorSpec, Stepped, check_step


def _leaves_of(space: Any, above: str = "") -> dict[str, Any]:
    inner = getattr(space, "spaces", None)
    if not isinstance(inner, Mapping):
        return {above: space}
    leaves: dict[str, Any] = {}
    for key, value in inner.items():
        leaves |= _leaves_of(value, f"{above}/{key}" if above else str(key))
    return leaves


def _value_at(observation: Any, path: str) -> NDArray[Any]:
    for key in path.split("/") if path else ():
        observation = observation[key]
    return _array(observation)


def _find_picture(space: Any, image_key: str) -> tuple[str, int]:
    leaves = _leaves_of(space)
    shapes: dict[str, tuple[int, ...]] = {
        path: getattr(leaf, "shape", None) or () for path, leaf in leaves.items()
    }
    pictures = [
        path
        for path, shape in shapes.items()
        if len(shape) == 3 and shape[0] == shape[1] and shape[2] == 3 and leaves[path].dtype == np.uint8
        if image_key in ("", path)
    ]
    if len(pictures) != 1:
        seen = f"{len(pictures) or 'no'} square picture{'s' * (len(pictures) > 1)}"
        seen += f" called {image_key}" if image_key else ""
        raise ConfigError(
            f"The environment shows {seen}, one of uint8 [H, H, 3] with colours last is needed. Its "
            f"observation has {_describe(leaves)}. Name it by VectorEnvSimulator(env, image_key=...); "
            "gymnasium.wrappers.TransformObservation and ResizeObservation turn one, "
            "AddRenderObservation adds one."
        )
    return pictures[0], shapes[pictures[0]][0]


def _state_width(space: Any, state_key: str) -> int:
    if not state_key:
        return 0
    leaves = _leaves_of(space)
    leaf = leaves.get(state_key)
    if leaf is None or not hasattr(leaf, "low") or len(leaf.shape) == 3:
        raise ConfigError(
            f"state_key is {state_key!r}, which is no box of numbers here. The environment's observation "
            f"has {_describe(leaves)}."
        )
    return int(np.prod(leaf.shape))


def _action_bounds(space: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if (
        (low is None or high is None or len(space.shape) != 1)
        or not np.issubdtype(space.dtype, np.floating)
        or not (np.isfinite(low).all() and np.isfinite(high).all())
    ):
        raise ConfigError(
            f"The environment's actions are {space}, but policies choose a row of real numbers within finite "
            "bounds: a Box of shape (A,) with a float dtype. Turn them with "
            "gymnasium.wrappers.TransformAction."
        )
    return np.asarray(low, np.float64), np.asarray(high, np.float64)


def _describe(leaves: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{path or 'one array'} ({getattr(leaf, 'dtype', None)}{list(getattr(leaf, 'shape', None) or ())})"
        for path, leaf in leaves.items()
    )


class VectorEnvSimulator:
    """The places of a vector environment, one for each of its environments.

    A success is ``info[success_key]`` of a step; where info has none, a termination with a positive reward.
    Rewards are dense. An episode is truncated by the environment, or after `max_steps`. A place that is left
    out of a `step` is stepped with the idle action, which ends its episode without a result.

    Args:
        env: Its resets must follow ``options["reset_mask"]``, as `SyncVectorEnv`'s do, and its episodes from
            their seeds.
        image_key: Path of the picture in the observation, like ``sensors/rgb``: uint8 ``[H, W, 3]``, square.
            Empty: the only picture.
        task: The instruction of every episode; empty: ``info[task_key]`` of each reset.
        task_key: Empty: ``task``. Unused with `task`.
        state_key: Path of the robot's state, flattened for policies. Empty: none.
        success_key: Key of a bool in info.
        idle: ``[A]`` the action that moves nothing. None: zeros, or the bound next to zero.
        max_steps: Steps until an episode is truncated; 0: ``max_episode_steps`` of the registration.
        name: Name in starts and recordings; empty: the registered one.
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
        self._env, self._mode = env, _mode_of(env)
        space = env.single_observation_space
        self._image_key, size = _find_picture(space, image_key)
        self._state_key, self._success_key = state_key, success_key
        self._task_key = "" if task else task_key or "task"
        self._low, self._high = _action_bounds(env.single_action_space)
        self._idle = _idle_action(idle, self._low, self._high)
        places, width = int(env.num_envs), _state_width(space, state_key)
        registration = env.spec
        if registration is None and hasattr(env, "get_attr"):
            registration = next(iter(env.get_attr("spec")), None)
        max_steps = max_steps or getattr(registration, "max_episode_steps", None) or 0
        if not max_steps:
            raise ConfigError(
                "The environment does not say after how many steps an episode is truncated. Say it: "
                "VectorEnvSimulator(env, max_steps=200)."
            )
        self.spec = SimulatorSpec(
            name=name or getattr(registration, "id", "vector_env").replace("/", "_"),
            tasks=(task,) if task else (),
            trials=0,
            max_steps=int(max_steps),
            image_size=size,
            state_dim=width,
            action_low=tuple(map(float, self._low)),
            action_high=tuple(map(float, self._high)),
            idle=tuple(map(float, self._idle)),
            reward="dense",
            places=places,
            lockstep=True,
        )
        self._playing = np.zeros(places, np.bool_)
        self._must_reset = np.ones(places, np.bool_)  # Places to be reset before the environment can step.
        self._steps = np.zeros(places, np.int64)
        self._seeds = np.zeros(places, np.int64)  # Of each place's last episode.
        self._images = np.zeros((places, size, size, 3), np.uint8)  # Newest picture of each place's episode.
        self._states = np.zeros((places, width), np.float32)
        self._shown: NDArray[np.uint8] | None = None  # [P, H, W, 3], the environment's newest.

    def reset(self, places: Sequence[int], starts: Sequence[SimStart]) -> Seen:
        """Begin one episode in each of n places."""
        rows = list(places)
        self._seeds[rows] = [start.seed for start in starts]
        mask = self._must_reset.copy()
        mask[rows] = True
        observation, infos = self._reset_env(mask)
        self._keep_seen(observation, rows)
        tasks = tuple(self._task_of(infos, row) for row in rows)
        self._playing[rows], self._steps[rows] = True, 0
        return self.look(rows)._replace(tasks=tasks)

    def step(self, places: Sequence[int], actions: NDArray[np.float32], *, draw: bool) -> Stepped:
        """Carry out one action in each of n places."""
        rows = list(places)
        check_step(rows, actions, self.spec.action_dim, self._playing)
        if self._must_reset.any():
            self._reset_env(self._must_reset.copy())
        batch = np.tile(self._idle, (len(self._playing), 1))
        batch[rows] = np.clip(actions, self._low, self._high)
        observation, *numbers, infos = self._env.step(batch.astype(self._env.single_action_space.dtype))
        shape, where = (len(self._playing),), f"step() of {self.spec.name}: its"
        all_rewards = check_array(_array(numbers[0]), shape, f"{where} rewards").astype(np.float32)
        all_terminated = check_verdicts(_array(numbers[1]), shape, f"{where} terminated")
        all_truncated = check_verdicts(_array(numbers[2]), shape, f"{where} truncated")
        self._shown = self._picture(observation, len(batch))
        if self._mode == "DISABLED":
            self._must_reset = all_terminated | all_truncated
        rewards, terminated, truncated = all_rewards[rows], all_terminated[rows], all_truncated[rows]
        ended = [row for row, over in zip(rows, terminated | truncated, strict=True) if over]
        self._keep_seen(observation, rows)
        last_infos = infos.get("final_info", {}) if self._mode == "SAME_STEP" else infos
        if self._mode == "SAME_STEP":
            self._keep_last(infos, ended)
        self._steps[rows] += 1
        truncated = (truncated | (self._steps[rows] >= self.spec.max_steps)) & ~terminated
        self._playing[:] = False
        self._playing[rows] = ~(terminated | truncated)
        success = terminated & (rewards > 0)
        for i, row in enumerate(rows):
            given = _row_of(last_infos if row in ended else infos, self._success_key, row, success)
            if given is not success:
                success[i] = check_verdicts(_array(given), (), f"{where} info[{self._success_key!r}]")
        return Stepped(self.look(rows) if draw else None, rewards, success, terminated, truncated)

    def look(self, places: Sequence[int]) -> Seen:
        """Return the newest observations of n places' episodes."""
        rows = list(places)
        return Seen(self._images[rows][:, None].copy(), self._states[rows].copy())

    def close(self) -> None:
        """Close the environment. May be called again."""
        self._env.close()

    def _reset_env(self, mask: NDArray[np.bool_]) -> tuple[Any, Mapping[str, Any]]:
        seeds = [int(seed) if masked else None for seed, masked in zip(self._seeds, mask, strict=True)]
        observation, infos = self._env.reset(seed=seeds, options={"reset_mask": mask.copy()})
        shown = self._picture(observation, len(mask))
        if self._shown is not None:
            kept = [int(i) for i in np.flatnonzero(~mask) if not np.array_equal(shown[i], self._shown[i])]
            if kept:
                raise RunError(
                    f"{self.spec.name} was asked to reset the places {np.flatnonzero(mask).tolist()}, but "
                    f"{kept} show something else now too. Its reset must follow options['reset_mask'], as "
                    "gymnasium.vector.SyncVectorEnv does it; else use one place: SyncVectorEnv([make])."
                )
        self._shown = shown
        self._must_reset &= ~mask
        return observation, infos

    def _picture(self, observation: Any, *places: int) -> NDArray[np.uint8]:
        found, size = _value_at(observation, self._image_key), self.spec.image_size
        check_pictures(found, (*places, size, size, 3), f"pictures of {self.spec.name}")
        return found.copy()

    def _keep_seen(self, observation: Any, rows: list[int]) -> None:
        assert self._shown is not None
        self._images[rows] = self._shown[rows]
        if self.spec.state_dim:
            self._states[rows] = _value_at(observation, self._state_key)[rows].reshape(len(rows), -1)

    def _keep_last(self, infos: Mapping[str, Any], ended: list[int]) -> None:
        # With SAME_STEP the present observations are the next episode's.
        for row in ended:
            last = _row_of(infos, "final_obs", row)
            if last is None:
                raise RunError(
                    f"{self.spec.name} has autoreset_mode SAME_STEP, but info['final_obs'] does not have "
                    f"what the episode in place {row} ended with. Use NEXT_STEP or DISABLED."
                )
            self._images[row] = self._picture(last)
            if self.spec.state_dim:
                self._states[row] = _value_at(last, self._state_key).reshape(-1)

    def _task_of(self, infos: Mapping[str, Any], row: int) -> str:
        if not self._task_key:
            return self.spec.tasks[0]
        task = _row_of(infos, self._task_key, row)
        names = ", ".join(name for name in infos if not name.startswith("_")) or "nothing"
        return check_instruction(
            task,
            f"After a reset of {self.spec.name}, info[{self._task_key!r}] of place {row} (info has {names}; "
            "VectorEnvSimulator(env, task_key=...) names another key, task='push it' gives all one)",
        )


def _array(values: Any) -> NDArray[Any]:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def _row_of(infos: Mapping[str, Any], key: str, row: int, absent: Any = None) -> Any:
    # Next to a key there may be a mask of places that have a value, ``_key``.
    if key not in infos or not bool(_array(infos.get(f"_{key}", np.ones(row + 1, np.bool_)))[row]):
        return absent
    values = infos[key]
    if isinstance(values, Mapping):  # Some keep what ended as one observation of all places.
        return {name: _row_of(values, name, row) for name in values}
    return values[row]


def _mode_of(env: Any) -> str:
    mode = getattr(env.metadata.get("autoreset_mode"), "name", "")
    if mode not in ("DISABLED", "NEXT_STEP", "SAME_STEP"):
        raise ConfigError(
            f"{type(env).__name__} does not say when it resets by itself. Set metadata['autoreset_mode'] to "
            "one of gymnasium.vector.AutoresetMode: DISABLED, NEXT_STEP, SAME_STEP."
        )
    return mode


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
