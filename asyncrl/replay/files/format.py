"""Say what stands in the HDF5 file of one complete group, check it, and read what is small.

    /              attributes: format, format_version, schema_version
    /group         [1] table: group_number, group_id, group_size, task, start_state, actor, oldest_version,
                   newest_version, successes
    /episodes      [E] table: the scalars of each episode, and where its decisions (N) and video frames (M)
                   lie: N_begin, N_end, M_begin, M_end
    /checksums     [E] table: CRC-32 of each episode's part of each array, of its little-endian bytes
    /frames, ...   the arrays of `episode_layout.episode_arrays`, all episodes concatenated along N or M;
                   arrays without either (final_frame) are stacked: [E, H, W, 3]
    each dataset   attributes: letters, unit

The columns of /checksums name the arrays, so also those of the sample. Where these are other arrays than the
action tokens alone, schema_version is 2. It is 3 where each episode says how many steps were taken, as those
of a simulator do: /episodes has the column steps_taken behind end_reason, and
`episode_layout.OPTIONAL_ARRAYS` may stand behind the other arrays. It is 4 where world_versions, the last of
these, says which world drew each decision; the column behind end_reason is weight then, how much the episode
counts in an update.

Everything is a number or fixed-length UTF-8 bytes; nothing is compressed or chunked, but for images that
`asyncrl replay compact` rewrote. Behind the HDF5 content lies a footer with a checksum of its structure and
its tables. `writer.py` writes the file, `reader.py` reads the arrays back.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncrl.episode_layout import EPISODE_ARRAYS, OPTIONAL_ARRAYS, STORED_SCHEMA_VERSIONS
from asyncrl.errors import OutOfFiles, ReplayError
from asyncrl.observability import signals
from asyncrl.records import Sampling
from asyncrl.storage.hdf5_bounds import attribute_of, dataset_in
from asyncrl.storage.regular_files import open_regular

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
    """Return the CRC-32 of the first `length` bytes without the extents, read in pieces."""
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


FORMAT: Final = "asyncrl-replay"
LIBVER: Final = ("v110", "v110")
"""Files that HDF5 1.10 tools can read, whatever HDF5 version writes them."""
FORMAT_VERSION: Final = 3
GROUP: Final = "group"
TABLE: Final = "episodes"
CHECKSUMS: Final = "checksums"
MOST_TABLE_BYTES: Final = 2**26
"""Of one table: 100,000 episodes with texts of 600 bytes."""
TABLES: Final = (GROUP, TABLE, CHECKSUMS)
"""The tables, in file order; the arrays lie behind them."""
UNITS: Final = {
    "frames": "8-bit sRGB",
    "tokens": "action bin",
    "logprobs": "nat",
    "values": "return",
    "actions": "world's action unit per step",
    "rewards": "1 at the first success",
    "success_scores": "probability",
    "policy_versions": "version",
    "noise_seeds": "seed",
    "final_frame": "8-bit sRGB",
    "video": "8-bit sRGB",
    "more_frames": "8-bit sRGB",
    "states": "simulator's unit per number",
    "final_more_frames": "8-bit sRGB",
    "final_state": "simulator's unit per number",
    "world_versions": "version",
}
COMPRESSED: Final = -1
BOUNDS: Final = ("N_begin", "N_end", "M_begin", "M_end")
ROOT: Final[dict[str, type]] = {
    "format": str,
    "format_version": int,
    "schema_version": int,
    "group_number": int,
    "group_id": str,
    "group_size": int,
    "task": str,
    "start_state": str,
    "actor": str,
    "oldest_version": int,
    "newest_version": int,
    "successes": int,
}
"""What a file says of its group."""
CONSTANT: Final = ("format", "format_version", "schema_version")
"""Those of `ROOT` that tell how to read the file: attributes. The others are columns of `/group`."""


@dataclass(frozen=True, kw_only=True)
class GroupFile:
    """What is known of a file without reading its arrays."""

    path: Path
    number: int
    oldest_version: int
    newest_version: int
    size: int
    """Bytes on disk."""
    mtime_ns: int
    """When the file was last written, in nanoseconds."""
    decisions: int
    """Of all its episodes."""
    sampling: Sampling
    """Of its first episode: a group has one."""
    world_version: int
    """The oldest of its decisions."""
    success: float
    """Share of its episodes that succeeded, by their weights, in [0, 1]; 0 where none counts."""
    episode_ids: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ArrayExtent:
    """Where an array lies in a file."""

    offset: int
    """Bytes from the beginning of the file; 0 when it is empty, `COMPRESSED` in a compacted file."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Count the bytes from `offset` on."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class GroupFileParts:
    """The small parts of a file and the extents of the large ones."""

    attributes: dict[str, Any]
    """See `ROOT`."""
    table: NDArray[Any]
    """``[E]`` the rows of ``/episodes``."""
    checksums: NDArray[Any]
    """``[E]`` the rows of ``/checksums``."""
    extents: dict[str, ArrayExtent]
    """Of every array."""
    found: os.stat_result
    """What the file system says of the file."""


