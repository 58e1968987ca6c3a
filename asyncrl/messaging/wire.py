"""Messages in and out of bytes. Pure functions: no sockets, no pickle, nothing about a peer is believed.

    frame 0    magic b"ARL1" | u32 crc32(body) | body: JSON {"schema", "kind", fields of the kind,
               and with an episode also "episode": {scalars}, "arrays": [[name, dtype, shape, crc32], ...]}
    frame 1..  one raw frame per array of `records.EPISODE_ARRAYS`, little-endian, C order, in that order

Which fields a kind has, and which arrays of which type and rank an episode has, is fixed here and in
`records`; a peer only says sizes, and every size is checked before anything is allocated. `decode` raises
`WireError` only.
"""

from __future__ import annotations

import json
import math
import reprlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl import __version__
from asyncrl.errors import WireError
from asyncrl.records import EPISODE_ARRAYS, EPISODE_SCALARS, SCHEMA_VERSION, Episode

Buffer = bytes | bytearray | memoryview

MAGIC: Final = b"ARL1"
_PREFIX: Final = struct.Struct("<4sI")
MAX_HEADER_BYTES: Final = 64 * 1024
MAX_FRAME_BYTES: Final = 256 * 2**20
MAX_MESSAGE_BYTES: Final = 512 * 2**20
MAX_FRAMES: Final = 1 + len(EPISODE_ARRAYS)
MAX_DIMENSION: Final = 2**20
MAX_TEXT: Final = 4096
MAX_READINGS: Final = 256

KINDS: Final[dict[str, dict[str, type]]] = {
    "hello": {"role": str, "name": str, "session": str, "version": int, "package": str},
    "welcome": {"boot": str, "known": bool, "package": str},
    "ping": {},
    "bye": {},
    "settings": {"name": str, "part": int},
    "settings_part": {"part": int, "parts": int, "text": str, "weights": str},
    "acquire": {"turn": int},
    "grant": {"turn": int, "number": int, "min_version": int, "keep_video": bool},
    "episode": {},
    "receipt": {"episode_id": str, "status": str, "reason": str},
    "waiting": {"share": float},
    "sample": {"request": str, "groups": int, "version": int},
    "batch": {"request": str, "group": int, "groups": int, "size": int},
    "version": {"version": int},
    "status": {},
    "status_reply": {"readings": dict, "contents": str},
    "stop": {},
    "stopped": {},
    "refused": {"reason": str, "package": str},
}
"""Every kind of message with its fields. `package` is the sender's version of asyncrl.
A `dict` maps names of metrics to finite numbers."""
WITH_EPISODE: Final = frozenset({"episode", "batch"})
"""Kinds that carry one episode."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One decoded message."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    episode: Episode | None = None

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def encode(kind: str, episode: Episode | None = None, **fields: Any) -> list[Buffer]:
    """Write a message.

    Args:
        kind: One of `KINDS`.
        episode: For kinds in `WITH_EPISODE`. Not copied: do not change its arrays before they were sent.
        fields: Exactly the fields of the kind; `package` may be left out and is this version then.

    Returns:
        The frames.

    Raises:
        WireError: The message breaks the format (a peer would refuse it).
    """
    if "package" in KINDS.get(kind, {}):
        fields.setdefault("package", __version__)
    check_fields(kind, fields, KINDS)
    if (episode is not None) != (kind in WITH_EPISODE):
        raise WireError(f"{kind!r} {'carries' if episode is None else 'does not carry'} an episode.")
    header: dict[str, Any] = {"kind": kind, **fields}
    payload: list[Buffer] = []
    if episode is not None:
        header["episode"] = scalars_of(episode)
        header["arrays"] = []
        sizes: dict[str, int] = {}
        for name in EPISODE_ARRAYS:
            array = np.ascontiguousarray(getattr(episode, name))
            _check_shape(name, array.dtype.name, list(array.shape), sizes)
            frame = as_bytes(array)
            header["arrays"].append([name, array.dtype.name, list(array.shape), zlib.crc32(frame)])
            payload.append(frame)
    frames: list[Buffer] = [write_header(header), *payload]
    _check_sizes(frames)
    return frames


def decode(frames: Sequence[Buffer]) -> Message:
    """Read a message. The arrays are fresh, aligned and writable copies.

    Raises:
        WireError: Whatever is wrong with it.
    """
    _check_sizes(frames)
    header = read_header(frames[0])
    kind = header.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise WireError(f"kind {_shown(kind)} is unknown. Known: {', '.join(KINDS)}.")
    scalars, arrays = header.pop("episode", None), header.pop("arrays", None)
    check_fields(kind, header, KINDS)
    if kind not in WITH_EPISODE:
        if scalars is not None or arrays is not None or len(frames) != 1:
            raise WireError(
                f"{kind!r} carries no episode, but came with one or with {len(frames) - 1} arrays."
            )
        return Message(kind=kind, fields=header)
    return Message(kind=kind, fields=header, episode=_read_episode(scalars, arrays, frames[1:]))


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
        _check_value(name, scalars[name], kind)
    _check_id(scalars["episode_id"])
    return scalars


def as_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array, little-endian, without a copy where possible."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8).data


def _check_sizes(frames: Sequence[Buffer]) -> None:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"{len(frames)} frames, but a message has 1 to {MAX_FRAMES}.")
    lengths = [len(frame) for frame in frames]
    if not _PREFIX.size <= lengths[0] <= MAX_HEADER_BYTES:
        raise WireError(
            f"the header has {lengths[0]} bytes; allowed are {_PREFIX.size} to {MAX_HEADER_BYTES}."
        )
    if max(lengths) > MAX_FRAME_BYTES or sum(lengths) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"the largest frame has {max(lengths)} bytes and all have {sum(lengths)}; allowed are "
            f"{MAX_FRAME_BYTES} and {MAX_MESSAGE_BYTES}. Smaller images or --replay.keep-video-every 0 help."
        )


def write_header(header: dict[str, Any]) -> bytes:
    """Write the first frame of a message: magic, checksum and the fields, with the schema's version."""
    body = json.dumps({"schema": SCHEMA_VERSION, **header}, separators=(",", ":"), allow_nan=False).encode()
    return _PREFIX.pack(MAGIC, zlib.crc32(body)) + body


