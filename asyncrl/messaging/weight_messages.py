"""Messages about weights between the learner and its receivers, framed by `framing`.

    receiver -> learner   newest     registers, is a heartbeat, and reports the version held; answered by
                                     `unchanged`, or by `offer` if a newer one can be fetched
                          bytes      a piece of one buffer of a version; answered by `chunk`, or `gone`
                          answer     of a member, to `group` or, with its version, to `send`; or the
                                     problem that ended its part of an epoch
                          leave      answered by `closed`
    learner -> receiver   layout     the receiver's manifest differs: names, shapes and dtypes, as JSON
                          group      a new epoch of the weight group begins
                          form       all members are ready: form the link
                          send       a version is broadcast over the link
                          closed     no version will follow
                          ended      the receiver belongs to an earlier start of the run
                          refused    the message, or the receiver, is not accepted

A `layout` and a `chunk` have a second frame with raw bytes; the header has its checksum.
"""

from __future__ import annotations

from typing import Final

from asyncrl.messaging.framing import MessageTable

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

MESSAGES: Final = MessageTable(kinds=KINDS, with_payload=WITH_PAYLOAD, most_bytes=MAX_PAYLOAD)
encode, decode = MESSAGES.encode, MESSAGES.decode
