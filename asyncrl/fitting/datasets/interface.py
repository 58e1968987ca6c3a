"""What is alike for all data sets of other programs: what they look like, and how samples become an episode.

A sample of such a data set is what was seen, then what was done. Ours are the other way round: action i
produced frame i. So an episode of T samples becomes one of T + 1 frames: its first action is the idle one,
and its last frame is what was seen after the last action, where the data set has that, and else its last
picture once more.

Letters: T samples of an episode, F = T + 1 its frames, H W picture size, K cameras, Q numbers of state,
A numbers per action.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.fitting.datasets.pictures import Placing
from asyncrl.fitting.datasets.settings import DataSetSettings
from asyncrl.fitting.recordings import Looks
from asyncrl.records import dummy_action
from asyncrl.simulators.interface import SimStart
from asyncrl.simulators.rollout import SimulatedEpisode

EPISODE_BYTES: Final = 4 * 2**30
"""Pictures of one episode, as they are placed: those of one are in memory at a time."""
MOST_EPISODES: Final = 10_000_000
MOST_SAMPLES: Final = 500_000_000
MOST_NUMBERS: Final = 4096
"""Of an action or of a state."""


class DataSet(Protocol):
    """A data set of another program, open to be read as a stream: one episode is in memory."""

    @property
    def path(self) -> Path:
        """Return the file or folder."""
        ...

    @property
    def looks(self) -> Looks:
        """Return what its episodes look like, as they are read."""
        ...

    @property
    def frames(self) -> int:
        """Count the frames of all episodes, as they are read."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Return what was chosen where the settings left it open, in sentences for the user."""
        ...

    def episodes(self) -> Iterator[SimulatedEpisode]:
        """Read one episode after the other.

        Raises:
            ConfigError: Something is damaged; says what and where.
        """
        ...


@dataclass(kw_only=True)
class Demonstration:
    """Samples of one episode, and what was seen after the last one if that is known."""

    name: str
    """Of its start."""
    number: int
    """Among the episodes of its data set."""
    task: str
    pictures: NDArray[np.uint8]
    """``[T or T + 1, K, H, W, 3]``, placed."""
    actions: NDArray[np.float32]
    """``[T, A]``."""
    states: NDArray[np.float32]
    """``[T or T + 1, Q]``."""
    rewards: NDArray[np.float32]
    """``[T]`` for the action of each sample."""
    success: NDArray[np.bool_]
    """``[T]`` whether the task was solved after the action of each sample."""


def kept_steps(samples: int, stride: int) -> NDArray[np.int64]:
    """Return the samples that are seen when only every so many steps are taken.

    Example:
        >>> kept_steps(7, 3).tolist()
        [0, 3, 6]
    """
    return np.arange(0, samples, stride)


def strided(demonstration: Demonstration, settings: DataSetSettings) -> Demonstration:
    """Take only every so many steps; pictures and states are taken already.

    A step's action is the last of those it replaces, or their sum but for the last number's; its reward is
    their sum, and it is solved if one of them is.
    """
    stride = settings.stride
    if stride == 1:
        return demonstration
    begins = kept_steps(len(demonstration.actions), stride)
    ends = np.minimum(begins + stride, len(demonstration.actions)) - 1
    actions = demonstration.actions[ends]
    if settings.between == "sum":
        actions = actions.copy()
        actions[:, :-1] = np.add.reduceat(demonstration.actions[:, :-1], begins, axis=0)
    demonstration.actions = actions
    demonstration.rewards = np.add.reduceat(demonstration.rewards, begins)
    demonstration.success = np.logical_or.reduceat(demonstration.success, begins)
    return demonstration


def episode_of(demonstration: Demonstration, settings: DataSetSettings) -> SimulatedEpisode:
    """Turn samples into an episode of ours.

    Where the last picture stands for what came after it, both of them have the verdict of the last action:
    one picture cannot be both solved and unsolved.
    """
    told = strided(demonstration, settings)
    pictures, states, steps = told.pictures, told.states, len(told.actions)
    repeated = len(pictures) == steps
    if repeated:
        pictures = np.concatenate([pictures, pictures[-1:]])
        states = np.concatenate([states, states[-1:]])
    success = np.concatenate([np.zeros(1, bool), told.success])
    if settings.solved == "end":
        success = np.arange(steps + 1) == steps
    if repeated:
        success[-2] |= success[-1]
    return SimulatedEpisode(
        start=SimStart(name=told.name, task=told.task, seed=told.number),
        repeat=0,
        task=told.task,
        frames=pictures[:, 0],
        more_frames=pictures[:, 1:],
        states=states,
        actions=np.concatenate([dummy_action(told.actions.shape[1])[None], told.actions]),
        rewards=np.concatenate([np.zeros(1, np.float32), told.rewards]),
        success=success,
        terminated=False,
        truncated=False,
        seconds=0.0,
    )


