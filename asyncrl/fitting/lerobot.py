"""LeRobot v3.0 folders: row t has the observation before action t, and reward and success of that action.

Letters: T samples of an episode, H W picture size.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, first_line
from asyncrl.facts import check_array, check_instruction, check_verdicts
from asyncrl.fitting.data_sets import DataSet, check_numbers, decode_picture, place_picture
from asyncrl.fitting.recording_files import Looks
from asyncrl.fitting.settings import DataSetSettings
from asyncrl.simulators.interface import SimStart
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.storage.untrusted import check_types, load_json, open_regular, shortened

INFO: Final = "meta/info.json"
"""codebase_version, fps, and features: key -> dtype, shape, names. Instructions are in meta/tasks.parquet."""
PLACES: Final = "chunk-*/file-*.parquet"
"""Files below meta/episodes: each episode's length, and the files with its rows and frames."""
DATA: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO: Final = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
"""Several episodes in a file, one row or frame per sample. Pictures outside movies are in the rows."""
AGAIN: Final = "Download or write the data set again."
GRID: Final = 0.1
"""Allowed error of times, in frames. LeRobot's writer sums times up, so they drift."""
ORDER: Final = {"frame_index": 1, "index": 1, "timestamp": 0}
"""Columns that order the rows -> their increment per step; 0: seconds."""
_NUMBERS: Final = ("float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool", "float16")


def is_lerobot(path: Path) -> bool:
    """Return True if a folder has LeRobot's layout, of any version."""
    return (path / INFO).is_file()


class _Place(NamedTuple):
    number: int
    length: int
    rows: tuple[int, int]  # Chunk and file.
    videos: Mapping[str, tuple[int, int, float]]  # Camera -> chunk, file and the seconds of the first frame.


