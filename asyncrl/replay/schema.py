"""The HDF5 file of one complete group: episodes in, one file out, and back. Plain h5py and h5dump read it.

    /              attributes: format, format_version, schema_version, group_number, group_id, group_size,
                   task, start_state, actor, oldest_version, newest_version, successes, crc32 (of the others)
    /episodes      [E] table: the scalars of each episode, and where its decisions (N) and video frames (M)
                   lie: N_begin, N_end, M_begin, M_end
    /frames, ...   the arrays of `records.EPISODE_ARRAYS`, all episodes concatenated along N or M; arrays
                   without either (final_frame) are stacked: [E, H, W, 3]
    each dataset   attributes: letters, unit, crc32 (of its little-endian bytes)

Everything is a number or fixed-length UTF-8 bytes; nothing is compressed or chunked. Behind the HDF5 content
lies a checksum of its structure (`footer.py`).
"""

from __future__ import annotations

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

FORMAT: Final = "asyncrl-replay"
FORMAT_VERSION: Final = 2
LIBVER: Final = ("v110", "v110")
"""Files that HDF5 1.10 tools can read, whatever HDF5 version writes them."""
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
_BOUNDS: Final = ("N_begin", "N_end", "M_begin", "M_end")
_ROOT: Final[dict[str, type]] = {
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
    episode_ids: tuple[str, ...]
    attributes: dict[str, Any]


def stacking_letter(name: str) -> str:
    """Return the letter along which an array's episodes are joined: N, M, or E when they are stacked."""
    first = EPISODE_ARRAYS[name].shape[0]
    return str(first) if first in ("N", "M") else "E"


def write_group(path: Path, number: int, episodes: Sequence[Episode]) -> dict[str, Any]:
    """Write a complete group into a new file. The caller makes it durable.

    Args:
        path: Must not exist.
        number: Of the group's grant.
        episodes: All members, in the order of `Episode.member`, of one image size.

    Returns:
        The file's attributes.
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
    with h5py.File(path, "x", libver=LIBVER) as file:
        _put(file, TABLE, _table(episodes), "E", "see docs")
        for name, spec in EPISODE_ARRAYS.items():
            parts = [getattr(episode, name) for episode in episodes]
            letter = stacking_letter(name)
            joined = np.stack(parts) if letter == "E" else np.concatenate(parts)
            letters = ("E", *spec.shape) if letter == "E" else spec.shape
            _put(file, name, joined, ",".join(map(str, letters)), UNITS[name])
        for key, kind in _ROOT.items():
            file.attrs[key] = _text(root[key]) if kind is str else np.int64(root[key])
        file.attrs["crc32"] = np.uint32(_root_crc(root))
        extents = [_extent(file[name]) for name in (TABLE, *EPISODE_ARRAYS)]
    append_footer(path, [extent for extent in extents if extent[1]])
    return root


def read_shard(path: Path) -> Shard:
    """Read a file's attributes and the ids of its episodes.

    Raises:
        ReplayError: It is torn, damaged, or of another format or schema version.
    """
    _check_whole(path)
    try:
        with h5py.File(path, "r") as file:
            root = _read_root(path, file)
            ids = tuple(x.decode() for x in _get(file, TABLE)["episode_id"].tolist())
    except _UNREADABLE as error:
        raise _damaged(path, str(error)) from None
    return describe(path, root, ids)


def describe(path: Path, attributes: dict[str, Any], episode_ids: Sequence[str]) -> Shard:
    """Sum up a sealed file whose attributes and episodes are known."""
    return Shard(
        path=path,
        number=attributes["group_number"],
        oldest_version=attributes["oldest_version"],
        newest_version=attributes["newest_version"],
        size=path.stat().st_size,
        episode_ids=tuple(episode_ids),
        attributes=attributes,
    )


def read_table(path: Path) -> NDArray[Any]:
    """Read ``/episodes``, checked: one row per episode, named columns."""
    _check_whole(path)
    try:
        with h5py.File(path, "r") as file:
            _read_root(path, file)
            return _checked(path, file, TABLE)
    except _UNREADABLE as error:
        raise _damaged(path, str(error)) from None


def read_group(path: Path, names: Sequence[str] = tuple(EPISODE_ARRAYS)) -> list[Episode]:
    """Read the episodes back, every checksum checked.

    Args:
        path: A sealed file.
        names: Arrays to read; the others come back empty, for a quick look.

    Raises:
        ReplayError: It is torn, damaged, or of another format or schema version.
    """
    _check_whole(path)
    try:
        with h5py.File(path, "r") as file:
            _read_root(path, file)
            table = _checked(path, file, TABLE)
            arrays = {name: _checked(path, file, name) for name in names}
        return [_episode(row, place, arrays) for place, row in enumerate(table)]
    except _UNREADABLE as error:
        raise _damaged(path, str(error)) from None


_UNREADABLE = (OSError, KeyError, ValueError, TypeError, RuntimeError, IndexError)
"""What h5py raises on a damaged file."""


def _damaged(path: Path, why: str) -> ReplayError:
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


def _put(file: h5py.File, name: str, array: NDArray[Any], letters: str, unit: str) -> None:
    dataset = file.create_dataset(name, data=array, track_times=False)
    dataset.attrs["letters"] = _text(letters)
    dataset.attrs["unit"] = _text(unit)
    dataset.attrs["crc32"] = np.uint32(zlib.crc32(as_bytes(array)))


def _extent(dataset: Any) -> tuple[int, int]:
    """Where the raw bytes of a contiguous dataset lie: offset and length; (0, 0) for an empty one."""
    return dataset.id.get_offset() or 0, dataset.id.get_storage_size()


def _root_crc(root: dict[str, Any]) -> int:
    return zlib.crc32("\n".join(f"{key}={root[key]}" for key in _ROOT).encode())


def _read_root(path: Path, file: h5py.File) -> dict[str, Any]:
    found: dict[str, Any] = {key: file.attrs[key] for key in (*_ROOT, "crc32")}
    root: dict[str, Any] = {
        key: found[key].decode() if kind is str else int(found[key]) for key, kind in _ROOT.items()
    }
    expected = {"format": FORMAT, "format_version": FORMAT_VERSION, "schema_version": SCHEMA_VERSION}
    for key, value in expected.items():
        if root[key] != value:
            raise ReplayError(
                f"{path} has {key} {root[key]}, this asyncrl reads {value}. Use the version that wrote it."
            )
    if int(found["crc32"]) != _root_crc(root):
        raise _damaged(path, "the checksum of its attributes does not match")
    return root


def _get(file: h5py.File, name: str) -> Any:
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise TypeError(f"{name} is not a dataset")
    return dataset[...]


def _checked(path: Path, file: h5py.File, name: str) -> NDArray[Any]:
    array = _get(file, name)
    expected: Any = file[name].attrs["crc32"]
    spec = EPISODE_ARRAYS.get(name)
    if spec is not None and array.dtype != np.dtype(spec.dtype):
        raise _damaged(path, f"{name} is {array.dtype}, expected {spec.dtype}")
    if zlib.crc32(as_bytes(array)) != int(expected):
        raise _damaged(path, f"the checksum of {name} does not match")
    return array


def _episode(row: Any, place: int, arrays: dict[str, NDArray[Any]]) -> Episode:
    n_begin, n_end, m_begin, m_end = (int(row[name]) for name in _BOUNDS)
    bounds = {"N": slice(n_begin, n_end), "M": slice(m_begin, m_end), "E": place}
    scalars: dict[str, Any] = {
        name: row[name].decode() if kind is str else kind(row[name]) for name, kind in EPISODE_SCALARS.items()
    }
    parts: dict[str, Any] = {
        name: arrays[name][bounds[stacking_letter(name)]] if name in arrays else np.empty(0, spec.dtype)
        for name, spec in EPISODE_ARRAYS.items()
    }
    return Episode(**scalars, **parts)


def _check_whole(path: Path) -> None:
    """Check length and structure before HDF5 opens the file: it may crash on a damaged one."""
    try:
        check_footer(path)
    except OSError as error:
        raise ReplayError(f"{path} cannot be read ({error.strerror}). Check the path.") from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
