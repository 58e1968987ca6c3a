"""Encode and decode messages as bytes: no sockets, no pickle, no trust in the peer.

    frame 0    magic b"ARL1" | u32 crc32(body) | body: JSON {"schema", "kind", fields of the kind,
               and with an episode also "episode": {scalars}, "arrays": [[name, dtype, shape, crc32], ...]}
    frame 1..  a raw frame for each array of `episode_layout.episode_arrays`, little-endian, C order

Schema version 1; 2 if the sample of the episode has other arrays than action tokens alone; 3 if it has
`steps_taken`, and perhaps `episode_layout.OPTIONAL_ARRAYS`. A peer names only the sample's arrays and sizes.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncrl import __version__
from asyncrl import episode_layout as layout
from asyncrl.errors import WireError
from asyncrl.messaging import episode_codec as codec
from asyncrl.messaging.episode_codec import Buffer, LongText
from asyncrl.records import Episode
from asyncrl.storage.untrusted import no_constant, without_doubles

MAGIC: Final = b"ARL1"
_PREFIX: Final = struct.Struct("<4sI")
MAX_HEADER_BYTES: Final = 2**20
MAX_FRAMES: Final = 1 + len(layout.EPISODE_ARRAYS) + layout.MAX_SAMPLE_ARRAYS + len(layout.OPTIONAL_ARRAYS)

KINDS: Final[dict[str, dict[str, type]]] = {
    "hello": {
        "role": str,
        "name": str,
        "session": str,
        "version": int,
        "secret": str,
        "attempt": int,
        "package": str,
    },
    "welcome": {"boot": str, "known": bool, "package": str},
    "ping": {},
    "bye": {},
    "settings": {"name": str},
    "settings_reply": {"config": LongText, "weights": str, "secret": str, "attempt": int},
    "acquire": {"turn": int, "groups": int},
    "grant": {"turn": int, "number": int, "min_version": int, "keep_video": bool},
    "given_up": {"turn": int},
    "episode": {},
    "failed": {
        "report": str,
        "number": int,
        "member": int,
        "cause": str,
        "start_state": str,
        "reason": str,
        "left": int,
    },
    "quarantined": {"start_state": str},
    "receipt": {"episode_id": str, "status": str, "reason": str},
    "report": {"readings": dict},
    "sample": {"request": str, "groups": int, "version": int},
    "chosen": {"request": str, "numbers": list},
    "fetch": {"request": str, "number": int},
    "batch": {"number": int, "size": int},
    "lost": {"request": str, "number": int, "reason": str},
    "nothing_to_learn": {"request": str, "reason": str},
    "notice": {"text": str},
    "version": {"version": int},
    "status": {},
    "status_reply": {"readings": dict, "contents": str, "groups": int, "episodes": int, "decisions": int},
    "stop": {},
    "stopped": {},
    "refused": {"reason": str, "package": str},
    "ended": {"attempt": int},
}
"""Kind of message -> fields. `package` is the sender's version of asyncrl; `secret` and `attempt` are those
of `RunIdentity`, and `ended` has the attempt that replaced the peer's. `given_up` repeats an answer whose
group is no longer open. A `fetch` is answered by `size` messages `batch`, one per episode, or by `lost`. A
`failed` is answered, like an episode, by a receipt. A `dict` maps names of metrics to finite numbers; a
`list` has the numbers of groups."""
WITH_EPISODE: Final = frozenset({"episode", "batch"})


@dataclass(frozen=True, kw_only=True)
class Message:
    """One decoded message."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    episode: Episode | None = None

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def encode(kind: str, episode: Episode | None = None, /, **fields: Any) -> list[Buffer]:
    """Encode a message as frames, by default with this version as `package`; else raise WireError."""
    if "package" in KINDS.get(kind, {}):
        fields.setdefault("package", __version__)
    check_fields(kind, fields, KINDS)
    if (episode is not None) != (kind in WITH_EPISODE):
        raise WireError(f"{kind!r} {'carries' if episode is None else 'does not carry'} an episode.")
    header: dict[str, Any] = {"kind": kind, **fields}
    payload: list[Buffer] = []
    schema = layout.SCHEMA_VERSION if episode is None else layout.version_of(episode)
    if episode is not None:
        header["episode"] = codec.scalars_of(episode)
        header["arrays"], payload = codec.write_arrays(episode)
    frames: list[Buffer] = [write_header(header, schema), *payload]
    _check_sizes(frames)
    return frames


