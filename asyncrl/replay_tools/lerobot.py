"""Write samples as a folder in the layout of LeRobot v3.0: one sample per step, 20 per second.

meta/info.json, meta/stats.json, meta/tasks.parquet, meta/episodes/chunk-000/file-000.parquet
data/chunk-000/file-000.parquet                             all episodes, one row per step
videos/observation.images.agentview/chunk-000/file-000.mp4  all episodes, one frame per step
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.replay_tools.episodes import StoredEpisode
from asyncrl.replay_tools.samples import STEPS_PER_SECOND, Rate, Samples
from asyncrl.storage.atomic import replacing
from asyncrl.storage.movies import can_write_mp4, write_mp4

IMAGE: Final = "observation.images.agentview"
_ACTION = ["dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper"]


def _number(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [1], "names": None}


def features_of(numbers: int) -> dict[str, dict[str, Any]]:
    """Return the columns for actions of so many numbers, without the shape of the images."""
    names = _ACTION if numbers == len(_ACTION) else [f"action_{i}" for i in range(numbers)]
    return {
        IMAGE: {"dtype": "video", "names": ["height", "width", "channels"]},
        "action": {"dtype": "float32", "shape": [numbers], "names": names},
        "next.reward": _number("float32"),
        "next.done": _number("bool"),
        "next.success": _number("bool"),
        "timestamp": _number("float32"),
        "frame_index": _number("int64"),
        "episode_index": _number("int64"),
        "index": _number("int64"),
        "task_index": _number("int64"),
    }


def info_of(
    episodes: int, frames: int, tasks: int, size: tuple[int, int], numbers: int, fps: int
) -> dict[str, Any]:
    """Describe a data set.

    Args:
        episodes: How many.
        frames: Of all episodes.
        tasks: Different ones.
        size: Height and width of the frames in pixels.
        numbers: Of an action.
        fps: Frames per second.
    """
    video = {
        "video.height": size[0],
        "video.width": size[1],
        "video.codec": "h264",
        "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }
    features = features_of(numbers)
    features[IMAGE] |= {"shape": [*size, 3], "info": video}
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


class RunningStatistics:
    """Statistics of one column, without keeping it. Pictures count per channel, scaled to [0, 1]."""

    def __init__(self, *, image: bool = False) -> None:
        self._image = image
        self._count = self._pixels = 0
        self._low = self._high = self._sum = self._squares = np.empty(0)

    def add(self, values: NDArray[Any]) -> None:
        """Count ``[T, D]`` numbers, or ``[T, H, W, 3]`` uint8 pictures."""
        flat = values.reshape(-1, values.shape[-1]).astype(np.float64) / (255 if self._image else 1)
        low, high = flat.min(axis=0), flat.max(axis=0)
        total, squares = flat.sum(axis=0), (flat**2).sum(axis=0)
        if self._count:
            low, high = np.minimum(low, self._low), np.maximum(high, self._high)
            total, squares = total + self._sum, squares + self._squares
        self._low, self._high, self._sum, self._squares = low, high, total, squares
        self._count += len(values)
        self._pixels += len(flat)

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as lists; those of pictures have the shape ``[3, 1, 1]``."""
        mean = self._sum / self._pixels
        spread = np.sqrt(np.maximum(0.0, self._squares / self._pixels - mean**2))
        told = {"min": self._low, "max": self._high, "mean": mean, "std": spread}
        shape = (-1, 1, 1) if self._image else (-1,)
        return {name: value.reshape(shape).tolist() for name, value in told.items()} | {
            "count": [self._count]
        }


FILE = "chunk-000/file-000"
ENCODING = {"g": "2", "crf": "18"}
"""A key frame every 2 frames, so that single frames are read fast; 18 is hardly told from the original."""


def write_lerobot(out: Path, episodes: Iterable[tuple[StoredEpisode, Samples]], rate: Rate) -> int:
    """Write the episodes.

    Args:
        out: A new folder; written beside itself first, so that it is whole once it is there.
        episodes: With their samples, all of one image size.
        rate: "step".

    Returns:
        Samples of all episodes.

    Raises:
        ConfigError: pyarrow or PyAV is not installed.
    """
    _require_packages()
    assert rate == "step"
    columns = _Columns()
    with replacing(out) as part:
        video = part / "videos" / IMAGE / f"{FILE}.mp4"
        video.parent.mkdir(parents=True)
        write_mp4(video, columns.follow(episodes), rate=STEPS_PER_SECOND, options=ENCODING)
        columns.write(part)
    return columns.index


