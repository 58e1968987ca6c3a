"""An episode in and out of the header and the frames of a message, for `wire`. Pure; sizes come first."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError
from asyncrl.messaging.fields import check_keys, check_value, shown
from asyncrl.records import EPISODE_ARRAYS, EPISODE_SCALARS, Episode

Buffer = bytes | bytearray | memoryview

MAX_DIMENSION: Final = 2**20


def scalars_of(episode: Episode) -> dict[str, Any]:
    """Return an episode's scalars as plain Python values, checked.

    Raises:
        WireError: One of them cannot be sent or stored.
    """
    try:
        scalars = {name: kind(getattr(episode, name)) for name, kind in EPISODE_SCALARS.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"a scalar of the episode has the wrong type: {error}.") from None
    for name, kind in EPISODE_SCALARS.items():
        check_value(name, scalars[name], kind)
    _check_id(scalars["episode_id"])
    return scalars


def as_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array, little-endian, without a copy where possible."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8).data


def write_arrays(episode: Episode) -> tuple[list[list[Any]], list[Buffer]]:
    """Return the header's entries and the frames of an episode's arrays; the frames are no copies.

    Raises:
        WireError: An array has a type or a shape that an episode cannot have.
    """
    entries: list[list[Any]] = []
    payload: list[Buffer] = []
    sizes: dict[str, int] = {}
    for name in EPISODE_ARRAYS:
        array = np.ascontiguousarray(getattr(episode, name))
        _check_shape(name, array.dtype.name, list(array.shape), sizes)
        frame = as_bytes(array)
        entries.append([name, array.dtype.name, list(array.shape), zlib.crc32(frame)])
        payload.append(frame)
    return entries, payload


def read_episode(scalars: Any, arrays: Any, frames: Sequence[Buffer]) -> Episode:
    """Read what the header says of an episode, and its frames. The arrays are fresh, writable copies.

    Raises:
        WireError: Whatever is wrong with it.
    """
    if not isinstance(scalars, dict) or not isinstance(arrays, list):
        raise WireError("the message lacks its episode or the list of its arrays.")
    check_keys("the episode", scalars, EPISODE_SCALARS)
    for name, expected in EPISODE_SCALARS.items():
        check_value(name, scalars[name], expected)
    _check_id(scalars["episode_id"])
    if not len(arrays) == len(frames) == len(EPISODE_ARRAYS):
        raise WireError(
            f"{len(arrays)} arrays in the header and {len(frames)} frames, expected {len(EPISODE_ARRAYS)}."
        )
    sizes: dict[str, int] = {}
    for name, entry, frame in zip(EPISODE_ARRAYS, arrays, frames, strict=True):
        if not isinstance(entry, list) or len(entry) != 4 or entry[0] != name:
            raise WireError(f"the entry of array {name} is {shown(entry)}.")
        if _check_shape(name, entry[1], entry[2], sizes) != len(frame):
            raise WireError(f"{name} has shape {entry[2]}, but its frame has {len(frame)} bytes.")
    found: dict[str, Any] = {}
    for (name, spec), entry, frame in zip(EPISODE_ARRAYS.items(), arrays, frames, strict=True):
        if type(entry[3]) is not int or zlib.crc32(frame) != entry[3]:
            raise WireError(f"the checksum of {name} does not match: it was changed on its way.")
        little = np.dtype(spec.dtype).newbyteorder("<")
        found[name] = np.frombuffer(frame, little).reshape(entry[2]).astype(spec.dtype, copy=True)
    return Episode(**scalars, **found)


def _check_id(episode_id: str) -> None:
    if len(episode_id) != 32 or not set(episode_id) <= set("0123456789abcdef"):
        raise WireError(f"episode_id {episode_id[:40]!r} is not 32 lower-case hexadecimal digits.")


def _check_shape(name: str, dtype: Any, shape: Any, sizes: dict[str, int]) -> int:
    """Check one array's type and shape against `records`; remember letters in `sizes`; return its bytes."""
    spec = EPISODE_ARRAYS[name]
    if dtype != spec.dtype:
        raise WireError(f"{name} is {shown(dtype)}, expected {spec.dtype}.")
    if type(shape) is not list or len(shape) != len(spec.shape):
        raise WireError(f"{name} has shape {shown(shape)}, expected {list(spec.shape)}.")
    for letter, size in zip(spec.shape, shape, strict=True):
        if type(size) is not int or not (letter != "M") <= size <= MAX_DIMENSION:
            raise WireError(f"{name} has shape {shown(shape)}: {shown(size)} is no size for {letter}.")
        expected = letter if isinstance(letter, int) else sizes.setdefault(letter, size)
        if size != expected:
            raise WireError(f"{name} has shape {shape}, but {letter} is {expected} elsewhere.")
    return math.prod(shape) * np.dtype(spec.dtype).itemsize
