"""The end of a group file: a checksum of all that libhdf5 interprets, checked before libhdf5 sees the file.

A damaged HDF5 structure can crash libhdf5 and with it the process, so no exception handler helps. Behind the
HDF5 content, which ends where its superblock says and which other tools read as ever, lies the footer:

    extents    (u64 offset, u64 bytes) of the raw bytes of each dataset, in file order
    tail       8 bytes "ARLFOOT1", u32 number of extents, u32 CRC-32 of the HDF5 content outside of the
               extents, u64 bytes of HDF5 content, u32 CRC-32 of the footer up to here

All little-endian. The raw bytes have checksums of their own (`schema.py`), checked when they are read: so a
look at a few small arrays of a large file stays cheap.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final

_MAGIC: Final = b"ARLFOOT1"
_EXTENT: Final = struct.Struct("<QQ")
_TAIL: Final = struct.Struct("<8sIIQ")
_CRC: Final = struct.Struct("<I")
_MAX_EXTENTS: Final = 64
_PIECE: Final = 2**20


def append_footer(path: Path, extents: Iterable[tuple[int, int]]) -> None:
    """Add the footer to a closed HDF5 file.

    Args:
        path: Written by nobody else.
        extents: (offset, bytes) of the raw bytes of each dataset.
    """
    placed = sorted(extents)
    with path.open("r+b") as file:
        length = file.seek(0, os.SEEK_END)
        checksum = _checksum_outside(file, placed, length)
        body = b"".join(_EXTENT.pack(*extent) for extent in placed)
        body += _TAIL.pack(_MAGIC, len(placed), checksum, length)
        file.seek(length)
        file.write(body + _CRC.pack(zlib.crc32(body)))


def check_footer(path: Path) -> None:
    """Check that libhdf5 can open the file without harm.

    Raises:
        OSError: It cannot be read.
        ValueError: It was cut short or changed; says where.
    """
    fixed = _TAIL.size + _CRC.size
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < fixed:
            raise ValueError(f"it has {size} bytes, too few for a footer")
        file.seek(size - fixed)
        magic, count, checksum, length = _TAIL.unpack(file.read(_TAIL.size))
        start = size - fixed - count * _EXTENT.size
        if magic != _MAGIC or count > _MAX_EXTENTS or start != length:
            raise ValueError("it does not end with its footer: it was cut short, or is not of this format")
        file.seek(start)
        footer = file.read(size - start)
        if zlib.crc32(footer[: -_CRC.size]) != _CRC.unpack(footer[-_CRC.size :])[0]:
            raise ValueError("the checksum of its footer does not match")
        extents = list(_EXTENT.iter_unpack(footer[: count * _EXTENT.size]))
        if _checksum_outside(file, extents, length) != checksum:
            raise ValueError("the checksum of its HDF5 structure does not match")


def _checksum_outside(file: BinaryIO, extents: list[tuple[int, int]], length: int) -> int:
    """CRC-32 of the first `length` bytes without the extents, read in pieces."""
    checksum, begin = 0, 0
    for offset, count in [*extents, (length, 0)]:
        if not begin <= offset <= offset + count <= length:
            raise ValueError(f"bytes {offset} to {offset + count} of a dataset lie outside of the file")
        file.seek(begin)
        while begin < offset:
            piece = file.read(min(_PIECE, offset - begin))
            if not piece:
                raise ValueError(f"it ends at byte {begin}")
            checksum, begin = zlib.crc32(piece, checksum), begin + len(piece)
        begin = offset + count
    return checksum