class LeRobotFolder(DataSet):
    """One folder."""

    def __init__(self, path: Path, settings: DataSetSettings) -> None:
        super().__init__(path, settings)
        if missing := [name for name in ("pyarrow", "av") if find_spec(name) is None]:
            raise ConfigError(
                f"{path} is a LeRobot folder, which needs {' and '.join(missing)}. Install what is missing "
                "with pip install 'asyncrl[lerobot]'."
            )
        self._features, self._rate, robot, self._count = _read_info(path)
        sizes = {key: size for key, about in self._features.items() if (size := _picture_size(about))}
        height, width = self.choose_cameras(sizes)
        self._sizes = sizes
        keys = [key for key, about in self._features.items() if about.get("dtype") in _NUMBERS]
        usual = {"action": "action", "reward": "next.reward", "success": "next.success"}
        self.choose_keys(keys, keys, states=[("observation.state",)], **usual)
        if not self.success:
            self.note_no_success()
        self._tasks = {} if settings.task else _read_tasks(path)
        self.state_dim = sum(map(self._width, self.state))
        self.looks = Looks(
            simulator=settings.simulator or robot or "lerobot",
            cameras=tuple(key.removeprefix("observation.images.") for key in self.cameras),
            height=height,
            width=width,
            action_dim=self._width(self.action),
            rate=self._rate / settings.stride,
        )
        self._places = self._read_places()
        self.frames = self.count_frames([place.length for place in self._places])

    def _width(self, key: str) -> int:
        return math.prod(self._features[key]["shape"])

    def _read_places(self) -> list[_Place]:
        videos = [key for key in self.cameras if self._features[key]["dtype"] == "video"]
        of_videos = ("chunk_index", "file_index", "from_timestamp")
        columns = ["episode_index", "length", "data/chunk_index", "data/file_index"]
        columns += [f"videos/{key}/{column}" for key in videos for column in of_videos]
        places: list[_Place] = []
        for file in sorted((self.path / "meta" / "episodes").glob(PLACES)):
            with _reading(file):
                table = _read_table(file, columns)
                found = np.concatenate([_numbers_in(table, name) for name in columns], 1).astype(float)
                if not ((found >= 0) & (found < 1e12)).all():
                    raise ValueError("it has a place below zero, or one that is no number")
            for number, length, chunk, index, *rest in found.tolist():
                of_key = zip(videos, rest[::3], rest[1::3], rest[2::3], strict=True)
                movies = {key: (int(c), int(i), begin) for key, c, i, begin in of_key}
                places.append(_Place(int(number), int(length), (int(chunk), int(index)), movies))
        places.sort(key=lambda place: place.number)
        numbers = {place.number for place in places}
        if not places or len(numbers) < len(places) or min(place.length for place in places) < 1:
            raise ConfigError(
                f"{self.path}: meta/episodes has no episodes, one twice, or one without samples. {AGAIN}"
            )
        if self._count not in (None, len(places)):
            raise ConfigError(
                f"{self.path}: meta/episodes has {len(places)} episodes, {INFO} has {self._count}. {AGAIN}"
            )
        for key in videos:
            self._check_tiling(key, places)
        self._numbers = numbers
        return places[: self.settings.episodes or None]

    def _check_tiling(self, key: str, places: Sequence[_Place]) -> None:
        """Check that each episode begins in a movie where the previous one ends, the first at 0."""
        end, last = 0.0, (-1, -1)
        for place in sorted(places, key=lambda place: place.videos[key]):
            chunk, index, begin = place.videos[key]
            end, last = (end if last == (chunk, index) else 0.0), (chunk, index)
            if abs(begin - end) * self._rate > GRID:
                raise ConfigError(
                    f"{self.path}: episode {place.number} begins at {begin:.4f} s in the movie of {key}, but "
                    f"the one before ends at {end:.4f} s, so its pictures belong to other actions. {AGAIN}"
                )
            end = begin + place.length / self._rate

    def episodes(self) -> Iterator[SimulatedEpisode]:
        """Read one episode after the other, with one file of rows and one movie of each camera open."""
        movies: dict[str, _Movie] = {}
        columns = ["episode_index", self.action, *self.state, self.reward, self.success, *self.cameras]
        columns += [] if self.settings.task else ["task_index"]
        kept = [name for name in dict.fromkeys(columns) if name and name not in self._places[0].videos]
        try:
            for (chunk, index), places in groupby(self._places, key=lambda place: place.rows):
                file = self.path / DATA.format(chunk_index=chunk, file_index=index)
                with _reading(file):
                    table = _read_table(file, kept, optional=tuple(ORDER))
                    numbers = _numbers_in(table, "episode_index")[:, 0]
                    if unknown := set(numbers.tolist()) - self._numbers:
                        raise ValueError(f"it has episode {min(unknown)}, which meta/episodes lacks")
                for place in places:
                    with _reading(file):
                        rows = np.flatnonzero(numbers == place.number)
                        if len(rows) != place.length:
                            raise ValueError(
                                f"it has {len(rows)} rows of episode {place.number}, where meta/episodes "
                                f"has {place.length}"
                            )
                        episode = self._episode(place, table.take(rows), movies)
                    yield episode
        finally:
            for movie in movies.values():
                movie.close()

    def _episode(self, place: _Place, table: Any, movies: dict[str, _Movie]) -> SimulatedEpisode:
        where = f"{self.path} episode {place.number}"
        _check_order(table, self._rate)
        kept = np.arange(0, place.length, self.settings.stride)
        look = (len(self.cameras), self.looks.height, self.looks.width, 3)
        pictures, shape = np.empty((len(kept), *look), np.uint8), (place.length, 1)
        for camera, key in enumerate(self.cameras):
            if key in place.videos:
                stored = self._movie_frames(place, key, kept, movies)
            else:
                stored = _pictures_in(table.take(kept), key, self._sizes[key])
            for row, picture in enumerate(stored):
                pictures[row, camera] = place_picture(picture, self.settings)
        nothing = np.zeros(shape, np.float32)

        def read(key: str, flag: str) -> NDArray[np.float32]:
            return check_numbers(where, key, _numbers_in(table, key), flag) if key else nothing

        states = [read(key, "state")[kept] for key in self.state]
        start = SimStart(
            name=f"{self.looks.simulator}/{self.path.name}/{place.number:06d}",
            task=self._task(table, where),
            seed=place.number,
        )
        return self.episode(
            where,
            start,
            pictures=pictures,
            states=np.concatenate(states, axis=1) if states else nothing[kept, :0],
            actions=read(self.action, "action"),
            rewards=check_array(read(self.reward, "reward"), shape, f"{where}: its rewards")[:, 0],
            success=check_verdicts(read(self.success, "success"), shape, f"{where}: {self.success}")[:, 0],
        )

    def _movie_frames(
        self, place: _Place, key: str, kept: NDArray[np.int64], movies: dict[str, _Movie]
    ) -> Iterator[NDArray[np.uint8]]:
        chunk, index, begin = place.videos[key]
        file = self.path / VIDEO.format(video_key=key, chunk_index=chunk, file_index=index)
        if key not in movies or movies[key].path != file:
            if key in movies:
                movies[key].close()
            movies[key] = _Movie(file, self._sizes[key], self._rate)
        return movies[key].frames(begin, kept)

    def _task(self, table: Any, where: str) -> str:
        task = self.settings.task
        if not task:
            of_rows = _numbers_in(table, "task_index")[:, 0]
            task = self._tasks.get(of_rows[0].item(), "")
            if (of_rows != of_rows[0]).any():
                self.note("instructions that change within an episode: the first one is taken")
        return check_instruction(task, f"{where} (or --dataset.task)")


