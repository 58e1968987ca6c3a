"""The wire format: what is sent arrives exactly, and nothing else is accepted."""

import dataclasses
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.episode_layout import episode_arrays
from asyncrl.errors import ConfigError, WireError
from asyncrl.messaging import sockets
from asyncrl.messaging.wire import KINDS, MAX_FRAMES, WITH_EPISODE, decode, encode
from support.episodes import SAMPLES, assert_same, make_episode, pack, simulated, unpack, with_chain


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_arrives_as_it_was_sent(kind: str) -> None:
    fields = {name: SAMPLES[expected] for name, expected in KINDS[kind].items()}
    episode = make_episode(video=True) if kind in WITH_EPISODE else None
    message = decode(encode(kind, episode, **fields))
    assert (message.kind, message.fields) == (kind, fields)
    assert (message.episode is None) == (episode is None)
    if episode is not None and message.episode is not None:
        assert_same(message.episode, episode)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("kind", sorted(WITH_EPISODE))
def test_the_sample_of_any_policy_arrives_exactly(kind: str, views: bool) -> None:
    fields = {name: SAMPLES[expected] for name, expected in KINDS[kind].items()}
    sent = with_chain(make_episode(5, 1, video=True, success=True))
    frames = encode(kind, sent, **fields)
    assert unpack(frames)[0]["schema"] == 2
    received = decode(frames, views=views).episode
    assert received is not None
    assert_same(received, sent)


def test_action_tokens_are_of_the_first_schema_version() -> None:
    header, frames = unpack(encode("episode", make_episode()))
    assert header["schema"] == 1
    assert [entry[0] for entry in header["arrays"]][:3] == ["frames", "tokens", "logprobs"]
    with pytest.raises(WireError, match="not those of its schema version"):
        decode(pack(header | {"schema": 2}, frames))
    header, frames = unpack(encode("episode", with_chain(make_episode())))
    with pytest.raises(WireError, match="not those of its schema version"):
        decode(pack(header | {"schema": 1}, frames))


HOSTILE_SAMPLES: dict[str, tuple[list[Any], str]] = {
    "no text": ([7, "float32", [2, 3]], "entry of an array"),
    "no identifier": (["a/b", "float32", [2, 3]], "name"),
    "a parent folder": (["..", "float32", [2, 3]], "name"),
    "letters that are not ASCII": (["k\u00e4se", "float32", [2, 3]], "name"),
    "a scalar of the episode": (["task", "float32", [2, 3]], "taken"),
    "an array of the episode": (["video", "float32", [2, 3]], "not those of its schema version"),
    "another array's": (["noise_steps", "float32", [2, 3]], "taken"),
    "objects": (["chain", "object", [2, 3]], "one of uint8"),
    "float64": (["chain", "float64", [2, 3]], "one of uint8"),
    "no dimension": (["chain", "float32", []], "dimensions"),
    "no shape": (["chain", "float32", 6], "has shape 6"),
    "other decisions": (["chain", "float32", [3, 2]], "expected N = 2"),
    "nothing": (["chain", "float32", [2, 0]], "has shape"),
    "too large": (["chain", "float32", [2, 2**40]], "has shape"),
    "more than came": (["chain", "float32", [2, 4]], "its frame has 24 bytes"),
    "tokens that are no bins": (["tokens", "float32", [2, 3]], "tokens is 'float32', expected int32"),
}


@pytest.mark.parametrize("what", HOSTILE_SAMPLES)
def test_an_array_that_no_sample_can_have_is_refused(what: str) -> None:
    entry, problem = HOSTILE_SAMPLES[what]
    sample = {"noise_steps": np.zeros(2, np.int32), "chain": np.zeros((2, 3), np.float32)}
    header, frames = unpack(encode("episode", dataclasses.replace(make_episode(), sample=sample)))
    assert header["arrays"][2][0] == "chain"
    header["arrays"][2][:3] = entry
    with pytest.raises(WireError, match=problem):
        decode(pack(header, frames))


def test_a_sample_has_at_most_16_arrays() -> None:
    sample = {f"part_{i}": np.zeros((2, 1), np.uint8) for i in range(16)}
    sent = dataclasses.replace(make_episode(), sample=sample)
    received = decode(encode("episode", sent)).episode
    assert received is not None
    assert_same(received, sent)
    with pytest.raises(WireError, match="17 arrays"):
        encode("episode", dataclasses.replace(sent, sample={**sample, "x": sample["part_0"]}))


