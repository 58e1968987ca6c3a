"""Read robomimic's HDF5 files: one demonstration after the other.

    data                   attribute  env_args  JSON: env_name, env_kwargs.control_freq
    data/demo_0 ...        in the order of their numbers; attributes, where there are some: task (our own
                           exports) or ep_meta (JSON with lang), success (of the whole demonstration)
        actions            [T, A]
        rewards            [T]                 for each action, where there are some
        obs/KEY            [T, H, W, 3] or [T, 3, H, W] uint8: a camera; [T, n] or [T]: numbers
        next_obs/KEY       what was seen after each action, where that is stored

Observation t was seen before action t.

Letters: T samples of a demonstration, H W picture size.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, first_line
from asyncrl.fitting.datasets.interface import (
    MOST_EPISODES,
    Demonstration,
    check_episode_bytes,
    check_key,
    check_numbers,
    check_width,
    chosen_cameras,
    episode_of,
    frames_of,
    kept_steps,
    placing_of,
    plain_task,
)
from asyncrl.fitting.datasets.pictures import check_resizable
from asyncrl.fitting.datasets.settings import NONE, DataSetSettings
from asyncrl.fitting.recordings import Looks
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.storage.untrusted import attribute_of, dataset_in, described_in, group_in, open_hdf5, parse_json

_PREFIX: Final = "demo_"
_STATES: Final = (
    ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"),
    ("robot_state",),
)
"""What is taken as the state where nothing was set: robosuite's, and that of our own exports."""
_AT_ONCE: Final = 32
"""Pictures that are read before they are resized."""
_UNREADABLE: Final = (
    *(OSError, KeyError, TypeError, ValueError, IndexError, RuntimeError, MemoryError, AttributeError),
    zlib.error,
)


def is_robomimic(path: Path) -> bool:
    """Tell whether a file is HDF5 with demonstrations in it."""
    try:
        with open_hdf5(path) as file:
            return any(map(_is_demo, map(str, group_in(file, "data"))))
    except _UNREADABLE:
        return False


def is_libero(path: Path) -> bool:
    """Tell whether a file has LIBERO's demonstrations: another order, and pictures upside down."""
    try:
        with open_hdf5(path) as file:
            data = group_in(file, "data")
            first = next(name for name in map(str, data) if _is_demo(name))
            return _of_libero(data, group_in(group_in(data, first), "obs"))
    except (*_UNREADABLE, StopIteration):
        return False


def _of_libero(data: h5py.Group, obs: h5py.Group) -> bool:
    return "problem_info" in data.attrs and "agentview_rgb" in obs and "ee_states" in obs


