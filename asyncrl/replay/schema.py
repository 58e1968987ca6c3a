"""The HDF5 file of one complete group: episodes in, one file out. Plain h5py and h5dump read it.

    /              attributes: format, format_version, schema_version, group_number, group_id, group_size,
                   task, start_state, actor, oldest_version, newest_version, successes, crc32 (of the others)
    /episodes      [E] table: the scalars of each episode, and where its decisions (N) and video frames (M)
                   lie: N_begin, N_end, M_begin, M_end
    /frames, ...   the arrays of `records.EPISODE_ARRAYS`, all episodes concatenated along N or M; arrays
                   without either (final_frame) are stacked: [E, H, W, 3]
    each dataset   attributes: letters, unit, crc32 (of its little-endian bytes)

Everything is a number or fixed-length UTF-8 bytes; nothing is compressed or chunked, but for images that
`asyncrl replay compact` rewrote. Behind the HDF5 content
lies a checksum of its structure (`footer.py`). `layout.py` reads it back.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ReplayError
from asyncrl.messaging.wire import as_bytes, scalars_of
from asyncrl.records import EPISODE_ARRAYS, EPISODE_SCALARS, SCHEMA_VERSION, Episode
from asyncrl.replay.footer import append_footer, check_footer
from asyncrl.replay.sheltered import new_hdf5

FORMAT: Final = "asyncrl-replay"
FORMAT_VERSION: Final = 2
TABLE: Final = "episodes"
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


@dataclass(frozen=True, kw_only=True)
class Shard:
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
    episode_ids: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an array lies in a file."""

    offset: int
    """Bytes from the beginning of the file; `COMPRESSED` for an array of a compacted file."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    crc32: int
    """Of its little-endian bytes in C order."""

    @property
    def nbytes(self) -> int:
        """Bytes from `offset` on."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Written:
    """The small parts of a file and the places of the large ones."""

    attributes: dict[str, Any]
    table: NDArray[Any]
    """``[E]`` the rows of ``/episodes``."""
    places: dict[str, Place]
    """Of ``/episodes`` and every array."""


def stacking_letter(name: str) -> str:
    """Return the letter along which an array's episodes are joined: N, M, or E when they are stacked."""
    first = EPISODE_ARRAYS[name].shape[0]
    return str(first) if first in ("N", "M") else "E"


def write_group(path: Path, number: int, episodes: Sequence[Episode]) -> Written:
    """Write a complete group into a new file. The caller makes it durable.

    Args:
        path: Must not exist.
        number: Of the group's grant.
        episodes: All members, in the order of `Episode.member`, of one image size.

    Returns:
        What stands in the file and where.
    """
    root = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "schema_version": SCHEMA_VERSION,
        "group_number": number,
        "oldest_version": min(episode.oldest_version for episode in episodes),
        "newest_version": max(int(episode.policy_versions.max()) for episode in episodes),
        "successes": sum(episode.success for episode in episodes),
    } | {
        name: getattr(episodes[0], name)
        for name in ("group_id", "group_size", "task", "start_state", "actor")
    }
    with new_hdf5(path) as file:
        table = _table(episodes)
        places = {TABLE: _put(file, TABLE, table, "E", "see docs")}
        for name, spec in EPISODE_ARRAYS.items():
            parts = [getattr(episode, name) for episode in episodes]
            letter = stacking_letter(name)
            joined = np.stack(parts) if letter == "E" else np.concatenate(parts)
            letters = ("E", *spec.shape) if letter == "E" else spec.shape
            places[name] = _put(file, name, joined, ",".join(map(str, letters)), UNITS[name])
        for key, kind in ROOT.items():
            _attribute(file, key, _text(root[key]) if kind is str else np.array(root[key], np.int64))
        _attribute(file, "crc32", np.array(root_crc(root), np.uint32))
        extents = [_extent(file[name]) for name in (TABLE, *EPISODE_ARRAYS)]
    append_footer(path, [extent for extent in extents if extent[1]])
    return Written(attributes=root, table=table, places=places)


def read_shard(path: Path) -> Shard:
    """Read a file's attributes and the ids of its episodes.

    Raises:
        ReplayError: It is torn, damaged, or of another format or schema version.
    """
    check_whole(path)
    try:
        with h5py.File(path, "r") as file:
            root, table = read_root(path, file), get_dataset(file, TABLE)[...]
            return describe(path, root, table)
    except UNREADABLE as error:
        raise damaged(path, str(error)) from None