def _require_packages() -> None:
    missing = [] if find_spec("pyarrow") else ["pyarrow (extra 'lerobot')"]
    missing += [] if can_write_mp4() else ["av (extra 'video')"]
    if missing:
        raise ConfigError(
            f"--format lerobot needs {' and '.join(missing)}, which is not installed. "
            "Install it with pip install 'asyncrl[lerobot]', or use --format robomimic."
        )


class _Columns:
    """Everything but the frames, gathered while the frames go to the encoder."""

    def __init__(self) -> None:
        self.index = 0
        """Samples so far."""
        self.size = (0, 0)
        """Height and width of the frames in the movie, in pixels."""
        self.numbers = 0
        """Of an action."""
        self.rows: list[dict[str, Any]] = []
        self.episodes: list[dict[str, Any]] = []
        self.tasks: dict[str, int] = {}
        self.stats: dict[str, RunningStatistics] = {}

    def follow(self, episodes: Iterable[tuple[StoredEpisode, Samples]]) -> Iterator[NDArray[np.uint8]]:
        """Yield every frame, ``[H, W, 3]``, and note its row."""
        for row, samples in episodes:
            self._note(row, samples)
            yield from samples.images

    def write(self, folder: Path) -> None:
        """Write the tables and the JSON files."""
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        meta = folder / "meta"
        kinds = [
            (name, _arrow(pa, about)) for name, about in features_of(self.numbers).items() if name != IMAGE
        ]
        _write_table(folder / "data" / f"{FILE}.parquet", pa.Table.from_pylist(self.rows, pa.schema(kinds)))
        _write_table(meta / "episodes" / f"{FILE}.parquet", pa.Table.from_pylist(self.episodes))
        _write_table(meta / "tasks.parquet", _task_table(pa, list(self.tasks)))
        info = info_of(
            len(self.episodes), self.index, len(self.tasks), self.size, self.numbers, STEPS_PER_SECOND
        )
        (meta / "info.json").write_text(json.dumps(info, indent=4) + "\n")
        stats = {name: running.as_dict() for name, running in self.stats.items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=4) + "\n")

    def _note(self, row: StoredEpisode, samples: Samples) -> None:
        begin, length, number = self.index, len(samples.actions), len(self.episodes)
        task = self.tasks.setdefault(row.episode.task, len(self.tasks))
        self.size = (samples.images.shape[1] // 2 * 2, samples.images.shape[2] // 2 * 2)
        self.numbers = samples.actions.shape[1]
        frames = np.arange(length)
        columns = {
            "action": samples.actions,
            "next.reward": samples.rewards,
            "next.done": samples.dones,
            "next.success": samples.successes,
            "timestamp": (frames / STEPS_PER_SECOND).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(length, number),
            "index": begin + frames,
            "task_index": np.full(length, task),
        }
        self.rows += [
            dict(zip(columns, values, strict=True))
            for values in zip(*(column.tolist() for column in columns.values()), strict=True)
        ]
        for name, column in columns.items():
            self.stats.setdefault(name, RunningStatistics()).add(column.reshape(length, -1))
        self.stats.setdefault(IMAGE, RunningStatistics(image=True)).add(samples.images)
        self.index += length
        self.episodes.append(_episode_row(row, number, begin, self.index))


def _episode_row(row: StoredEpisode, number: int, begin: int, end: int) -> dict[str, Any]:
    """Return one row of meta/episodes: what LeRobot asks for, then where the episode comes from."""
    position = {"chunk_index": 0, "file_index": 0}
    seconds = {"from_timestamp": begin / STEPS_PER_SECOND, "to_timestamp": end / STEPS_PER_SECOND}
    return {
        "episode_index": number,
        "tasks": [row.episode.task],
        "length": end - begin,
        **{f"data/{name}": value for name, value in position.items()},
        "dataset_from_index": begin,
        "dataset_to_index": end,
        **{f"videos/{IMAGE}/{name}": value for name, value in (position | seconds).items()},
        **{f"meta/episodes/{name}": value for name, value in position.items()},
        "asyncrl/episode_id": row.episode.episode_id,
        "asyncrl/success": row.episode.success,
        "asyncrl/policy_version": row.episode.oldest_version,
    }


def _arrow(pa: Any, about: dict[str, Any]) -> Any:
    kind = {"float32": pa.float32(), "int64": pa.int64(), "bool": pa.bool_()}[about["dtype"]]
    (length,) = about["shape"]
    return kind if length == 1 else pa.list_(kind, length)


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
