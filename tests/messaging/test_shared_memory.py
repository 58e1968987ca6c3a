"""The ring of shared memory: places never overlap, views are what was put there, no peer is believed."""

import dataclasses
import fcntl
import itertools
import mmap
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WireError
from asyncrl.messaging import shared_memory
from asyncrl.messaging.shared_memory import (
    ALIGNMENT,
    Places,
    RingMissing,
    RingOutOfReach,
    RingReader,
    Rings,
    RingWriter,
    same_host,
)
from asyncrl.messaging.wire import decode, encode
from support.episodes import assert_same, make_episode, pack, unpack

SIZE = 2**20
LARGE = {"image": 160, "versions": (3,)}
"""Of an episode whose frames and final frame have 76,800 bytes each."""


@pytest.fixture
def writer() -> Iterator[RingWriter]:
    ring = RingWriter(SIZE)
    yield ring
    ring.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000))), st.integers(0, 10_000))
def test_living_places_never_overlap_and_all_that_is_freed_becomes_one_piece(
    steps: list[tuple[bool, int]], size: int
) -> None:
    places, living = Places(size), dict[int, int]()
    for take, number in steps:
        if take:
            offset = places.take(number)
            largest = max((length for _, length in places.free), default=0)
            if offset is None:
                assert largest < max(number, 1), "there was room"
            else:
                assert offset % ALIGNMENT == 0
                assert offset + number <= size
                living[offset] = number
        elif living:
            gone = sorted(living)[number % len(living)]
            del living[gone]
            places.give_back(gone)
        pieces = sorted([*living.items(), *places.free])
        for (begin, length), (following, _) in itertools.pairwise(pieces):
            assert begin + length <= following
    for offset in living:
        places.give_back(offset)
    assert places.free == [(0, size // ALIGNMENT * ALIGNMENT)]


def test_the_first_place_that_fits_is_taken_again() -> None:
    places = Places(1024)
    assert [places.take(100), places.take(200), places.take(100)] == [0, 128, 384]
    places.give_back(128)
    assert [places.take(300), places.take(65), places.take(1)] == [512, 128, 256]


def test_what_was_put_is_seen_read_only_and_without_a_copy(writer: RingWriter) -> None:
    reader, sent = RingReader(writer.announcement()), make_episode(5, 1, **LARGE)
    offsets = writer.put_episode(sent)
    assert offsets.keys() == {"frames", "final_frame"}, "the rest is small"
    message = decode(encode("episode", sent, offsets), reader)
    assert message.episode is not None
    assert_same(message.episode, sent)
    assert message.shared_bytes == 2 * 76_800
    assert not message.episode.frames.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        message.episode.frames.setflags(write=True)
    writer.give_back(offsets)
    assert writer.put_episode(make_episode(6, 0, **LARGE)).keys() == offsets.keys()
    assert not np.array_equal(message.episode.frames, sent.frames), "it is the ring itself"


def test_arrays_that_are_not_contiguous_are_put_exactly(writer: RingWriter) -> None:
    sent = make_episode(**LARGE)
    sent = dataclasses.replace(sent, frames=np.asfortranarray(sent.frames[:, :, ::-1]))
    received = decode(encode("episode", sent, writer.put_episode(sent)), RingReader(writer.announcement()))
    assert received.episode is not None
    np.testing.assert_array_equal(received.episode.frames, sent.frames)


def test_without_room_an_array_stays_in_its_frame() -> None:
    ring = RingWriter(100_000)
    sent = make_episode(**LARGE)
    offsets = ring.put_episode(sent)
    assert offsets.keys() == {"frames"}
    assert ring.put_episode(sent) == {}
    received = decode(encode("episode", sent, offsets), RingReader(ring.announcement())).episode
    assert received is not None
    assert_same(received, sent)
    ring.close()


def test_a_view_outlives_the_ring_of_both_sides() -> None:
    ring, sent = RingWriter(SIZE), make_episode(**LARGE)
    rings = Rings(SIZE)
    assert rings.announced(b"a", ring.announcement()) == ""
    received = decode(encode("episode", sent, ring.put_episode(sent)), rings.get(b"a")).episode
    ring.close()
    rings.forget(b"a")
    del ring
    assert rings.get(b"a") is None
    assert received is not None
    assert_same(received, sent)


def test_the_size_of_a_ring_cannot_be_changed(writer: RingWriter) -> None:
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(writer.announcement()["fd"], size)


def place(ring: RingWriter, offset: Any) -> list[bytes]:
    """A message with another offset for its frames, the header's checksum right again."""
    sent = make_episode(**LARGE)
    header, frames = unpack(encode("episode", sent, ring.put_episode(sent)))
    header["arrays"][0][4] = offset
    return pack(header, frames)


@pytest.mark.parametrize(
    "offset", [-1, -64, SIZE, SIZE - 76_799, 2**63, -(2**64), True, 1.0, "0", None, [0], {}, 64, 76_864]
)
def test_an_offset_outside_or_to_other_bytes_is_refused(writer: RingWriter, offset: Any) -> None:
    reader = RingReader(writer.announcement())
    assert decode(place(writer, 0), reader).episode is not None, "where it is"
    with pytest.raises(WireError):
        decode(place(writer, offset), reader)


def test_only_pictures_may_lie_in_the_ring(writer: RingWriter) -> None:
    """A hostile actor may write to the ring after the check, so nothing with rules may lie there."""
    reader, sent = RingReader(writer.announcement()), make_episode(versions=(0,) * 300)
    content = np.frombuffer(sent.logprobs.tobytes(), np.uint8)
    offset = writer.put(content)
    assert offset is not None
    with pytest.raises(WireError, match="logprobs cannot lie"):
        decode(encode("episode", sent, {"logprobs": offset}), reader)


def test_entries_of_other_lengths_and_filled_frames_are_refused(writer: RingWriter) -> None:
    reader, sent = RingReader(writer.announcement()), make_episode(**LARGE)
    header, frames = unpack(encode("episode", sent, writer.put_episode(sent)))
    with pytest.raises(WireError, match="its frame has 76800 bytes"):
        decode(pack(header, [sent.frames.tobytes(), *frames[1:]]), reader)
    header["arrays"][0].append(0)
    with pytest.raises(WireError, match="the entry of array frames"):
        decode(pack(header, frames), reader)
    del header["arrays"][0][4:]
    with pytest.raises(WireError, match="its frame has 0 bytes"):
        decode(pack(header, frames), reader)


def test_a_changed_byte_in_the_ring_is_found(writer: RingWriter) -> None:
    reader, sent = RingReader(writer.announcement()), make_episode(**LARGE)
    offsets = writer.put_episode(sent)
    frames = encode("episode", sent, offsets)
    with mmap.mmap(writer.announcement()["fd"], SIZE) as ring:
        ring[offsets["final_frame"] + 5] ^= 1
        with pytest.raises(WireError, match="checksum of final_frame"):
            decode(frames, reader)
        ring[offsets["final_frame"] + 5] ^= 1
    decode(frames, reader)


def test_arrays_in_a_ring_count_for_the_limits(writer: RingWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, reader = make_episode(**LARGE), RingReader(writer.announcement())
    frames = encode("episode", sent, writer.put_episode(sent))
    monkeypatch.setattr("asyncrl.messaging.episode_codec.MAX_MESSAGE_BYTES", 150_000)
    with pytest.raises(WireError, match="all have"):
        decode(frames, reader)
    with pytest.raises(WireError, match="all have"):
        encode("episode", sent, {"frames": 0, "final_frame": 76_800})


def test_without_a_mapped_ring_that_is_what_is_said(writer: RingWriter) -> None:
    sent = make_episode(**LARGE)
    with pytest.raises(RingMissing):
        decode(encode("episode", sent, writer.put_episode(sent)))


def announced(fd: int, name: str, size: int) -> dict[str, Any]:
    return {"host": shared_memory.this_host(), "name": name, "pid": os.getpid(), "fd": fd, "bytes": size}


@pytest.mark.parametrize(
    ("seals", "size", "said", "complaint"),
    [
        (0, SIZE, SIZE, "not sealed"),
        (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, SIZE, SIZE, "not sealed"),
        (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK, SIZE, SIZE, "not sealed"),
        (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL, SIZE // 2, SIZE, "has 524288 bytes"),
        (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL, SIZE, SIZE // 2, "has 1048576 bytes"),
    ],
)
def test_a_memory_file_that_could_fault_is_refused(seals: int, size: int, said: int, complaint: str) -> None:
    fd = os.memfd_create("asyncrl-x", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE)
        os.ftruncate(fd, size)  # Shrunk after it was announced.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(WireError, match=complaint):
            RingReader(announced(fd, "asyncrl-x", said))
    finally:
        os.close(fd)


def test_what_is_no_memory_file_is_refused_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(bytes(SIZE))
    disguised = tmp_path / "memfd:x (deleted)"
    disguised.write_bytes(bytes(SIZE))
    flags = {tmp_path / "pipe": os.O_RDWR, Path("/dev/zero"): os.O_RDONLY, tmp_path: os.O_RDONLY}
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "file", disguised):
        fd = os.open(path, flags.get(path, os.O_RDONLY))
        try:
            with pytest.raises(WireError, match="not a memory file"):
                RingReader(announced(fd, "x", SIZE))
        finally:
            os.close(fd)
    read, write = os.pipe()
    with pytest.raises(WireError, match="not a memory file"):
        RingReader(announced(read, "x", SIZE))
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    "changes", [{"pid": 0}, {"pid": -1}, {"fd": -1}, {"bytes": 0}, {"bytes": -5}, {"pid": -(2**63)}]
)
def test_numbers_that_cannot_be_are_refused(writer: RingWriter, changes: dict[str, int]) -> None:
    with pytest.raises(WireError, match="positive"):
        RingReader(writer.announcement() | changes)


@pytest.mark.parametrize(
    "changes",
    [{"host": "elsewhere"}, {"host": ""}, {"pid": 2**62}, {"fd": 2**62}, {"fd": 10_000}],
)
def test_a_ring_that_cannot_be_reached_is_no_error(writer: RingWriter, changes: dict[str, Any]) -> None:
    with pytest.raises(RingOutOfReach):
        RingReader(writer.announcement() | changes)


def test_no_descriptor_is_left_over(writer: RingWriter) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for changes in ({}, {"bytes": 5}, {"name": "y"}, {"fd": 0}, {"fd": 10_000}):
        try:
            RingReader(writer.announcement() | changes)
        except (WireError, RingOutOfReach):
            assert changes
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_peer_has_one_ring_and_all_have_a_limit(writer: RingWriter) -> None:
    other, rings = RingWriter(SIZE), Rings(2 * SIZE - 1)
    assert rings.announced(b"a", writer.announcement()) == ""
    mapped = rings.get(b"a")
    assert rings.announced(b"a", writer.announcement()) == "", "said again"
    assert rings.get(b"a") is mapped
    with pytest.raises(WireError, match="second ring"):
        rings.announced(b"a", other.announcement())
    assert "1048576 are taken" in rings.announced(b"b", other.announcement())
    assert rings.get(b"b") is None
    rings.forget(b"a")
    assert rings.announced(b"b", other.announcement()) == ""
    other.close()


@pytest.mark.parametrize(
    ("endpoint", "same"),
    [
        ("ipc:///tmp/x/replay", True),
        ("tcp://127.0.0.1:5555", True),
        ("tcp://10.0.0.5:5555", False),
        ("tcp://elsewhere:5555", False),
    ],
)
def test_only_ipc_and_loopback_are_the_same_host(endpoint: str, same: bool) -> None:
    assert same_host(endpoint) is same


def test_the_checksum_is_that_of_what_was_sent(writer: RingWriter) -> None:
    """Were the copy in the ring wrong, the replay would find it."""
    sent = make_episode(**LARGE)
    header, _ = unpack(encode("episode", sent, writer.put_episode(sent)))
    assert header["arrays"][0][3] == zlib.crc32(sent.frames.tobytes())