def describe(path: Path, attributes: dict[str, Any], table: NDArray[Any]) -> Shard:
    """Sum up a sealed file whose attributes and table of episodes are known."""
    found = path.stat()
    return Shard(
        path=path,
        number=attributes["group_number"],
        oldest_version=attributes["oldest_version"],
        newest_version=attributes["newest_version"],
        size=found.st_size,
        mtime_ns=found.st_mtime_ns,
        decisions=int(table["N_end"][-1]),
        episode_ids=tuple(x.decode() for x in table["episode_id"].tolist()),
        attributes=attributes,
    )


UNREADABLE = (OSError, KeyError, ValueError, TypeError, RuntimeError, IndexError)
"""What h5py raises on a damaged file."""


def damaged(path: Path, why: str) -> ReplayError:
    """Say that a file cannot be used."""
    return ReplayError(f"{path} is damaged: {why}. Move it away; the rest of the replay does not need it.")


def _text(value: str) -> NDArray[np.bytes_]:
    encoded = value.encode()
    return np.array(encoded, dtype=f"S{max(1, len(encoded))}")


def _table(episodes: Sequence[Episode]) -> NDArray[Any]:
    """One row per episode: scalars, then where its parts of the arrays begin and end."""
    rows = [scalars_of(episode) for episode in episodes]
    columns: dict[str, NDArray[Any]] = {}
    for name, kind in EPISODE_SCALARS.items():
        values = [row[name].encode() if kind is str else row[name] for row in rows]
        width = max(1, *(len(value) for value in values)) if kind is str else 0
        columns[name] = np.array(values, {str: f"S{width}", int: "<i8", float: "<f8"}[kind])
    for letter, name in (("N", "frames"), ("M", "video")):
        ends = np.cumsum([len(getattr(episode, name)) for episode in episodes]).astype("<i8")
        columns[f"{letter}_begin"] = np.concatenate([np.zeros(1, "<i8"), ends[:-1]])
        columns[f"{letter}_end"] = ends
    table = np.empty(len(rows), [(name, column.dtype) for name, column in columns.items()])
    for name, column in columns.items():
        table[name] = column
    return table


def _attribute(target: h5py.File | h5py.Dataset, name: str, value: NDArray[Any]) -> None:
    """Write a new scalar attribute. `target.attrs` writes the same bytes but takes several times as long."""
    kind = h5py.h5t.py_create(value.dtype, logical=True)
    h5py.h5a.create(target.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR)).write(value)


def _put(file: h5py.File, name: str, array: NDArray[Any], letters: str, unit: str) -> Place:
    dataset = file.create_dataset(name, data=array, track_times=False)
    crc32 = zlib.crc32(as_bytes(array))
    _attribute(dataset, "letters", _text(letters))
    _attribute(dataset, "unit", _text(unit))
    _attribute(dataset, "crc32", np.array(crc32, np.uint32))
    return Place(offset=dataset.id.get_offset() or 0, dtype=array.dtype, shape=array.shape, crc32=crc32)


def _extent(dataset: Any) -> tuple[int, int]:
    """Where the raw bytes of a contiguous dataset lie: offset and length; (0, 0) for an empty one."""
    return dataset.id.get_offset() or 0, dataset.id.get_storage_size()


def root_crc(root: dict[str, Any]) -> int:
    """Checksum of the root attributes."""
    return zlib.crc32("\n".join(f"{key}={root[key]}" for key in ROOT).encode())


def read_root(path: Path, file: h5py.File) -> dict[str, Any]:
    """Read the root attributes, checked.

    Raises:
        ReplayError: Their checksum does not match, or the format or schema version is another.
    """
    found: dict[str, Any] = {key: file.attrs[key] for key in (*ROOT, "crc32")}
    root: dict[str, Any] = {
        key: found[key].decode() if kind is str else int(found[key]) for key, kind in ROOT.items()
    }
    expected = {"format": FORMAT, "format_version": FORMAT_VERSION, "schema_version": SCHEMA_VERSION}
    for key, value in expected.items():
        if root[key] != value:
            raise ReplayError(
                f"{path} has {key} {root[key]}, this asyncrl reads {value}. Use the version that wrote it."
            )
    if int(found["crc32"]) != root_crc(root):
        raise damaged(path, "the checksum of its attributes does not match")
    return root


def get_dataset(file: h5py.File, name: str) -> Any:
    """Find a dataset.

    Raises:
        KeyError: There is nothing of that name.
        TypeError: It is something else.
    """
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise TypeError(f"{name} is not a dataset")
    return dataset


def check_whole(path: Path) -> None:
    """Check length and structure before HDF5 opens the file: it may crash on a damaged one."""
    try:
        check_footer(path)
    except OSError as error:
        raise ReplayError(f"{path} cannot be read ({error.strerror}). Check the path.") from None
    except ValueError as error:
        raise damaged(path, str(error)) from None
