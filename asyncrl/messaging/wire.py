"""Messages between replay, actors and learner, framed by `framing`; some carry an episode.

An episode adds "episode": {scalars} and "arrays": [[name, dtype, shape, crc32], ...] to the header, and a raw
frame for each array of `episode_layout.episode_arrays`, little-endian, in C order.

Schema version 1; 2 if the sample of the episode has other arrays than action tokens alone; 3 if it has
`steps_taken`, and perhaps `episode_layout.OPTIONAL_ARRAYS`. A peer names only the sample's arrays and sizes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl import __version__
from asyncrl import episode_layout as layout
from asyncrl.errors import WireError
from asyncrl.messaging.framing import (
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    PREFIX,
    Buffer,
    FramedMessage,
    LongText,
    check_fields,
    check_keys,
    check_value,
    read_header,
    shown,
    take_schema,
    write_header,
)
from asyncrl.records import Episode

MAX_DIMENSION: Final = 2**20
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
class Message(FramedMessage):
    """One decoded message, without a payload."""

    episode: Episode | None = None


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
        header["episode"] = scalars_of(episode)
        header["arrays"], payload = write_arrays(episode)
    frames: list[Buffer] = [write_header(header, schema), *payload]
    _check_sizes(frames)
    return frames


def decode(frames: Sequence[Buffer], *, views: bool = False) -> Message:
    """Decode a message or raise WireError; `views`: images are read-only views, other arrays are copies."""
    _check_sizes(frames)
    header = read_header(frames[0])
    with_episode = isinstance(header.get("kind"), str) and header["kind"] in WITH_EPISODE
    schema = take_schema(header, layout.SCHEMA_VERSIONS if with_episode else (layout.SCHEMA_VERSION,))
    kind = header.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise WireError(f"kind {shown(kind)} is unknown. Known: {', '.join(KINDS)}.")
    scalars, arrays = header.pop("episode", None), header.pop("arrays", None)
    check_fields(kind, header, KINDS)
    if kind not in WITH_EPISODE:
        if scalars is not None or arrays is not None or len(frames) != 1:
            raise WireError(
                f"{kind!r} carries no episode, but came with one or with {len(frames) - 1} arrays."
            )
        return Message(kind=kind, fields=header)
    episode = read_episode(scalars, arrays, frames[1:], schema=schema, views=views)
    if schema != layout.version_of(episode):
        raise WireError(
            f"a sample of {shown(list(episode.sample))} with {episode.steps_taken} steps taken is not "
            f"of schema version {schema}."
        )
    return Message(kind=kind, fields=header, episode=episode)


def _check_sizes(frames: Sequence[Buffer]) -> None:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"{len(frames)} frames, but a message has 1 to {MAX_FRAMES}.")
    lengths = [len(frame) for frame in frames]
    if not PREFIX.size <= lengths[0] <= MAX_HEADER_BYTES:
        raise WireError(
            f"the header has {lengths[0]} bytes; allowed are {PREFIX.size} to {MAX_HEADER_BYTES}."
        )
    if max(lengths) > MAX_FRAME_BYTES or sum(lengths) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"the largest frame or array has {max(lengths)} bytes and all have {sum(lengths)}; allowed are "
            f"{MAX_FRAME_BYTES} and {MAX_MESSAGE_BYTES}. Smaller images or "
            "--replay.keep-video-every 0 help."
        )


# --- the episode of a message; sizes are checked before anything is allocated


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