def decode(frames: Sequence[Buffer], *, views: bool = False) -> Message:
    """Decode a message or raise WireError; `views`: images are read-only views, other arrays are copies."""
    _check_sizes(frames)
    header = _parse(frames[0])
    with_episode = isinstance(header.get("kind"), str) and header["kind"] in WITH_EPISODE
    schema = _check_schema(header, layout.SCHEMA_VERSIONS if with_episode else (layout.SCHEMA_VERSION,))
    kind = header.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise WireError(f"kind {codec.shown(kind)} is unknown. Known: {', '.join(KINDS)}.")
    scalars, arrays = header.pop("episode", None), header.pop("arrays", None)
    check_fields(kind, header, KINDS)
    if kind not in WITH_EPISODE:
        if scalars is not None or arrays is not None or len(frames) != 1:
            raise WireError(
                f"{kind!r} carries no episode, but came with one or with {len(frames) - 1} arrays."
            )
        return Message(kind=kind, fields=header)
    episode = codec.read_episode(scalars, arrays, frames[1:], schema=schema, views=views)
    if schema != layout.version_of(episode):
        raise WireError(
            f"a sample of {codec.shown(list(episode.sample))} with {episode.steps_taken} steps taken is not "
            f"of schema version {schema}."
        )
    return Message(kind=kind, fields=header, episode=episode)


def _check_sizes(frames: Sequence[Buffer]) -> None:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"{len(frames)} frames, but a message has 1 to {MAX_FRAMES}.")
    lengths = [len(frame) for frame in frames]
    if not _PREFIX.size <= lengths[0] <= MAX_HEADER_BYTES:
        raise WireError(
            f"the header has {lengths[0]} bytes; allowed are {_PREFIX.size} to {MAX_HEADER_BYTES}."
        )
    if max(lengths) > codec.MAX_FRAME_BYTES or sum(lengths) > codec.MAX_MESSAGE_BYTES:
        raise WireError(
            f"the largest frame or array has {max(lengths)} bytes and all have {sum(lengths)}; allowed are "
            f"{codec.MAX_FRAME_BYTES} and {codec.MAX_MESSAGE_BYTES}. Smaller images or "
            "--replay.keep-video-every 0 help."
        )


def write_header(header: dict[str, Any], schema: int = layout.SCHEMA_VERSION) -> bytes:
    """Encode the first frame: magic, checksum, schema version and fields."""
    body = json.dumps({"schema": schema, **header}, separators=(",", ":"), allow_nan=False).encode()
    return _PREFIX.pack(MAGIC, zlib.crc32(body)) + body


def read_header(frame: Buffer) -> dict[str, Any]:
    """Decode the first frame, of at least 8 bytes, without the schema version."""
    header = _parse(frame)
    _check_schema(header, (layout.SCHEMA_VERSION,))
    return header


def _parse(frame: Buffer) -> dict[str, Any]:
    magic, crc = _PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise WireError(f"the message begins with {magic!r}, expected {MAGIC!r}: not a message of asyncrl.")
    body = bytes(frame[_PREFIX.size :])
    if zlib.crc32(body) != crc:
        raise WireError("the checksum of the header does not match: it was changed on its way.")
    try:
        header = json.loads(body.decode(), object_pairs_hook=without_doubles, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise WireError(f"the header is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(header, dict):
        raise WireError(f"the header is a {type(header).__name__}, expected an object.")
    return header


def _check_schema(header: dict[str, Any], allowed: tuple[int, ...]) -> int:
    schema = header.pop("schema", None)
    if type(schema) is not int or schema not in allowed:
        raise WireError(
            f"the peer speaks schema version {codec.shown(schema)}, this side {allowed[-1]} (asyncrl "
            f"{codec.shown(header.get('package', 'of unknown version'))} there, {__version__!r} here). "
            "Run the same asyncrl version on both sides."
        )
    return schema


def check_fields(kind: str, fields: dict[str, Any], kinds: dict[str, dict[str, type]]) -> None:
    """Check the fields of a message against the table of kinds."""
    if kind not in kinds:
        raise WireError(f"kind {kind[:40]!r} is unknown. Known: {', '.join(kinds)}.")
    codec.check_keys(kind, fields, kinds[kind])
    for name, expected in kinds[kind].items():
        codec.check_value(f"{kind}.{name}", fields[name], expected)
