"""Recordings: HDF5 files `part-*.h5` with the episodes of a simulator, written and read as a stream.

Letters: E episodes, F frames of all episodes, H W image size, A numbers per action.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import tempfile
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AssetError, ConfigError, first_line
from asyncrl.facts import check_instructions, check_pictures, check_verdicts
from asyncrl.records import POSE_DIM
from asyncrl.simulators.interface import SimStart
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.storage.atomic import replacing
from asyncrl.storage.untrusted import dataset_in, files_in, open_hdf5, parse_json

if TYPE_CHECKING:
    import h5py

_log = logging.getLogger(__name__)
FORMAT: Final = "asyncrl-recordings-2"
SUFFIXES: Final = (".h5", ".hdf5")
FIRST_SIMULATOR: Final = "tabletop"
RATE: Final = "steps_per_second"  # Key of the attribute `about`.
UNREADABLE: Final = (
    *(OSError, KeyError, TypeError, ValueError, IndexError, RuntimeError, MemoryError, AttributeError),
    zlib.error,
)  # Raised by h5py and by the checks of its results.


ROWS: Final = ("frames", "actions", "rewards", "success", "poses", "states", "more_frames")
"""Datasets of a file with a row per frame; the last three are optional."""
BLOCK_BYTES: Final = 64 * 2**20  # Pictures moved at a time.


def cache_folder() -> Path:
    """Return TMPDIR, else /var/tmp (/tmp is memory on many hosts), else the system's temporary folder."""
    lasting = Path("/var/tmp")  # noqa: S108 - the file in it is made without a name
    if not os.environ.get("TMPDIR") and lasting.is_dir() and os.access(lasting, os.W_OK):
        return lasting
    return Path(tempfile.gettempdir())


class FrameFile:
    """``[F, H, W, 3]`` uint8 in an unnamed temporary file, read like an array; safe for concurrent threads.

    Reads copy rows, without a mapping: memory stays small, and a failing disk is an error of the call.
    """

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        self.shape = shape
        self.nbytes = math.prod(shape)
        self._rows = np.arange(shape[0])
        self._row_bytes = math.prod(shape[1:])
        folder = cache_folder()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                if self.nbytes:
                    os.posix_fallocate(file.fileno(), 0, self.nbytes)
                self._handle = os.dup(file.fileno())
        except OSError as error:
            free = shutil.disk_usage(folder).free if folder.is_dir() else 0
            raise AssetError(
                f"The recordings' pictures take {self.nbytes / 1e9:.1f} GB unpacked, and {folder} has "
                f"{free / 1e9:.1f} GB free ({error.strerror}). Set TMPDIR to a folder with more."
            ) from error
        weakref.finalize(self, os.close, self._handle)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        """Return a copy of rows as NumPy indexes them: ``[..., H, W, 3]`` uint8."""
        rows = np.asarray(self._rows[index])
        flat = rows.reshape(-1)
        frames = np.empty((len(flat), *self.shape[1:]), np.uint8)
        if len(flat):
            breaks = (np.flatnonzero(np.diff(flat) != 1) + 1).tolist()
            for begin, end in pairwise([0, *breaks, len(flat)]):
                self._read(frames[begin:end], int(flat[begin]))
        return frames.reshape(*rows.shape, *self.shape[1:])

    def _read(self, into: NDArray[np.uint8], row: int) -> None:
        left, at = into.data.cast("B"), row * self._row_bytes
        while left:
            count = os.preadv(self._handle, [left], at)
            if not count:
                raise AssetError("The file of unpacked pictures became shorter. Run the command again.")
            left, at = left[count:], at + count

    def write(self, row: int, frames: NDArray[np.uint8]) -> None:
        """Write ``[n, H, W, 3]`` from `row` on."""
        if frames.shape[1:] != self.shape[1:] or row + len(frames) > len(self):
            raise ValueError(f"{frames.shape} from row {row} on does not fit into {self.shape}")
        if not frames.size:
            return
        left, at = np.ascontiguousarray(frames).data.cast("B"), row * self._row_bytes
        while left:
            count = os.pwrite(self._handle, left, at)
            left, at = left[count:], at + count


Frames = NDArray[np.uint8] | FrameFile  # [F, H, W, 3] uint8, in memory or in a file.


