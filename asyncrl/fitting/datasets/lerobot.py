"""Read folders in the layout of LeRobot v3.0: one episode after the other.

    meta/info.json                          codebase_version, fps, features: key -> dtype, shape, names
    meta/tasks.parquet                      task_index and the instruction
    meta/episodes/chunk-*/file-*.parquet    of each episode: length, and where its rows and frames lie
    data/chunk-*/file-*.parquet             one row per sample; columns named like the features
    videos/KEY/chunk-*/file-*.mp4           one frame per sample; several episodes in a file

Row t has what was seen before action t, and `next.reward`, `next.success` for that action. Pictures are
movies (dtype video) or files in the rows (dtype image).

Letters: T samples of an episode, E episodes, H W picture size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.fitting.datasets.interface import (
    MOST_EPISODES,
    MOST_SAMPLES,
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
from asyncrl.fitting.datasets.lerobot_tables import (
    DATA,
    INFO,
    VIDEO,
    Movie,
    RowStream,
    batches,
    numbers_in,
    picture_size,
    read_info,
    read_tasks,
    reading_table,
)
from asyncrl.fitting.datasets.pictures import check_resizable, decoded
from asyncrl.fitting.datasets.settings import NONE, DataSetSettings
from asyncrl.fitting.recordings import Looks
from asyncrl.simulators.rollout import SimulatedEpisode

_NUMBERS: Final = ("float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool", "float16")


def is_lerobot(path: Path) -> bool:
    """Tell whether a folder is in LeRobot's layout, of any version."""
    return (path / INFO).is_file()


