"""Frame and check messages: JSON headers with a table of fields, raw frames, no pickle, no trust in the peer.

    frame 0    magic b"ARL1" | u32 crc32(body) | body: JSON {"schema", "kind", fields of the kind}
    frame 1..  raw bytes

`wire` has the messages of the replay, `weight_messages` those about weights.
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

from asyncrl import __version__
from asyncrl.episode_layout import SCHEMA_VERSION
from asyncrl.errors import WireError

Buffer = bytes | bytearray | memoryview

MAGIC: Final = b"ARL1"
PREFIX: Final = struct.Struct("<4sI")
MAX_HEADER_BYTES: Final = 2**20
MAX_FRAME_BYTES: Final = 256 * 2**20
MAX_MESSAGE_BYTES: Final = 512 * 2**20
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


# --- headers


def write_header(header: dict[str, Any], schema: int = SCHEMA_VERSION) -> bytes:
    """Encode the first frame: magic, checksum, schema version and fields."""
    body = _dump({"schema": schema, **header})
    return PREFIX.pack(MAGIC, zlib.crc32(body)) + body


def read_header(frame: Buffer) -> dict[str, Any]:
    """Decode the first frame, of at least 8 bytes, with the schema version."""
    magic, crc = PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise WireError(f"the message begins with {magic!r}, expected {MAGIC!r}: not a message of asyncrl.")
    body = bytes(frame[PREFIX.size :])
    if zlib.crc32(body) != crc:
        raise WireError("the checksum of the header does not match: it was changed on its way.")
    try:
        header = json.loads(body.decode())
        plain = _dump(header) == body or _dump(header, (", ", ": ")) == body
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise WireError(f"the header is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(header, dict):
        raise WireError(f"the header is a {type(header).__name__}, expected an object.")
    if not plain:
        raise WireError(
            "the header is not plain JSON: it names a field twice, or has other spaces or escapes."
        )
    return header


def _dump(header: Any, separators: tuple[str, str] = (",", ":")) -> bytes:
    return json.dumps(header, separators=separators, allow_nan=False).encode()


def take_schema(header: dict[str, Any], allowed: tuple[int, ...] = (SCHEMA_VERSION,)) -> int:
    """Remove and return the schema version, one of `allowed`."""
    schema = header.pop("schema", None)
    if type(schema) is not int or schema not in allowed:
        raise WireError(
            f"the peer speaks schema version {shown(schema)}, this side {allowed[-1]} (asyncrl "
            f"{shown(header.get('package', 'of unknown version'))} there, {__version__!r} here). "
            "Run the same asyncrl version on both sides."
        )
    return schema


def check_fields(kind: str, fields: dict[str, Any], kinds: dict[str, dict[str, type]]) -> None:
    """Check the fields of a message against the table of kinds."""
    if kind not in kinds:
        raise WireError(f"kind {kind[:40]!r} is unknown. Known: {', '.join(kinds)}.")
    check_keys(kind, fields, kinds[kind])
    for name, expected in kinds[kind].items():
        check_value(f"{kind}.{name}", fields[name], expected)


# --- messages of a table, with at most one raw frame


@dataclass(frozen=True, kw_only=True)
class FramedMessage:
    """One decoded message."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: Buffer = b""
    """The second frame, not copied; empty when the kind has none."""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


@dataclass(frozen=True, kw_only=True)
class MessageTable:
    """Kinds of messages with their fields; those `with_payload` have a raw frame and its CRC-32 as `crc`."""

    kinds: dict[str, dict[str, type]]
    with_payload: frozenset[str]
    most_bytes: int  # of a raw frame

    def encode(self, kind: str, payload: Buffer | None = None, **fields: Any) -> list[Buffer]:
        """Encode a message; raises WireError if it breaks the format."""
        if payload is not None:
            fields["crc"] = zlib.crc32(payload)
        check_fields(kind, fields, self.kinds)
        header = write_header({"kind": kind, **fields})
        frames: list[Buffer] = [header] if payload is None else [header, payload]
        self._check_frames(kind, frames)
        return frames

    def decode(self, frames: Sequence[Buffer]) -> FramedMessage:
        """Decode a message; raises nothing but WireError."""
        if not frames or not PREFIX.size <= len(frames[0]) <= MAX_HEADER_BYTES:
            raise WireError(
                f"the message has {len(frames)} frames; its header has {PREFIX.size} to "
                f"{MAX_HEADER_BYTES} bytes."
            )
        header = read_header(frames[0])
        take_schema(header)
        kind = header.pop("kind", None)
        if not isinstance(kind, str):
            raise WireError("the message has no kind.")
        check_fields(kind, header, self.kinds)
        self._check_frames(kind, frames)
        if kind not in self.with_payload:
            return FramedMessage(kind=kind, fields=header)
        if zlib.crc32(frames[1]) != header["crc"]:
            raise WireError(f"the checksum of a {kind} does not match: it was changed on its way.")
        return FramedMessage(kind=kind, fields=header, payload=frames[1])

    def _check_frames(self, kind: str, frames: Sequence[Buffer]) -> None:
        expected = 2 if kind in self.with_payload else 1
        if len(frames) != expected:
            raise WireError(f"{kind!r} has {expected} frames, but came with {len(frames)}.")
        if len(frames[-1]) > self.most_bytes:
            raise WireError(f"{kind!r} carries {len(frames[-1])} bytes, allowed are {self.most_bytes}.")
