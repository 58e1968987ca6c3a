"""Write and read the part of a message that is an episode, for `wire`. Pure; sizes are checked first."""

from __future__ import annotations

import math
import reprlib
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.episode_layout import (
    COUNTED_SCHEMA_VERSION,
    EPISODE_ARRAYS,
    MAX_SAMPLE_ARRAYS,
    ArraySpec,
    array_specs,
    episode_arrays,
    optional_arrays,
    sample_specs,
    scalar_types,
    specs_of,
    version_of,
)
from asyncrl.errors import WireError
from asyncrl.records import Episode

MAX_TEXT: Final = 4096
MAX_READINGS: Final = 256


def shown(value: Any) -> str:
    """Show what a peer sent: shortly, and however deep it is nested (str() gives up on that)."""
    return reprlib.repr(value)[:80]


def check_keys(where: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuse missing and unknown fields."""
    if found.keys() != expected.keys():
        raise WireError(f"{where} has the fields {sorted(found)[:20]!s:.200}, expected {sorted(expected)}.")


def check_value(where: str, value: Any, expected: type) -> None:
    """Refuse a value of another type than `expected`, or one that cannot be stored."""
    if type(value) is not expected:
        raise WireError(f"{where} is a {type(value).__name__}, expected {expected.__name__}.")
    if isinstance(value, str):
        check_text(where, value)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise WireError(f"{where} does not fit into 64 bits.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise WireError(f"{where} is {value}, expected a finite number.")
    elif isinstance(value, dict):
        if len(value) > MAX_READINGS:
            raise WireError(f"{where} has {len(value)} entries, allowed are {MAX_READINGS}.")
        for name, number in value.items():
            check_text(where, name)
            check_value(where, number, float)


def check_text(where: str, text: str) -> None:
    """Refuse a text that is too long or that HDF5 cannot store."""
    if len(text) > MAX_TEXT:
        raise WireError(f"{where} has {len(text)} characters, allowed are {MAX_TEXT}.")
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise WireError(f"{where} holds a character that is not text (NUL or a lone surrogate).")


Buffer = bytes | bytearray | memoryview

MAX_FRAME_BYTES: Final = 256 * 2**20
MAX_MESSAGE_BYTES: Final = 512 * 2**20
MAX_DIMENSION: Final = 2**20


def scalars_of(episode: Episode) -> dict[str, Any]:
    """Return an episode's scalars as plain Python values, checked.

    Raises:
        WireError: One of them cannot be sent or stored.
    """
    types = scalar_types(version_of(episode))
    try:
        scalars = {name: kind(getattr(episode, name)) for name, kind in types.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"a scalar of the episode has the wrong type: {error}.") from None
    for name, kind in types.items():
        check_value(name, scalars[name], kind)
    _check_id(scalars["episode_id"])
    return scalars


def as_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array of any shape and dtype, little-endian, without a copy where possible."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8).data


def check_sizes(lengths: Sequence[int]) -> None:
    """Refuse arrays or frames that are too large, alone or together."""
    if max(lengths) > MAX_FRAME_BYTES or sum(lengths) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"the largest frame or array has {max(lengths)} bytes and all have {sum(lengths)}; allowed are "
            f"{MAX_FRAME_BYTES} and {MAX_MESSAGE_BYTES}. Smaller images or --replay.keep-video-every 0 help."
        )


def write_arrays(episode: Episode) -> tuple[list[list[Any]], list[Buffer]]:
    """Return the header's entries and the frames of an episode's arrays; the frames are no copies."""
    entries: list[list[Any]] = []
    payload: list[Buffer] = []
    sizes: dict[str, int] = {}
    arrays = {name: np.ascontiguousarray(array) for name, array in episode_arrays(episode).items()}
    try:
        specs = specs_of(episode)
    except ValueError as error:
        raise WireError(f"{error}.") from None
    for (name, array), spec in zip(arrays.items(), specs.values(), strict=True):
        _check_shape(name, spec, array.dtype.name, list(array.shape), sizes)
        frame = as_bytes(array)
        entries.append([name, array.dtype.name, list(array.shape), zlib.crc32(frame)])
        payload.append(frame)
    check_sizes([len(frame) for frame in payload])
    return entries, payload


def read_episode(scalars: Any, arrays: Any, frames: Sequence[Buffer], *, schema: int, views: bool) -> Episode:
    """Read what the header says of an episode, and its frames.

    The arrays are fresh, writable copies; with `views` the images are read-only views. `schema` is the
    version that the header says.
    """
    if not isinstance(scalars, dict) or not isinstance(arrays, list):
        raise WireError("the message lacks its episode or the list of its arrays.")
    types, counted = scalar_types(schema), schema == COUNTED_SCHEMA_VERSION
    allowed = optional_arrays(schema)
    check_keys("the episode", scalars, types)
    for name, expected in types.items():
        check_value(name, scalars[name], expected)
    _check_id(scalars["episode_id"])
    fixed = len(EPISODE_ARRAYS)
    for entry in arrays:
        if not isinstance(entry, list) or len(entry) != 4:
            raise WireError(f"the entry of an array is {shown(entry)}.")
    optional = _optional_names(arrays, allowed)
    others = fixed + len(optional)
    if not (len(arrays) == len(frames) and others <= len(arrays) <= others + MAX_SAMPLE_ARRAYS):
        raise WireError(
            f"{len(arrays)} arrays in the header and {len(frames)} frames, expected {others} and the "
            "sample's."
        )
    sample = arrays[1 : 1 + len(arrays) - others]  # After the first, as in `array_specs`.
    specs = _specs([entry[:3] for entry in sample], optional, counted=counted)
    _check_arrays(specs, arrays, frames)
    read: dict[str, Any] = {}
    for (name, spec), entry, content in zip(specs.items(), arrays, frames, strict=True):
        if type(entry[3]) is not int or zlib.crc32(content) != entry[3]:
            raise WireError(f"the checksum of {name} does not match: it was changed on its way.")
        little = np.dtype(spec.dtype).newbyteorder("<")
        array = np.frombuffer(memoryview(content).toreadonly(), little).reshape(entry[2])
        in_place = views and little.itemsize == 1  # Wider ones may not be aligned.
        read[name] = array.astype(spec.dtype, copy=not in_place)
    shown_again = {entry[0]: read.pop(entry[0]) for entry in sample}
    return Episode(**scalars, **read, sample=shown_again)


def _optional_names(arrays: Sequence[Any], allowed: Sequence[str]) -> list[str]:
    """Return the names of the optional arrays: the last of the entries, as in `array_specs`."""
    last = [entry[0] for entry in arrays[len(arrays) - len(allowed) :]]
    return [name for name in last if isinstance(name, str) and name in allowed]


def _specs(sample: Sequence[Any], optional: Sequence[str], *, counted: bool) -> dict[str, ArraySpec]:
    """Check names, types and ranks of a sample's arrays; return all arrays of the episode."""
    try:
        return array_specs(sample_specs(sample), optional, counted=counted)
    except ValueError as error:
        raise WireError(f"{error}.") from None


def _check_arrays(specs: dict[str, ArraySpec], arrays: list[Any], frames: Sequence[Buffer]) -> None:
    """Check what the header says of all arrays against `records` and against the frames' lengths."""
    sizes: dict[str, int] = {}
    for (name, spec), entry, frame in zip(specs.items(), arrays, frames, strict=True):
        if entry[0] != name:
            raise WireError(f"the entry of array {name} is {shown(entry)}.")
        if len(frame) != _check_shape(name, spec, entry[1], entry[2], sizes):
            raise WireError(f"{name} has shape {entry[2]}, but its frame has {len(frame)} bytes.")
    check_sizes([len(frame) for frame in frames])


def _check_id(episode_id: str) -> None:
    if len(episode_id) != 32 or not set(episode_id) <= set("0123456789abcdef"):
        raise WireError(f"episode_id {episode_id[:40]!r} is not 32 lower-case hexadecimal digits.")


def _check_shape(name: str, spec: ArraySpec, dtype: Any, shape: Any, sizes: dict[str, int]) -> int:
    """Check one array's type and shape; remember letters in `sizes`; return its bytes."""
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
