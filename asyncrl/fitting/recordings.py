"""Write recordings of a simulator to HDF5 files, and read them back; pictures are never all in memory.

A recording folder holds `part-*.h5` files. Inside: the frames of all episodes one after another with an
offset table, numbers and fixed-length text only, so that any HDF5 tool can read them.

Letters: E episodes, F frames of all episodes, H W image size, A numbers per action.

What recordings look like: what those that are fitted together must have in common.
"""

from __future__ import annotations

import json
import logging
import math
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AssetError, ConfigError, first_line
from asyncrl.fitting.frame_file import FrameFile, FrameRows, Frames, blocks
from asyncrl.records import POSE_DIM
from asyncrl.simulators.interface import SimStart, SimulatorSpec
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.storage.atomic import replacing
from asyncrl.storage.untrusted import attribute_of, dataset_in, open_hdf5

if TYPE_CHECKING:
    import h5py


@dataclass(frozen=True, kw_only=True)
class Looks:
    """Of one file of recordings, or of one data set of another program."""

    simulator: str
    cameras: tuple[str, ...]
    height: int
    """Of the pictures in pixels, like `width`."""
    width: int
    action_dim: int
    rate: float = 0.0
    """Steps per second; 0: not said."""

    def fits(self, other: Looks) -> bool:
        """Tell whether both can be fitted together: they are alike, and of one rate where both say it."""
        same_rate = not (self.rate and other.rate) or abs(self.rate - other.rate) < 1e-6
        return same_rate and self._told() == other._told()

    def _told(self) -> tuple[object, ...]:
        return self.simulator, self.cameras, self.height, self.width, self.action_dim

    def __str__(self) -> str:
        rate = f" at {self.rate:g} steps a second" if self.rate else ""
        return (
            f"pictures of {self.height} x {self.width} pixels by {', '.join(self.cameras)} and actions of "
            f"{self.action_dim} numbers{rate} in {self.simulator}"
        )


_log = logging.getLogger(__name__)
FORMAT = "asyncrl-recordings-2"
_FAMILY: Final = "asyncrl-recordings-"
FORMATS = ("asyncrl-recordings-1", FORMAT)
"""That are read; the first had neither rewards nor states nor further cameras, and its starts were seeds."""
FIRST_SIMULATOR: Final = "tabletop"
FIRST_CAMERAS: Final = ("main",)
"""What all recordings of the first format were made with."""
RATE: Final = "steps_per_second"
"""In `about`, where it is known."""
_UNREADABLE = (OSError, KeyError, TypeError, ValueError, IndexError, RuntimeError, MemoryError, zlib.error)


@dataclass(frozen=True, kw_only=True)
class Recordings:
    """Episodes of one simulator, one after another. Action i produced frame i."""

    frames: Frames
    """``[F, H, W, 3]`` of the first camera. Read from disk by row, where files were loaded."""
    actions: NDArray[np.float32]
    """``[F, A]``; the first row of each episode is the dummy action."""
    success: NDArray[np.bool_]
    """``[F]``."""
    offsets: NDArray[np.int64]
    """``[E + 1]``; episode e owns frames ``offsets[e] : offsets[e + 1]``."""
    tasks: list[str]
    """``[E]`` instructions."""
    seeds: NDArray[np.int64]
    """``[E]``."""
    task_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """``[E]`` numbers of the tasks, -1 where they have none; empty: as if all were -1."""
    simulator: str = FIRST_SIMULATOR
    """Name of the simulator."""
    poses: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, POSE_DIM), np.float32))
    """``[F, 8]`` where the hand is in each frame (`simulators.interface.hand_pose`); ``[0, 8]``: not every
    file says it."""

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def image_size(self) -> int:
        """Return height and width of the pictures in pixels.

        Raises:
            ConfigError: They differ.
        """
        _, height, width, _ = self.frames.shape
        if height != width:
            raise ConfigError(
                f"The recorded pictures are {height} x {width} pixels, but models look at square ones. "
                "Record square pictures, or have those of a data set made square: --dataset.image-size 128, "
                "with --dataset.aspect stretch, crop or pad."
            )
        return height

    def span(self, episode: int) -> slice:
        """Return the rows of one episode."""
        return slice(int(self.offsets[episode]), int(self.offsets[episode + 1]))

    def solved(self) -> NDArray[np.bool_]:
        """Tell of each episode whether it was solved at any step: ``[E]`` bool."""
        return np.array([self.success[self.span(e)].any() for e in range(len(self))])

    def scenes(self) -> NDArray[np.int64]:
        """Number the scenes: ``[E]`` int64 from 0. Every numbered task has its own; others share one."""
        if len(self.task_ids) != len(self) or (self.task_ids < 0).any():
            return np.zeros(len(self), np.int64)
        return np.unique(self.task_ids, return_inverse=True)[1].astype(np.int64)


