"""The end of a group file: a checksum of all that libhdf5 interprets, checked before libhdf5 sees the file.

A damaged HDF5 structure can crash libhdf5 and with it the process, so no exception handler helps. Behind the
HDF5 content, which ends where its superblock says and which other tools read as ever, lies the footer:

    extents    (u64 offset, u64 bytes) of the values of each array, in file order
    tail       8 bytes "ARLFOOT1", u32 number of extents, u32 CRC-32 of the HDF5 content outside of the
               extents, u64 bytes of HDF5 content, u32 CRC-32 of the footer up to here

All little-endian. The tables count as structure. The arrays have checksums of their own in one of them
(`schema.py`), checked when they are read: so a look at a few small arrays of a large file stays cheap.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_MAGIC: Final = b"ARLFOOT1"
_EXTENT: Final = struct.Struct("<QQ")
_TAIL: Final = struct.Struct("<8sIIQ")
_CRC: Final = struct.Struct("<I")
_MAX_EXTENTS: Final = 64
_PIECE: Final = 2**20


def make_footer(extents: Sequence[tuple[int, int]], checksum: int, length: int) -> bytes:
    """Make the footer of a file.

    Args:
        extents: (offset, bytes) of the values of each array, in file order.
        checksum: CRC-32 of the HDF5 content outside of the extents.
        length: Bytes of HDF5 content.
    """
    body = b"".join(_EXTENT.pack(*extent) for extent in extents)
    body += _TAIL.pack(_MAGIC, len(extents), checksum, length)
    return body + _CRC.pack(zlib.crc32(body))


def append_footer(path: Path) -> None:
    """Add a footer without extents to a closed HDF5 file: every byte counts as structure."""
    with path.open("r+b") as file:
        length = file.seek(0, os.SEEK_END)
        file.write(make_footer((), _checksum_outside(file.fileno(), [], length), length))


def check_footer(handle: int) -> None:
    """Check that libhdf5 can open the file without harm.

    Args:
        handle: Of the file, open for reading.

    Raises:
        OSError: It cannot be read.
        ValueError: It was cut short or changed; says where.
    """
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
    if _checksum_outside(handle, extents, length) != checksum:
        raise ValueError("the checksum of its HDF5 structure does not match")


def fingerprint(handle: int, size: int) -> int:
    """Return a number that tells a sealed file of `size` bytes from others: the checksum of its footer.

    The footer has the checksum of the tables, and these have those of all arrays.

    Raises:
        OSError: It cannot be read.
        ValueError: It is too short.
    """
    last = os.pread(handle, _CRC.size, max(0, size - _CRC.size))
    if len(last) < _CRC.size:
        raise ValueError(f"it has {size} bytes, too few for a footer")
    return _CRC.unpack(last)[0]


def _checksum_outside(handle: int, extents: list[tuple[int, int]], length: int) -> int:
    """CRC-32 of the first `length` bytes without the extents, read in pieces."""
    checksum, begin = 0, 0
    for offset, count in [*extents, (length, 0)]:
        if not begin <= offset <= offset + count <= length:
            raise ValueError(f"bytes {offset} to {offset + count} of a dataset lie outside of the file")
        while begin < offset:
            piece = os.pread(handle, min(_PIECE, offset - begin), begin)
            if not piece:
                raise ValueError(f"it ends at byte {begin}")
            checksum, begin = zlib.crc32(piece, checksum), begin + len(piece)
        begin = offset + count
    return checksum