def stacking_letter(name: str) -> str:
    """Return the letter along which an array's episodes are joined: N, M, or E when they are stacked."""
    known = EPISODE_ARRAYS | OPTIONAL_ARRAYS
    first = known[name].shape[0] if name in known else "N"  # Else of the sample.
    return str(first) if first in ("N", "M") else "E"


def read_group_file(path: Path) -> GroupFile:
    """Read what a file says of its group, and the ids of its episodes.

    Raises:
        ReplayError: It is torn, damaged, or of another format or schema version.
    """
    found = check_whole(path)
    try:
        with h5py.File(path, "r") as file:
            return describe(path, read_root(path, file), get_table(file, TABLE)[...], found)
    except UNREADABLE as error:
        raise unreadable(path, error) from None


def describe(path: Path, attributes: dict[str, Any], table: NDArray[Any], found: os.stat_result) -> GroupFile:
    """Sum up a sealed file whose small parts are known.

    Args:
        path: Of the file.
        attributes: See `read_root`.
        table: ``[E]`` structured, with the fields of the dataset `TABLE`: dtype as in the file.
        found: What the file system says of it.
    """
    return GroupFile(
        path=path,
        number=attributes["group_number"],
        oldest_version=attributes["oldest_version"],
        newest_version=attributes["newest_version"],
        size=found.st_size,
        mtime_ns=found.st_mtime_ns,
        decisions=int(table["N_end"][-1]),
        sampling=Sampling(float(table["temperature"][0]), int(table["top_k"][0])),
        world_version=int(table["world_version"].min()),
        success=_success(table),
        episode_ids=tuple(x.decode() for x in table["episode_id"].tolist()),
        attributes=attributes,
    )


def _success(table: NDArray[Any]) -> float:
    """Return `GroupFile.success` of the rows of ``/episodes``: ``[E]`` structured."""
    succeeded = table["end_reason"] == b"success"
    weights = table["weight"] if "weight" in (table.dtype.names or ()) else np.ones(len(table))
    weights = weights.clip(0, 1)  # Nobody has looked yet at what stands there.
    return float((succeeded * weights).sum() / weights.sum()) if weights.any() else 0.0


UNREADABLE = (
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
"""What h5py raises on a damaged file."""


def unreadable(path: Path, error: Exception) -> ReplayError:
    """Say that a file is damaged; or, when it could not even be opened for want of descriptors, that."""
    if signals.exhausted(error):
        return OutOfFiles(f"{path} cannot be read now ({error}). {signals.REMEDY}")
    return damaged(path, str(error))


def damaged(path: Path, why: str) -> ReplayError:
    """Say that a file cannot be used."""
    return ReplayError(f"{path} is damaged: {why}. Move it away; the rest of the replay does not need it.")


def read_root(path: Path, file: h5py.File) -> dict[str, Any]:
    """Read what a file says of its group; see `ROOT`.

    Raises:
        ReplayError: The format or schema version is another.
    """
    found: dict[str, Any] = {key: attribute_of(file, key) for key in CONSTANT}
    expected = {
        "format": (FORMAT.encode(),),
        "format_version": (FORMAT_VERSION,),
        "schema_version": STORED_SCHEMA_VERSIONS,
    }
    for key, values in expected.items():
        if found[key] not in values:
            raise ReplayError(
                f"{path} has {key} {found[key]}, this asyncrl reads {' and '.join(map(str, values))}. "
                "Use the version that wrote it."
            )
    row = get_table(file, GROUP)[0]
    found |= {key: row[key] for key in ROOT if key not in CONSTANT}
    return {key: found[key].decode() if kind is str else int(found[key]) for key, kind in ROOT.items()}


def get_dataset(file: h5py.File, name: str) -> Any:
    """Find a dataset, and check that it declares no more than the file can hold (`hdf5_bounds.dataset_in`).

    Raises:
        KeyError: There is nothing of that name.
        TypeError: It is something else.
        ValueError: It declares too much.
    """
    return dataset_in(file, name)


def get_table(file: h5py.File, name: str) -> Any:
    """Find one of `TABLES`, which are as large as they are stored, and never compressed.

    Raises:
        KeyError: There is nothing of that name.
        TypeError: It is something else.
        ValueError: It declares too much, more than `MOST_TABLE_BYTES`, or is compressed.
    """
    table = dataset_in(file, name)
    nbytes = math.prod(table.shape) * table.dtype.itemsize
    if table.chunks or nbytes > MOST_TABLE_BYTES:
        raise ValueError(
            f"the table {name} declares {nbytes} bytes in {len(table.shape)} axes, or is compressed"
        )
    return table


def check_whole(path: Path) -> os.stat_result:
    """Check length and structure before HDF5 opens the file: it may crash on a damaged one."""
    try:
        handle = open_regular(path)
    except OSError as error:
        if signals.exhausted(error):
            raise unreadable(path, error) from None
        raise ReplayError(f"{path} cannot be read ({error.strerror}). Check the path.") from None
    try:
        check_footer(handle)
        return os.fstat(handle)
    except OSError as error:
        raise ReplayError(f"{path} cannot be read ({error.strerror}). Check the path.") from None
    except ValueError as error:
        raise damaged(path, str(error)) from None
    finally:
        os.close(handle)
