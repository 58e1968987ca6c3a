"""Damaged messages and files end in the one error, or arrive as they were."""

import json
import random
import struct
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest

from asyncrl.errors import ReplayError, WireError
from asyncrl.messaging.wire import KINDS, WITH_EPISODE, Message, decode, encode
from asyncrl.replay.admission import problem_with
from asyncrl.replay.events import Ledger, read_entries, write_line
from asyncrl.replay.group_file import read_group, read_group_file, write_group
from asyncrl.replay.store import read_meta
from support.episodes import SAMPLES, make_episode, pack, unpack, with_chain

Frames = list[bytes]
EXTREMES: list[Any] = [
    *(0, -1, 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 2**256, 10**4000),
    *(0.0, -0.0, 1e308, 5e-324, 0.1, True, False, None, "", "0", "a" * 4096, "a" * 4097, "\0", "é" * 100),
    *("../x", "\ud800", "NaN", [], {}, [[]], [1] * 100, {"a": 1.0}, ["uint8"], "|O", ">u1", [2**40] * 4),
]
"""Values put in place of header entries."""
FORGED = {"forge", "bomb", "misplace"}
"""Kinds of damage after which the checksum of the header is right again."""
SLACK = 16 * 2**20
"""Bytes that decoding may take beyond twice the message: a parsed header of 64 KiB, and what Python keeps."""


def valid_messages() -> list[Frames]:
    """At least one message of each kind; several with episodes of different and of equal shapes."""
    found = []
    for kind, about in KINDS.items():
        fields = {name: SAMPLES[expected] for name, expected in about.items()}
        episodes = [make_episode(i, i % 2, video=i == 3, image=4 + 4 * (i == 4)) for i in range(5)]
        episodes += [with_chain(episode) for episode in episodes[2:]]
        for episode in episodes if kind in WITH_EPISODE else [None]:
            found.append([bytes(frame) for frame in encode(kind, episode, **fields)])
    return found


def content(message: Message) -> bytes:
    """One byte string per content: the message as this side would send it."""
    return b"|".join(bytes(frame) for frame in encode(message.kind, message.episode, **message.fields))


def flip_bits(rng: random.Random, whole: bytes) -> bytes:
    changed = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, whole: bytes) -> bytes:
    return whole[: rng.randrange(len(whole) + 1)]


def repeat_range(rng: random.Random, whole: bytes) -> bytes:
    a, b = sorted(rng.randrange(len(whole) + 1) for _ in range(2))
    return whole[:b] + whole[a:b] + whole[b:]


def zero_range(rng: random.Random, whole: bytes) -> bytes:
    a = rng.randrange(len(whole) + 1)
    b = min(len(whole), a + rng.choice((1, 4, 8, 64, 512)))
    return whole[:a] + bytes(b - a) + whole[b:]


def put_extreme(rng: random.Random, whole: bytes) -> bytes:
    number = rng.choice((0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1))
    raw = struct.pack("<Q", number)[: rng.choice((1, 2, 4, 8))]
    place = rng.randrange(max(1, len(whole) - len(raw)))
    return whole[:place] + raw + whole[place + len(raw) :]


BYTES = (flip_bits, truncate, repeat_range, zero_range, put_extreme)


def splice_bytes(rng: random.Random, one: bytes, other: bytes) -> bytes:
    """The beginning of one, the end of the other."""
    return one[: rng.randrange(len(one) + 1)] + other[rng.randrange(len(other) + 1) :]


def damage_frame(rng: random.Random, frames: Frames, pool: list[Frames]) -> Frames:
    place = 0 if rng.random() < 0.5 else rng.randrange(len(frames))
    return [*frames[:place], rng.choice(BYTES)(rng, frames[place]), *frames[place + 1 :]]


def drop_frame(rng: random.Random, frames: Frames, pool: list[Frames]) -> Frames:
    place = rng.randrange(len(frames))
    return frames[:place] + frames[place + 1 :]


def repeat_frame(rng: random.Random, frames: Frames, pool: list[Frames]) -> Frames:
    place, to = rng.randrange(len(frames)), rng.randrange(len(frames) + 1)
    return [*frames[:to], frames[place], *frames[to:]]


def swap_frames(rng: random.Random, frames: Frames, pool: list[Frames]) -> Frames:
    changed, a, b = list(frames), rng.randrange(len(frames)), rng.randrange(len(frames))
    changed[a], changed[b] = changed[b], changed[a]
    return changed


def splice_frames(rng: random.Random, frames: Frames, pool: list[Frames]) -> Frames:
    other = rng.choice(pool)
    if rng.random() < 0.5:
        cut = rng.randrange(len(frames) + 1)
        return frames[:cut] + other[cut:]
    place, source = rng.randrange(len(frames)), rng.choice(other)
    mixed = source if rng.random() < 0.5 else splice_bytes(rng, frames[place], source)
    return [*frames[:place], mixed, *frames[place + 1 :]]


