"""Read the episodes of a group's file: HDF5 says once where the arrays lie, `preadv` reads them.

The arrays are contiguous and uncompressed, so one system call reads a whole group; only the images of files
that `asyncrl replay compact` rewrote are compressed, and read by HDF5. HDF5 has one lock for the
process and takes its time for every dataset; it is needed only for files that this process did not write.

Checksums are verified on the first read of each array of a file and not on repeats: a sealed file never
changes, and a file whose inode, size or time of writing changed counts as another file.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncrl.episode_layout import (
    COUNTED_SCHEMA_VERSION,
    DROPPED_FIELDS_VERSION,
    EPISODE_ARRAYS,
    OPTIONAL_ARRAYS,
    ArraySpec,
    array_specs,
    optional_arrays,
    sample_specs,
    scalar_types,
    schema_version,
)
from asyncrl.errors import ReplayError
from asyncrl.observability import signals
from asyncrl.records import REWARDED, Episode
from asyncrl.replay.files.compression import read_compressed
from asyncrl.replay.files.format import (
    BOUNDS,
    CHECKSUMS,
    COMPRESSED,
    TABLE,
    UNREADABLE,
    ArrayExtent,
    GroupFileParts,
    check_footer,
    check_whole,
    damaged,
    get_dataset,
    get_table,
    read_root,
    stacking_letter,
    unreadable,
)
from asyncrl.storage.hdf5_bounds import MOST
from asyncrl.storage.regular_files import open_regular

LARGEST_GAP: Final = 1 << 16
"""Bytes between two arrays that are read and thrown away rather than skipped by a second call."""
KNOWN_FILES: Final = 1024
"""Files whose layout is kept in memory, about 20 kB each."""

Identity = tuple[int, int, int]
"""Inode, size in bytes, time of writing in nanoseconds."""


class Buffers:
    """Memory that is used again: what was read before is overwritten by the next read."""

    def __init__(self) -> None:
        """Begin empty; grows to the largest group."""
        self._flat: dict[int, NDArray[np.uint8]] = {}

    def take(self, index: int, nbytes: int) -> NDArray[np.uint8]:
        """Return ``[nbytes]`` uint8 for the piece of a file at `index` in the order of reading."""
        held = self._flat.get(index)
        if held is None or held.size < nbytes:
            held = self._flat[index] = np.empty(nbytes, np.uint8)
        return held[:nbytes]


class GroupReader:
    """Reads groups and remembers where their arrays lie. Threads may use it; each file is read by one."""

    def __init__(self) -> None:
        """Know no file yet."""
        self._known: OrderedDict[Path, _CachedLayout] = OrderedDict()
        self._lock = threading.Lock()
        """Around changes of `_known`."""

    def remember(self, path: Path, written: GroupFileParts) -> None:
        """Note a file that this process wrote; its checksums are still verified on the first read."""
        self._note(path, _CachedLayout(written))

    def forget(self, path: Path) -> None:
        """Note that a file is gone."""
        with self._lock:
            self._known.pop(path, None)

    def read(
        self,
        path: Path,
        names: Sequence[str] | None = None,
        *,
        without: Collection[str] = (),
        buffers: Buffers | None = None,
        verify: bool = False,
        attributes: dict[str, Any] | None = None,
    ) -> list[Episode]:
        """Read the episodes of a group, in the order of their members.

        Args:
            path: A sealed file.
            names: Arrays to read; the others come back empty, for a quick look. None: all of them.
            without: Arrays not to read, whatever `names` says.
            buffers: Where to put them; the episodes are valid until the next read. None: into fresh memory.
            verify: Check all checksums again, also those that were checked before.
            attributes: What the file says of its group has to be this; None: anything.

        Raises:
            ReplayError: It is torn, damaged, or of another format or schema version.
            CodecMissing: It was compacted with a codec that is not installed here.
        """
        handle, known = self._open(path)
        try:
            if attributes not in (None, known.written.attributes):
                raise damaged(path, "it is not the file that it was")
            if verify or not known.verified:
                check_footer(handle)
            names = [name for name in names or known.names if name not in without]
            arrays = _read_arrays(handle, known.plan(tuple(names)), buffers)
            if packed := known.compressed(names):
                read_compressed(path, packed)
            episodes = known.episodes(arrays | packed)
            for name in names if verify else set(names) - known.verified:
                known.check(name, episodes)
            return episodes
        except UNREADABLE as error:
            self.forget(path)
            raise unreadable(path, error) from None
        finally:
            os.close(handle)

    def _open(self, path: Path) -> tuple[int, _CachedLayout]:
        """Open a file and find its layout. The caller closes the handle."""
        try:
            handle = open_regular(path)
        except OSError as error:
            if signals.exhausted(error):
                raise unreadable(path, error) from None
            raise ReplayError(f"{path} cannot be read ({error.strerror}). Check the path.") from None
        try:
            known = self._known.get(path)
            if known is None or known.identity != _identity(os.fstat(handle)):
                known = _CachedLayout(read_layout(path))
                self._note(path, known)
        except BaseException:
            os.close(handle)
            raise
        return handle, known

    def _note(self, path: Path, known: _CachedLayout) -> None:
        with self._lock:
            self._known[path] = known
            while len(self._known) > KNOWN_FILES:
                self._known.popitem(last=False)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """What one call reads."""

    offset: int
    nbytes: int
    arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...], int], ...]
    """Name, type, shape, and first byte within the piece."""


class _CachedLayout:
    """What was learned of one file, in the form that reading needs."""

    def __init__(self, written: GroupFileParts) -> None:
        self.written, self.identity = written, _identity(written.found)
        self.verified: set[str] = set()
        """Arrays whose checksum was found right."""
        self._plans: dict[tuple[str, ...], tuple[_Piece, ...]] = {}
        rows = [
            dict(zip(written.table.dtype.names or (), row, strict=True)) for row in written.table.tolist()
        ]
        self.names: tuple[str, ...] = written.checksums.dtype.names or ()
        """Of all arrays, in file order."""
        version = written.attributes["schema_version"]
        self._sample = frozenset(self.names) - EPISODE_ARRAYS.keys() - set(optional_arrays(version))
        self._letters = {name: stacking_letter(name) for name in self.names}
        self._bounds = [tuple(row[name] for name in BOUNDS) for row in rows]
        nothing = {name: np.empty(0, written.extents[name].dtype) for name in self.names}
        self._no_sample = {name: nothing.pop(name) for name in self.names if name in self._sample}
        absent = dict.fromkeys(OPTIONAL_ARRAYS.keys() - nothing.keys())
        self._members = [_scalars(row, version) | absent | nothing for row in rows]
        self._checksums = {name: written.checksums[name].tolist() for name in self.names}

    def plan(self, names: tuple[str, ...]) -> tuple[_Piece, ...]:
        """Say where the arrays `names` lie, but for compressed ones; neighbours are read together."""
        if names not in self._plans:
            extents = {name: self.written.extents[name] for name in names}
            self._plans[names] = tuple(_pieces({n: p for n, p in extents.items() if p.offset != COMPRESSED}))
        return self._plans[names]

    def compressed(self, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Make room for those of the arrays `names` that have to be decoded."""
        extents = {name: self.written.extents[name] for name in names}
        return {n: np.empty(p.shape, p.dtype) for n, p in extents.items() if p.offset == COMPRESSED}

    def episodes(self, arrays: dict[str, NDArray[Any]]) -> list[Episode]:
        """Cut the arrays of the group into episodes. The slices are views."""
        episodes = list[Episode]()
        letters = [(name, array, self._letters[name]) for name, array in arrays.items()]
        for index, (member, (n, n_end, m, m_end)) in enumerate(zip(self._members, self._bounds, strict=True)):
            fields, sample = member.copy(), self._no_sample.copy()
            for name, array, letter in letters:
                (sample if name in sample else fields)[name] = (
                    array[n:n_end] if letter == "N" else array[m:m_end] if letter == "M" else array[index]
                )
            fields["sample"] = sample
            # What `Episode(**fields)` does, in a fifteenth of its time: it sets frozen fields one by one.
            episode = object.__new__(Episode)
            episode.__dict__.update(fields)
            episodes.append(episode)
        return episodes

    def check(self, name: str, episodes: list[Episode]) -> None:
        """Compare the checksums of an array.

        Raises:
            ValueError: One does not match.
        """
        arrays = [e.sample[name] if name in self._sample else getattr(e, name) for e in episodes]
        found = [zlib.crc32(array.reshape(-1).view(np.uint8).data) for array in arrays]
        if found != self._checksums[name]:
            raise ValueError(f"the checksum of {name} does not match")
        self.verified.add(name)