class RobomimicFile:
    """`DataSet` of one file."""

    def __init__(self, path: Path, settings: DataSetSettings) -> None:
        """Look into the file, without its pictures."""
        self.path = path
        self._settings = settings
        self._placing = placing_of(settings)
        self.notes: list[str] = []
        with _opened(path) as file:
            data = group_in(file, "data")
            numbers = sorted(int(name.removeprefix(_PREFIX)) for name in map(str, data) if _is_demo(name))
            if not numbers or len(numbers) > MOST_EPISODES:
                raise ValueError("there is no data/demo_0")
            self.demos = [f"{_PREFIX}{number}" for number in numbers][: settings.episodes or None]
            self._look_at(file, data)

    def _look_at(self, file: h5py.File, data: h5py.Group) -> None:
        settings, first = self._settings, self.demos[0]
        self._env = _json_of(data, "env_args")
        given = self._env.get("env_kwargs")
        kwargs: Mapping[str, Any] = given if isinstance(given, dict) else {}
        if kwargs.get("sample") == "decision":
            raise ConfigError(
                f"{self.path} has one sample per decision: the pictures and actions between are not in it. "
                "Export with --rate step."
            )
        demo = group_in(data, first)
        obs = group_in(demo, "obs")
        if _of_libero(data, obs):
            raise ConfigError(
                f"{self.path} has LIBERO's demonstrations, whose pictures come after their actions and are "
                "upside down. Import them first: asyncrl recordings import FILES --out FOLDER."
            )
        seen = list(map(str, obs))
        sizes = {key: size for key in seen if (size := _picture_size(obs, key))}
        self.cameras = chosen_cameras(str(self.path), list(sizes), settings)
        if not settings.cameras and len(sizes) > 1:
            self.notes.append(f"camera {self.cameras[0]} of {', '.join(sizes)} (--dataset.cameras)")
        others = [key for key in map(str, demo) if _dataset(demo, key) is not None]
        self.action = settings.action or "actions"
        check_key(str(self.path), "action", self.action, others)
        self.state = self._state_keys([key for key in seen if key not in sizes])
        of_state = (dataset_in(file, f"data/{first}/obs/{key}") for key in self.state)
        self._state_dim = sum(map(_width, of_state))
        self.reward = self._optional(settings.reward, "reward", "rewards", others)
        self.success = self._optional(settings.success, "success", "", others)
        self.looks = self._seen(file, sizes, kwargs)
        lengths = [len(dataset_in(file, f"data/{name}/{self.action}")) for name in self.demos]
        if min(lengths) < 1:
            raise ValueError("a demonstration has no action")
        self.frames = frames_of(np.array(lengths), settings.stride)
        if not self.success and settings.solved == "key" and settings.success != NONE:
            self._note_success(file, demo)

    def _seen(
        self, file: h5py.File, sizes: Mapping[str, tuple[int, int]], kwargs: Mapping[str, Any]
    ) -> Looks:
        placed = {self._placing.size_of(*sizes[key]) for key in self.cameras}
        for key in self.cameras:
            check_resizable(*sizes[key], self._placing, str(self.path))
        if len(placed) > 1:
            raise ConfigError(
                f"{self.path} has pictures of different sizes from {', '.join(self.cameras)}. Resize them "
                "(--dataset.image-size), or choose one (--dataset.cameras)."
            )
        ((height, width),) = placed
        rate = kwargs.get("control_freq", kwargs.get("steps_per_second", 0))
        known = type(rate) in (int, float) and 0 < rate <= 10_000
        name = self._env.get("env_name")
        return Looks(
            simulator=self._settings.simulator or (name if isinstance(name, str) and name else "robomimic"),
            cameras=tuple(key.removesuffix("_image") for key in self.cameras),
            height=height,
            width=width,
            action_dim=_width(dataset_in(file, f"data/{self.demos[0]}/{self.action}")),
            rate=float(rate) / self._settings.stride if known else 0.0,
        )

    def _optional(self, asked: str, flag: str, usual: str, keys: list[str]) -> str:
        """Return a key that may be missing; empty: it is."""
        if asked and asked != NONE:
            check_key(str(self.path), flag, asked, keys)
        return "" if asked == NONE else asked or (usual if usual in keys else "")

    def _state_keys(self, keys: list[str]) -> tuple[str, ...]:
        asked = self._settings.state
        if asked == (NONE,):
            return ()
        for key in asked:
            check_key(str(self.path), "state", key, keys)
        return asked or next((usual for usual in _STATES if set(usual) <= set(keys)), ())

    def _note_success(self, file: h5py.File, demo: h5py.Group) -> None:
        if "success" in demo.attrs:
            return
        if not self.reward or not _is_sparse(dataset_in(file, f"data/{self.demos[0]}/{self.reward}")[:]):
            self.notes.append(
                "nothing says when a task is solved: no episode counts as solved (--dataset.success KEY, or "
                "--dataset.solved end for demonstrations)"
            )

    def episodes(self) -> Iterator[SimulatedEpisode]:
        """Read one demonstration after the other. See `DataSet.episodes`."""
        with _opened(self.path) as file:
            for name in self.demos:
                yield episode_of(self._demonstration(file, name), self._settings)

    def _demonstration(self, file: h5py.File, name: str) -> Demonstration:
        where = f"{self.path} {name}"
        demo = group_in(group_in(file, "data"), name)
        group_in(demo, "obs")
        actions = check_numbers(
            where, self.action, _rows(dataset_in(file, f"data/{name}/{self.action}")), "action"
        )
        steps = len(actions)
        check_width(where, "an action", actions, self.looks.action_dim)
        states = self._states(file, name, steps)
        check_width(where, "the state", states, self._state_dim)
        rewards = np.zeros(steps, np.float32)
        if self.reward:
            stored = _rows(dataset_in(file, f"data/{name}/{self.reward}"))
            rewards = check_numbers(where, self.reward, stored, "reward")[:, 0]
        if len(rewards) != steps:
            raise ValueError(f"{name} has {steps} actions and {len(rewards)} rewards")
        check_episode_bytes(where, -(-steps // self._settings.stride) + 1, self.looks)
        return Demonstration(
            name=f"{self.looks.simulator}/{self.path.stem}/{name}",
            number=int(name.removeprefix(_PREFIX)),
            task=self._task(group_in(file, "data"), demo),
            pictures=self._pictures(file, name, steps),
            actions=actions,
            states=states,
            rewards=rewards,
            success=self._solved(file, name, demo, rewards),
        )

    def _pictures(self, file: h5py.File, name: str, steps: int) -> NDArray[np.uint8]:
        kept = kept_steps(steps, self._settings.stride)
        after = "next_obs" in group_in(group_in(file, "data"), name)
        shape = (len(kept) + after, len(self.cameras), self.looks.height, self.looks.width, 3)
        placed = np.empty(shape, np.uint8)
        for number, key in enumerate(self.cameras):
            stored = dataset_in(file, f"data/{name}/obs/{key}")
            if len(stored) != steps:
                raise ValueError(f"{name} has {steps} actions and {len(stored)} pictures of {key}")
            for begin in range(0, len(kept), _AT_ONCE):
                rows = kept[begin : begin + _AT_ONCE]
                block = stored[int(rows[0]) : int(rows[-1]) + 1 : self._settings.stride]
                for place, picture in enumerate(block, begin):
                    placed[place, number] = self._placing.place(_last_channels(picture))
            if after:
                last = dataset_in(file, f"data/{name}/next_obs/{key}")[-1]
                placed[-1, number] = self._placing.place(_last_channels(last))
        return placed

    def _states(self, file: h5py.File, name: str, steps: int) -> NDArray[np.float32]:
        kept = kept_steps(steps, self._settings.stride)
        after = "next_obs" in group_in(group_in(file, "data"), name)
        if not self.state:
            return np.zeros((len(kept) + after, 0), np.float32)
        parts = [_rows(dataset_in(file, f"data/{name}/obs/{key}")) for key in self.state]
        if any(len(part) != steps for part in parts):
            raise ValueError(f"{name} has {steps} actions, but states of another length")
        found = np.concatenate(parts, axis=1)[kept]
        if after:
            last = [_rows(dataset_in(file, f"data/{name}/next_obs/{key}"))[-1:] for key in self.state]
            found = np.concatenate([found, np.concatenate(last, axis=1)])
        return check_numbers(f"{self.path} {name}", "the state", found, "state")

    def _solved(
        self, file: h5py.File, name: str, demo: h5py.Group, rewards: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        if self.success:
            stored = _rows(dataset_in(file, f"data/{name}/{self.success}"))
            if len(stored) != len(rewards):
                raise ValueError(f"{name} has {len(rewards)} actions and {len(stored)} {self.success}")
            return check_numbers(f"{self.path} {name}", self.success, stored, "success")[:, 0] > 0.5
        nothing = np.zeros(len(rewards), bool)
        if self._settings.success == NONE:
            return nothing
        if "success" in demo.attrs:
            nothing[-1] = bool(attribute_of(demo, "success"))
            return nothing
        return rewards > 0 if _is_sparse(rewards) else nothing

    def _task(self, data: h5py.Group, demo: h5py.Group) -> str:
        told: Any = self._settings.task
        if not told and "task" in demo.attrs:
            told = attribute_of(demo, "task")
        for group, attribute, key in (
            (demo, "ep_meta", "lang"),
            (data, "problem_info", "language_instruction"),
        ):
            told = told or _json_of(group, attribute).get(key)
        if not isinstance(told, str) or not plain_task(told):
            raise ConfigError(
                f"{self.path} does not say what its demonstrations are to do. Say it: --dataset.task 'lift "
                "the cube'."
            )
        return plain_task(told)


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """Open a file; what is wrong in it while the block reads is said with its name."""
    try:
        with open_hdf5(path) as file:
            yield file
    except ConfigError:
        raise
    except _UNREADABLE as error:
        raise ConfigError(
            f"{path} cannot be read as a robomimic file ({first_line(error)}). Mend it, or leave it out."
        ) from error


def _is_demo(name: str) -> bool:
    return name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdecimal() and len(name) < 24


def _json_of(group: h5py.Group, name: str) -> dict[str, Any]:
    """Return an attribute that is a JSON object, else an empty one: nothing depends on it alone."""
    if name not in group.attrs:
        return {}
    try:
        found = attribute_of(group, name)
        return parse_json(found if isinstance(found, bytes) else str(found).encode(), dict)
    except ValueError:
        return {}


def _dataset(group: h5py.Group, name: str) -> h5py.Dataset | None:
    try:
        return described_in(group, name)
    except TypeError:  # A group, or a link to another file.
        return None


def _picture_size(obs: h5py.Group, key: str) -> tuple[int, int] | None:
    """Return height and width of a camera's pictures; None: these are no pictures."""
    found = _dataset(obs, key)
    if found is None or found.ndim != 4 or found.dtype != np.uint8:
        return None
    if found.shape[-1] == 3:
        return found.shape[1], found.shape[2]
    return (found.shape[2], found.shape[3]) if found.shape[1] == 3 else None


def _last_channels(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return picture if picture.shape[-1] == 3 else picture.transpose(1, 2, 0)


def _rows(dataset: h5py.Dataset) -> NDArray[Any]:
    """Read ``[T, n]`` numbers; ``[T]`` become ``[T, 1]``."""
    found = dataset[:]
    return found[:, None] if found.ndim == 1 else found


def _width(dataset: h5py.Dataset) -> int:
    return dataset.shape[1] if dataset.ndim > 1 else 1


def _is_sparse(rewards: NDArray[Any]) -> bool:
    return bool(np.isin(rewards, (0, 1)).all())