@pytest.mark.parametrize("views", [False, True])
def test_arrays_can_be_written_to_and_images_can_stay_where_they_came(views: bool) -> None:
    episode = make_episode(3, 1, video=True)
    turned = np.asfortranarray(episode.frames[:, :, ::-1])
    episode = dataclasses.replace(episode, frames=turned)  # Not contiguous.
    frames = [bytearray(frame) for frame in encode("episode", episode)]
    received = decode(frames, views=views).episode
    assert received is not None
    assert_same(received, episode)
    for place, (name, array) in enumerate(episode_arrays(received).items(), start=1):
        stays = views and array.dtype == np.uint8
        assert np.shares_memory(array, np.frombuffer(frames[place], np.uint8)) == stays, name
        assert array.flags.writeable != stays
        assert array.flags.aligned


def changed(**changes: Any) -> list[bytes]:
    """A valid episode message with changed header entries; the array `frames` is entry 0."""
    header, frames = unpack(encode("episode", make_episode()))
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if part == "array":
            header["arrays"][0][int(name)] = value
        elif name:
            header[part][name] = value
        else:
            header[part] = value
    return pack(header, frames)


GOOD_HEADER, GOOD_FRAMES = unpack(encode("episode", make_episode()))
PING = {"schema": 1, "kind": "ping"}
HOSTILE: dict[str, list[bytes]] = {
    "no frames": [],
    "empty header": [b""],
    "other magic": [b"AREP" + pack(PING)[0][4:]],
    "header of 65 KiB": pack(PING | {"x": "y" * 66_000}),
    "wrong checksum": [pack(PING)[0][:-1] + b" "],
    "not JSON": pack(b"{"),
    "not UTF-8": pack(b'{"schema":1,"kind":"\xff"}'),
    "nested 30 thousand times": pack(b"[" * 30_000 + b"]" * 30_000),
    "an integer of 5000 digits": pack(b'{"schema":' + b"9" * 5000 + b"}"),
    "NaN": pack(b'{"schema":1,"kind":"report","readings":{"a":NaN}}'),
    "a key twice": pack(b'{"schema":1,"kind":"ping","kind":"stop"}'),
    "schema as bool": pack(PING | {"schema": True}),
    "kind unknown": pack(PING | {"kind": "exec"}),
    "missing field": pack({"schema": 1, "kind": "acquire"}),
    "bool for int": pack({"schema": 1, "kind": "acquire", "turn": True}),
    "65 bits": pack({"schema": 1, "kind": "acquire", "turn": 2**64}),
    "text of 5000 letters": pack({"schema": 1, "kind": "refused", "reason": "x" * 5000}),
    "lone surrogate": pack(b'{"schema":1,"kind":"refused","reason":"\\ud800"}'),
    "readings not numbers": pack({"schema": 1, "kind": "report", "readings": {"a": "b"}}),
    "frames on a ping": pack(PING, [b"abc"]),
    "episode without arrays": pack({k: v for k, v in GOOD_HEADER.items() if k != "arrays"}, GOOD_FRAMES),
    "missing frame": pack(GOOD_HEADER, GOOD_FRAMES[:-1]),
    "1000 frames": pack(GOOD_HEADER, [b""] * 1000),
    "frame a byte short": pack(GOOD_HEADER, [GOOD_FRAMES[0][:-1], *GOOD_FRAMES[1:]]),
    "frames swapped": pack(GOOD_HEADER, [GOOD_FRAMES[0], *GOOD_FRAMES[1:][::-1]]),
    "array named ../x": changed(array__0="../x"),
    "big-endian dtype": changed(array__1=">u1"),
    "dimension 2**40": changed(array__2=[2**40, 4, 4, 3]),
    "negative dimensions": changed(array__2=[-2, -4, 4, 3]),
    "a letter of two sizes": changed(array__2=[4, 4, 2, 3]),
    "checksum of an array": changed(array__3=1),
    "entry with five parts": changed(arrays=[[*GOOD_HEADER["arrays"][0], 0], *GOOD_HEADER["arrays"][1:]]),
    "id as a path": changed(episode__episode_id="../" + "a" * 29),
    "member a text": changed(episode__member="0"),
    "extra scalar": changed(episode__extra=1),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_message_is_refused_with_the_one_error(name: str) -> None:
    with pytest.raises(WireError):
        decode(HOSTILE[name])


def test_limits_are_checked_before_the_header_is_read() -> None:
    large = memoryview(bytearray(1)).cast("B")
    with pytest.raises(WireError, match="frames"):
        decode([b"garbage!", *[large] * MAX_FRAMES])
    with pytest.raises(WireError, match="largest frame"):
        decode([b"garbage!", np.broadcast_to(np.zeros(1, np.uint8), 2**28 + 1)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "change",
    [
        {"frames": np.zeros((2, 4, 4, 3), np.float32)},
        {"sample": {"tokens": np.zeros((2, 8, 6), np.int32)}},
        {"task": "a\0b"},
        {"temperature": float("nan")},
        {"episode_id": "x"},
    ],
)
def test_what_a_peer_would_refuse_is_not_sent(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        encode("episode", dataclasses.replace(make_episode(), **change))


def test_the_socket_folder_is_private_and_short(tmp_path: Path) -> None:
    folder = sockets.private_folder()
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(sockets.ipc_endpoint(folder)) < sockets.MAX_IPC_PATH
    finally:
        folder.rmdir()
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        sockets.ipc_endpoint(tmp_path)
    with pytest.raises(ConfigError, match="107"):
        sockets.check_endpoint(f"ipc://{tmp_path}/{'x' * 120}")


def test_only_loopback_needs_no_encryption() -> None:
    for endpoint in ("tcp://127.0.0.1:5555", "tcp://127.1.2.3:1", "tcp://[::1]:5555"):
        assert sockets.check_endpoint(endpoint) == endpoint
    hosts = (
        "0.0.0.0:5555",
        "localhost:5555",
        "[::]:5555",
        "[::2]:5555",
        "*:5555",
        "10.0.0.1:5555",
        "host:5555",
    )
    ports = ("127.0.0.1", "127.0.0.1:*", "127.0.0.1:70000")
    others = ("udp://127.0.0.1:1", "ipc://relative", "ipc:///no/folder/x")
    for endpoint in (*(f"tcp://{rest}" for rest in (*hosts, *ports)), *others):
        with pytest.raises(ConfigError):
            sockets.check_endpoint(endpoint)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("end", ["success", "terminated", "truncated"])
def test_an_episode_of_a_simulator_arrives_exactly_under_the_third_schema_version(end, views) -> None:
    for sent in (
        simulated(make_episode(5, 1, video=True), end=end),
        simulated(with_chain(make_episode(5, 1)), steps=6, end=end, cameras=1),
        simulated(make_episode(5, 1), end=end, cameras=1, state=0),
    ):
        frames = encode("episode", sent)
        assert unpack(frames)[0]["schema"] == 3
        received = decode(frames, views=views).episode
        assert received is not None
        assert_same(received, sent)
        assert (received.steps, received.end_reason) == (sent.steps, end)


def test_what_only_simulators_tell_is_refused_under_another_version_or_in_another_place() -> None:
    header, frames = unpack(encode("episode", simulated(make_episode())))
    with pytest.raises(WireError, match="the episode has the fields"):
        decode(pack(header | {"schema": 1}, frames))
    uncounted = header | {"episode": header["episode"] | {"steps_taken": -1}}
    with pytest.raises(WireError, match="not of schema version 3"):
        decode(pack(uncounted, frames))
    arrays = header["arrays"]
    names = [entry[0] for entry in arrays]
    assert names[-4:] == ["more_frames", "states", "final_more_frames", "final_state"]
    with pytest.raises(WireError, match="states and final_state belong together"):
        decode(pack(header | {"arrays": arrays[:-1]}, frames[:-1]))
    swapped = [*arrays[:-2], arrays[-1], arrays[-2]]
    with pytest.raises(WireError, match="final_state, final_more_frames are not"):
        decode(pack(header | {"arrays": swapped}, [*frames[:-2], frames[-1], frames[-2]]))
    wrong = [*arrays[:-1], ["final_state", "float32", [4], arrays[-1][3]]]
    with pytest.raises(WireError, match="expected Q = 3"):
        decode(pack(header | {"arrays": wrong}, frames))
    plain, own = unpack(encode("episode", make_episode()))
    extra = simulated(make_episode(), cameras=1).states
    assert extra is not None
    entry = ["states", "float32", list(extra.shape), zlib.crc32(extra.tobytes())]
    with pytest.raises(WireError):
        decode(pack(plain | {"arrays": [*plain["arrays"], entry]}, [*own, extra.tobytes()]))
