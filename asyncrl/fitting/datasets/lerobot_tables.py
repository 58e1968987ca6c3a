"""Read the tables of a LeRobot v3 folder: parquet files, some rows at a time.

pyarrow believes what a file says of itself, so how much a file declares is looked at before it is read.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from asyncrl.errors import ConfigError, first_line
from asyncrl.storage.regular_files import open_regular

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
