"""Read the tables of a LeRobot v3 folder: parquet files, some rows at a time.

pyarrow believes what a file says of itself, so how much a file declares is looked at before it is read.

Read what a LeRobot v3 folder says about itself: features, steps per second, instructions.

Read the movies of a LeRobot v3 folder, from front to back: a file holds several episodes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, first_line
from asyncrl.fitting.datasets.pictures import Placing
from asyncrl.storage.untrusted import check_types, load_json, open_regular, shortened

INFO: Final = "meta/info.json"
DATA: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO: Final = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
"""Where version 3.0 keeps rows and movies."""


def read_info(path: Path) -> tuple[dict[str, dict[str, Any]], float, str]:
    """Return a folder's features, its steps per second and the robot, if that is said."""
    try:
        info = load_json(path / INFO, dict)
        check_types(info, {"codebase_version": str, "fps": float, "features": dict})
        version, rate = info["codebase_version"], float(info["fps"])
        if not version.startswith("v3."):
            raise ConfigError(
                f"{path} is a LeRobot folder of version {shortened(version)}, and v3.0 is read. Convert it "
                "with LeRobot: python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id NAME."
            )
        if not 0 < rate <= 10_000:
            raise ValueError(f"fps is {rate}")
        features = {key: _feature(key, about) for key, about in info["features"].items()}
        for name, usual in (("data_path", DATA), ("video_path", VIDEO)):
            if info.get(name) not in (None, usual):
                raise ValueError(f"{name} is {shortened(info[name])}, expected {usual}")
        robot = info.get("robot_type")
        return features, rate, robot if isinstance(robot, str) else ""
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path / INFO} cannot be read ({first_line(error)}). Download or write the data set again."
        ) from error


def _feature(key: str, about: object) -> dict[str, Any]:
    """Check one feature."""
    if not isinstance(about, dict):
        raise ValueError(f"the feature {shortened(key)} is no object")
    check_types(about, {"dtype": str, "shape": list})
    if not all(type(size) is int and 0 < size <= 2**31 for size in about["shape"]):
        raise ValueError(f"the feature {shortened(key)} has the shape {shortened(about['shape'])}")
    if "/" in key or key in ("", ".", ".."):
        raise ValueError(f"a feature is called {shortened(key)}, which is no name of a folder")
    return about