def read_group(path: Path, names: Sequence[str] | None = None) -> list[Episode]:
    """Read the episodes of a file, every checksum checked. See `GroupReader.read`."""
    return GroupReader().read(path, names)


def read_layout(path: Path) -> GroupFileParts:
    """Ask HDF5 for the tables and the extents of the arrays.

    Raises:
        ReplayError: It is torn, damaged, or of another format or schema version.
    """
    found = check_whole(path)
    try:
        with h5py.File(path, "r") as file:
            root = read_root(path, file)
            table, checksums = (get_table(file, name)[...] for name in (TABLE, CHECKSUMS))
            if root["schema_version"] == DROPPED_FIELDS_VERSION:
                kept = [name for name in checksums.dtype.names or () if name != "world_versions"]
                checksums = checksums[kept]
            specs = _specs(file, root, checksums)
            extents = {name: _extent(path, file, name, spec) for name, spec in specs.items()}
        _check_extents(extents.values(), found.st_size)
    except UNREADABLE as error:
        raise unreadable(path, error) from None
    return GroupFileParts(attributes=root, table=table, checksums=checksums, extents=extents, found=found)


def _specs(file: h5py.File, root: dict[str, Any], checksums: NDArray[Any]) -> dict[str, ArraySpec]:
    """Return the arrays of a file, by the columns of its checksums."""
    names = checksums.dtype.names or ()
    version = root["schema_version"]
    counted, allowed = version == COUNTED_SCHEMA_VERSION, optional_arrays(version)
    optional = [name for name in names if name in allowed]
    sample = [(name, get_dataset(file, name)) for name in names if name not in {*EPISODE_ARRAYS, *optional}]
    found = sample_specs((name, dataset.dtype.name, dataset.shape) for name, dataset in sample)
    specs = array_specs(found, optional, counted=counted)
    expected = schema_version(found, counted=counted)
    if tuple(specs) != names or version not in (expected, DROPPED_FIELDS_VERSION):
        raise ValueError(f"its arrays {', '.join(names)} are not those of its schema version")
    return specs


