"""A group's file in, its episodes out: HDF5 says once where the arrays lie, `preadv` reads them.

The arrays are contiguous and uncompressed, so one system call reads a whole group; only the images of files
that `asyncrl replay compact` rewrote are compressed, and read by HDF5. HDF5 has one lock for the
process and takes its time for every dataset; it is needed only for files that this process did not write.

Checksums are verified on the first read of each array of a file and not on repeats: a sealed file never
changes, and a file whose inode, size or time of writing changed counts as another file.
"""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ReplayError
from asyncrl.records import EPISODE_ARRAYS, EPISODE_SCALARS, Episode
from asyncrl.replay.codecs import read_compressed
from asyncrl.replay.schema import (
    BOUNDS,
    COMPRESSED,
    TABLE,
    UNREADABLE,
    Place,
    Written,
    check_whole,
    damaged,
    get_dataset,
    read_root,
    stacking_letter,
)

ALL: Final = tuple(EPISODE_ARRAYS)
LARGEST_GAP: Final = 1 << 16
"""Bytes between two arrays that are read and thrown away rather than skipped by a second call."""
KNOWN_FILES: Final = 4096
"""Files whose layout is kept in memory, about 5 kB each."""

Identity = tuple[int, int, int]
"""Inode, size in bytes, time of writing in nanoseconds."""


class Buffers:
    """Memory that is used again: what was read before is overwritten by the next read."""

    def __init__(self) -> None:
        """Begin empty; grows to the largest group."""
        self._flat: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, nbytes: int) -> NDArray[np.uint8]:
        """Return ``[nbytes]`` for an array."""
        held = self._flat.get(name)
        if held is None or held.size < nbytes:
            held = self._flat[name] = np.empty(nbytes, np.uint8)
        return held[:nbytes]


class GroupReader:
    """Reads groups and remembers where their arrays lie. Used by one thread."""

    def __init__(self) -> None:
        """Know no file yet."""
        self._known: OrderedDict[Path, _Known] = OrderedDict()

    def remember(self, path: Path, written: Written) -> None:
        """Note a file that this process wrote; its checksums are still verified on the first read."""
        self._note(path, _Known(_identity(path.stat()), written))

    def forget(self, path: Path) -> None:
        """Note that a file is gone."""
        self._known.pop(path, None)

    def read(
        self,
        path: Path,
        names: Sequence[str] = ALL,
        *,
        buffers: Buffers | None = None,
        verify: bool = False,
        attributes: dict[str, Any] | None = None,
    ) -> list[Episode]:
        """Read the episodes of a group, in the order of their members.

        Args:
            path: A sealed file.
            names: Arrays to read; the others come back empty, for a quick look.
            buffers: Where to put them; the episodes are valid until the next read. None: into fresh memory.
            verify: Check all checksums again, also those that were checked before.
            attributes: What the file's root attributes have to be; None: anything.

        Raises:
            ReplayError: It is torn, damaged, or of another format or schema version.
            CodecMissing: It was compacted with a codec that is not installed here.
        """
        handle, known = self._open(path)
        try:
            if attributes not in (None, known.written.attributes):
                raise damaged(path, "it is not the file that it was")
            arrays = self._arrays(path, handle, known, names, buffers or Buffers(), verify=verify)
            return [_episode(row, place, arrays) for place, row in enumerate(known.written.table)]
        except UNREADABLE as error:
            self.forget(path)
            raise damaged(path, str(error)) from None
        finally:
            os.close(handle)

    def _arrays(
        self, path: Path, handle: int, known: _Known, names: Sequence[str], buffers: Buffers, *, verify: bool
    ) -> dict[str, NDArray[Any]]:
        """Read the arrays `names`, and verify what was not verified before (with `verify`: everything)."""
        wanted = set(names) if TABLE in known.verified and not verify else {TABLE, *names}
        places = {name: known.written.places[name] for name in wanted}
        flat = {name: buffers.take(name, place.nbytes) for name, place in places.items()}
        _read_all(handle, {name: x for name, x in places.items() if x.offset != COMPRESSED}, flat)
        if packed := {name: x for name, x in places.items() if x.offset == COMPRESSED}:
            read_compressed(path, {name: flat[name].reshape(x.shape) for name, x in packed.items()})
        for name in wanted if verify else wanted - known.verified:
            if zlib.crc32(flat[name].data) != places[name].crc32:
                raise ValueError(f"the checksum of {name} does not match")
            known.verified.add(name)
        return {name: flat[name].view(places[name].dtype).reshape(places[name].shape) for name in names}

    def _open(self, path: Path) -> tuple[int, _Known]:
        """Open a file and find its layout. The caller closes the handle."""
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ReplayError(f"{path} cannot be read ({error.strerror}). Check the path.") from None
        try:
            identity = _identity(os.fstat(handle))
            known = self._known.get(path)
            if known is None or known.identity != identity:
                known = _Known(identity, read_layout(path))
                self._note(path, known)
        except BaseException:
            os.close(handle)
            raise
        return handle, known

    def _note(self, path: Path, known: _Known) -> None:
        self._known[path] = known
        while len(self._known) > KNOWN_FILES:
            self._known.popitem(last=False)


