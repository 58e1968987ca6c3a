"""Write samples as a folder in the layout of LeRobot v3.0, one sample per step or per decision.

Letters: T samples, D numbers of a sample, H W picture size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import ExitStack
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
"""LeRobot's names; for numbers, they are interpolated between two samples."""
_LEVELS: Final = 256


def number_statistics(values: NDArray[Any]) -> dict[str, Any]:
    """Return statistics of ``[T]`` or ``[T, D]`` numbers: ``[D]`` lists by name, and the sample count."""
    values = values.reshape(len(values), -1).astype(np.float64)
    found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    found |= {name: np.quantile(values, share, axis=0) for name, share in QUANTILES.items()}
    return {name: value.tolist() for name, value in found.items()} | {"count": [len(values)]}


def level_counts(pictures: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Count how often each level occurs in ``[T, H, W, 3]`` pictures: ``[3, 256]``."""
    return np.stack([np.bincount(pictures[..., i].ravel(), minlength=_LEVELS) for i in range(3)])


def picture_statistics(counts: NDArray[np.int64], pictures: int) -> dict[str, Any]:
    """Return statistics of levels in [0, 1]: ``[3, 1, 1]`` lists by name, and the number of pictures."""
    found, levels = dict[str, Any](), np.arange(_LEVELS) / 255
    for weights in counts:
        seen, mean = levels[weights > 0], float(np.average(levels, weights=weights))
        std = math.sqrt(float(np.average((levels - mean) ** 2, weights=weights)))
        channel = {"min": seen[0], "max": seen[-1], "mean": mean, "std": std}
        for name, share in QUANTILES.items():
            channel[name] = np.quantile(levels, share, weights=weights, method="inverted_cdf")
        for name, value in channel.items():
            found.setdefault(name, []).append([[float(value)]])
    return found | {"count": [pictures]}


IMAGE: Final = "observation.images.agentview"
STATE: Final = "observation.state"
CHUNK: Final = "decision.actions"  # All actions of a decision, step by step, where a sample is a decision
_ACTION: Final = ["dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper"]
Arrays = dict[str, NDArray[Any]]  # Columns by name, ``[T, ...]``


def pictures_of(samples: Samples) -> Arrays:
    """Return the pictures of every camera, ``[T, H, W, 3]`` uint8, the first camera first."""
    more = np.moveaxis(samples.more_images, 1, 0)
    others = {f"observation.images.{camera_name(n)}": images for n, images in enumerate(more)}
    return {IMAGE: samples.images, **others}


def feature_of(name: str, column: NDArray[Any]) -> dict[str, Any]:
    """Describe a column of numbers, ``[T]`` or ``[T, D]``."""
    size = column.shape[1] if column.ndim == 2 else 1
    names = {
        "action": _ACTION if size == len(_ACTION) else [f"action_{i}" for i in range(size)],
        STATE: [f"state_{i}" for i in range(size)],
    }
    return {"dtype": column.dtype.name, "shape": [size], "names": names.get(name)}


def video_of(pictures: NDArray[np.uint8], fps: float) -> dict[str, Any]:
    """Describe a column that is a movie; it lacks the last row or column of an odd height or width."""
    height, width = (side // 2 * 2 for side in pictures.shape[1:3])
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
    return {"dtype": "video", "shape": [height, width, 3], "names": names, "info": about}


def info_of(
    features: dict[str, dict[str, Any]], fps: float, *, episodes: int, frames: int, tasks: int
) -> dict[str, Any]:
    """Return the content of meta/info.json; `fps` in samples per second."""
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
        "features": features,
    }


def episode_row(
    row: StoredEpisode, cameras: Iterable[str], rate: Fraction, number: int, begin: int, end: int
) -> dict[str, Any]:
    """Return one row of meta/episodes: LeRobot's columns, then the origin of the episode."""
    position = {"chunk_index": 0, "file_index": 0}
    seconds = {"from_timestamp": float(begin / rate), "to_timestamp": float(end / rate)}
    places = {f"videos/{key}/{n}": v for key in cameras for n, v in (position | seconds).items()}
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
        data = _DataSet(part, rate)
        with data.movies:
            for row, samples in episodes:
                data.add(row, samples)
        data.write()
    return data.length


class _DataSet:
    def __init__(self, folder: Path, rate: Rate) -> None:
        self.length = 0  # Samples so far.
        self.movies = ExitStack()
        self._folder, self._per_step = folder, rate == "step"
        self._rate = Fraction(STEPS_PER_SECOND)  # Samples per second.
        self._features: dict[str, dict[str, Any]] = {}  # Those of the first episode.
        self._writers: list[Mp4Writer] = []
        self._columns: dict[str, list[NDArray[Any]]] = {}
        self._levels: dict[str, NDArray[np.int64]] = {}
        self._episodes: list[dict[str, Any]] = []
        self._tasks: dict[str, int] = {}

    @property
    def _fps(self) -> float:
        return int(self._rate) if self._rate.denominator == 1 else float(self._rate)

    def add(self, row: StoredEpisode, samples: Samples) -> None:
        pictures = pictures_of(samples)
        if not self._features:
            self._begin(samples, pictures)
        length, number = len(samples.actions), len(self._episodes)
        frames = np.arange(length)
        columns = {
            STATE: samples.states,
            "action": samples.actions,
            CHUNK: samples.chunks,
            "next.reward": samples.rewards,
            "next.done": samples.dones,
            "next.success": samples.successes,
            "timestamp": (frames / float(self._rate)).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(length, number),
            "index": self.length + frames,
            "task_index": np.full(length, self._tasks.setdefault(row.episode.task, len(self._tasks))),
        }
        columns = {name: column for name, column in columns.items() if column.size}
        features = {name: video_of(images, self._fps) for name, images in pictures.items()}
        features |= {name: feature_of(name, column) for name, column in columns.items()}
        self._features = self._features or features
        if features != self._features:
            found, first = ({n: x["shape"] for n, x in some.items()} for some in (features, self._features))
            raise ConfigError(
                f"episode {row.episode.episode_id[:12]} has {found}, and others have {first}, but a data set "
                "has one layout. Choose episodes of one kind: --task, --world-version, --version."
            )
        for writer, images in zip(self._writers, pictures.values(), strict=True):
            for frame in images:
                writer.add(frame)
        about = episode_row(row, pictures, self._rate, number, self.length, self.length + length)
        self._episodes.append(about | self._count(columns, pictures))
        self.length += length

    def write(self) -> None:
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        meta = self._folder / "meta"
        types = {"float32": pa.float32(), "int64": pa.int64(), "bool": pa.bool_()}
        kinds = [
            (name, types[about["dtype"]] if size == 1 else pa.list_(types[about["dtype"]], size))
            for name, about in self._features.items()
            if about["dtype"] in types
            for size in about["shape"]
        ]
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        # LeRobot has a list of one number as the number.
        cells = {name: (x[:, 0] if x.shape[1:] == (1,) else x).tolist() for name, x in columns.items()}
        _write_table(self._folder / "data" / f"{FILE}.parquet", pa.table(cells, pa.schema(kinds)))
        _write_table(meta / "episodes" / f"{FILE}.parquet", pa.Table.from_pylist(self._episodes))
        _write_table(meta / "tasks.parquet", _task_table(pa, list(self._tasks)))
        counts = {"episodes": len(self._episodes), "frames": self.length, "tasks": len(self._tasks)}
        info = info_of(self._features, self._fps, **counts)
        (meta / "info.json").write_text(json.dumps(info, indent=4) + "\n")
        stats = {name: picture_statistics(counts, self.length) for name, counts in self._levels.items()}
        stats |= {name: number_statistics(column) for name, column in columns.items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=4) + "\n")

    def _begin(self, samples: Samples, cameras: Iterable[str]) -> None:
        if not self._per_step:
            self._rate /= samples.chunks.shape[1] // samples.actions.shape[1]
        for key in cameras:
            path = self._folder / "videos" / key / f"{FILE}.mp4"
            path.parent.mkdir(parents=True)
            writer = Mp4Writer(path, rate=self._rate, options=ENCODING)
            self._writers.append(self.movies.enter_context(writer))

    def _count(self, columns: Arrays, pictures: Arrays) -> dict[str, Any]:
        """Keep an episode's numbers for the total; return its own statistics, as columns of meta/episodes."""
        own: dict[str, dict[str, Any]] = {}
        for name, images in pictures.items():
            counts = level_counts(images)
            self._levels[name] = self._levels.get(name, 0) + counts
            own[name] = picture_statistics(counts, len(images))
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(column)
            own[name] = number_statistics(column)
        return {f"stats/{name}/{what}": value for name, of in own.items() for what, value in of.items()}


def _task_table(pa: Any, tasks: list[str]) -> Any:
    """Return the tasks and their numbers; pandas' metadata make the text the index, as in LeRobot."""
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks)})
    columns = [
        {"name": n, "field_name": n, "pandas_type": p, "numpy_type": t, "metadata": None}
        for n, p, t in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    note = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    return table.replace_schema_metadata({"pandas": json.dumps(note)})


def _write_table(path: Path, table: Any) -> None:
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
