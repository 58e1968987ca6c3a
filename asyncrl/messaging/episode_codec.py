"""Encode and decode the episode of a message, for `wire`. Sizes are checked before anything is allocated."""

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
    """Format a peer's value in at most 80 characters, however deeply it is nested."""
    return reprlib.repr(value)[:80]


def check_keys(where: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that no field is missing or unknown."""
    if found.keys() != expected.keys():
        raise WireError(f"{where} has the fields {sorted(found)[:20]!s:.200}, expected {sorted(expected)}.")


def check_value(where: str, value: Any, expected: type) -> None:
    """Check a value's type, and that it can be stored."""
    if type(value) is not expected:
        raise WireError(f"{where} is a {type(value).__name__}, expected {expected.__name__}.")
    if isinstance(value, str):
        _check_text(where, value)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise WireError(f"{where} does not fit into 64 bits.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise WireError(f"{where} is {value}, expected a finite number.")
    elif isinstance(value, dict):
        if len(value) > MAX_READINGS:
            raise WireError(f"{where} has {len(value)} entries, allowed are {MAX_READINGS}.")
        for name, number in value.items():
            _check_text(where, name)
            check_value(where, number, float)


def _check_text(where: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        raise WireError(f"{where} has {len(text)} characters, allowed are {MAX_TEXT}.")
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise WireError(f"{where} holds a character that is not text (NUL or a lone surrogate).")


Buffer = bytes | bytearray | memoryview

MAX_FRAME_BYTES: Final = 256 * 2**20
MAX_MESSAGE_BYTES: Final = 512 * 2**20
MAX_DIMENSION: Final = 2**20


def scalars_of(episode: Episode) -> dict[str, Any]:
    """Return an episode's scalars as checked Python values."""
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
    """Return an array's bytes, little-endian, if possible without a copy."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8).data


def check_sizes(lengths: Sequence[int]) -> None:
    """Check the sizes of arrays or frames, and their sum."""
    if max(lengths) > MAX_FRAME_BYTES or sum(lengths) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"the largest frame or array has {max(lengths)} bytes and all have {sum(lengths)}; allowed are "
            f"{MAX_FRAME_BYTES} and {MAX_MESSAGE_BYTES}. Smaller images or --replay.keep-video-every 0 help."
        )


def write_arrays(episode: Episode) -> tuple[list[list[Any]], list[Buffer]]:
    """Return the header's entries and the frames of an episode's arrays, without copies."""
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
    """Decode an episode from its header's entries and its frames.

    Args:
        schema: Version in the header.
        views: Whether images are read-only views of the frames; other arrays are writable copies.
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
    # The optional arrays are the last ones, as in `array_specs`.
    last = [entry[0] for entry in arrays[len(arrays) - len(allowed) :]]
    optional = [name for name in last if isinstance(name, str) and name in allowed]
    others = fixed + len(optional)
    if not (len(arrays) == len(frames) and others <= len(arrays) <= others + MAX_SAMPLE_ARRAYS):
        raise WireError(
            f"{len(arrays)} arrays in the header and {len(frames)} frames, expected {others} and the "
            "sample's."
        )
    sample = arrays[1 : 1 + len(arrays) - others]  # After the first, as in `array_specs`.
    try:
        specs = array_specs(sample_specs([entry[:3] for entry in sample]), optional, counted=counted)
    except ValueError as error:
        raise WireError(f"{error}.") from None
    sizes: dict[str, int] = {}
    for (name, spec), entry, frame in zip(specs.items(), arrays, frames, strict=True):
        if entry[0] != name:
            raise WireError(f"the entry of array {name} is {shown(entry)}.")
        if len(frame) != _check_shape(name, spec, entry[1], entry[2], sizes):
            raise WireError(f"{name} has shape {entry[2]}, but its frame has {len(frame)} bytes.")
    check_sizes([len(frame) for frame in frames])
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


def _check_id(episode_id: str) -> None:
    if len(episode_id) != 32 or not set(episode_id) <= set("0123456789abcdef"):
        raise WireError(f"episode_id {episode_id[:40]!r} is not 32 lower-case hexadecimal digits.")


def _check_shape(name: str, spec: ArraySpec, dtype: Any, shape: Any, sizes: dict[str, int]) -> int:
    """Check one array's type and shape against the sizes of letters so far; return its bytes."""
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