def chosen(recordings: Recordings, episodes: Sequence[int]) -> Recordings:
    """Return some episodes, in that order; their pictures stay where they are."""
    spans = [recordings.span(episode) for episode in episodes]
    rows = np.concatenate([np.arange(span.start, span.stop) for span in spans] or [np.empty(0, np.int64)])
    numbers = np.array(episodes, np.int64)
    return Recordings(
        frames=FrameRows(recordings.frames, rows),
        actions=recordings.actions[rows],
        success=recordings.success[rows],
        offsets=np.cumsum([0, *(span.stop - span.start for span in spans)]).astype(np.int64),
        tasks=[recordings.tasks[episode] for episode in episodes],
        seeds=recordings.seeds[numbers],
        task_ids=recordings.task_ids[numbers] if len(recordings.task_ids) else recordings.task_ids,
        simulator=recordings.simulator,
        poses=recordings.poses[rows] if len(recordings.poses) else recordings.poses,
    )


def write_part(
    path: Path, episodes: Iterable[SimulatedEpisode], spec: SimulatorSpec, about: dict[str, object]
) -> int:
    """Write episodes to one HDF5 file (complete or absent, never torn) and return how many."""
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    lengths: list[int] = []
    tasks: list[bytes] = []
    starts: list[SimStart] = []
    ends: list[tuple[bool, bool]] = []
    with replacing(path) as part, h5py.File(part, "w", libver=("v110", "v110")) as file:
        file.attrs.update(
            format=FORMAT, simulator=spec.name, cameras=json.dumps(spec.cameras), about=json.dumps(about)
        )
        for episode in episodes:
            _append(file, "frames", episode.frames)
            _append(file, "actions", episode.actions)
            _append(file, "success", episode.success.astype(np.uint8))
            _append(file, "rewards", episode.rewards)
            if episode.poses.size:
                _append(file, "poses", episode.poses)
            if episode.states.shape[1]:
                _append(file, "states", episode.states)
            if episode.more_frames.shape[1]:
                _append(file, "more_frames", episode.more_frames)
            lengths.append(len(episode.frames))
            tasks.append(episode.task.encode())
            starts.append(episode.start)
            ends.append((episode.terminated, episode.truncated))
        file["offsets"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        names = [start.name.encode() for start in starts]
        file["tasks"] = np.array(tasks, dtype=f"S{max(map(len, tasks), default=1)}")
        file["starts"] = np.array(names, dtype=f"S{max(map(len, names), default=1)}")
        for name in ("seed", "task_id", "trial"):
            file[f"{name}s"] = np.array([getattr(start, name) for start in starts], dtype=np.int64)
        for column, name in enumerate(("terminated", "truncated")):
            file[name] = np.array([end[column] for end in ends], dtype=np.uint8)
    return len(lengths)


def _append(file: object, name: str, rows: NDArray) -> None:
    import h5py

    assert isinstance(file, h5py.File)
    if name not in file:
        shape = rows.shape[1:]
        file.create_dataset(
            name,
            data=rows,
            maxshape=(None, *shape),
            chunks=(16, *shape),
            compression="gzip",
            compression_opts=1,
        )
        return
    dataset = file[name]
    assert isinstance(dataset, h5py.Dataset)
    begin = dataset.shape[0]
    dataset.resize(begin + len(rows), axis=0)
    dataset[begin:] = rows


def is_recording(path: Path) -> bool:
    """Tell whether a file says that it is a recording, of whatever version."""
    try:
        with open_hdf5(path) as file:
            return str(attribute_of(file, "format")).startswith(_FAMILY)
    except _UNREADABLE:
        return False


def recording_files(folder: Path) -> list[Path]:
    """List the files of a recording in order.

    Raises:
        AssetError: There are none.
    """
    parts = sorted(folder.glob("part-*.h5"))
    if not parts:
        raise AssetError(
            f"{folder} holds no part-*.h5 recordings, nor a data set of LeRobot v3 (meta/info.json) or "
            f"robomimic (*.hdf5). Make recordings with `asyncrl collect --out {folder}`."
        )
    return parts


@dataclass(frozen=True, kw_only=True)
class RecordingFile:
    """A file without its pictures; the other arrays as in `Recordings`."""

    simulator: str
    cameras: tuple[str, ...]
    shape: tuple[int, int, int, int]
    """``F, H, W, 3`` of the pictures."""
    actions: NDArray[np.float32]
    success: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    tasks: list[str]
    seeds: NDArray[np.int64]
    task_ids: NDArray[np.int64]
    poses: NDArray[np.float32]
    rate: float = 0.0
    """Steps per second; 0: not said."""

    def solved(self) -> NDArray[np.bool_]:
        """Tell of each episode whether it was solved at any step: ``[E]`` bool."""
        return np.logical_or.reduceat(self.success, self.offsets[:-1]) if self.tasks else np.zeros(0, bool)

    @property
    def looks(self) -> Looks:
        """What recordings that are fitted together have in common."""
        return Looks(
            simulator=self.simulator,
            cameras=self.cameras,
            height=self.shape[1],
            width=self.shape[2],
            action_dim=self.actions.shape[1],
            rate=self.rate,
        )


def read_part(path: Path) -> RecordingFile:
    """Read everything of a file but its pictures.

    Raises:
        ConfigError: It is no recording, or is damaged.
    """
    with opened(path) as file:
        first = attribute_of(file, "format") == FORMATS[0]
        frames = dataset_in(file, "frames")
        seeds = dataset_in(file, "seeds")[:]
        part = RecordingFile(
            simulator=FIRST_SIMULATOR if first else str(attribute_of(file, "simulator")),
            cameras=FIRST_CAMERAS if first else tuple(json.loads(str(attribute_of(file, "cameras")))),
            shape=frames.shape,
            actions=_numbers(dataset_in(file, "actions")[:], "actions"),
            success=dataset_in(file, "success")[:].astype(bool),
            offsets=dataset_in(file, "offsets")[:],
            tasks=[task.decode() for task in dataset_in(file, "tasks")[:]],
            seeds=seeds,
            task_ids=np.full(len(seeds), -1) if first else dataset_in(file, "task_ids")[:],
            poses=dataset_in(file, "poses")[:] if "poses" in file else np.zeros((0, POSE_DIM), np.float32),
            rate=_rate_in(file),
        )
        _check(part, frames.dtype)
        return part


def _numbers(stored: NDArray[np.generic], name: str) -> NDArray[np.float32]:
    """Return numbers of any type as those of 32 bits."""
    if stored.dtype.kind not in "fiu":
        raise ValueError(f"{name} are {stored.dtype}, expected float32")
    found = stored.astype(np.float32, copy=False)
    if not np.isfinite(found).all():
        raise ValueError(f"its {name} are not all finite")
    return found


def _rate_in(file: h5py.File) -> float:
    """Return the steps per second that an import noted; 0: nothing did."""
    about = json.loads(str(attribute_of(file, "about"))) if "about" in file.attrs else {}
    rate = about.get(RATE, 0) if isinstance(about, dict) else 0
    return float(rate) if isinstance(rate, int | float) else 0.0


def _check(part: RecordingFile, dtype: np.dtype) -> None:
    """Raise ValueError where the arrays contradict each other."""
    shape, offsets, episodes = part.shape, part.offsets, len(part.tasks)
    if len(shape) != 4 or shape[-1] != 3 or dtype != np.uint8:
        raise ValueError(f"frames are {dtype}{list(shape)}")
    if part.actions.ndim != 2 or not len(part.actions) == len(part.success) == shape[0]:
        raise ValueError(
            f"{shape[0]} frames, but {len(part.actions)} actions and {len(part.success)} success"
        )
    poses = part.poses
    if poses.dtype != np.float32 or poses.shape not in ((0, POSE_DIM), (shape[0], POSE_DIM)):
        raise ValueError(f"{shape[0]} frames, but poses are {poses.dtype}{list(poses.shape)}")
    if not np.isfinite(poses).all():
        raise ValueError("its poses are not all finite")
    if offsets.shape != (episodes + 1,) or not len(part.seeds) == len(part.task_ids) == episodes:
        raise ValueError(f"{episodes} tasks, but {len(offsets)} offsets and {len(part.seeds)} seeds")
    if offsets[0] != 0 or offsets[-1] != shape[0] or (np.diff(offsets) < 1).any():
        raise ValueError("its offsets do not cut the frames into episodes")


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Open a recording to read; what is wrong in it while the block reads is said with its name."""
    try:
        with open_hdf5(path) as file:
            if (found := attribute_of(file, "format")) not in FORMATS:
                raise ConfigError(f"{path} has format {found!r}, expected {FORMAT!r}. Collect it again.")
            yield file
    except ConfigError:
        raise
    except _UNREADABLE as error:
        raise ConfigError(f"{path} is not a recording ({first_line(error)}). Collect it again.") from error


def unpack_frames(path: Path, into: FrameFile, row: int) -> None:
    """Write the pictures of a recording from a row on."""
    with opened(path) as file:
        frames = dataset_in(file, "frames")
        if frames.chunks is None or frames.compression != "gzip" or frames.shuffle or frames.fletcher32:
            for part in blocks(frames.shape):
                into.write(row + part.start, frames[part])
        else:
            _inflate(frames, into, row)


def _inflate(dataset: h5py.Dataset, into: FrameFile, row: int) -> None:
    """Unpack compressed frames on all cores: HDF5 itself unpacks on one. A few parts are in memory."""
    chunks, most, rows = dataset.chunks, math.prod(dataset.chunks or ()) + 1, dataset.shape[0]
    assert chunks is not None

    def write(offset: int, compressed: bytes) -> None:
        unpacked = zlib.decompressobj().decompress(compressed, most)
        part = np.frombuffer(unpacked, np.uint8).reshape(chunks)
        into.write(row + offset, part[: rows - offset])

    workers = os.cpu_count() or 1
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for number in range(dataset.id.get_num_chunks()):
            offset = dataset.id.get_chunk_info(number).chunk_offset
            if offset[1:] != (0, 0, 0):
                raise ValueError("its frames are not stored whole")
            waiting.append(pool.submit(write, offset[0], dataset.id.read_direct_chunk(offset)[1]))
            if len(waiting) > 2 * workers:
                waiting.popleft().result()
        for done in waiting:
            done.result()
