"""Data sets of other programs: the part common to LeRobot and robomimic.

Letters: T samples of an episode, H W picture size, K cameras, Q numbers of state, A numbers per action.
"""

from __future__ import annotations

import io
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.bounds import PIXELS
from asyncrl.errors import ConfigError
from asyncrl.fitting.recording_files import EpisodeArrays, FrameFile, Looks
from asyncrl.fitting.settings import NONE, DataSetSettings
from asyncrl.observability.terminal import progress
from asyncrl.records import dummy_action
from asyncrl.simulators.interface import SimStart
from asyncrl.simulators.rollout import SimulatedEpisode

if TYPE_CHECKING:
    from PIL import Image

_log = logging.getLogger(__name__)
FORMATS: Final = ("PNG", "JPEG", "WEBP", "BMP")
_MODES: Final = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
AS_STORED: Final = DataSetSettings()


class DataSet(ABC):
    """A data set of another program, read as a stream: one episode is in memory."""

    looks: Looks
    frames: int  # Of all episodes, as they are read.
    state_dim: int
    cameras: tuple[str, ...]
    action: str
    state: tuple[str, ...]
    reward: str
    success: str  # Keys; empty if there is no such thing

    def __init__(self, path: Path, settings: DataSetSettings) -> None:
        self.path, self.settings = path, settings
        self._noted: set[str] = set()

    @abstractmethod
    def episodes(self) -> Iterator[SimulatedEpisode]:
        """Read one episode after the other; ConfigError if damaged."""

    def read(self, into: FrameFile, row: int) -> EpisodeArrays:
        """Write the first camera's pictures from `row` on, and return all other data."""
        read: list[tuple[NDArray[np.float32], NDArray[np.bool_], str, int]] = []
        offsets, name = [0], f"read {self.path.name}"
        bar = progress(self.episodes(), desc=name, unit="episode", delay=2, leave=False)
        for episode in bar:
            into.write(row + offsets[-1], episode.frames)
            offsets.append(offsets[-1] + len(episode.frames))
            read.append((episode.actions, episode.success, episode.task, episode.seed))
        actions, success, tasks, seeds = zip(*read, strict=True)
        return EpisodeArrays(
            actions=np.concatenate(actions),
            success=np.concatenate(success),
            offsets=np.array(offsets, np.int64),
            tasks=list(tasks),
            seeds=np.array(seeds, np.int64),
            task_ids=np.full(len(tasks), -1, np.int64),
        )

    def note(self, choice: str) -> None:
        """Log a choice that the settings left open, once."""
        if choice not in self._noted:
            self._noted.add(choice)
            _log.warning("%s: %s", self.path, choice)

    def choose_cameras(self, sizes: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
        """Choose among the cameras and their stored sizes; return height and width of placed pictures."""
        if not sizes:
            raise ConfigError(f"{self.path} has no pictures. Give a data set with a camera.")
        for key in self.settings.cameras:
            self.check_key("cameras", key, list(sizes))
        at_wrist = ("wrist", "hand", "gripper")
        others = [key for key in sizes if not any(word in key.lower() for word in at_wrist)]
        self.cameras = self.settings.cameras or ([*others, *sizes][0],)
        if not self.settings.cameras and len(sizes) > 1:
            self.note(f"camera {self.cameras[0]} of {', '.join(sizes)} (--dataset.cameras)")
        placed = {placed_size(*sizes[key], self.settings) for key in self.cameras}
        if len(placed) > 1:
            raise ConfigError(
                f"{self.path} has pictures of different sizes from {', '.join(self.cameras)}. Resize them "
                "(--dataset.image-size), or choose one (--dataset.cameras)."
            )
        return placed.pop()

    def choose_keys(
        self,
        keys: Sequence[str],
        state_keys: Sequence[str],
        *,
        action: str,
        states: Sequence[tuple[str, ...]],
        reward: str,
        success: str = "",
    ) -> None:
        """Choose the keys of numbers: those of the settings, else the usual ones given here."""
        asked = self.settings
        self.action = asked.action or action
        self.check_key("action", self.action, keys)
        self.state = () if asked.state == (NONE,) else asked.state
        for key in self.state:
            self.check_key("state", key, state_keys)
        if not asked.state:
            self.state = next((usual for usual in states if set(usual) <= set(state_keys)), ())
        self.reward = reward if reward in keys else ""
        self.success = asked.success or (success if success in keys else "")
        if self.success == NONE:
            self.success = ""
        elif asked.success:
            self.check_key("success", self.success, keys)

    def check_key(self, flag: str, key: str, keys: Sequence[str]) -> None:
        """Refuse a key that the data set does not have, listing those it has."""
        if key not in keys:
            there = ", ".join(keys) or "none of that kind"
            raise ConfigError(f"{self.path} has no {key} (--dataset.{flag}). There are: {there}.")

    def note_no_success(self) -> None:
        """Log that no key has successes, unless the settings name one."""
        if self.settings.success != NONE and self.settings.solved == "key":
            self.note(
                "no key marks when a task is solved: no such episode counts as solved (--dataset.success "
                "KEY, or --dataset.solved end for demonstrations)"
            )

    def count_frames(self, samples: Sequence[int]) -> int:
        """Count the frames that result from episodes with these numbers of samples."""
        return sum(-(-count // self.settings.stride) + 1 for count in samples)

    def episode(
        self,
        where: str,
        start: SimStart,
        *,
        pictures: NDArray[np.uint8],
        states: NDArray[np.float32],
        actions: NDArray[np.float32],
        rewards: NDArray[np.float32],
        success: NDArray[np.bool_],
    ) -> SimulatedEpisode:
        """Shift samples, observation then action, into our order, in which action i produced frame i.

        The first action is idle. Without an observation after the last action, the last picture and verdict
        repeat. With a stride, rewards are summed, and a step is solved if one of its samples is.

        Args:
            pictures: ``[N, K, H, W, 3]`` of the N kept steps, or one more after the last action.
            states: ``[N, Q]``, likewise.
            actions: ``[T, A]`` of all steps, like `rewards` ``[T]`` and `success` ``[T]``.
        """
        for what, values, width in (
            ("an action", actions, self.looks.action_dim),
            ("the state", states, self.state_dim),
        ):
            if values.shape[1] != width:
                raise ConfigError(
                    f"{where} has {values.shape[1]} numbers of {what}, where the data set has {width}. Mend "
                    "it, or leave the episode out."
                )
        if (stride := self.settings.stride) > 1:
            begins, every = np.arange(0, len(actions), stride), actions
            actions = every[np.minimum(begins + stride, len(every)) - 1]
            if self.settings.between == "sum":
                actions[:, :-1] = np.add.reduceat(every[:, :-1], begins, axis=0)
            rewards, success = np.add.reduceat(rewards, begins), np.logical_or.reduceat(success, begins)
        steps = len(actions)
        if repeated := len(pictures) == steps:
            pictures = np.concatenate([pictures, pictures[-1:]])
            states = np.concatenate([states, states[-1:]])
        success = np.concatenate([np.zeros(1, bool), success])
        if self.settings.solved == "end":
            success = np.arange(steps + 1) == steps
        if repeated:
            success[-2] |= success[-1]
        return SimulatedEpisode(
            start=start,
            repeat=0,
            task=start.task,
            frames=pictures[:, 0],
            more_frames=pictures[:, 1:],
            states=states,
            actions=np.concatenate([dummy_action(actions.shape[1])[None], actions]),
            rewards=np.concatenate([np.zeros(1, np.float32), rewards]),
            success=success,
            terminated=False,
            truncated=False,
            seconds=0.0,
        )


def check_numbers(where: str, what: str, values: NDArray[Any], flag: str) -> NDArray[np.float32]:
    """Return numbers ``[T, n]`` as float32; ConfigError unless all are finite."""
    problem = f"{values.dtype}{list(values.shape)}, expected numbers [T, A]"
    if values.ndim == 2 and values.shape[1] and values.dtype.kind in "fiub":
        found = values.astype(np.float32)
        if np.isfinite(found).all():
            return found
        problem = "not all finite numbers of 32 bits"
    raise ConfigError(
        f"{where}: {what} are {problem}. Mend the data set, or choose another key (--dataset.{flag})."
    )


def placed_size(height: int, width: int, settings: DataSetSettings) -> tuple[int, int]:
    """Return the height and width that `place_picture` gives a picture."""
    if settings.image_size:
        return settings.image_size, settings.image_size
    side = {"stretch": 0, "crop": min(height, width), "pad": max(height, width)}[settings.aspect]
    return (side, side) if side else (height, width)


def place_picture(picture: NDArray[np.uint8], settings: DataSetSettings) -> NDArray[np.uint8]:
    """Flip, square and resize a picture ``[H, W, 3]`` uint8. Resizing averages, then filters.

    >>> settings = DataSetSettings(image_size=2, aspect="crop")
    >>> place_picture(np.full((4, 8, 3), 9, np.uint8), settings).shape
    (2, 2, 3)
    """
    from PIL import Image

    if settings.flip != "none":
        picture = picture[::-1] if settings.flip == "vertical" else picture[::-1, ::-1]
    height, width = picture.shape[:2]
    image = Image.fromarray(np.ascontiguousarray(picture))
    if settings.aspect != "stretch" and height != width:
        side = (min if settings.aspect == "crop" else max)(height, width)
        left, top = int((width - side) / 2), int((height - side) / 2)
        image = image.crop((left, top, left + side, top + side))  # Black beyond the picture.
    height, width = placed_size(height, width, settings)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return np.asarray(image).copy()


def decode_picture(content: bytes, size: Sequence[int] = ()) -> NDArray[np.uint8]:
    """Decode one picture of a size (empty: up to `PIXELS`), upright; ValueError for other files."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            found, wanted = (image.height, image.width), f"at most {PIXELS} x {PIXELS}"
            if max(found) <= PIXELS:
                if has := _unclear(image):
                    raise ValueError(
                        f"it has {has}: save one opaque picture with 8 bits of red, green and blue"
                    )
                upright = ImageOps.exif_transpose(image).convert("RGB")
                found, wanted = (upright.height, upright.width), " x ".join(map(str, size))
                if not size or found == tuple(size):
                    return np.asarray(upright)
            raise ValueError(f"a picture has {found[0]} x {found[1]} pixels, expected {wanted}")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"a picture cannot be read ({error})") from error


def _unclear(image: Image.Image) -> str:
    """Name a property of a file that 8-bit RGB cannot represent; empty if there is none."""
    if image.mode not in _MODES:
        return f"{image.mode} pixels"
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        return "several pictures"
    clear = image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255
    return "transparent pixels" if clear else ""
