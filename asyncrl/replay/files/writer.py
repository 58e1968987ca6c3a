"""Write the file of a complete group: `pwritev` puts the values between pieces of structure from libhdf5.

The values go from the episodes' own memory into the file, neither joined nor copied before. libhdf5 works in
memory only, so it never meets a full disk.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncrl.episode_layout import (
    COUNTED_SCHEMA_VERSION,
    ArraySpec,
    array_specs,
    decision_layout,
    episode_arrays,
    optional_of,
    sample_specs,
    scalar_types,
    version_of,
)
from asyncrl.messaging.episode_codec import as_bytes
from asyncrl.records import Episode
from asyncrl.replay.files.format import (
    BOUNDS,
    CHECKSUMS,
    CONSTANT,
    FORMAT,
    FORMAT_VERSION,
    GROUP,
    LIBVER,
    ROOT,
    TABLE,
    TABLES,
    UNITS,
    ArrayExtent,
    GroupFileParts,
    make_footer,
    stacking_letter,
)

ALIGNMENT: Final = 8
"""Bytes; so the values can be used where they were read to."""
TEXT_STEP: Final = 16
"""Text columns are widened to a multiple of this, so that few structures serve many groups."""
KEPT: Final = 256
"""Structures kept in memory, about 10 kB each."""


@dataclass(frozen=True)
class Dimensions:
    """What the structure of a file follows from. Letters as in `records`, N and M summed over E episodes."""

    E: int
    N: int
    M: int
    H: int
    W: int
    C: int
    A: int
    sample: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape of one decision of each of the sample's arrays."""
    group_widths: tuple[int, ...]
    """Bytes of each text column of the table of the group."""
    episode_widths: tuple[int, ...]
    """Bytes of each text column of the table of episodes."""
    version: int
    """Schema version of the episodes."""
    optional: tuple[str, ...] = ()
    """Their `episode_layout.OPTIONAL_ARRAYS`."""
    V: int = 0
    Q: int = 0

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """Return the arrays of the file, in the order of `episode_layout.episode_arrays`."""
        sample = sample_specs((name, dtype, (None, *shape)) for name, dtype, shape in self.sample)
        return array_specs(sample, self.optional, counted=self.version == COUNTED_SCHEMA_VERSION)


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A file without its values."""

    length: int
    """Bytes of HDF5 content."""
    extents: dict[str, ArrayExtent]
    """Of every dataset, in file order; empty ones at 0."""
    gaps: tuple[bytes, ...]
    """What stands before each of them, and after the last."""


@lru_cache(maxsize=KEPT)
def structure_of(dimensions: Dimensions) -> Structure:
    """Have libhdf5 make the structure, in memory."""
    sparse = _Sparse()
    extents, gaps, begin = _lay_out(sparse, dimensions), list[bytes](), 0
    for extent in extents.values():
        gaps.append(sparse.content(begin, extent.offset))
        begin = extent.offset + extent.nbytes
    gaps.append(sparse.content(begin, sparse.length))
    return Structure(length=sparse.length, extents=extents, gaps=tuple(gaps))


class _Sparse(io.RawIOBase):
    """A file that keeps what is written to it and has zeros elsewhere, however long it is."""

    def __init__(self) -> None:
        self.length, self._at = 0, 0
        self._written: list[tuple[int, bytes]] = []

    def content(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`."""
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
    """Return the type of the row of `/group`."""
    return _columns({name: kind for name, kind in ROOT.items() if name not in CONSTANT}, widths)


def table_type(widths: tuple[int, ...], version: int) -> np.dtype[Any]:
    """Return the type of the rows of `/episodes`, of episodes of a schema version."""
    return _columns(scalar_types(version) | dict.fromkeys(BOUNDS, int), widths)


def checksums_type(names: Iterable[str]) -> np.dtype[Any]:
    """Return the type of the rows of `/checksums`, for arrays of these names."""
    return np.dtype([(name, "<u4") for name in names])


def _columns(kinds: dict[str, type], widths: tuple[int, ...]) -> np.dtype[Any]:
    left = iter(widths)
    return np.dtype(
        [(name, f"S{next(left)}" if kind is str else {int: "<i8", float: "<f8"}[kind])
         for name, kind in kinds.items()]
    )  # fmt: skip