def picture_size(about: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return height and width of a camera's pictures; None: these are no pictures in colour."""
    shape, names = about["shape"], about.get("names")
    details = about.get("info") or about.get("video_info") or {}
    depth = isinstance(details, dict) and (details.get("video.is_depth_map") or details.get("is_depth_map"))
    if about["dtype"] not in ("video", "image") or len(shape) != 3 or depth:
        return None
    first = isinstance(names, list) and bool(names) and str(names[0]).startswith("channel")
    if first or (shape[0] == 3 and shape[2] != 3):
        return (shape[1], shape[2]) if shape[0] == 3 else None
    return (shape[0], shape[1]) if shape[2] == 3 else None


def read_tasks(path: Path) -> dict[int, str]:
    """Read the instructions by number."""
    file = path / "meta" / "tasks.parquet"
    texts = [name for name in columns_of(file) if name != "task_index"]
    column = next((name for name in ("task", "__index_level_0__") if name in texts), None)
    if column is None:
        raise ConfigError(
            f"{file} has no column of instructions (task), only {', '.join(texts)[:200]}. Give one "
            "instruction for all: --dataset.task 'fold the towel'."
        )
    tasks: dict[int, str] = {}
    for batch in batches(file, ["task_index", column]):
        with reading_table(file):
            numbers = numbers_in(batch, "task_index")[:, 0].tolist()
            tasks |= dict(zip(numbers, texts_in(batch, column), strict=True))
    return tasks


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    from av.error import FFmpegError  # pyright: ignore[reportMissingImports]

    try:
        yield
    except ConfigError:
        raise
    except (FFmpegError, OSError, ValueError, TypeError, IndexError, RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"{path} cannot be read ({first_line(error)}). Download or write the data set again."
        ) from error


class Movie:
    """One camera's movie, opened at its first frame."""

    def __init__(self, path: Path, size: tuple[int, int], rate: float, placing: Placing) -> None:
        """Open it.

        Args:
            size: Height and width that its frames must have, in pixels.
            rate: Frames per second.
        """
        import av  # pyright: ignore[reportMissingImports]

        self.path = path
        self._size, self._rate, self._placing = size, rate, placing
        with _reading(path):
            # A handle instead of a name: what the file says can then lead to no other file.
            self._raw = io.FileIO(open_regular(path), "rb")
            try:
                self._container: Any = av.open(self._raw, format="mp4")
                stream = self._container.streams.video[0]
                self._check(stream.height, stream.width)
                stream.thread_type = "AUTO"
                self._frames: Iterator[Any] = self._container.decode(stream)
            except BaseException:
                self._raw.close()
                raise
        self._frame: Any = None
        self._at = -1.0
        """Seconds of the frame that was decoded last."""

    def read(self, begin: float, steps: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        """Decode some frames of an episode.

        Args:
            steps: ``[n]`` of the episode, rising.
            into: ``[n, H, W, 3]`` of the placed frames, which are written to it.
        """
        with _reading(self.path):
            for place, step in enumerate(steps.tolist()):
                into[place] = self._placing.place(self._frame_at(begin + step / self._rate))

    def _frame_at(self, seconds: float) -> NDArray[np.uint8]:
        tolerance = 0.5 / self._rate
        while self._at < seconds - tolerance:
            self._frame = next(self._frames, None)
            if self._frame is None or self._frame.time is None:
                raise ValueError(f"it has no frame at {seconds:.3f} s")
            self._at = float(self._frame.time)
        if self._at > seconds + tolerance:
            raise ValueError(f"it has no frame at {seconds:.3f} s, the next is at {self._at:.3f} s")
        self._check(self._frame.height, self._frame.width)
        return self._frame.to_ndarray(format="rgb24")

    def _check(self, height: int, width: int) -> None:
        if (height, width) != self._size:
            raise ValueError(
                f"its frames have {height} x {width} pixels, but meta/info.json says "
                f"{self._size[0]} x {self._size[1]}"
            )

    def close(self) -> None:
        """Close the file."""
        self._container.close()
        self._raw.close()


ROW_GROUP_BYTES: Final = 4 * 2**30
"""Unpacked bytes that the columns of a row group which are read may have."""
MOST_ROWS: Final = 500_000_000
THRIFT_ITEMS: Final = 10_000_000
"""Items that the description of a file may have: columns times row groups."""
ROWS_AT_ONCE: Final = 4096
PICTURES_AT_ONCE: Final = 32
"""Rows that are read at once where they hold pictures."""


@contextmanager
def reading_table(path: Path) -> Iterator[None]:
    """Say what is wrong with a parquet file with its name."""
    import pyarrow as pa  # pyright: ignore[reportMissingImports]

    try:
        yield
    except ConfigError:
        raise
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, IndexError, MemoryError) as error:
        raise ConfigError(
            f"{path} cannot be read ({first_line(error)}). Download or write the data set again."
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

    with reading_table(path), io.FileIO(open_regular(path), "rb") as raw:
        file = pq.ParquetFile(
            raw, thrift_string_size_limit=THRIFT_ITEMS * 16, thrift_container_size_limit=THRIFT_ITEMS
        )
        if file.metadata.num_rows > MOST_ROWS:
            raise ValueError(f"it declares {file.metadata.num_rows} rows")
        yield file


def columns_of(path: Path) -> list[str]:
    """Return the names of the columns of a file."""
    with _opened(path) as file:
        return list(file.schema_arrow.names)


def batches(path: Path, columns: Sequence[str], *, rows: int = ROWS_AT_ONCE) -> Iterator[Any]:
    """Read a file some rows at a time.

    Yields:
        Batches of Arrow.
    """
    with _opened(path) as file:
        there = file.schema_arrow.names
        if missing := [name for name in columns if name not in there]:
            raise ValueError(f"it has no column {missing[0]}, only {', '.join(there)[:500]}")
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            parts = (group.column(i) for i in range(group.num_columns))
            size = sum(
                part.total_uncompressed_size
                for part in parts
                if part.path_in_schema.split(".")[0] in {name.split(".")[0] for name in columns}
            )
            if not 0 <= size <= ROW_GROUP_BYTES:
                raise ValueError(f"a row group declares {size} bytes, at most {ROW_GROUP_BYTES} are read")
        yield from file.iter_batches(batch_size=rows, columns=list(columns))


def numbers_in(batch: Any, column: str) -> NDArray[Any]:
    """Return a column of numbers, or of lists of equally many: ``[T, n]``."""
    import pyarrow as pa  # pyright: ignore[reportMissingImports]

    array = batch.column(batch.schema.get_field_index(column))
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


def texts_in(batch: Any, column: str) -> list[str]:
    """Return a column of texts."""
    found = batch.column(batch.schema.get_field_index(column)).to_pylist()
    if not all(isinstance(text, str) for text in found):
        raise ValueError(f"{column} does not hold texts")
    return found


class RowStream:
    """Rows of a file in their order, as many at a time as an episode has."""

    def __init__(self, path: Path, columns: Sequence[str], *, pictures: Sequence[str] = ()) -> None:
        """Open a file."""
        self._columns, self._pictures = tuple(columns), tuple(pictures)
        rows = PICTURES_AT_ONCE if pictures else ROWS_AT_ONCE
        self._path = path
        self._batches = batches(path, [*columns, *pictures], rows=rows)
        self._batch: Any = None
        self._used = 0

    def take(self, count: int) -> Iterator[tuple[dict[str, NDArray[Any]], dict[str, list[bytes]]]]:
        """Return the next rows, in one or several pieces.

        Yields:
            Numbers ``[n, ...]`` and pictures (their files) by column, of ``n`` rows.
        """
        while count:
            if self._batch is None or self._used == len(self._batch):
                self._batch, self._used = next(self._batches, None), 0
                if self._batch is None:
                    raise ConfigError(
                        f"{self._path} has {count} rows fewer than meta/episodes says. Download or write the "
                        "data set again."
                    )
            piece = self._batch.slice(self._used, count)
            self._used, count = self._used + len(piece), count - len(piece)
            with reading_table(self._path):
                numbers = {name: numbers_in(piece, name) for name in self._columns}
                pictures = {name: _files_in(piece, name) for name in self._pictures}
            yield numbers, pictures

    def close(self) -> None:
        """Close the file."""
        self._batches.close()  # pyright: ignore[reportAttributeAccessIssue]


def _files_in(batch: Any, column: str) -> list[bytes]:
    """Return the files of a column of pictures, as Hugging Face's data sets store them."""
    found = batch.column(batch.schema.get_field_index(column)).to_pylist()
    files = [row.get("bytes") if isinstance(row, dict) else row for row in found]
    packed = [file for file in files if isinstance(file, bytes)]
    if len(packed) < len(files):
        raise ValueError(f"{column} does not hold pictures: they may lie in files beside the table")
    return packed