def blocks(shape: Sequence[int]) -> list[slice]:
    """Cut the rows ``[F, H, W, 3]`` into slices of about `BLOCK_BYTES`, all but the last a multiple of 64.

    >>> blocks((130, 512, 512, 3))
    [slice(0, 64, None), slice(64, 128, None), slice(128, 130, None)]
    """
    size = max(1, BLOCK_BYTES // (64 * max(1, math.prod(shape[1:])))) * 64
    return [slice(begin, min(begin + size, shape[0])) for begin in range(0, shape[0], size)]


@dataclass(frozen=True, kw_only=True)
class Looks:
    """Properties shared by recordings that are fitted together."""

    simulator: str
    cameras: tuple[str, ...]
    height: int
    width: int
    action_dim: int
    rate: float = 0.0  # Steps per second; 0 if unknown.

    def fits(self, other: Looks) -> bool:
        """Return True if all properties are equal, the rate only if both are known."""
        same_rate = not (self.rate and other.rate) or abs(self.rate - other.rate) < 1e-6
        return same_rate and replace(self, rate=other.rate) == other

    def __str__(self) -> str:
        rate = f" at {self.rate:g} steps a second" if self.rate else ""
        return (
            f"pictures of {self.height} x {self.width} pixels by {', '.join(self.cameras)} and actions of "
            f"{self.action_dim} numbers{rate} in {self.simulator}"
        )


@dataclass(frozen=True, kw_only=True)
class EpisodeArrays:
    """Numbers of episodes, one after another. Action i produced frame i."""

    actions: NDArray[np.float32]  # [F, A]; the first row of each episode is the dummy action.
    success: NDArray[np.bool_]  # [F].
    offsets: NDArray[np.int64]  # [E + 1]; episode e owns frames offsets[e] : offsets[e + 1].
    tasks: list[str]  # [E] instructions.
    seeds: NDArray[np.int64]  # [E].
    task_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """``[E]`` numbers of the tasks, -1 if unnumbered; empty: all are."""
    poses: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, POSE_DIM), np.float32))
    """``[F, 8]`` of the hand (`simulators.interface.hand_pose`); ``[0, 8]`` if a file has none."""

    def __len__(self) -> int:
        return len(self.tasks)

    def span(self, episode: int) -> slice:
        """Return the rows of one episode."""
        return slice(int(self.offsets[episode]), int(self.offsets[episode + 1]))

    def solved(self) -> NDArray[np.bool_]:
        """Return the episodes that were solved at any step: ``[E]`` bool."""
        return np.logical_or.reduceat(self.success, self.offsets[:-1]) if len(self) else np.zeros(0, bool)


@dataclass(frozen=True, kw_only=True)
class Recordings(EpisodeArrays):
    """Episodes of one simulator, with their pictures."""

    frames: Frames  # [F, H, W, 3] of the first camera.
    simulator: str = FIRST_SIMULATOR

    @property
    def image_size(self) -> int:
        """Return height and width of the pictures in pixels; ConfigError unless they are square."""
        _, height, width, _ = self.frames.shape
        if height != width:
            raise ConfigError(
                f"The recorded pictures are {height} x {width} pixels, but models look at square ones. "
                "Record square pictures, or have those of a data set made square: --dataset.image-size 128, "
                "with --dataset.aspect stretch, crop or pad."
            )
        return height

    def scenes(self) -> NDArray[np.int64]:
        """Number the scenes: ``[E]`` int64 from 0. Every numbered task has its own; others share one."""
        if len(self.task_ids) != len(self) or (self.task_ids < 0).any():
            return np.zeros(len(self), np.int64)
        return np.unique(self.task_ids, return_inverse=True)[1].astype(np.int64)