def _extent(path: Path, file: h5py.File, name: str, spec: ArraySpec) -> ArrayExtent:
    dataset = get_dataset(file, name)
    if dataset.dtype != np.dtype(spec.dtype):
        raise damaged(path, f"{name} is {dataset.dtype}, expected {spec.dtype}")
    offset = COMPRESSED if dataset.chunks else dataset.id.get_offset()
    if offset is None and dataset.size:
        raise damaged(path, f"{name} is not stored in one piece")
    return ArrayExtent(offset=offset or 0, dtype=dataset.dtype, shape=dataset.shape)


def _check_extents(extents: Iterable[ArrayExtent], file_bytes: int) -> None:
    """Check where the arrays lie, before memory for them is taken.

    Raises:
        ValueError: One ends behind the file, or the compressed ones together decode to too much.
    """
    decoded = 0
    for extent in extents:
        if extent.offset == COMPRESSED:
            decoded += extent.nbytes
        elif extent.offset + extent.nbytes > file_bytes:
            raise ValueError(f"an array ends at byte {extent.offset + extent.nbytes} of {file_bytes}")
    if decoded > MOST:
        raise ValueError(f"its arrays decode to {decoded} bytes, at most {MOST} can be")


def _identity(found: os.stat_result) -> Identity:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _scalars(row: dict[str, Any], version: int) -> dict[str, Any]:
    types = scalar_types(version)
    scalars = {name: row[name].decode() if kind is str else row[name] for name, kind in types.items()}
    return {"steps_taken": REWARDED, **scalars}


def _pieces(extents: dict[str, ArrayExtent]) -> Iterator[_Piece]:
    """Join neighbours. What is empty lies nowhere; it goes with any other."""
    joined: list[list[tuple[str, ArrayExtent]]] = []
    end = -LARGEST_GAP - 1
    for name, extent in sorted(extents.items(), key=lambda item: item[1].offset):
        if extent.offset - end > LARGEST_GAP:
            joined.append([])
        joined[-1].append((name, extent))
        end = extent.offset + extent.nbytes
    for neighbours in joined:
        begin, (_, last) = neighbours[0][1].offset, neighbours[-1]
        arrays = tuple((name, p.dtype, p.shape, p.offset - begin) for name, p in neighbours)
        yield _Piece(offset=begin, nbytes=last.offset + last.nbytes - begin, arrays=arrays)


def _read_arrays(handle: int, pieces: Sequence[_Piece], buffers: Buffers | None) -> dict[str, NDArray[Any]]:
    """Read the arrays of the pieces, each into its part of one buffer per piece."""
    found: dict[str, NDArray[Any]] = {}
    for index, piece in enumerate(pieces):
        flat = np.empty(piece.nbytes, np.uint8) if buffers is None else buffers.take(index, piece.nbytes)
        filled = 0
        while filled < piece.nbytes:  # One call, but for more than 2 GiB.
            count = os.preadv(handle, [flat[filled:].data], piece.offset + filled)
            if count == 0:
                raise OSError("the file ends too early")
            filled += count
        for name, dtype, shape, begin in piece.arrays:
            found[name] = np.ndarray(shape, dtype, flat, begin)
    return found