def _check_order(table: Any, rate: float) -> None:
    """Check that the rows of one episode are in the order of time, without a gap."""
    for name, unit in ORDER.items():
        if name in table.column_names:
            counted = _numbers_in(table, name)[:, 0] * (unit or rate)
            counted = counted - (counted[0] if name == "index" else 0)  # It counts through all episodes.
            off = ~(np.abs(counted - np.arange(len(table))) <= GRID)
            if off.any():
                raise ValueError(
                    f"row {int(off.argmax())} of an episode has another {name}: they are not in order"
                )


def _read_info(path: Path) -> tuple[dict[str, dict[str, Any]], float, str, int | None]:
    """Return features, rate, robot, and the number of episodes if it is known."""
    with _reading(path / INFO):
        info = load_json(path / INFO)
        check_types(info, {"codebase_version": str, "fps": float, "features": dict})
        version, rate = info["codebase_version"], float(info["fps"])
        if not version.startswith("v3."):
            raise ConfigError(
                f"{path} is a LeRobot folder of version {shortened(version)}, and v3.0 is read. Convert it "
                "with LeRobot 0.4: python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --root "
                f"{path.resolve().parent} --repo-id {path.resolve().name} --push-to-hub=false"
            )
        if not 0 < rate <= 10_000:
            raise ValueError(f"fps is {rate}")
        for key, about in info["features"].items():
            if not isinstance(about, dict):
                raise ValueError(f"the feature {shortened(key)} is no object")
            check_types(about, {"dtype": str, "shape": list})
            if not all(type(size) is int and 0 < size <= 2**31 for size in about["shape"]):
                raise ValueError(f"the feature {shortened(key)} has the shape {shortened(about['shape'])}")
            if "/" in key or key in ("", ".", ".."):
                raise ValueError(f"a feature is called {shortened(key)}, which is no name of a folder")
        for name, usual in (("data_path", DATA), ("video_path", VIDEO)):
            if info.get(name) not in (None, usual):
                raise ValueError(f"{name} is {shortened(info[name])}, expected {usual}")
        robot = info.get("robot_type")
        count = info.get("total_episodes")
        return info["features"], rate, robot if isinstance(robot, str) else "", count


def _picture_size(about: Mapping[str, Any]) -> tuple[int, int] | None:
    shape, names = about["shape"], about.get("names")
    details = about.get("info") or about.get("video_info") or {}
    depth = isinstance(details, dict) and (details.get("video.is_depth_map") or details.get("is_depth_map"))
    if about["dtype"] not in ("video", "image") or len(shape) != 3 or depth:
        return None
    first = isinstance(names, list) and bool(names) and str(names[0]).startswith("channel")
    if first or (shape[0] == 3 and shape[2] != 3):
        return (shape[1], shape[2]) if shape[0] == 3 else None
    return (shape[0], shape[1]) if shape[2] == 3 else None


def _read_tasks(path: Path) -> dict[int, Any]:
    file = path / "meta" / "tasks.parquet"
    with _reading(file):
        table = _read_table(file, ["task_index"], texts=("task", "__index_level_0__"))
        numbers, texts = _numbers_in(table, "task_index")[:, 0].tolist(), table.column(1).to_pylist()
        if len(set(numbers)) < len(numbers):
            raise ValueError("it has a task_index twice")
    return dict(zip(numbers, texts, strict=True))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    from av.error import FFmpegError  # pyright: ignore[reportMissingImports]

    own = (OSError, KeyError, TypeError, ValueError, IndexError, RuntimeError, MemoryError)
    try:
        yield
    except ConfigError:
        raise
    except (pa.ArrowException, FFmpegError, *own) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}). {AGAIN}") from error


