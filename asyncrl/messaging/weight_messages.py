"""Messages about weights between the learner and its receivers, with the header of `wire`.

    receiver -> learner   newest     registers, is a heartbeat, and reports the version held; answered by
                                     `unchanged`, or by `offer` if a newer one can be fetched
                          bytes      a piece of one buffer of a version; answered by `chunk`, or `gone`
                          answer     of a member, to `group` or, with its version, to `send`; or the
                                     problem that ended its part of an epoch
                          leave
    learner -> receiver   layout     the receiver's manifest is another: names, shapes and dtypes, as JSON
                          group      a new epoch of the weight group begins
                          form       all members are ready: form the link
                          send       a version is broadcast over the link
                          closed     no version will follow
                          ended      the receiver belongs to an earlier start of the run
                          refused    the message, or the receiver, is not accepted

A `layout` and a `chunk` have a second frame with raw bytes; the header has its checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncrl.errors import WireError
from asyncrl.messaging.wire import MAX_HEADER_BYTES, Buffer, check_fields, read_header, write_header

CHUNK: Final = 2**20  # most bytes of a buffer in one message
MAX_PAYLOAD: Final = 16 * 2**20
"""Most bytes of a second frame: a chunk, or the manifest of some hundred thousand tensors."""

GREETING: Final = {"name": str, "member": int, "pid": int, "started": int, "secret": str, "attempt": int}
KINDS: Final[dict[str, dict[str, type]]] = {
    "newest": {**GREETING, "manifest": int, "held": int},
    "bytes": {"version": int, "buffer": int, "offset": int, "length": int},
    "answer": {"epoch": int, "version": int, "problem": str},
    "leave": {"reason": str},
    "offer": {"version": int, "checksum": int},
    "unchanged": {},
    "layout": {"crc": int},
    "chunk": {"version": int, "buffer": int, "offset": int, "crc": int},
    "gone": {"version": int},
    "group": {"epoch": int},
    "form": {"epoch": int, "rank": int, "size": int, "store": str},
    "send": {"epoch": int, "version": int, "buffer_index": int, "checksum": int},
    "closed": {},
    "ended": {"attempt": int},
    "refused": {"reason": str},
}
"""Every kind of message with its fields. `secret` and `attempt` are those of `RunIdentity`; `checksum` is of
all buffers, `manifest` and `crc` are CRC-32. `member` is 1 for a receiver of the weight group, whose
`pid` and `started` name its process on the learner's host (0: on another host)."""
WITH_PAYLOAD: Final = frozenset({"layout", "chunk"})


@dataclass(frozen=True, kw_only=True)
class WeightMessage:
    """One decoded message."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: Buffer = b""
    """The second frame, not copied; empty when the kind has none."""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def encode(kind: str, payload: Buffer | None = None, **fields: Any) -> list[Buffer]:
    """Encode a message; raises WireError if it breaks the format."""
    if payload is not None:
        fields["crc"] = zlib.crc32(payload)
    check_fields(kind, fields, KINDS)
    header = write_header({"kind": kind, **fields})
    frames: list[Buffer] = [header] if payload is None else [header, payload]
    _check_frames(kind, frames)
    return frames


def decode(frames: Sequence[Buffer]) -> WeightMessage:
    """Decode a message; raises nothing but WireError."""
    if not frames or not 8 <= len(frames[0]) <= MAX_HEADER_BYTES:
        raise WireError(
            f"the message has {len(frames)} frames; its header has 8 to {MAX_HEADER_BYTES} bytes."
        )
    header = read_header(frames[0])
    kind = header.pop("kind", None)
    if not isinstance(kind, str):
        raise WireError("the message has no kind.")
    check_fields(kind, header, KINDS)
    _check_frames(kind, frames)
    if kind not in WITH_PAYLOAD:
        return WeightMessage(kind=kind, fields=header)
    if zlib.crc32(frames[1]) != header["crc"]:
        raise WireError(f"the checksum of a {kind} does not match: it was changed on its way.")
    return WeightMessage(kind=kind, fields=header, payload=frames[1])


def _check_frames(kind: str, frames: Sequence[Buffer]) -> None:
    expected = 2 if kind in WITH_PAYLOAD else 1
    if len(frames) != expected:
        raise WireError(f"{kind!r} has {expected} frames, but came with {len(frames)}.")
    if len(frames[-1]) > MAX_PAYLOAD:
        raise WireError(f"{kind!r} carries {len(frames[-1])} bytes, allowed are {MAX_PAYLOAD}.")
