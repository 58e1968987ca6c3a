"""Weights fetched piece by piece: bit-exact, the newest, only for the admitted, and damage is noticed."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from asyncrl.errors import ConfigError, WeightSyncError, WireError
from asyncrl.messaging import weight_messages
from asyncrl.messaging.framing import Buffer
from asyncrl.messaging.keys import create_keys, load_client_keys, load_server_keys
from asyncrl.messaging.weight_messages import CHUNK, KINDS, WITH_PAYLOAD, decode, encode
from asyncrl.observability import metrics_system as m
from asyncrl.weights import receiver as pulling
from asyncrl.weights import weight_server
from asyncrl.weights.interface import PULL
from asyncrl.weights.publisher import BroadcastPublisher
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.weight_server import ServerSettings
from support.weights import PATIENCE, channel_folder, events, policy, raw, source, swap_until, wait_for_all

LOOPBACK = "tcp://127.0.0.1:0"


@contextmanager
def opened(security: Any = None, silence: float = 30.0) -> Iterator[tuple[BroadcastPublisher, str]]:
    settings = ServerSettings(listen=LOOPBACK, security=security, silence=silence)
    with channel_folder() as folder:
        channel = BroadcastPublisher("shared_memory", folder, deadline=1.0, settings=settings)
        try:
            yield channel, channel.pull_endpoint
        finally:
            channel.close()


@pytest.fixture
def channel() -> Iterator[tuple[BroadcastPublisher, str]]:
    with opened() as made:
        yield made


@contextmanager
def receiving(
    endpoint: str, name: str = "far", elements: int = 1_000_000, **more: Any
) -> Iterator[WeightReceiver]:
    receiver = WeightReceiver(PULL, endpoint, name, policy(0, elements), **more)
    try:
        yield receiver
    finally:
        receiver.close()
        assert not receiver._thread.is_alive()


def test_versions_arrive_bit_exact_and_the_learner_counts_the_actors(channel) -> None:
    publisher, endpoint = channel
    tensors = policy(0)
    assert 4 * tensors["body"].numel() > 3 * CHUNK
    with receiving(endpoint, "far") as one, receiving(endpoint, "further") as two:
        publisher.publish(source(10), 0)
        wait_for_all(publisher, 0, 2)
        assert one.wait_for_first(PATIENCE) == two.wait_for_first(PATIENCE) == 0
        assert one.swap_into(tensors) == 0
        assert raw(tensors) == raw(policy(10))
        for version in range(1, 6):
            publisher.publish(source(version), version)
            for receiver in (one, two):
                assert swap_until(receiver, tensors, version) == version
                assert raw(tensors) == raw(policy(version))
        wait_for_all(publisher, 5, 2)
        status = publisher.status()
        assert status[m.WEIGHTS_MEMBERS] == status[m.WEIGHTS_JOINED] == 2
        assert status[m.WEIGHTS_PULLED_BYTES] == 2 * 6 * status[m.WEIGHTS_BYTES]
        assert status[m.WEIGHTS_PULL_SECONDS] > 0
    expected = ["joined (1", "joined (2", "left (1", "left (0"]
    told = events(publisher, 4)
    assert all(part in line for part, line in zip(expected, told, strict=True)), told
    assert publisher.status()[m.WEIGHTS_JOINED] == 0
    (copy,) = publisher.server.copies.by_number.values()
    for _ in range(3):
        with receiving(endpoint, "short") as short:
            assert short.wait_for_first(PATIENCE) == 5
    events(publisher, 6)
    assert publisher.server.copies.by_number[5] is copy, "actors that come and go make it once"
    publisher.publish(source(6), 6)
    until = time.monotonic() + PATIENCE
    while publisher.server.copies.by_number and time.monotonic() < until:
        time.sleep(0.02)
    assert publisher.server.copies.by_number == {}, "without actors there is no copy of a newer version"


def test_a_version_replaced_while_it_is_fetched_arrives_whole_and_the_newer_one_follows(
    channel: tuple[BroadcastPublisher, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, endpoint = channel
    pieces, go_on, half = [0], threading.Event(), threading.Event()
    genuine = WeightReceiver._request_piece

    def slowly(self: WeightReceiver, version: int, piece: tuple[int, int, int]) -> bool:
        pieces[0] += 1
        if pieces[0] == 3:
            half.set()
            assert go_on.wait(PATIENCE)
        return genuine(self, version, piece)

    monkeypatch.setattr(pulling, "IN_FLIGHT", 1)
    monkeypatch.setattr(WeightReceiver, "_request_piece", slowly)
    publisher.publish(source(0), 0)
    with receiving(endpoint) as receiver:
        assert half.wait(PATIENCE)
        for version in range(1, 8):  # More than there are buffers: the learner never waits.
            began = time.monotonic()
            publisher.publish(source(version), version)
            assert time.monotonic() - began < 0.5
            time.sleep(0.05)
        go_on.set()
        assert receiver.wait_for_first(PATIENCE) in (0, 7), "or both are there by now"
        tensors = policy(99)
        assert swap_until(receiver, tensors, 7) == 7
        assert raw(tensors) == raw(policy(7))


def test_a_version_that_is_gone_is_begun_again_with_the_newest(channel, monkeypatch) -> None:
    publisher, endpoint = channel
    genuine, forgot = WeightReceiver._request_piece, [0]

    def forget(self: WeightReceiver, version: int, piece: tuple[int, int, int]) -> bool:
        forgot[0] += 1
        return genuine(self, version - (forgot[0] == 2), piece)

    monkeypatch.setattr(WeightReceiver, "_request_piece", forget)
    publisher.publish(source(3), 3)
    with receiving(endpoint) as receiver:
        monkeypatch.setattr(pulling, "ASK_AGAIN", 0.3)
        tensors = policy(0)
        assert swap_until(receiver, tensors, 3) == 3
        assert raw(tensors) == raw(policy(3))
    assert forgot[0] > 4


def damaging(monkeypatch: pytest.MonkeyPatch, times: int, place: str) -> list[int]:
    """Damage the first `times` chunks that are sent: in a byte of the payload, or before its checksum."""
    genuine, damaged = weight_messages.encode, [0]

    def encode_badly(kind: str, payload: Buffer | None = None, **fields: Any) -> list[Buffer]:
        if kind != "chunk" or damaged[0] >= times or payload is None:
            return genuine(kind, payload, **fields)
        damaged[0] += 1
        bad = bytearray(payload)
        bad[len(bad) // 2] ^= 4
        if place == "memory":
            return genuine(kind, bytes(bad), **fields)
        return [genuine(kind, payload, **fields)[0], bytes(bad)]

    monkeypatch.setattr(weight_server, "encode", encode_badly)
    return damaged


@pytest.mark.parametrize("place", ["network", "memory"])
def test_damaged_pieces_are_fetched_again_and_a_network_that_always_damages_ends_the_actor(
    channel: tuple[BroadcastPublisher, str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    publisher, endpoint = channel
    damaged = damaging(monkeypatch, 1, place)
    publisher.publish(source(1), 1)
    with receiving(endpoint) as receiver:
        tensors = policy(0)
        assert swap_until(receiver, tensors, 1) == 1
        assert raw(tensors) == raw(policy(1))
    assert damaged == [1]
    damaging(monkeypatch, 10_000, place)
    with receiving(endpoint) as receiver, pytest.raises(WeightSyncError, match=r"damaged weights .* 3 times"):
        receiver.wait_for_first(PATIENCE)


def test_an_actor_that_vanished_is_found_out_and_one_that_comes_back_is_welcome(monkeypatch) -> None:
    monkeypatch.setattr(pulling, "HEARTBEAT", 0.2)
    with opened(silence=1.5) as (publisher, endpoint), receiving(endpoint) as receiver:
        publisher.publish(source(0), 0)
        assert receiver.wait_for_first(PATIENCE) == 0
        publisher.wait_for_first(0, PATIENCE)
        for puller in publisher.server.subscribers.values():
            puller.heard -= 10.0
        assert "was not heard of for 1.5 s (0" in events(publisher, 2)[1]
        publisher.publish(source(1), 1)
        tensors = policy(0)
        assert swap_until(receiver, tensors, 1) == 1
        assert "joined (1" in events(publisher, 1)[0]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys", ["learner", "far"])
    return tmp_path / "keys"


def test_listed_keys_are_admitted_and_all_else_is_told(keys: Path) -> None:
    public, secret = zmq.curve_keypair()
    mine = load_client_keys(keys, "far")
    with opened(load_server_keys(keys)) as (publisher, endpoint):
        publisher.publish(source(1, elements=10), 0)
        with receiving(endpoint, elements=10, security=mine) as receiver:
            assert receiver.wait_for_first(PATIENCE) == 0
        wrong = [
            (replace(mine, public=public, secret=secret), "server of weights .* not on its allow-list"),
            (None, "one side uses keys"),
            (replace(mine, server=public), "is not its public key"),
        ]
        for security, why in wrong:
            refused = pytest.raises(WeightSyncError, match=why)
            with receiving(endpoint, elements=10, security=security) as receiver, refused:
                receiver.wait_for_first(PATIENCE)


def test_the_server_beyond_loopback_needs_keys() -> None:
    for listen in ("tcp://10.0.0.5:0", "tcp://0.0.0.0:0", "tcp://*:5"):
        settings = ServerSettings(listen=listen)
        with channel_folder() as folder, pytest.raises(ConfigError, match="neither is set"):
            BroadcastPublisher("shared_memory", folder, settings=settings)


def test_a_message_that_breaks_the_format_is_a_wire_error() -> None:
    samples: dict[type, Any] = {str: "x", int: 7}
    for kind, about in KINDS.items():
        fields: dict[str, Any] = {
            name: samples[expected] for name, expected in about.items() if name != "crc"
        }
        frames = encode(kind, b"payload" if kind in WITH_PAYLOAD else None, **fields)
        assert decode(frames).fields.items() >= fields.items()
        for place, frame in enumerate(frames):
            for byte in range(len(frame)):
                changed = bytearray(frame)
                changed[byte] ^= 1
                with pytest.raises(WireError):
                    decode([*frames[:place], bytes(changed), *frames[place + 1 :]])
        for wrong in ([], frames[1:], [*frames, b"x"]):
            with pytest.raises(WireError):
                decode(wrong)