def _read_table(
    path: Path, columns: Sequence[str], texts: Sequence[str] = (), optional: Sequence[str] = ()
) -> Any:
    """Read columns, the first of `texts` that exists, and all of `optional` that exist."""
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

    with io.FileIO(open_regular(path), "rb") as raw:
        file = pq.ParquetFile(raw)
        there = file.schema_arrow.names
        missing = [name for name in columns if name not in there]
        text = [name for name in texts if name in there][:1]
        if missing or len(text) < bool(texts):
            lacking = [*missing, *texts][0]
            raise ValueError(f"it has no column {lacking}, only {', '.join(there)[:500]}")
        wanted = list(dict.fromkeys([*columns, *text, *(name for name in optional if name in there)]))
        return file.read(wanted).select(wanted)


def _numbers_in(table: Any, column: str) -> NDArray[Any]:
    import pyarrow as pa  # pyright: ignore[reportMissingImports]

    array = table.column(column).combine_chunks()
    rows, kind = len(array), array.type
    if array.null_count:
        raise ValueError(f"{column} has rows without a value")
    if isinstance(array, pa.ExtensionArray):
        array, kind = array.storage, array.storage.type
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if not pa.types.is_fixed_size_list(kind) and len(array.value_lengths().unique()) > 1:
            raise ValueError(f"{column} has rows of different lengths")
        array, kind = array.flatten(), kind.value_type
    if array.null_count:
        raise ValueError(f"{column} has numbers without a value")
    values, width = array.to_numpy(zero_copy_only=False), len(array) // max(1, rows)
    if values.dtype.kind not in "fiub":
        raise ValueError(f"{column} holds {kind}, expected numbers")
    return values.reshape(rows, width)


def _pictures_in(table: Any, column: str, size: tuple[int, int]) -> Iterator[NDArray[np.uint8]]:
    for row in table.column(column):
        value = row.as_py()
        packed = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(packed, bytes):
            raise ValueError(f"{column} does not hold pictures: they may lie in files next to the table")
        yield decode_picture(packed, size)


class _Movie:
    def __init__(self, path: Path, size: tuple[int, int], rate: float) -> None:
        import av  # pyright: ignore[reportMissingImports]

        self.path = path
        self._size, self._rate = size, rate
        with _reading(path):
            # A handle instead of a name: the file's content can then lead to no other file.
            self._raw = io.FileIO(open_regular(path), "rb")
            try:
                self._container: Any = av.open(self._raw, format="mp4")
                if (count := len(self._container.streams.video)) != 1:
                    raise ValueError(f"it has {count} movies, expected 1")
                stream = self._container.streams.video[0]
                stream.thread_type = "AUTO"
                self._decoded: Iterator[Any] = self._container.decode(stream)
            except BaseException:
                self._raw.close()
                raise
        self._frame: Any = None
        self._at = -1.0

    def frames(self, begin: float, steps: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        """Decode the frames ``[H, W, 3]`` at rising steps of an episode that begins at `begin` seconds."""
        tolerance = GRID / self._rate
        for step in steps.tolist():
            seconds = begin + step / self._rate
            with _reading(self.path):
                while self._at < seconds - tolerance:
                    self._frame = next(self._decoded, None)
                    if self._frame is None or self._frame.time is None:
                        raise ValueError(f"it has no frame at {seconds:.3f} s")
                    # Of the first frame alone: PyAV frees a frame late whose data were looked at.
                    if self._at < 0 and any(d.type.name == "DISPLAYMATRIX" for d in self._frame.side_data):
                        raise ValueError("its frames are to be turned or mirrored: write them upright")
                    self._at = float(self._frame.time)
                if self._at > seconds + tolerance:
                    raise ValueError(f"it has no frame at {seconds:.3f} s, the next is at {self._at:.3f} s")
                if (found := (self._frame.height, self._frame.width)) != self._size:
                    raise ValueError(
                        f"its frames have {found[0]} x {found[1]} pixels, but meta/info.json has "
                        f"{self._size[0]} x {self._size[1]}"
                    )
                picture = self._frame.to_ndarray(format="rgb24")
            yield picture

    def close(self) -> None:
        self._container.close()
        self._raw.close()