def _lay_out(sparse: _Sparse, dimensions: Dimensions) -> dict[str, ArrayExtent]:
    """Make the file with its datasets, values left out; return where the values belong, in file order."""
    extents: dict[str, ArrayExtent] = {}
    with h5py.File(
        sparse,
        "w",
        libver=LIBVER,
        alignment_threshold=1,
        alignment_interval=ALIGNMENT,
    ) as file:
        for name, value in _constants(dimensions.version).items():
            _attribute(file, name, value)
        for name, (dtype, shape, letters) in _datasets(dimensions).items():
            dataset = _create(file, name, dtype, shape)
            _attribute(dataset, "letters", letters)
            _attribute(dataset, "unit", UNITS.get(name, "see docs"))
            extents[name] = ArrayExtent(offset=dataset.id.get_offset() or 0, dtype=dtype, shape=shape)
    return dict(sorted(extents.items(), key=lambda item: (item[1].offset, item[1].nbytes)))


def _constants(version: int) -> dict[str, str | int]:
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "schema_version": version}


def _datasets(dimensions: Dimensions) -> dict[str, tuple[np.dtype[Any], tuple[int, ...], str]]:
    """Return type, shape and letters of every dataset in file order: what is small comes first."""
    tables = {
        GROUP: (group_type(dimensions.group_widths), (1,), "1"),
        TABLE: (table_type(dimensions.episode_widths, dimensions.version), (dimensions.E,), "E"),
        CHECKSUMS: (checksums_type(dimensions.arrays), (dimensions.E,), "E"),
    }
    assert tuple(tables) == TABLES
    arrays: dict[str, tuple[np.dtype[Any], tuple[int, ...], str]] = {}
    for name, spec in dimensions.arrays.items():
        letters = spec.shape if stacking_letter(name) != "E" else ("E", *spec.shape)
        shape = tuple(x if isinstance(x, int) else getattr(dimensions, x) for x in letters)
        shown = (getattr(dimensions, x) if x in ("C", "A") else x for x in letters)
        arrays[name] = np.dtype(spec.dtype).newbyteorder("<"), shape, ",".join(map(str, shown))
    return tables | dict(sorted(arrays.items(), key=lambda item: -item[1][0].itemsize))


