"""What a peer's connection can take from a server is bounded: memory by unfinished messages, descriptors."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import zmq

from asyncrl.messaging import connections
from asyncrl.messaging.connections import INTERVAL, ConnectionGuard
from asyncrl.messaging.sockets import bind_router, private_folder
from asyncrl.observability import metrics_system as m
from asyncrl.observability import process_status, waits
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from asyncrl.weights.publisher import build_publisher
from asyncrl.weights.pull_server import PullSettings
from support import child_environment
from support.replay_server import acquire, push_group, until
from support.sockets import connect_dealer
from support.weights import PATIENCE, channel_folder, policy
from support.whole_runs import free_port

MIB = 1 << 20
LOOPBACK = "tcp://127.0.0.1:0"
ALLOWED = 64 * MIB
REPLAY = """
import logging, sys
from pathlib import Path
from asyncrl.launch.roles import open_run_replay
from asyncrl.observability import process_status
from asyncrl.replay.server import serve_replay
from support.replay_server import CONFIG
logging.basicConfig(level=logging.INFO)
process_status.publish_as(Path(sys.argv[1]), "replay")
replay = open_run_replay(Path(sys.argv[1]) / "replay", CONFIG)
serve_replay(replay, sys.argv[2], ready=lambda: print("ready", flush=True), unfinished=int(sys.argv[3]))
"""


def wait_for(condition: Callable[[], object], what: str = "") -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process reads the counts of the run in `tmp_path`, and its own begin at 0."""
    monkeypatch.setattr(process_status, "_own_file", None)
    monkeypatch.setattr(process_status, "_early", {})
    process_status.publish_as(tmp_path, "learner-0")


def disconnected() -> float:
    return waits.wait_metrics()[m.DISCONNECTED]


