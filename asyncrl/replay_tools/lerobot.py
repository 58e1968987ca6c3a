"""Write samples as a folder in the layout of LeRobot v3.0, one sample per step or per decision.

Letters: T samples, D numbers of a sample, H W picture size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.replay_tools.episodes import StoredEpisode
from asyncrl.replay_tools.samples import STEPS_PER_SECOND, Rate, Samples, camera_name
from asyncrl.storage.atomic import replacing
from asyncrl.storage.media import Mp4Writer, can_write_mp4

QUANTILES: Final = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
"""As LeRobot calls them; between two samples they are interpolated."""
_LEVELS: Final = 256


class NumberStatistics:
    """Statistics of a column of numbers, which is kept."""

    def __init__(self) -> None:
        self._parts: list[NDArray[Any]] = []

    def add(self, values: NDArray[Any]) -> None:
        """Count ``[T, D]`` numbers."""
        self._parts.append(values)

    def as_dict(self) -> dict[str, Any]:
        """Return ``[D]`` lists by name, and how many samples there were."""
        values = np.concatenate(self._parts).astype(np.float64)
        found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
        found |= {name: np.quantile(values, share, axis=0) for name, share in QUANTILES.items()}
        return {name: value.tolist() for name, value in found.items()} | {"count": [len(values)]}


class PictureStatistics:
    """Statistics of a camera's pictures per channel, in [0, 1], from how often each level occurs."""

    def __init__(self) -> None:
        self._counts = np.zeros((3, _LEVELS), np.int64)
        self._pictures = 0

    def add(self, pictures: NDArray[np.uint8]) -> None:
        """Count ``[T, H, W, 3]`` pictures."""
        for channel in range(3):
            self._counts[channel] += np.bincount(pictures[..., channel].ravel(), minlength=_LEVELS)
        self._pictures += len(pictures)

    def as_dict(self) -> dict[str, Any]:
        """Return ``[3, 1, 1]`` lists by name, and how many pictures there were."""
        channels = [_of_levels(counts) for counts in self._counts]
        found = {name: [[[channel[name]]] for channel in channels] for name in channels[0]}
        return found | {"count": [self._pictures]}


def _of_levels(counts: NDArray[np.int64]) -> dict[str, float]:
    seen, levels, total = np.flatnonzero(counts), np.arange(_LEVELS) / 255, int(counts.sum())
    mean = float((counts * levels).sum() / total)
    spread = math.sqrt(float((counts * (levels - mean) ** 2).sum() / total))
    found = {"min": float(levels[seen[0]]), "max": float(levels[seen[-1]]), "mean": mean, "std": spread}
    return found | {name: _quantile(counts, total, share) for name, share in QUANTILES.items()}


def _quantile(counts: NDArray[np.int64], total: int, share: float) -> float:
    """Return what `np.quantile` gives of all the levels that were counted, in [0, 1]."""
    ends, place = np.cumsum(counts), (total - 1) * share
    low, high = (int(np.searchsorted(ends, at, side="right")) for at in (math.floor(place), math.ceil(place)))
    return (low + (high - low) * (place - math.floor(place))) / 255