def read_header(frame: Buffer) -> dict[str, Any]:
    """Read the first frame of a message, which has at least 8 bytes; all but the schema's version.

    Raises:
        WireError: It is damaged, no message of asyncrl, or of another schema version.
    """
    magic, crc = _PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise WireError(f"the message begins with {magic!r}, expected {MAGIC!r}: not a message of asyncrl.")
    body = bytes(frame[_PREFIX.size :])
    if zlib.crc32(body) != crc:
        raise WireError("the checksum of the header does not match: it was changed on its way.")
    try:
        header = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise WireError(f"the header is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(header, dict):
        raise WireError(f"the header is a {type(header).__name__}, expected an object.")
    schema = header.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA_VERSION:
        raise WireError(
            f"the peer speaks schema version {_shown(schema)}, this side {SCHEMA_VERSION} (asyncrl "
            f"{_shown(header.get('package', 'of unknown version'))} there, {__version__!r} here). "
            "Run the same asyncrl version on both sides."
        )
    return header


def _shown(value: Any) -> str:
    """Show what a peer sent: shortly, and however deep it is nested (str() gives up on that)."""
    return reprlib.repr(value)[:80]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number here")


def check_fields(kind: str, fields: dict[str, Any], kinds: dict[str, dict[str, type]]) -> None:
    """Check the fields of a message against the table of its kinds.

    Raises:
        WireError: The kind is unknown, or a field is missing, unknown, or of the wrong type or size.
    """
    if kind not in kinds:
        raise WireError(f"kind {kind[:40]!r} is unknown. Known: {', '.join(kinds)}.")
    _check_keys(kind, fields, kinds[kind])
    for name, expected in kinds[kind].items():
        _check_value(f"{kind}.{name}", fields[name], expected)


def _check_keys(where: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    if found.keys() != expected.keys():
        raise WireError(f"{where} has the fields {sorted(found)[:20]!s:.200}, expected {sorted(expected)}.")


def _check_value(where: str, value: Any, expected: type) -> None:
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
            _check_value(where, number, float)


def _check_text(where: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        raise WireError(f"{where} has {len(text)} characters, allowed are {MAX_TEXT}.")
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise WireError(f"{where} holds a character that is not text (NUL or a lone surrogate).")


def _check_id(episode_id: str) -> None:
    if len(episode_id) != 32 or not set(episode_id) <= set("0123456789abcdef"):
        raise WireError(f"episode_id {episode_id[:40]!r} is not 32 lower-case hexadecimal digits.")


def _check_shape(name: str, dtype: Any, shape: Any, sizes: dict[str, int]) -> int:
    """Check one array's type and shape against `records`; remember letters in `sizes`; return its bytes."""
    spec = EPISODE_ARRAYS[name]
    if dtype != spec.dtype:
        raise WireError(f"{name} is {_shown(dtype)}, expected {spec.dtype}.")
    if type(shape) is not list or len(shape) != len(spec.shape):
        raise WireError(f"{name} has shape {_shown(shape)}, expected {list(spec.shape)}.")
    for letter, size in zip(spec.shape, shape, strict=True):
        if type(size) is not int or not (letter != "M") <= size <= MAX_DIMENSION:
            raise WireError(f"{name} has shape {_shown(shape)}: {_shown(size)} is no size for {letter}.")
        expected = letter if isinstance(letter, int) else sizes.setdefault(letter, size)
        if size != expected:
            raise WireError(f"{name} has shape {shape}, but {letter} is {expected} elsewhere.")
    return math.prod(shape) * np.dtype(spec.dtype).itemsize


def _read_episode(scalars: Any, arrays: Any, frames: Sequence[Buffer]) -> Episode:
    if not isinstance(scalars, dict) or not isinstance(arrays, list):
        raise WireError("the message lacks its episode or the list of its arrays.")
    _check_keys("the episode", scalars, EPISODE_SCALARS)
    for name, expected in EPISODE_SCALARS.items():
        _check_value(name, scalars[name], expected)
    _check_id(scalars["episode_id"])
    if not len(arrays) == len(frames) == len(EPISODE_ARRAYS):
        raise WireError(
            f"{len(arrays)} arrays in the header and {len(frames)} frames, expected {len(EPISODE_ARRAYS)}."
        )
    sizes: dict[str, int] = {}
    for name, entry, frame in zip(EPISODE_ARRAYS, arrays, frames, strict=True):
        if not isinstance(entry, list) or len(entry) != 4 or entry[0] != name:
            raise WireError(f"the entry of array {name} is {_shown(entry)}.")
        if _check_shape(name, entry[1], entry[2], sizes) != len(frame):
            raise WireError(f"{name} has shape {entry[2]}, but its frame has {len(frame)} bytes.")
    found: dict[str, Any] = {}
    for (name, spec), entry, frame in zip(EPISODE_ARRAYS.items(), arrays, frames, strict=True):
        if type(entry[3]) is not int or zlib.crc32(frame) != entry[3]:
            raise WireError(f"the checksum of {name} does not match: it was changed on its way.")
        little = np.dtype(spec.dtype).newbyteorder("<")
        found[name] = np.frombuffer(frame, little).reshape(entry[2]).astype(spec.dtype, copy=True)
    return Episode(**scalars, **found)