def require_packages(path: Path) -> None:
    """Refuse a folder that cannot be read for lack of packages."""
    missing = [name for name in ("pyarrow", "av") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{path} is a LeRobot folder, which needs {' and '.join(missing)}. Install what is missing with "
            "pip install 'asyncrl[lerobot]'."
        )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where an episode lies."""

    number: int
    length: int
    data: tuple[int, int]
    """Chunk and file of its rows."""
    videos: Mapping[str, tuple[int, int, float]]
    """Camera -> chunk and file of its frames, and the seconds at which they begin."""


class LeRobotFolder:
    """`DataSet` of one folder."""

    def __init__(self, path: Path, settings: DataSetSettings) -> None:
        """Look into the folder, without its rows and pictures."""
        require_packages(path)
        self.path = path
        self._settings = settings
        self._placing = placing_of(settings)
        self.notes: list[str] = []
        self._features, self.rate, robot = read_info(path)
        sizes = {key: size for key, about in self._features.items() if (size := picture_size(about))}
        self.cameras = chosen_cameras(str(path), list(sizes), settings)
        if not settings.cameras and len(sizes) > 1:
            self.notes.append(f"camera {self.cameras[0]} of {', '.join(sizes)} (--dataset.cameras)")
        self._sizes = {key: sizes[key] for key in self.cameras}
        self._choose_keys()
        self._tasks = {} if settings.task else read_tasks(path)
        self.looks = self._seen(robot)
        self._places = self._read_places()
        lengths = np.array([place.length for place in self._places], np.int64)
        if lengths.sum() > MOST_SAMPLES:
            raise ConfigError(f"{path} has {lengths.sum()} samples. Take a part: --dataset.episodes.")
        self.frames = frames_of(lengths, settings.stride)
        for length in lengths.tolist():
            check_episode_bytes(str(path), -(-length // settings.stride) + 1, self.looks)

    def _choose_keys(self) -> None:
        settings, where = self._settings, str(self.path)
        keys = [key for key, about in self._features.items() if about.get("dtype") in _NUMBERS]
        self.action = settings.action or "action"
        check_key(where, "action", self.action, keys)
        self.state = () if settings.state == (NONE,) else settings.state
        for key in self.state:
            check_key(where, "state", key, keys)
        if not settings.state and "observation.state" in keys:
            self.state = ("observation.state",)
        self.reward = self._optional(settings.reward, "reward", "next.reward", keys)
        self.success = self._optional(settings.success, "success", "next.success", keys)
        if not self.success and settings.success != NONE and settings.solved == "key":
            self.notes.append(
                "nothing says when a task is solved: no episode counts as solved (--dataset.success KEY, or "
                "--dataset.solved end for demonstrations)"
            )

    def _optional(self, asked: str, flag: str, usual: str, keys: list[str]) -> str:
        """Return a key that may be missing; empty: it is."""
        if asked and asked != NONE:
            check_key(str(self.path), flag, asked, keys)
        return "" if asked == NONE else asked or (usual if usual in keys else "")

    def _seen(self, robot: str) -> Looks:
        for size in self._sizes.values():
            check_resizable(*size, self._placing, str(self.path))
        placed = {self._placing.size_of(*size) for size in self._sizes.values()}
        if len(placed) > 1:
            raise ConfigError(
                f"{self.path} has pictures of different sizes from {', '.join(self.cameras)}. Resize them "
                "(--dataset.image-size), or choose one (--dataset.cameras)."
            )
        ((height, width),) = placed
        return Looks(
            simulator=self._settings.simulator or robot or "lerobot",
            cameras=tuple(key.removeprefix("observation.images.") for key in self.cameras),
            height=height,
            width=width,
            action_dim=self._width(self.action),
            rate=self.rate / self._settings.stride,
        )

    def _width(self, key: str) -> int:
        return math.prod(self._features[key]["shape"])

    def _read_places(self) -> list[_Place]:
        """Read where the episodes lie, in their order."""
        videos = [key for key in self.cameras if self._features[key]["dtype"] == "video"]
        of_videos = [
            f"videos/{key}/{what}"
            for key in videos
            for what in ("chunk_index", "file_index", "from_timestamp")
        ]
        columns = ["episode_index", "length", "data/chunk_index", "data/file_index", *of_videos]
        files = sorted((self.path / "meta" / "episodes").glob("chunk-*/file-*.parquet"))
        places: list[_Place] = []
        for file in files:
            for batch in batches(file, columns):
                with reading_table(file):
                    found = np.concatenate([numbers_in(batch, name) for name in columns], axis=1)
                    places += [_place(row, videos) for row in _checked(found.astype(float)).tolist()]
                if len(places) > MOST_EPISODES:
                    raise ConfigError(f"{file}: more than {MOST_EPISODES} episodes are not read.")
        places.sort(key=lambda place: place.number)
        numbers = {place.number for place in places}
        if not places or len(numbers) < len(places) or min(place.length for place in places) < 1:
            raise ConfigError(
                f"{self.path}: meta/episodes has no episodes, one twice, or one without samples. Download or "
                "write the data set again."
            )
        return places[: self._settings.episodes or None]

    def episodes(self) -> Iterator[SimulatedEpisode]:
        """Read one episode after the other. See `DataSet.episodes`."""
        open_files = _OpenFiles(self)
        try:
            for place in self._places:
                yield episode_of(self._demonstration(place, open_files), self._settings)
        finally:
            open_files.close()

    def _demonstration(self, place: _Place, files: _OpenFiles) -> Demonstration:
        where = f"{self.path} episode {place.number}"
        kept = kept_steps(place.length, self._settings.stride)
        shape = (len(kept), len(self.cameras), self.looks.height, self.looks.width, 3)
        pictures = np.empty(shape, np.uint8)
        numbers = self._rows(place, files, pictures)
        for camera, key in enumerate(self.cameras):
            if key in place.videos:
                files.movie(key, place).read(place.videos[key][2], kept, pictures[:, camera])
        if (numbers["episode_index"] != place.number).any():
            raise ConfigError(
                f"{where}: its rows are not where meta/episodes says. Download or write the data set again."
            )
        length = place.length
        parts = [check_numbers(where, key, numbers[key], "state")[kept] for key in self.state]
        states = np.concatenate(parts, axis=1) if parts else np.zeros((len(kept), 0), np.float32)
        actions = check_numbers(where, self.action, numbers[self.action], "action")
        check_width(where, "an action", actions, self.looks.action_dim)
        check_width(where, "the state", states, sum(map(self._width, self.state)))
        reward = numbers[self.reward] if self.reward else np.zeros((length, 1), np.float32)
        success = numbers[self.success] if self.success else np.zeros((length, 1), np.float32)
        return Demonstration(
            name=f"{self.looks.simulator}/{self.path.name}/{place.number:06d}",
            number=place.number,
            task=self._task(numbers, where),
            pictures=pictures,
            actions=actions,
            states=states,
            rewards=check_numbers(where, self.reward, reward, "reward")[:, 0],
            success=check_numbers(where, self.success, success, "success")[:, 0] > 0.5,
        )

    def _rows(self, place: _Place, files: _OpenFiles, pictures: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Read the numbers of an episode; pictures that lie in its rows are unpacked into `pictures`."""
        pieces: list[dict[str, NDArray[Any]]] = []
        stride, step = self._settings.stride, 0
        for numbers, packed in files.rows(place).take(place.length):
            for camera, key in enumerate(self.cameras):
                for offset, content in enumerate(packed.get(key, ())):
                    if (step + offset) % stride == 0:
                        stored = self._decoded(content, key, place)
                        pictures[(step + offset) // stride, camera] = self._placing.place(stored)
            pieces.append(numbers)
            step += len(numbers["episode_index"])
        try:
            return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        except ValueError as error:
            raise ConfigError(
                f"{self.path} episode {place.number} has rows of different widths. Write the data set again."
            ) from error

    def _decoded(self, content: bytes, key: str, place: _Place) -> NDArray[np.uint8]:
        try:
            return decoded(content, self._sizes[key])
        except ValueError as error:
            raise ConfigError(
                f"{self.path} episode {place.number}, {key}: {error}. Download or write the data set again."
            ) from error

    def _task(self, numbers: Mapping[str, NDArray[Any]], where: str) -> str:
        """Return the instruction of an episode: that of its first sample, if it changes."""
        told = self._settings.task
        if not told:
            of_rows = numbers["task_index"][:, 0]
            told = self._tasks.get(int(of_rows[0]), "")
            if (of_rows != of_rows[0]).any():
                note = "instructions that change within an episode: the first one is taken"
                self.notes += [] if note in self.notes else [note]
        if not plain_task(told):
            raise ConfigError(f"{where} has no instruction. Give one: --dataset.task 'fold the towel'.")
        return plain_task(told)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of numbers that are read."""
        asked = (self.action, *self.state, self.reward, self.success)
        of_task = () if self._settings.task else ("task_index",)
        return tuple(dict.fromkeys(["episode_index", *of_task, *(key for key in asked if key)]))

    def open_rows(self, chunk: int, number: int) -> RowStream:
        """Open a file of rows."""
        pictures = [key for key in self.cameras if self._features[key]["dtype"] == "image"]
        path = self.path / DATA.format(chunk_index=chunk, file_index=number)
        return RowStream(path, self.columns, pictures=pictures)

    def open_movie(self, key: str, chunk: int, number: int) -> Movie:
        """Open a movie of a camera."""
        path = self.path / VIDEO.format(video_key=key, chunk_index=chunk, file_index=number)
        return Movie(path, self._sizes[key], self.rate, self._placing)


class _OpenFiles:
    """The files that the episodes being read lie in: one of rows, and one movie of each camera."""

    def __init__(self, folder: LeRobotFolder) -> None:
        self._folder = folder
        self._rows: tuple[tuple[int, int], RowStream] | None = None
        self._movies: dict[str, tuple[tuple[int, int], Movie]] = {}

    def rows(self, place: _Place) -> RowStream:
        if self._rows is None or self._rows[0] != place.data:
            if self._rows is not None:
                self._rows[1].close()
            self._rows = (place.data, self._folder.open_rows(*place.data))
        return self._rows[1]

    def movie(self, key: str, place: _Place) -> Movie:
        *file, _ = place.videos[key]
        found = self._movies.get(key)
        if found is None or found[0] != tuple(file):
            if found is not None:
                found[1].close()
            found = ((file[0], file[1]), self._folder.open_movie(key, *file))
            self._movies[key] = found
        return found[1]

    def close(self) -> None:
        if self._rows is not None:
            self._rows[1].close()
        for _, movie in self._movies.values():
            movie.close()


def _checked(places: NDArray[np.float64]) -> NDArray[np.float64]:
    if not ((places >= 0) & (places < 1e12)).all():
        raise ValueError("it has a place below zero, or one that is no number")
    return places


def _place(row: list[float], videos: list[str]) -> _Place:
    number, length, chunk, file, *of_videos = row
    parts = [of_videos[i : i + 3] for i in range(0, len(of_videos), 3)]
    return _Place(
        number=int(number),
        length=int(length),
        data=(int(chunk), int(file)),
        videos={key: (int(p[0]), int(p[1]), p[2]) for key, p in zip(videos, parts, strict=True)},
    )
