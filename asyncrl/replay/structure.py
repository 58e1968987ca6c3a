"""The HDF5 structure of a group's file: its dimensions in, the bytes between its values out.

What libhdf5 writes beside the values of the datasets follows from their shapes alone. So libhdf5 makes it in
memory, once for each set of dimensions, and `writing.py` puts values between its pieces. The constant facts
(format, versions, letters, units) are attributes; what differs from group to group is a value of a dataset.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncrl.records import EPISODE_ARRAYS, EPISODE_SCALARS, SCHEMA_VERSION
from asyncrl.replay.schema import (
    BOUNDS,
    CHECKSUMS,
    CONSTANT,
    FORMAT,
    FORMAT_VERSION,
    GROUP,
    ROOT,
    TABLE,
    TABLES,
    UNITS,
    Place,
    stacking_letter,
)

LIBVER: Final = ("v110", "v110")
"""Files that HDF5 1.10 tools can read, whatever HDF5 version writes them."""
ALIGNMENT: Final = 8
"""Bytes; so the values can be used where they were read to."""
TEXT_STEP: Final = 16
"""Text columns are widened to a multiple of this, so that few structures serve many groups."""
KEPT: Final = 256
"""Structures kept in memory, about 10 kB each."""


@dataclass(frozen=True)
class Dimensions:
    """What the structure of a file follows from. Letters as in `records`, summed over the E episodes."""

    E: int
    N: int
    M: int
    H: int
    W: int
    group_widths: tuple[int, ...]
    """Bytes of each text column of the table of the group."""
    episode_widths: tuple[int, ...]
    """Bytes of each text column of the table of episodes."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A file without its values."""

    length: int
    """Bytes of HDF5 content."""
    places: dict[str, Place]
    """Of every dataset, in file order; empty ones at 0."""
    gaps: tuple[bytes, ...]
    """What stands before each of them, and after the last."""


@lru_cache(maxsize=KEPT)
def structure_of(dimensions: Dimensions) -> Structure:
    """Have libhdf5 make the structure, in memory."""
    sparse = _Sparse()
    places, gaps, begin = _lay_out(sparse, dimensions), list[bytes](), 0
    for place in places.values():
        gaps.append(sparse.content(begin, place.offset))
        begin = place.offset + place.nbytes
    gaps.append(sparse.content(begin, sparse.length))
    return Structure(length=sparse.length, places=places, gaps=tuple(gaps))


class _Sparse(io.RawIOBase):
    """A file that keeps what is written to it and has zeros elsewhere, however long it is."""

    def __init__(self) -> None:
        self.length, self._at = 0, 0
        self._written: list[tuple[int, bytes]] = []

    def content(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end`."""
        found = bytearray(end - begin)
        for offset, piece in self._written:
            first, last = max(begin, offset), min(end, offset + len(piece))
            if first < last:
                found[first - begin : last - begin] = piece[first - offset : last - offset]
        return bytes(found)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        return self._at

    def write(self, piece: Any) -> int:
        self._written.append((self._at, bytes(piece)))
        self._at += len(piece)
        self.length = max(self.length, self._at)
        return len(piece)

    def readinto(self, into: Any) -> int:
        into[:] = self.content(self._at, self._at + len(into))
        self._at += len(into)
        return len(into)

    def truncate(self, size: int | None = None) -> int:
        self.length = self._at if size is None else size
        return self.length


def group_type(widths: tuple[int, ...]) -> np.dtype[Any]:
    """The type of the row of `/group`."""
    return _columns({name: kind for name, kind in ROOT.items() if name not in CONSTANT}, widths)


def table_type(widths: tuple[int, ...]) -> np.dtype[Any]:
    """The type of the rows of `/episodes`."""
    return _columns(EPISODE_SCALARS | dict.fromkeys(BOUNDS, int), widths)


CHECKSUMS_TYPE: Final = np.dtype([(name, "<u4") for name in EPISODE_ARRAYS])
"""The type of the rows of `/checksums`."""


def _columns(kinds: dict[str, type], widths: tuple[int, ...]) -> np.dtype[Any]:
    left = iter(widths)
    return np.dtype(
        [(name, f"S{next(left)}" if kind is str else {int: "<i8", float: "<f8"}[kind])
         for name, kind in kinds.items()]
    )  # fmt: skip


def _lay_out(sparse: _Sparse, dimensions: Dimensions) -> dict[str, Place]:
    """Make the file with its datasets, values left out; return where the values belong, in file order."""
    places: dict[str, Place] = {}
    with h5py.File(
        sparse,
        "w",
        libver=LIBVER,
        alignment_threshold=1,
        alignment_interval=ALIGNMENT,
    ) as file:
        for name, value in {"format": FORMAT, **_versions()}.items():
            _attribute(file, name, value)
        for name, (dtype, shape, letters) in _datasets(dimensions).items():
            dataset = _create(file, name, dtype, shape)
            _attribute(dataset, "letters", letters)
            _attribute(dataset, "unit", UNITS.get(name, "see docs"))
            places[name] = Place(offset=dataset.id.get_offset() or 0, dtype=dtype, shape=shape)
    return dict(sorted(places.items(), key=lambda item: (item[1].offset, item[1].nbytes)))


def _versions() -> dict[str, int]:
    return {"format_version": FORMAT_VERSION, "schema_version": SCHEMA_VERSION}


def _datasets(dimensions: Dimensions) -> dict[str, tuple[np.dtype[Any], tuple[int, ...], str]]:
    """Type, shape and letters of every dataset in file order: what is small and often read comes first."""
    tables = {
        GROUP: (group_type(dimensions.group_widths), (1,), "1"),
        TABLE: (table_type(dimensions.episode_widths), (dimensions.E,), "E"),
        CHECKSUMS: (CHECKSUMS_TYPE, (dimensions.E,), "E"),
    }
    assert tuple(tables) == TABLES
    arrays: dict[str, tuple[np.dtype[Any], tuple[int, ...], str]] = {}
    for name, spec in EPISODE_ARRAYS.items():
        letters = spec.shape if stacking_letter(name) != "E" else ("E", *spec.shape)
        shape = tuple(x if isinstance(x, int) else getattr(dimensions, x) for x in letters)
        arrays[name] = np.dtype(spec.dtype).newbyteorder("<"), shape, ",".join(map(str, letters))
    return tables | dict(sorted(arrays.items(), key=lambda item: -item[1][0].itemsize))


def _create(file: h5py.File, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> h5py.Dataset:
    """Make a contiguous dataset whose place is fixed now and whose values are not written."""
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    how.set_obj_track_times(False)
    kind, space = h5py.h5t.py_create(dtype, logical=True), h5py.h5s.create_simple(shape)
    return h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, dcpl=how))


def _attribute(target: h5py.File | h5py.Dataset, name: str, value: str | int) -> None:
    """Write a new scalar attribute: fixed-length UTF-8 bytes or an int64."""
    array: NDArray[Any] = np.array(value, "<i8") if isinstance(value, int) else np.array(value.encode())
    kind = h5py.h5t.py_create(array.dtype, logical=True)
    h5py.h5a.create(target.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR)).write(array)