IMAGE: Final = "observation.images.agentview"
STATE: Final = "observation.state"
CHUNK: Final = "decision.actions"
"""All actions of a decision, step by step, where a sample is a decision."""
_ACTION = ["dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper"]


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """Sizes of a sample; one folder holds samples of one layout."""

    cameras: int
    size: tuple[int, int]  # height and width in pixels
    numbers: int
    chunk: int  # numbers of all actions of a decision; 0: a sample is a step
    states: int  # numbers of a state; 0: it is not known

    @classmethod
    def of(cls, samples: Samples) -> SampleLayout:
        """Return the layout of an episode's samples."""
        return cls(
            cameras=1 + samples.more_images.shape[1],
            size=(samples.images.shape[1], samples.images.shape[2]),
            numbers=samples.actions.shape[1],
            chunk=samples.chunks.shape[1],
            states=samples.states.shape[1],
        )

    @property
    def image_keys(self) -> list[str]:
        """Names of the cameras' columns, the first one first."""
        return [IMAGE, *(f"observation.images.{camera_name(n)}" for n in range(self.cameras - 1))]

    def features(self) -> dict[str, dict[str, Any]]:
        """Return the columns that are tables, in their order."""
        names = _ACTION if self.numbers == len(_ACTION) else [f"action_{i}" for i in range(self.numbers)]
        states = [f"state_{i}" for i in range(self.states)]
        return {
            **({STATE: _column("float32", self.states, states)} if self.states else {}),
            "action": _column("float32", self.numbers, names),
            **({CHUNK: _column("float32", self.chunk)} if self.chunk else {}),
            "next.reward": _column("float32"),
            "next.done": _column("bool"),
            "next.success": _column("bool"),
            "timestamp": _column("float32"),
            **{f"{name}index": _column("int64") for name in ("frame_", "episode_", "", "task_")},
        }

    def videos(self, fps: float) -> dict[str, dict[str, Any]]:
        """Return the columns that are movies; an odd height or width loses a row or column in them."""
        height, width = (side // 2 * 2 for side in self.size)
        about = {
            "video.height": height,
            "video.width": width,
            "video.codec": "h264",
            "video.pix_fmt": "yuv420p",
            "video.is_depth_map": False,
            "video.fps": fps,
            "video.channels": 3,
            "has_audio": False,
        }
        names = ["height", "width", "channels"]
        video = {"dtype": "video", "shape": [height, width, 3], "names": names, "info": about}
        return {key: dict(video) for key in self.image_keys}


def _column(dtype: str, size: int = 1, names: list[str] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [size], "names": names}


def info_of(
    layout: SampleLayout, rate: Fraction, *, episodes: int, frames: int, tasks: int
) -> dict[str, Any]:
    """Return the content of meta/info.json; `rate` in samples per second."""
    fps = int(rate) if rate.denominator == 1 else float(rate)
    return {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": {"train": f"0:{episodes}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": layout.videos(fps) | layout.features(),
    }


def episode_row(
    row: StoredEpisode, layout: SampleLayout, rate: Fraction, number: int, begin: int, end: int
) -> dict[str, Any]:
    """Return one row of meta/episodes: LeRobot's columns, then the origin of the episode."""
    position = {"chunk_index": 0, "file_index": 0}
    seconds = {"from_timestamp": float(begin / rate), "to_timestamp": float(end / rate)}
    places = {f"videos/{key}/{n}": v for key in layout.image_keys for n, v in (position | seconds).items()}
    return {
        "episode_index": number,
        "tasks": [row.episode.task],
        "length": end - begin,
        **{f"data/{name}": value for name, value in position.items()},
        "dataset_from_index": begin,
        "dataset_to_index": end,
        **places,
        **{f"meta/episodes/{name}": value for name, value in position.items()},
        "asyncrl/episode_id": row.episode.episode_id,
        "asyncrl/success": row.episode.success,
        "asyncrl/policy_version": row.episode.oldest_version,
    }


FILE: Final = "chunk-000/file-000"
ENCODING: Final = {"g": "2", "crf": "18"}
"""A key frame every 2 frames, so that single frames are read fast; 18 is nearly lossless to the eye."""


def write_lerobot(out: Path, episodes: Iterable[tuple[StoredEpisode, Samples]], rate: Rate) -> int:
    """Write the episodes; return the number of their samples."""
    missing = [] if find_spec("pyarrow") else ["pyarrow (extra 'lerobot')"]
    missing += [] if can_write_mp4() else ["av (extra 'video')"]
    if missing:
        raise ConfigError(
            f"--format lerobot needs {' and '.join(missing)}, which is not installed. "
            "Install it with pip install 'asyncrl[lerobot]', or use --format robomimic."
        )
    with replacing(out) as part:
        part.mkdir()
        columns = _Columns(part, rate)
        with columns.movies:
            for row, samples in episodes:
                columns.add(row, samples)
        columns.write()
    return columns.index


class _Columns:
    def __init__(self, folder: Path, rate: Rate) -> None:
        self.index = 0  # Samples so far.
        self.movies = ExitStack()
        self._folder, self._per_step = folder, rate == "step"
        self._layout: SampleLayout | None = None
        self._rate = Fraction(STEPS_PER_SECOND)
        self._writers: list[Mp4Writer] = []
        self._rows: list[dict[str, Any]] = []
        self._episodes: list[dict[str, Any]] = []
        self._tasks: dict[str, int] = {}
        self._stats: dict[str, NumberStatistics | PictureStatistics] = {}

    def add(self, row: StoredEpisode, samples: Samples) -> None:
        layout = SampleLayout.of(samples)
        if self._layout is None:
            self._begin(layout)
        elif layout != self._layout:
            raise ConfigError(
                f"episode {row.episode.episode_id[:12]} has {layout}, and others have {self._layout}, but a "
                "data set has one layout. Choose episodes of one kind: --task, --world-version, --version."
            )
        pictures = [samples.images, *np.moveaxis(samples.more_images, 1, 0)]
        for writer, frames in zip(self._writers, pictures, strict=True):
            for frame in frames:
                writer.add(frame)
        self._add_rows(row, samples, layout, dict(zip(layout.image_keys, pictures, strict=True)))

    def write(self) -> None:
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        assert self._layout is not None
        meta = self._folder / "meta"
        types = {"float32": pa.float32(), "int64": pa.int64(), "bool": pa.bool_()}
        kinds = [
            (name, types[about["dtype"]] if size == 1 else pa.list_(types[about["dtype"]], size))
            for name, about in self._layout.features().items()
            for size in about["shape"]
        ]
        rows = pa.Table.from_pylist(self._rows, pa.schema(kinds))
        _write_table(self._folder / "data" / f"{FILE}.parquet", rows)
        _write_table(meta / "episodes" / f"{FILE}.parquet", pa.Table.from_pylist(self._episodes))
        _write_table(meta / "tasks.parquet", _task_table(pa, list(self._tasks)))
        counts = {"episodes": len(self._episodes), "frames": self.index, "tasks": len(self._tasks)}
        info = info_of(self._layout, self._rate, **counts)
        (meta / "info.json").write_text(json.dumps(info, indent=4) + "\n")
        stats = {name: gathered.as_dict() for name, gathered in self._stats.items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=4) + "\n")

    def _begin(self, layout: SampleLayout) -> None:
        self._layout = layout
        if not self._per_step:
            self._rate /= layout.chunk // layout.numbers
        for key in layout.image_keys:
            path = self._folder / "videos" / key / f"{FILE}.mp4"
            path.parent.mkdir(parents=True)
            writer = Mp4Writer(path, rate=self._rate, options=ENCODING)
            self._writers.append(self.movies.enter_context(writer))

    def _add_rows(
        self,
        row: StoredEpisode,
        samples: Samples,
        layout: SampleLayout,
        pictures: dict[str, NDArray[np.uint8]],
    ) -> None:
        begin, length, number = self.index, len(samples.actions), len(self._episodes)
        task = self._tasks.setdefault(row.episode.task, len(self._tasks))
        frames = np.arange(length)
        columns = {
            **({STATE: samples.states} if layout.states else {}),
            "action": samples.actions,
            **({CHUNK: samples.chunks} if layout.chunk else {}),
            "next.reward": samples.rewards,
            "next.done": samples.dones,
            "next.success": samples.successes,
            "timestamp": (frames / float(self._rate)).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(length, number),
            "index": begin + frames,
            "task_index": np.full(length, task),
        }
        self._rows += [
            dict(zip(columns, values, strict=True))
            for values in zip(*(_cells(column) for column in columns.values()), strict=True)
        ]
        self.index += length
        about = episode_row(row, layout, self._rate, number, begin, self.index)
        self._episodes.append(about | self._count(columns, pictures))

    def _count(
        self, columns: dict[str, NDArray[Any]], pictures: dict[str, NDArray[np.uint8]]
    ) -> dict[str, Any]:
        """Add an episode to the statistics of all; returns its own, as columns of meta/episodes."""
        own: dict[str, Any] = {}
        for name, values in (pictures | columns).items():
            kind = PictureStatistics if name in pictures else NumberStatistics
            shaped = values if name in pictures else values.reshape(len(values), -1)
            alone = kind()
            for gathered in (alone, self._stats.setdefault(name, kind())):
                gathered.add(shaped)
            own |= {f"stats/{name}/{what}": value for what, value in alone.as_dict().items()}
        return own


def _cells(column: NDArray[Any]) -> list[Any]:
    """Return the cells of a column; LeRobot has a list of one number as the number."""
    return (column[:, 0] if column.ndim == 2 and column.shape[1] == 1 else column).tolist()


def _task_table(pa: Any, tasks: list[str]) -> Any:
    """Return the tasks and their numbers; the note for pandas makes the text the index, for LeRobot."""
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks)})
    columns = [("task_index", "int64", "int64"), ("task", "unicode", "object")]
    note = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [
            {"name": n, "field_name": n, "pandas_type": p, "numpy_type": t, "metadata": None}
            for n, p, t in columns
        ],
        "pandas_version": "2.0.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(note)})


def _write_table(path: Path, table: Any) -> None:
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