class _Known:
    """What was learned of one file."""

    def __init__(self, identity: Identity, written: Written) -> None:
        self.identity, self.written = identity, written
        self.verified: set[str] = set()
        """Arrays whose checksum was found right."""


def read_group(path: Path, names: Sequence[str] = ALL) -> list[Episode]:
    """Read the episodes of a file, every checksum checked. See `GroupReader.read`."""
    return GroupReader().read(path, names)


def read_layout(path: Path) -> Written:
    """Ask HDF5 for the attributes, the table and the places of the arrays.

    Raises:
        ReplayError: It is torn, damaged, or of another format or schema version.
    """
    check_whole(path)
    try:
        with h5py.File(path, "r") as file:
            root = read_root(path, file)
            table = get_dataset(file, TABLE)[...]
            places = {name: _place(path, file, name) for name in (TABLE, *ALL)}
    except UNREADABLE as error:
        raise damaged(path, str(error)) from None
    return Written(attributes=root, table=table, places=places)


def _place(path: Path, file: h5py.File, name: str) -> Place:
    dataset = get_dataset(file, name)
    spec = EPISODE_ARRAYS.get(name)
    if spec is not None and dataset.dtype != np.dtype(spec.dtype):
        raise damaged(path, f"{name} is {dataset.dtype}, expected {spec.dtype}")
    offset = COMPRESSED if dataset.chunks else dataset.id.get_offset()
    if offset is None and dataset.size:
        raise damaged(path, f"{name} is not stored in one piece")
    return Place(
        offset=offset or 0, dtype=dataset.dtype, shape=dataset.shape, crc32=int(dataset.attrs["crc32"])
    )


def _identity(found: os.stat_result) -> Identity:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_all(handle: int, places: dict[str, Place], flat: dict[str, NDArray[np.uint8]]) -> None:
    """Read arrays in the order of the file, with one call for neighbours."""
    begin, end, parts = 0, 0, list[memoryview]()
    for name, place in sorted(places.items(), key=lambda item: item[1].offset):
        if not place.nbytes:
            continue
        if parts and 0 <= place.offset - end <= LARGEST_GAP:
            parts.append(memoryview(bytearray(place.offset - end)))
        else:
            _preadv(handle, parts, begin)
            begin, parts = place.offset, []
        parts.append(flat[name].data)
        end = place.offset + place.nbytes
    _preadv(handle, parts, begin)


def _preadv(handle: int, parts: list[memoryview], offset: int) -> None:
    """Fill all parts from `offset` on, however little one call brings."""
    parts = [part for part in parts if len(part)]
    while parts:
        count = os.preadv(handle, parts, offset)
        if count == 0:
            raise OSError("the file ends too early")
        offset += count
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = parts[0][count:]


def _episode(row: Any, place: int, arrays: dict[str, NDArray[Any]]) -> Episode:
    n_begin, n_end, m_begin, m_end = (int(row[name]) for name in BOUNDS)
    bounds = {"N": slice(n_begin, n_end), "M": slice(m_begin, m_end), "E": place}
    scalars: dict[str, Any] = {
        name: row[name].decode() if kind is str else kind(row[name]) for name, kind in EPISODE_SCALARS.items()
    }
    parts: dict[str, Any] = {
        name: arrays[name][bounds[stacking_letter(name)]] if name in arrays else np.empty(0, spec.dtype)
        for name, spec in EPISODE_ARRAYS.items()
    }
    return Episode(**scalars, **parts)
