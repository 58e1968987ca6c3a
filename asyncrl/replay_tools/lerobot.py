"""Write samples as a folder in the layout of LeRobot v3.0, one sample per step or per decision.

meta/info.json, meta/stats.json, meta/tasks.parquet, meta/episodes/chunk-000/file-000.parquet
data/chunk-000/file-000.parquet              all episodes, one row per sample
videos/CAMERA/chunk-000/file-000.mp4         all episodes, one frame per sample; of every camera a movie
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.replay_tools.column_statistics import NumberStatistics, PictureStatistics
from asyncrl.replay_tools.episodes import StoredEpisode
from asyncrl.replay_tools.lerobot_features import CHUNK, STATE, SampleLayout, episode_row, info_of
from asyncrl.replay_tools.samples import STEPS_PER_SECOND, Rate, Samples
from asyncrl.storage.atomic import replacing
from asyncrl.storage.movies import Mp4Writer, can_write_mp4

FILE: Final = "chunk-000/file-000"
ENCODING: Final = {"g": "2", "crf": "18"}
"""A key frame every 2 frames, so that single frames are read fast; 18 is hardly told from the original."""


def write_lerobot(out: Path, episodes: Iterable[tuple[StoredEpisode, Samples]], rate: Rate) -> int:
    """Write the episodes.

    Returns:
        Samples of all episodes.
    """
    _require_packages()
    with replacing(out) as part:
        part.mkdir()
        columns = _Columns(part, rate)
        with columns.movies:
            for row, samples in episodes:
                columns.add(row, samples)
        columns.write()
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
    """Everything but the pictures, gathered while these go to the encoders."""

    def __init__(self, folder: Path, rate: Rate) -> None:
        self.index = 0
        """Samples so far."""
        self.movies = ExitStack()
        """Closes them."""
        self._folder, self._per_step = folder, rate == "step"
        self._layout: SampleLayout | None = None
        self._rate = Fraction(STEPS_PER_SECOND)
        self._writers: list[Mp4Writer] = []
        self._rows: list[dict[str, Any]] = []
        self._episodes: list[dict[str, Any]] = []
        self._tasks: dict[str, int] = {}
        self._stats: dict[str, NumberStatistics | PictureStatistics] = {}

    def add(self, row: StoredEpisode, samples: Samples) -> None:
        """Write an episode's pictures, and note its rows."""
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
        self._note(row, samples, layout, dict(zip(layout.image_keys, pictures, strict=True)))

    def write(self) -> None:
        """Write the tables and the JSON files."""
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        assert self._layout is not None
        meta = self._folder / "meta"
        kinds = [(name, _arrow(pa, about)) for name, about in self._layout.features().items()]
        rows = pa.Table.from_pylist(self._rows, pa.schema(kinds))
        _write_table(self._folder / "data" / f"{FILE}.parquet", rows)
        _write_table(meta / "episodes" / f"{FILE}.parquet", pa.Table.from_pylist(self._episodes))
        _write_table(meta / "tasks.parquet", _task_table(pa, list(self._tasks)))
        info = info_of(
            self._layout,
            self._rate,
            episodes=len(self._episodes),
            frames=self.index,
            tasks=len(self._tasks),
        )
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

    def _note(
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
