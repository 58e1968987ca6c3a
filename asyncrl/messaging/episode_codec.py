"""Encode and decode the episode of a message, for `wire`. Sizes are checked before anything is allocated."""

from __future__ import annotations

import math
import reprlib
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl import episode_layout as layout
from asyncrl.errors import WireError
from asyncrl.records import Episode

MAX_TEXT: Final = 4096
MAX_LONG_TEXT: Final = 2**19
MAX_READINGS: Final = 256
MAX_NUMBERS: Final = 2**16


class LongText(str):
    """Type of a field for a text of up to `MAX_LONG_TEXT` characters, instead of `MAX_TEXT`."""


def shown(value: Any) -> str:
    """Format a peer's value in at most 80 characters, however deeply it is nested."""
    return reprlib.repr(value)[:80]


def check_keys(where: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that no field is missing or unknown."""
    if found.keys() != expected.keys():
        raise WireError(f"{where} has the fields {sorted(found)[:20]!s:.200}, expected {sorted(expected)}.")


def check_value(where: str, value: Any, expected: type) -> None:
    """Check a value's type, and that it can be stored."""
    most = MAX_LONG_TEXT if expected is LongText else MAX_TEXT
    if type(value) is not (wanted := str if expected is LongText else expected):
        raise WireError(f"{where} is a {type(value).__name__}, expected {wanted.__name__}.")
    if isinstance(value, str):
        _check_text(where, value, most)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise WireError(f"{where} does not fit into 64 bits.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise WireError(f"{where} is {value}, expected a finite number.")
    elif isinstance(value, (dict, list)):
        allowed = MAX_READINGS if isinstance(value, dict) else MAX_NUMBERS
        if len(value) > allowed:
            raise WireError(f"{where} has {len(value)} entries, allowed are {allowed}.")
        for number in value if isinstance(value, list) else ():
            check_value(where, number, int)
        for name, number in value.items() if isinstance(value, dict) else ():
            _check_text(where, name)
            check_value(where, number, float)


def _check_text(where: str, text: str, most: int = MAX_TEXT) -> None:
    if len(text) > most:
        raise WireError(f"{where} has {len(text)} characters, allowed are {most}.")
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise WireError(f"{where} holds a character that is not text (NUL or a lone surrogate).")


Buffer = bytes | bytearray | memoryview

MAX_FRAME_BYTES: Final = 256 * 2**20
MAX_MESSAGE_BYTES: Final = 512 * 2**20
MAX_DIMENSION: Final = 2**20


def scalars_of(episode: Episode) -> dict[str, Any]:
    """Return an episode's scalars as checked Python values."""
    types = layout.scalar_types(layout.version_of(episode))
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


def write_arrays(episode: Episode) -> tuple[list[list[Any]], list[Buffer]]:
    """Return the header's entries and the frames of an episode's arrays, without copies."""
    entries: list[list[Any]] = []
    payload: list[Buffer] = []
    if (problem := layout.problem_with_shapes(episode)) is not None:
        raise WireError(f"{problem}.")
    for name, array in layout.episode_arrays(episode).items():
        frame = as_bytes(array)
        entries.append([name, array.dtype.name, list(array.shape), zlib.crc32(frame)])
        payload.append(frame)
    return entries, payload


def read_episode(scalars: Any, arrays: Any, frames: Sequence[Buffer], *, schema: int, views: bool) -> Episode:
    """Decode an episode; `views`: images are read-only views of the frames, other arrays writable copies."""
    if not isinstance(scalars, dict) or not isinstance(arrays, list):
        raise WireError("the message lacks its episode or the list of its arrays.")
    types = layout.scalar_types(schema)
    check_keys("the episode", scalars, types)
    for name, expected in types.items():
        check_value(name, scalars[name], expected)
    _check_id(scalars["episode_id"])
    for entry in arrays:
        if not (isinstance(entry, list) and len(entry) == 4 and isinstance(entry[0], str)):
            raise WireError(f"the entry of an array is {shown(entry)}.")
        if not (
            isinstance(entry[2], list) and all(type(x) is int and 0 <= x <= MAX_DIMENSION for x in entry[2])
        ):
            raise WireError(f"{entry[0][:80]} has shape {shown(entry[2])}.")
    if len(arrays) != len(frames):
        raise WireError(f"{len(arrays)} arrays in the header, but {len(frames)} frames.")
    try:
        specs = layout.parse_specs([(name, dtype, shape) for name, dtype, shape, _ in arrays], schema)
        layout.sizes_of(specs, [shape for _, _, shape, _ in arrays])
    except ValueError as error:
        raise WireError(f"{error}.") from None
    for (name, _, shape, _), spec, frame in zip(arrays, specs.values(), frames, strict=True):
        nbytes = math.prod(shape) * np.dtype(spec.dtype).itemsize
        if len(frame) != nbytes or (0 in shape and spec.shape[0] != "M"):
            raise WireError(f"{name} has shape {shape}, but its frame has {len(frame)} bytes.")
    read: dict[str, Any] = {}
    for (name, spec), entry, content in zip(specs.items(), arrays, frames, strict=True):
        if type(entry[3]) is not int or zlib.crc32(content) != entry[3]:
            raise WireError(f"the checksum of {name} does not match: it was changed on its way.")
        little = np.dtype(spec.dtype).newbyteorder("<")
        array = np.frombuffer(memoryview(content).toreadonly(), little).reshape(entry[2])
        in_place = views and little.itemsize == 1  # Wider ones may not be aligned.
        read[name] = array.astype(spec.dtype, copy=not in_place)
    return Episode(**scalars, **layout.as_fields(read))


def _check_id(episode_id: str) -> None:
    if len(episode_id) != 32 or not set(episode_id) <= set("0123456789abcdef"):
        raise WireError(f"episode_id {episode_id[:40]!r} is not 32 lower-case hexadecimal digits.")
