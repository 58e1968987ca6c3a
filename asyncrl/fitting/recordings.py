"""Write recordings of the simulator to HDF5 files, and read them back as arrays.

A recording folder holds `part-*.h5` files. Inside: the frames of all episodes one after another with an
offset table, numbers and fixed-length text only, so that any HDF5 tool can read them.

Letters: E episodes, F frames of all episodes, H W image size.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AssetError, ConfigError, first_line
from asyncrl.simulators.interface import SimStart, SimulatorSpec
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.storage.atomic import replacing
from asyncrl.storage.hdf5_bounds import attribute_of, dataset_in

if TYPE_CHECKING:
    import h5py

FORMAT = "asyncrl-recordings-2"
FORMATS = ("asyncrl-recordings-1", FORMAT)
"""That are read; the first had neither rewards nor states nor further cameras, and its starts were seeds."""
_UNREADABLE = (OSError, KeyError, TypeError, ValueError, IndexError, RuntimeError, MemoryError, zlib.error)


@dataclass(frozen=True, kw_only=True)
class Recordings:
    """Episodes of the simulator, concatenated. Action i produced frame i."""

    frames: NDArray[np.uint8]
    """``[F, H, W, 3]``."""
    actions: NDArray[np.float32]
    """``[F, 7]``; the first row of each episode is the dummy action."""
    success: NDArray[np.bool_]
    """``[F]``."""
    offsets: NDArray[np.int64]
    """``[E + 1]``; episode e owns frames ``offsets[e] : offsets[e + 1]``."""
    tasks: list[str]
    """``[E]`` instructions."""
    seeds: NDArray[np.int64]
    """``[E]``."""

    def __len__(self) -> int:
        return len(self.tasks)

    def span(self, episode: int) -> slice:
        """Return the rows of one episode."""
        return slice(int(self.offsets[episode]), int(self.offsets[episode + 1]))

    def solved(self) -> NDArray[np.bool_]:
        """Tell of each episode whether it was solved at any step: ``[E]`` bool."""
        return np.array([self.success[self.span(e)].any() for e in range(len(self))])


def write_part(
    path: Path, episodes: Iterable[SimulatedEpisode], spec: SimulatorSpec, about: dict[str, object]
) -> int:
    """Write episodes to one HDF5 file (complete or absent, never torn) and return how many.

    Args:
        path: Of the file.
        episodes: With all their frames.
        spec: Of the simulator that they were played in.
        about: How they came to be, for who reads the file.
    """
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


def load_recordings(folders: Iterable[Path]) -> Recordings:
    """Read every part of the given folders.

    Raises:
        AssetError: a folder holds no recordings.
        ConfigError: a file is not a recording of this format.
    """
    parts = [part for folder in folders for part in _parts(folder)]
    loaded = [_read(part) for part in parts]
    starts = np.cumsum([0] + [len(part.frames) for part in loaded])
    return Recordings(
        frames=np.concatenate([part.frames for part in loaded]),
        actions=np.concatenate([part.actions for part in loaded]),
        success=np.concatenate([part.success for part in loaded]),
        offsets=np.concatenate(
            [[0], *(part.offsets[1:] + start for part, start in zip(loaded, starts[:-1], strict=True))]
        ).astype(np.int64),
        tasks=[task for part in loaded for task in part.tasks],
        seeds=np.concatenate([part.seeds for part in loaded]),
    )


def _parts(folder: Path) -> Iterator[Path]:
    parts = sorted(folder.glob("part-*.h5"))
    if not parts:
        raise AssetError(
            f"{folder} holds no part-*.h5 recordings. Make some with `asyncrl collect --out {folder}`."
        )
    yield from parts


def _read(path: Path) -> Recordings:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            if (found := attribute_of(file, "format")) not in FORMATS:
                raise ConfigError(f"{path} has format {found!r}, expected {FORMAT!r}. Collect it again.")
            return Recordings(
                frames=_inflate(dataset_in(file, "frames")),
                actions=dataset_in(file, "actions")[:],
                success=dataset_in(file, "success")[:].astype(bool),
                offsets=dataset_in(file, "offsets")[:],
                tasks=[task.decode() for task in dataset_in(file, "tasks")[:]],
                seeds=dataset_in(file, "seeds")[:],
            )
    except ConfigError:
        raise
    except _UNREADABLE as error:
        raise ConfigError(f"{path} is not a recording ({first_line(error)}). Collect it again.") from error


def _inflate(dataset: h5py.Dataset) -> NDArray[np.uint8]:
    """Read compressed frames on all cores: HDF5 itself decompresses on one."""
    rows, most = np.empty(dataset.shape, np.uint8), math.prod(dataset.chunks or ()) + 1

    def write(offset: int, compressed: bytes) -> None:
        unpacked = zlib.decompressobj().decompress(compressed, most)
        chunk = np.frombuffer(unpacked, np.uint8).reshape(dataset.chunks)
        rows[offset : offset + len(chunk)] = chunk[: len(rows) - offset]

    with ThreadPoolExecutor() as pool:
        chunks = [dataset.id.get_chunk_info(i).chunk_offset for i in range(dataset.id.get_num_chunks())]
        stored = ((offset[0], dataset.id.read_direct_chunk(offset)[1]) for offset in chunks)
        for done in [pool.submit(write, *chunk) for chunk in stored]:
            done.result()
    return rows