def bomb(rng: random.Random, frames: Frames, pool: list[Frames]) -> Frames:
    """Much from little: many frames, a large header, deep nesting, long lists, long numbers."""
    depth, n = rng.choice((10, 900, 990, 1000, 3000, 30_000)), rng.choice((10, 1000, 20_000))
    header = json.dumps({"schema": 1, "kind": rng.choice(list(KINDS))})[:-1].encode()
    deep = b"[" * depth + b"]" * depth
    return rng.choice(
        [
            frames + [b""] * n,
            frames + [frames[-1]] * min(n, 100),
            [frames[0] + b" " * rng.choice((1, 2**16, 2**20)), *frames[1:]],
            pack(deep),
            pack(b'{"a":' * depth + b"1" + b"}" * depth),
            pack(header + b',"turn":' + deep + b"}"),
            pack(header + b',"arrays":' + deep + b',"episode":' + deep + b"}", frames[1:]),
            pack(header + b',"turn":' + b"9" * n + b"}"),
            pack(header + b',"version":1e' + b"9" * min(n, 1000) + b"}"),
            pack(header + b',"x":[' + b"{}," * n + b"1]}"),
            pack(header + b"," + b",".join(b'"k%d":1' % i for i in range(min(n, 5000))) + b"}"),
        ]
    )


def forge(rng: random.Random, frames: Frames, pool: list[Frames]) -> Frames:
    """Put an extreme value, of any type, anywhere into the header, and make its checksum right again."""
    header, payload = unpack(frames)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(header)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        node, key = rng.choice(places)
        if isinstance(node, dict) and rng.random() < 0.2:
            node.pop(key, None)
        elif isinstance(node, dict) and rng.random() < 0.1:
            node[rng.choice(("x", "", "schema ", "é" * 50))] = rng.choice(EXTREMES)
        else:
            node[key] = rng.choice(EXTREMES)
    return pack(header, payload)


def misplace(rng: random.Random, frames: Frames, pool: list[Frames]) -> Frames:
    """Take another array's entry, place or name for one, and make the checksum of the header right again."""
    header, payload = unpack(rng.choice([frames for frames in pool if len(frames) > 1]))
    arrays, (one, other) = header["arrays"], rng.choices(range(len(payload)), k=2)
    change = rng.randrange(4)
    if change == 0:
        arrays[one][1:] = arrays[other][1:]
    elif change == 1:
        arrays[one], arrays[other] = arrays[other], arrays[one]
        payload[one], payload[other] = payload[other], payload[one]
    elif change == 2:
        arrays[one][0] = rng.choice([arrays[other][0], *EXTREMES])
    else:
        arrays[one][4:] = [rng.choice(EXTREMES)]
    return pack(header, payload)


MESSAGES = [*2 * [misplace, damage_frame, forge], drop_frame, repeat_frame, swap_frames, splice_frames, bomb]


def _said(frames: Frames) -> str:
    """What the header says."""
    return json.dumps(unpack(frames)[0], sort_keys=True)


def judge(frames: Frames, genuine: set[bytes], *, forged: bool) -> str:
    """Decode and say 'refused' or 'accepted', while tracemalloc runs.

    Accepted may be what is genuine or, where the sender made the checksum right, what the header says.
    """
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        message = decode(frames)
    except WireError:
        message = None
    taken = tracemalloc.get_traced_memory()[1] - before
    allowed = 2 * sum(map(len, frames)) + SLACK
    assert taken <= allowed, f"decoding took {taken} bytes, allowed are {allowed}"
    if message is None:
        return "refused"
    if forged:
        meant = encode(message.kind, message.episode, **message.fields)
        assert _said(frames) == _said([bytes(frame) for frame in meant]), "not what the header says"
    else:
        assert content(message) in genuine, "altered content was accepted"
    if message.episode is not None:
        problem_with(message.episode)
    return "accepted"


def mutated(rng: random.Random, pool: list[Frames]) -> tuple[str, Frames]:
    """One damaged message and the name of the damage."""
    change = rng.choice(MESSAGES)
    return change.__name__, change(rng, rng.choice(pool), pool)


def valid_files(folder: Path) -> dict[str, list[bytes]]:
    """The bytes of sound files by kind: group, ledger, meta."""
    groups = []
    for number, image in enumerate((4, 8, 16)):
        path = folder / f"group-{number}.h5"
        group = [make_episode(number, i, image=image, video=image == 8) for i in (0, 1)]
        write_group(path, number, [with_chain(episode) for episode in group] if number == 2 else group)
        groups.append(path.read_bytes())
    ledger = Ledger(folder / "ledger.log", print)
    ledger.append(learner="s", version=0)
    for n in range(20):
        ledger.append(grant=n, actor="actor-0", turn=n, min_version=0)
        ledger.append(used=[n, n + 1], request=f"r-{n}", version=n)
    ledger.append(refused="it is ü")
    ledger.close()
    meta = {"format": "asyncrl-replay", "format_version": 3, "schema_version": 1, "group_size": 8}
    lines = (folder / "ledger.log").read_bytes()
    return {"group": groups, "ledger": [lines], "meta": [write_line(meta) + b"\n"]}