def frames_of(samples: NDArray[np.int64], stride: int) -> int:
    """Count the frames that episodes of so many samples ``[E]`` become."""
    return int((-(-samples // stride) + 1).sum())


def plain_task(text: str) -> str:
    """Return an instruction as ours are: lower case, single spaces, without a full stop.

    Example:
        >>> plain_task(" Fold the  Towel.")
        'fold the towel'
    """
    return " ".join(text.lower().split()).rstrip(" .")


def main_camera(keys: list[str]) -> str:
    """Choose the camera that models see: the first one that is not at a wrist, as far as names tell."""
    at_wrist = ("wrist", "hand", "gripper")
    return next((key for key in keys if not any(word in key.lower() for word in at_wrist)), keys[0])


def chosen_cameras(where: str, keys: list[str], settings: DataSetSettings) -> tuple[str, ...]:
    """Return the keys of the cameras that are read.

    Args:
        where: Names the data set.
        keys: Of all its cameras.
        settings: Say which.

    Raises:
        ConfigError: It has no camera, or not one that was asked for; lists those there are.
    """
    if not keys:
        raise ConfigError(f"{where} has no pictures. Give a data set with a camera.")
    for key in settings.cameras:
        check_key(where, "cameras", key, keys)
    return settings.cameras or (main_camera(keys),)


def check_key(where: str, flag: str, key: str, keys: list[str] | Mapping[str, Any]) -> None:
    """Refuse a key that a data set does not have.

    Raises:
        ConfigError: Lists those there are.
    """
    if key not in keys:
        there = ", ".join(keys) or "none of that kind"
        raise ConfigError(f"{where} has no {key} (--dataset.{flag}). There are: {there}.")


def check_numbers(where: str, what: str, values: NDArray[Any], flag: str) -> NDArray[np.float32]:
    """Return numbers ``[T, A]`` as float32.

    Raises:
        ConfigError: They are of another form, or not all finite.
    """
    if values.ndim != 2 or not 1 <= values.shape[1] <= MOST_NUMBERS or values.dtype.kind not in "fiub":
        raise ConfigError(
            f"{where}: {what} are {values.dtype}{list(values.shape)}, expected numbers [T, A] with A of 1 to "
            f"{MOST_NUMBERS}. Choose another key (--dataset.{flag})."
        )
    found = values.astype(np.float32)
    if not np.isfinite(found).all():
        raise ConfigError(
            f"{where}: {what} are not all finite numbers of 32 bits. Mend the data set, or choose another "
            f"key (--dataset.{flag})."
        )
    return found


def check_width(where: str, what: str, values: NDArray[Any], expected: int) -> None:
    """Refuse an episode whose numbers ``[T, n]`` are not as many as those of the others.

    Raises:
        ConfigError: They are not.
    """
    if values.shape[1] != expected:
        raise ConfigError(
            f"{where} has {values.shape[1]} numbers of {what}, where the data set has {expected}. Mend it, "
            "or leave the episode out."
        )


def check_episode_bytes(where: str, samples: int, looks: Looks) -> None:
    """Refuse an episode whose pictures would not fit into memory.

    Raises:
        ConfigError: They would not.
    """
    needed = samples * len(looks.cameras) * looks.height * looks.width * 3
    if needed > EPISODE_BYTES:
        raise ConfigError(
            f"{where} has {samples} pictures of {looks.height} x {looks.width} pixels from "
            f"{len(looks.cameras)} cameras, {needed / 1e9:.1f} GB in memory. Resize them "
            "(--dataset.image-size 128), or take fewer (--dataset.stride)."
        )


def placing_of(settings: DataSetSettings) -> Placing:
    """Return what becomes of pictures."""
    return Placing(image_size=settings.image_size, aspect=settings.aspect, flip=settings.flip)