def episodes_per_part(nbytes: int) -> int:
    """Count the episodes with `nbytes` of pictures each that share a file: at most 32, at most 256 MiB."""
    return max(1, min(32, 256 * 2**20 // max(1, nbytes)))


def write_part(
    path: Path,
    episodes: Iterable[SimulatedEpisode],
    simulator: str,
    cameras: Sequence[str],
    about: dict[str, object],
) -> int:
    """Write episodes to one HDF5 file (complete or absent, never torn) and return how many."""
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    lengths: list[int] = []
    written: list[tuple[str, SimStart, bool, bool]] = []
    with replacing(path) as part, h5py.File(part, "w", libver=("v110", "v110"), locking=False) as file:
        file.attrs.update(
            format=FORMAT, simulator=simulator, cameras=json.dumps(cameras), about=json.dumps(about)
        )
        for episode in episodes:
            for name in ROWS:
                if (rows := getattr(episode, name)).size:
                    _append(file, name, rows.astype(np.uint8) if rows.dtype == bool else rows)
            lengths.append(len(episode.frames))
            written.append((episode.task, episode.start, episode.terminated, episode.truncated))
        file["offsets"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        for name, texts in (
            ("tasks", [task.encode() for task, *_ in written]),
            ("starts", [start.name.encode() for _, start, *_ in written]),
        ):
            file[name] = np.array(texts, dtype=f"S{max(map(len, texts), default=1)}")
        for name in ("seed", "task_id", "trial"):
            file[f"{name}s"] = np.array([getattr(start, name) for _, start, *_ in written], dtype=np.int64)
        for column, name in enumerate(("terminated", "truncated"), 2):
            file[name] = np.array([row[column] for row in written], dtype=np.uint8)
    return len(lengths)


def _append(file: h5py.File, name: str, rows: NDArray[Any]) -> None:
    if name in file:
        dataset: Any = file[name]
        begin = dataset.shape[0]
        dataset.resize(begin + len(rows), axis=0)
        dataset[begin:] = rows
        return
    sizes: dict[str, Any] = {"maxshape": (None, *rows.shape[1:]), "chunks": (16, *rows.shape[1:])}
    file.create_dataset(name, data=rows, compression="gzip", compression_opts=1, **sizes)


def hdf5_files(path: Path) -> list[Path]:
    """List the HDF5 files of a folder in order, or the file itself; an AssetError if there are none."""
    if not path.is_dir():
        return [path]
    files = files_in(path, *SUFFIXES)
    below = [file for folder in sorted(path.glob("*/")) for file in files_in(folder, *SUFFIXES)]
    if not files:
        raise AssetError(
            f"{path} holds no part-*.h5 recordings, nor a data set of LeRobot v3 (meta/info.json) or "
            f"robomimic (*.hdf5). Make recordings with `asyncrl collect --out {path}`, or name "
            f"{below[0].parent if below else 'another folder'}."
        )
    if below:
        _log.warning(
            "%s lies in a folder below and is not read. Name that folder, too, to read it.", below[0]
        )
    return files


def must_be_new(folder: Path) -> None:
    """Check, without making it, that a folder can hold a new recording."""
    if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        raise ConfigError(f"--out {folder} is a file, where a folder is expected. Choose another name.")
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        problem = errno.EACCES if above.is_dir() else errno.ENOTDIR
        raise ConfigError(f"--out {folder} cannot be made ({os.strerror(problem)}). Choose another folder.")
    if files_in(folder, *SUFFIXES):
        raise ConfigError(
            f"--out {folder} already holds recordings; they are not overwritten. Choose another folder."
        )


@dataclass(frozen=True, kw_only=True)
class RecordingFile(EpisodeArrays):
    """A recording without its pictures."""

    path: Path
    looks: Looks
    frames: int  # F.

    def read(self, into: FrameFile, row: int) -> RecordingFile:
        """Write the first camera's pictures from `row` on."""
        with _opened(self.path) as file:
            frames = dataset_in(file, "frames")
            if offsets := _deflated(frames):
                _inflate(frames, offsets, into, row)
                return self
            for part in blocks(frames.shape):
                into.write(row + part.start, frames[part])
        return self


def read_part(path: Path) -> RecordingFile:
    """Read everything of a file but its pictures."""
    with _opened(path) as file:
        frames, success = dataset_in(file, "frames"), dataset_in(file, "success")[:]
        check_pictures(frames, (-1, -1, -1, 3), f"{path}: frames")
        actions = dataset_in(file, "actions")[:]
        numbers = {name: dataset_in(file, name)[:] for name in ("offsets", "seeds", "task_ids")}
        for name, rows in numbers.items():
            if rows.dtype.kind not in "iu" or rows.ndim != 1:
                raise ValueError(
                    f"{name} are {rows.dtype}{list(rows.shape)}, expected int64 of one dimension"
                )
        if actions.dtype.kind not in "fiu" or not actions.size:
            raise ValueError(f"actions are {actions.dtype}{list(actions.shape)}, expected float32 [F, A]")
        if actions.ndim != 2 or not len(actions) == len(success) == len(frames):
            raise ValueError(f"{len(frames)} frames, but {len(actions)} actions and {len(success)} success")
        about = parse_json(str(file.attrs["about"]).encode()) if "about" in file.attrs else {}
        rate, cameras = about.get(RATE, 0), json.loads(str(file.attrs["cameras"]))
        if type(rate) not in (int, float) or rate < 0:
            raise ValueError(f"{RATE} is {rate!r}")
        if not isinstance(cameras, list) or not all(isinstance(camera, str) for camera in cameras):
            raise ValueError(f"cameras are {cameras!r}, expected a list of names")
        part = RecordingFile(
            path=path,
            looks=Looks(
                simulator=str(file.attrs["simulator"]),
                cameras=tuple(cameras),
                height=frames.shape[1],
                width=frames.shape[2],
                action_dim=actions.shape[1],
                rate=float(rate),
            ),
            frames=len(frames),
            actions=actions.astype(np.float32, copy=False),
            success=check_verdicts(success, (len(frames),), f"{path}: success"),
            tasks=list(check_instructions(dataset_in(file, "tasks")[:].tolist(), str(path))),
            **{name: rows.astype(np.int64) for name, rows in numbers.items()},
            poses=dataset_in(file, "poses")[:] if "poses" in file else np.zeros((0, POSE_DIM), np.float32),
        )
        _check(part)
        return part


def _check(part: RecordingFile) -> None:
    poses, offsets, episodes = part.poses, part.offsets, len(part.tasks)
    if poses.dtype != np.float32 or poses.shape not in ((0, POSE_DIM), (part.frames, POSE_DIM)):
        raise ValueError(f"{part.frames} frames, but poses are {poses.dtype}{list(poses.shape)}")
    for name, numbers in (("actions", part.actions), ("poses", poses)):
        if not np.isfinite(numbers).all():
            raise ValueError(f"its {name} are not all finite")
    if offsets.shape != (episodes + 1,) or not len(part.seeds) == len(part.task_ids) == episodes:
        raise ValueError(f"{episodes} tasks, but {len(offsets)} offsets and {len(part.seeds)} seeds")
    if offsets[0] != 0 or offsets[-1] != part.frames or (np.diff(offsets) < 1).any():
        raise ValueError("its offsets do not cut the frames into episodes")


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    try:
        with open_hdf5(path) as file:
            if (found := file.attrs["format"]) != FORMAT:
                raise ConfigError(f"{path} has format {found!r}, expected {FORMAT!r}. Collect it again.")
            yield file
    except ConfigError:
        raise
    except UNREADABLE as error:
        raise ConfigError(f"{path} is not a recording ({first_line(error)}). Collect it again.") from error


def _deflated(dataset: h5py.Dataset) -> list[tuple[int, ...]]:
    """Return the offsets of all chunks; empty unless each is written, has whole frames and only gzip."""
    import h5py

    created, chunks, stored = dataset.id.get_create_plist(), dataset.chunks, list[Any]()
    if chunks is None or chunks[1:] != dataset.shape[1:]:
        return []
    if [created.get_filter(i)[0] for i in range(created.get_nfilters())] != [h5py.h5z.FILTER_DEFLATE]:
        return []
    dataset.id.chunk_iter(stored.append)
    offsets = sorted(chunk.chunk_offset for chunk in stored)
    whole = [offset[0] for offset in offsets] == list(range(0, dataset.shape[0], chunks[0]))
    return offsets if whole and not any(chunk.filter_mask for chunk in stored) else []


def _inflate(dataset: h5py.Dataset, offsets: Sequence[tuple[int, ...]], into: FrameFile, row: int) -> None:
    """Unpack chunks into rows from `row` on, on all cores; HDF5 would use one."""
    chunks, most, rows = dataset.chunks, math.prod(dataset.chunks or ()) + 1, dataset.shape[0]
    assert chunks is not None

    def write(offset: int, compressed: bytes) -> None:
        stream = zlib.decompressobj()
        part = np.frombuffer(stream.decompress(compressed, most), np.uint8).reshape(chunks)
        if not stream.eof:
            raise ValueError("a chunk of its frames was cut short")
        into.write(row + offset, part[: rows - offset])

    workers = os.cpu_count() or 1
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for offset in offsets:
            waiting.append(pool.submit(write, offset[0], dataset.id.read_direct_chunk(offset)[1]))
            if len(waiting) > 2 * workers:
                waiting.popleft().result()
        for done in waiting:
            done.result()