def damaged_file(rng: random.Random, kind: str, files: dict[str, list[bytes]]) -> tuple[str, bytes]:
    """One damaged file and the name of the damage. Half of it falls on where HDF5 keeps its structure."""
    whole = rng.choice(files[kind])
    if rng.random() < 0.1:
        other = rng.choice(files[rng.choice(list(files))])
        return "splice", splice_bytes(rng, whole, other)
    change, cut = rng.choice(BYTES), 4096 if rng.random() < 0.5 else len(whole)
    return change.__name__, change(rng, whole[:cut]) + whole[cut:]


def checksum_of_group(episodes: Any) -> int:
    """A number for the content of a group."""
    parts = (content(Message(kind="episode", episode=episode)) for episode in episodes)
    return zlib.crc32(b"".join(parts))


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("_traced")
def test_a_damaged_message_is_refused_or_unchanged() -> None:
    pool, rng = valid_messages(), random.Random(0)
    genuine = {content(decode(frames)) for frames in pool}
    seen: Counter[tuple[str, str]] = Counter()
    for _ in range(3000):
        name, frames = mutated(rng, pool)
        seen[name, judge(frames, genuine, forged=name in FORGED)] += 1
    assert {decode(frames).kind for frames in pool} == KINDS.keys()
    assert sum(seen.values()) == 3000
    assert seen["forge", "refused"] > 100
    assert seen["forge", "accepted"] > 0, "an extreme but legal number, as it was said"
    assert seen["misplace", "refused"] > 100
    assert seen["misplace", "accepted"] > 0, "the sample in another order, or what is the same"


def test_a_damaged_group_file_is_refused_or_unchanged(tmp_path: Path) -> None:
    files, rng, path = valid_files(tmp_path), random.Random(1), tmp_path / "group-damaged.h5"
    genuine = {checksum_of_group(read_group(tmp_path / f"group-{n}.h5")) for n in range(3)}
    refused = 0
    for _ in range(300):
        _, whole = damaged_file(rng, "group", files)
        path.write_bytes(whole)
        try:
            read_group_file(path)
            assert checksum_of_group(read_group(path)) in genuine
        except ReplayError:
            refused += 1
    assert refused > 200


def test_a_damaged_ledger_gives_only_lines_that_were_written(tmp_path: Path) -> None:
    files, rng, path = valid_files(tmp_path), random.Random(2), tmp_path / "damaged.log"
    genuine, warned = list(read_entries(tmp_path / "ledger.log", print)), list[str]()
    assert len(genuine) == 42
    for _ in range(500):
        path.write_bytes(damaged_file(rng, "ledger", files)[1])
        before, entries = len(warned), list(read_entries(path, warned.append))
        assert all(entry in genuine for entry in entries)
        assert len(warned) > before or entries == genuine[: len(entries)], "what changed is reported"
    assert len(warned) > 300


def test_a_damaged_replay_json_is_refused_or_unchanged(tmp_path: Path) -> None:
    files, rng = valid_files(tmp_path), random.Random(3)
    (tmp_path / "replay.json").write_bytes(files["meta"][0])
    genuine, refused = read_meta(tmp_path), 0
    for _ in range(500):
        (tmp_path / "replay.json").write_bytes(damaged_file(rng, "meta", files)[1])
        try:
            assert read_meta(tmp_path) == genuine
        except ReplayError:
            refused += 1
    assert refused > 400


def test_hdf5_never_sees_a_file_whose_structure_is_damaged(tmp_path, monkeypatch) -> None:
    """Libhdf5 itself may crash on one, so no exception handler would help."""
    whole, path = valid_files(tmp_path)["group"][0], tmp_path / "damaged.h5"
    path.write_bytes(whole)
    file: Any
    with h5py.File(path) as file:
        arrays = [file[name] for name in file if name not in ("group", "episodes", "checksums")]
        values = [range(x.id.get_offset(), x.id.get_offset() + x.nbytes) for x in arrays if x.size]

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("HDF5 opened it")

    monkeypatch.setattr("h5py.File", opened)
    path.write_bytes(whole)
    with pytest.raises(AssertionError, match="HDF5 opened it"):
        read_group_file(path)
    for place in [*range(0, 600, 13), *range(len(whole) - 200, len(whole), 7)]:
        if any(place in of_array for of_array in values):
            continue  # Its own checksum covers it.
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        for read in (read_group_file, read_group):
            with pytest.raises(ReplayError, match="damaged"):
                read(path)
    for length in (0, 1, 27, 28, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ReplayError, match="damaged"):
            read_group_file(path)


def test_a_replay_folder_of_the_earlier_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "replay.json").write_text('{"format": "asyncrl-replay", "format_version": 2}')
    with pytest.raises(ReplayError, match="format_version 2, this asyncrl reads 3"):
        read_meta(tmp_path)