class Replay:
    """A replay in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.log = folder / "replay.log"
        command = [sys.executable, "-c", REPLAY, str(folder), self.endpoint, str(ALLOWED)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env=child_environment()
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", self.log.read_text()

    def memory(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def end(self) -> None:
        assert self.process.poll() is None, self.log.read_text()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def raw_flood(endpoint: str) -> Iterator[socket.socket]:
    """A TCP connection that has greeted like a DEALER without keys; what is sent next are parts."""
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as peer:
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31))
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
        peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
        yield peer


def part_of(nbytes: int) -> bytes:
    """One frame that says that more follow."""
    return b"\x03" + nbytes.to_bytes(8, "big") + bytes(nbytes)


def flood(endpoint: str, most: int) -> int:
    """Send parts of one message until the connection ends, `most` bytes at most; returns how many went."""
    part, sent = part_of(MIB // 4), 0
    with raw_flood(endpoint) as peer:
        try:
            while sent < most:
                peer.sendall(part)
                sent += len(part)
        except OSError:
            return sent
    return sent


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("counted")
def test_a_message_without_end_is_cut_off_while_an_honest_actor_goes_on(tmp_path: Path) -> None:
    """One such message made the replay grow by 1,447 MB, of which 443 MB stayed."""
    replay = Replay(tmp_path)
    learner = ZmqLearnerPort(replay.endpoint, version=0)
    assert learner.status()
    actor = ZmqActorPort(replay.endpoint, "actor-0")
    before, highest, stop = replay.memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stop.wait(0.02):
            highest = max(highest, replay.memory())

    watching = threading.Thread(target=watch)
    watching.start()
    floods = [threading.Thread(target=flood, args=(replay.endpoint, 10 * ALLOWED)) for _ in range(3)]
    for each in floods:
        each.start()
    version = 0
    while any(each.is_alive() for each in floods) or version < 3:
        for _ in range(2):
            push_group(actor, acquire(actor), "actor-0", version)
        until(actor, 0)
        assert len(learner.sample(groups=2, version=version, timeout=PATIENCE)) == 2
        version += 1
        learner.report_version(version)
    for each in floods:
        each.join(PATIENCE)
    wait_for(lambda: disconnected() == 3, replay.log.read_text())
    # As much as is allowed for each, what arrived within a look, and as much again for libzmq's buffers.
    assert highest - before < 3 * ALLOWED + 200 * MIB
    wait_for(lambda: replay.memory() - before < 40 * MIB, f"{(replay.memory() - before) // MIB} MiB stay")
    stop.set()
    watching.join()
    said = replay.log.read_text()
    assert said.count("was disconnected") == 3
    assert re.search(rf"it sent \d+ bytes without the end of a message, allowed are {ALLOWED}\n", said)
    assert "127.0.0.1:" in said
    actor.close(1.0)
    learner.close()
    replay.end()


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("counted")
def test_all_unfinished_messages_together_are_bounded_too(tmp_path: Path) -> None:
    context = zmq.Context()
    guards: list[ConnectionGuard] = []
    make = partial(ConnectionGuard, unfinished=100 * MIB, all_unfinished=8 * MIB)
    server = bind_router(context, LOOPBACK, prepare=lambda each: guards.append(make(each)))
    endpoint = server.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
    with ExitStack() as stack:
        for mebibytes in (1, 2, 3, 4):
            peer = stack.enter_context(raw_flood(endpoint))
            peer.sendall(part_of(mebibytes * MIB))
        wait_for(lambda: guards[0].note_drained() or guards[0].disconnected)
        time.sleep(3 * INTERVAL)
    # 10 MiB are there; the largest had to go, the other 6 may stay.
    assert guards[0].disconnected == disconnected() == 1
    guards[0].close()
    context.destroy(0)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("counted")
def test_whole_messages_of_any_number_are_never_too_much(tmp_path: Path) -> None:
    """The reader is slower than the peer, and pauses, and is still the only one who holds it up."""
    context = zmq.Context()
    guards: list[ConnectionGuard] = []
    make = partial(ConnectionGuard, unfinished=4 * MIB)
    server = bind_router(context, LOOPBACK, prepare=lambda each: guards.append(make(each)))
    endpoint = server.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
    peer = connect_dealer(context, endpoint, b"honest")
    sending = threading.Thread(
        target=lambda: [peer.send_multipart([b"%d" % n, bytes(2 * MIB)]) for n in range(60)]
    )
    sending.start()
    for number in range(60):
        if number in (5, 30):
            time.sleep(0.5)
        assert server.poll(int(1000 * PATIENCE))
        name, index, _ = server.recv_multipart(copy=False)
        assert index.bytes == b"%d" % number
        guards[0].note(name)
    guards[0].note_drained()
    sending.join(PATIENCE)
    assert guards[0].disconnected == 0
    guards[0].close()
    context.destroy(0)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("counted")
def test_of_too_many_connections_the_oldest_silent_one_goes_and_who_speaks_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    context = zmq.Context()
    guards: list[ConnectionGuard] = []
    make = partial(ConnectionGuard, connections=20)
    server = bind_router(context, LOOPBACK, prepare=lambda each: guards.append(make(each)))
    endpoint = server.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
    honest = connect_dealer(context, endpoint, b"honest")
    honest.send(b"0")
    name, _ = server.recv_multipart(copy=False)
    guards[0].note(name)
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    silent = [socket.create_connection((host, int(port)), timeout=PATIENCE) for _ in range(60)]
    wait_for(lambda: guards[0].disconnected == 41)
    for number, peer in enumerate(silent):
        peer.settimeout(0.2 if number > 40 else PATIENCE)
        if number < 41:
            while peer.recv(100):  # libzmq's greeting, then the end.
                pass
    honest.send(b"1")
    assert server.recv_multipart()[1] == b"1"
    late = connect_dealer(context, endpoint, b"late")
    late.send(b"2")
    assert server.recv_multipart() == [b"late", b"2"]
    assert "it never sent a message" in caplog.text
    assert disconnected() >= 41
    for peer in silent:
        peer.close()
    guards[0].close()
    context.destroy(0)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("counted")
def test_a_request_for_weights_without_end_is_cut_off_early() -> None:
    pulls = PullSettings(listen="tcp://127.0.0.1:0", security=None, silence=10.0)
    with channel_folder() as folder:
        publisher = build_publisher("gloo", folder, deadline=1.0, pulls=pulls)
        publisher.publish(policy(0, elements=10), 0)
        assert publisher.pulls is not None
        flood(publisher.pulls.endpoint, 1000 * MIB)
        wait_for(lambda: disconnected() == 1)
        publisher.close()


def test_a_guard_of_a_unix_socket_bounds_the_number_of_connections() -> None:
    context = zmq.Context()
    guards: list[ConnectionGuard] = []
    folder = private_folder()
    make = partial(ConnectionGuard, connections=5)
    bind_router(context, f"ipc://{folder}/r", prepare=lambda each: guards.append(make(each)))
    peers = []
    for _ in range(12):
        peers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        peers[-1].connect(f"{folder}/r")
    wait_for(lambda: guards[0].disconnected == 7)
    for peer in peers:
        peer.close()
    guards[0].close()
    context.destroy(0)
    shutil.rmtree(folder)


def test_a_connection_that_closes_while_it_is_looked_at_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    inode = os.fstat(descriptor).st_ino
    os.close(descriptor)
    monkeypatch.setattr(connections, "_is", lambda *_: True)  # As a moment before.
    assert connections._received(descriptor, inode) is None
    assert connections._shut_down(descriptor, inode) == ""
