"""Write an HDF5 file whole and durably, with a footer that is checked before libhdf5 opens the file.

libhdf5 may crash on a damaged structure, so the footer has a checksum of everything but the arrays' values,
which have their own. libhdf5 writes to memory only, so it never meets a full disk.
"""

from __future__ import annotations

import errno
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import h5py

from asyncrl.errors import CodecMissing, OutOfFiles, ReplayError
from asyncrl.observability import signals
from asyncrl.storage.atomic import replacing
from asyncrl.storage.untrusted import open_regular

LIBVER: Final = ("v110", "v110")  # HDF5 1.10 tools can read the files, whatever HDF5 version writes them
UNREADABLE: Final = (
    OSError,
    KeyError,
    ValueError,
    TypeError,
    RuntimeError,
    IndexError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
)
"""Errors that h5py raises on a damaged file."""

_MAGIC: Final = b"ARLFOOT1"
_EXTENT: Final = struct.Struct("<QQ")
_TAIL: Final = struct.Struct("<8sIIQ")
_CRC: Final = struct.Struct("<I")
_MAX_EXTENTS: Final = 64
_PIECE: Final = 2**20


@contextmanager
def sealing(path: Path) -> Iterator[tuple[h5py.File, list[tuple[int, int]]]]:
    """Build an HDF5 file in memory; when the block ends, reserve its space and write it durably, or nothing.

    Yields it, and an empty list for (offset, bytes) of values that the footer's checksum leaves out.
    """
    memory = io.BytesIO()
    with h5py.File(memory, "w", libver=LIBVER) as file:
        extents = list[tuple[int, int]]()
        yield file, extents
    content = memory.getbuffer()
    checksum = _checksum_outside(lambda begin, count: content[begin : begin + count], extents, len(content))
    footer = make_footer(extents, checksum, len(content))
    with replacing(path) as part, part.open("xb") as whole:
        os.posix_fallocate(whole.fileno(), 0, len(content) + len(footer))
        whole.write(content)
        whole.write(footer)


@contextmanager
def opened(path: Path) -> Iterator[tuple[h5py.File, int]]:
    """Open a sealed file and return its bytes; errors of h5py in the block mean that it is damaged."""
    size = _check_whole(path)
    try:
        with h5py.File(path, "r", locking=False) as file:  # It never changes.
            yield file, size
    except UNREADABLE as error:
        raise unreadable(path, error) from None


def make_footer(extents: Sequence[tuple[int, int]], checksum: int, length: int) -> bytes:
    """Return the footer: (offset, bytes) of each array's values, checksum and length of the HDF5 content."""
    body = b"".join(_EXTENT.pack(*extent) for extent in extents)
    body += _TAIL.pack(_MAGIC, len(extents), checksum, length)
    return body + _CRC.pack(zlib.crc32(body))


def _check_whole(path: Path) -> int:
    try:
        handle = open_regular(path)
        try:
            _check_footer(handle)
            return os.fstat(handle).st_size
        finally:
            os.close(handle)
    except OSError as error:
        if signals.exhausted(error):
            raise unreadable(path, error) from None
        raise ReplayError(f"{path} cannot be read ({error.strerror}). Check the path.") from None
    except ValueError as error:
        raise damaged(path, str(error)) from None


def _check_footer(handle: int) -> None:
    fixed, size = _TAIL.size + _CRC.size, os.fstat(handle).st_size
    if size < fixed:
        raise ValueError(f"it has {size} bytes, too few for a footer")
    magic, count, checksum, length = _TAIL.unpack_from(os.pread(handle, fixed, size - fixed))
    start = size - fixed - count * _EXTENT.size
    if magic != _MAGIC or count > _MAX_EXTENTS or start != length:
        raise ValueError("it does not end with its footer: it was cut short, or is not of this format")
    footer = os.pread(handle, size - start, start)
    if zlib.crc32(footer[: -_CRC.size]) != _CRC.unpack(footer[-_CRC.size :])[0]:
        raise ValueError("the checksum of its footer does not match")
    extents = list(_EXTENT.iter_unpack(footer[: count * _EXTENT.size]))
    if _checksum_outside(lambda begin, count: os.pread(handle, count, begin), extents, length) != checksum:
        raise ValueError("the checksum of its HDF5 structure does not match")


def _checksum_outside(
    read: Callable[[int, int], bytes | memoryview], extents: Sequence[tuple[int, int]], length: int
) -> int:
    checksum, begin = 0, 0
    for offset, count in [*extents, (length, 0)]:
        if not begin <= offset <= offset + count <= length:
            raise ValueError(f"bytes {offset} to {offset + count} of a dataset lie outside of the file")
        while begin < offset:
            piece = read(begin, min(_PIECE, offset - begin))
            if not piece:
                raise ValueError(f"it ends at byte {begin}")
            checksum, begin = zlib.crc32(piece, checksum), begin + len(piece)
        begin = offset + count
    return checksum


def unreadable(path: Path, error: Exception) -> ReplayError:
    """Return the error of a damaged file, or of too few file descriptors."""
    if signals.exhausted(error):
        return OutOfFiles(f"{path} cannot be read now ({error}). {signals.REMEDY}")
    return damaged(path, str(error))


def damaged(path: Path, why: str) -> ReplayError:
    """Return the error of a file that cannot be used."""
    return ReplayError(f"{path} is damaged: {why}. Move it away; the rest of the replay does not need it.")


def is_full(error: OSError) -> bool:
    """True if an error of writing means that there is no space."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def require_codec(path: Path, dataset: h5py.Dataset) -> None:
    """Check that a dataset can be decoded here: earlier versions compacted with codecs of hdf5plugin too."""
    created = dataset.id.get_create_plist()
    filters = [created.get_filter(index)[0] for index in range(created.get_nfilters())]
    for number in filters:
        if h5py.h5z.filter_avail(number):
            continue
        if find_spec("hdf5plugin") is None:
            raise CodecMissing(
                f"{path} is compressed with a codec of the package hdf5plugin. Install it with pip install "
                "'asyncrl[compression]'."
            )
        import_module("hdf5plugin")  # It registers its filters.