def _create(file: h5py.File, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> h5py.Dataset:
    """Make a contiguous dataset whose extent is fixed now and whose values are not written."""
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


Part = bytes | memoryview
MOST_PARTS: Final = 1000
"""Parts that one `pwritev` is given; Linux takes 1024."""


def write_group(path: Path, number: int, episodes: Sequence[Episode]) -> GroupFileParts:
    """Write a complete group into a new file and sync its content. The caller syncs its name.

    Space for all of it is asked for before any of it is written.

    Args:
        path: Must not exist.
        number: Of the group's grant.
        episodes: All members, in the order of `Episode.member`, of one image size.

    Returns:
        What stands in the file and where.

    Raises:
        OSError: There is no space, or the disk does not take it.
        ValueError: The episodes do not fit together.
    """
    layout = decision_layout(episodes[0])
    if any(decision_layout(episode) != layout for episode in episodes):
        raise ValueError(
            "the episodes' samples or log-probs, or their cameras or states, differ in name, type or shape"
        )
    if len({version_of(episode) for episode in episodes}) > 1:
        raise ValueError("some of the episodes say how many steps were taken, others do not")
    attributes = _attributes(number, episodes)
    members = [episode_arrays(episode) for episode in episodes]
    values = {name: [as_bytes(member[name]) for member in members] for name in members[0]}
    checksums = np.array(
        [tuple(map(zlib.crc32, parts)) for parts in zip(*values.values(), strict=True)],
        checksums_type(values),
    )
    group, table, widths = _tables(attributes, episodes)
    structure = structure_of(_dimensions(episodes, widths))
    values |= {GROUP: [as_bytes(group)], TABLE: [as_bytes(table)], CHECKSUMS: [as_bytes(checksums)]}
    found = _write_file(path, _in_file_order(structure, values))
    return GroupFileParts(
        attributes=attributes, table=table, checksums=checksums, extents=structure.extents, found=found
    )


def _in_file_order(structure: Structure, values: dict[str, list[memoryview]]) -> list[Part]:
    """Return the whole file: structure, values, and the footer with the checksum of what libhdf5 reads."""
    parts, checksum, begin = list[Part](), 0, structure.gaps[0]
    for (name, extent), gap in zip(structure.extents.items(), structure.gaps[1:], strict=True):
        if sum(map(len, values[name])) != extent.nbytes:
            raise ValueError(f"{name} of the episodes does not make up {extent.dtype}{list(extent.shape)}")
        parts += [begin, *values[name]]
        checksum = zlib.crc32(begin, checksum)
        if name in TABLES:
            checksum = zlib.crc32(values[name][0], checksum)
        begin = gap
    arrays = [extent for name, extent in structure.extents.items() if name not in TABLES and extent.nbytes]
    extents = [(extent.offset, extent.nbytes) for extent in arrays]
    footer = make_footer(extents, zlib.crc32(begin, checksum), structure.length)
    return [part for part in (*parts, begin, footer) if len(part)]


def _write_file(path: Path, parts: list[Part]) -> os.stat_result:
    """Write and sync a new file; return what the file system says of it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(handle, 0, sum(map(len, parts)))
        offset = 0
        while parts:
            written = os.pwritev(handle, parts[:MOST_PARTS], offset)
            offset += written
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = parts[0][written:]
        os.fsync(handle)
        return os.fstat(handle)
    finally:
        os.close(handle)


def _attributes(number: int, episodes: Sequence[Episode]) -> dict[str, Any]:
    """Gather the facts of `format.ROOT`, in its order."""
    first = episodes[0]
    found = {
        **_constants(version_of(first)),
        "group_number": number,
        "oldest_version": min(episode.oldest_version for episode in episodes),
        "newest_version": max(int(episode.policy_versions.max()) for episode in episodes),
        "successes": sum(episode.success for episode in episodes),
    }
    return {name: found[name] if name in found else getattr(first, name) for name in ROOT}


def _tables(
    attributes: dict[str, Any], episodes: Sequence[Episode]
) -> tuple[NDArray[Any], NDArray[Any], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the rows of `/group` and `/episodes`, and the widths of their texts."""
    row = [_plain(attributes[name]) for name in ROOT if name not in CONSTANT]
    version = attributes["schema_version"]
    rows = [
        [_plain(kind(getattr(episode, name))) for name, kind in scalar_types(version).items()]
        for episode in episodes
    ]
    for letter in ("frames", "video"):
        ends = list(accumulate(len(getattr(episode, letter)) for episode in episodes))
        for member, begin, end in zip(rows, [0, *ends], ends, strict=False):
            member += [begin, end]
    widths = _widths([row]), _widths(rows)
    group = np.array([tuple(row)], group_type(widths[0]))
    table = np.array([tuple(member) for member in rows], table_type(widths[1], version))
    return group, table, widths


def _plain(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _widths(rows: list[list[Any]]) -> tuple[int, ...]:
    """Return the bytes that each column of text needs, rounded up."""
    columns = [column for column in zip(*rows, strict=True) if isinstance(column[0], bytes)]
    return tuple(max(1, -(-max(map(len, column)) // TEXT_STEP)) * TEXT_STEP for column in columns)


def _dimensions(episodes: Sequence[Episode], widths: tuple[tuple[int, ...], tuple[int, ...]]) -> Dimensions:
    first = episodes[0]
    height, width, _ = first.final_frame.shape
    _, steps, numbers = first.logprobs.shape
    return Dimensions(
        E=len(episodes),
        N=sum(len(episode.frames) for episode in episodes),
        M=sum(len(episode.video) for episode in episodes),
        H=height,
        W=width,
        C=steps,
        A=numbers,
        sample=tuple((name, array.dtype.name, array.shape[1:]) for name, array in first.sample.items()),
        group_widths=widths[0],
        episode_widths=widths[1],
        version=version_of(first),
        optional=optional_of(first),
        V=0 if first.final_more_frames is None else len(first.final_more_frames),
        Q=0 if first.final_state is None else len(first.final_state),
    )
