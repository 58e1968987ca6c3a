"""The weights' socket reads its messages like any wire: no message is fatal, and strangers stay outside."""

import contextlib
import os
import resource
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.messaging.framing import Buffer
from asyncrl.messaging.weight_messages import decode, encode
from asyncrl.observability import metrics_system as m
from asyncrl.observability import waits
from asyncrl.storage.run_owner import RunIdentity
from asyncrl.weights.interface import PULL
from asyncrl.weights.packing import WholeTensors
from asyncrl.weights.publisher import BroadcastPublisher
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.weight_server import ServerSettings
from support.sockets import connect_dealer
from support.weights import PATIENCE, events, policy, raw, source, swap_until

SMALL = policy(0, elements=10)
MEMBER: dict[str, Any] = {
    "name": "stranger",
    "held": -1,
    "member": 1,
    "pid": 0,
    "started": 0,
    "secret": "",
    "attempt": 0,
    "manifest": 0,
}
GARBAGE: list[list[Buffer]] = [
    [b""],
    [b"null"],
    [b"\xff\xfe not UTF-8"],
    [b"[" * 60_000],
    [b"garbage!!", b"more"],
    encode("unchanged"),
    encode("closed"),
    encode("send", epoch=1, version=1, buffer_index=0, checksum=0),
    [bytes(encode("leave", reason="")[0])[:-1]],
]


@contextlib.contextmanager
def all_taken() -> Iterator[None]:
    """Let files of others take all descriptors that are free; a reserve still has its own."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, before[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Stranger:
    """A peer that sends what it likes."""

    def __init__(self, endpoint: str, name: bytes = b"stranger") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect_dealer(self._context, endpoint, name)

    def tell(self, frames: list[Buffer]) -> None:
        self._socket.send_multipart(frames)

    def hears(self, kind: str) -> dict[str, Any]:
        """Wait for a message of a kind; others are skipped."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if self._socket.poll(100) and (found := decode(self._socket.recv_multipart())).kind == kind:
                return found.fields
        raise AssertionError(f"no {kind} came")

    def end(self, linger: int = 0) -> None:
        self._context.destroy(linger)


@pytest.fixture
def stranger(publisher: BroadcastPublisher) -> Iterator[Stranger]:
    made = Stranger(publisher.endpoint)
    yield made
    made.end()


@pytest.mark.usefixtures("counted")
def test_garbage_is_counted_and_stops_nobody(publisher: BroadcastPublisher, stranger: Stranger) -> None:
    publisher.publish(WholeTensors(SMALL), 0)
    for frames in GARBAGE:
        stranger.tell(frames)
        stranger.hears("refused")
    receiver = WeightReceiver("shared_memory", publisher.endpoint, "actor-0", SMALL)
    assert receiver.wait_for_first(PATIENCE) == 0
    publisher.publish(source(1, elements=10), 1)
    tensors = policy(0, elements=10)
    assert swap_until(receiver, tensors, 1) == 1
    assert raw(tensors) == raw(policy(1, elements=10))
    assert waits.wait_metrics()[m.WRONG_ENTRIES] == len(GARBAGE)
    assert publisher.status()[m.WEIGHTS_MEMBERS] == 1
    receiver.close()


def test_senseless_requests_are_refused_and_survived(publisher, stranger) -> None:
    publisher.publish(WholeTensors(SMALL), 0)
    piece: dict[str, Any] = {"version": 0, "buffer": 0, "offset": 0, "length": 8}
    puller = MEMBER | {"member": 0}
    asked = [
        (encode("bytes", **piece), "gone"),  # It never asked what is newest.
        (encode("newest", **(puller | {"name": "\x1b[2J"})), "refused"),
        (encode("newest", **puller), "offer"),
        (encode("bytes", **piece), "chunk"),
    ]
    wrong = [
        {"buffer": 9},
        {"buffer": -1},
        {"offset": 10**9},
        {"offset": -1},
        {"length": 0},
        {"length": 2**40},
    ]
    for frames, kind in asked + [(encode("bytes", **(piece | change)), "refused") for change in wrong]:
        stranger.tell(frames)
        stranger.hears(kind)
    publisher.publish(source(1, elements=10), 1)


@pytest.mark.parametrize("answer", ["nothing", "wrong epoch", "broken"])
def test_a_member_that_answers_nonsense_costs_an_epoch_at_a_time_and_ends_nobody(
    publisher: BroadcastPublisher, stranger: Stranger, answer: str
) -> None:
    publisher.publish(WholeTensors(SMALL), 0)
    receiver = WeightReceiver("shared_memory", publisher.endpoint, "actor-0", SMALL)
    assert receiver.wait_for_first(PATIENCE) == 0
    stranger.tell(encode("newest", **MEMBER))
    epoch = stranger.hears("group")["epoch"]
    if answer == "wrong epoch":
        stranger.tell(encode("answer", epoch=2**62, version=-1, problem=""))
        stranger.tell(encode("answer", epoch=-1, version=2**62, problem=""))
    elif answer == "broken":
        stranger.tell(encode("answer", epoch=epoch, version=-1, problem="\x1b[2J" + "x" * 1000))
    publisher.publish(source(1, elements=10), 1)
    tensors = policy(0, elements=10)
    assert swap_until(receiver, tensors, 1) == 1
    assert raw(tensors) == raw(policy(1, elements=10))
    receiver.close()


@pytest.mark.parametrize("kind", ["leaves", "is silent"])
def test_newcomers_that_take_no_part_do_not_keep_weights_from_the_others(
    publisher: BroadcastPublisher, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("asyncrl.weights.publisher.READY_SECONDS", 0.2)
    publisher.publish(WholeTensors(SMALL), 0)
    receiver = WeightReceiver("shared_memory", publisher.endpoint, "actor-0", SMALL)
    assert receiver.wait_for_first(PATIENCE) == 0
    tensors = policy(0, elements=10)
    for version in range(1, 15):
        for name in (f"{version}-{number}" for number in range(4)):
            newcomer = Stranger(publisher.endpoint, name.encode())
            newcomer.tell(encode("newest", **MEMBER | {"name": name}))
            if kind == "leaves":
                time.sleep(0.02)  # Not before it was noticed.
                newcomer.tell(encode("leave", reason=""))
            newcomer.end(linger=1000)
        publisher.publish(source(version, elements=10), version)
        assert swap_until(receiver, tensors, version) == version
    assert publisher._epoch <= 30, "56 came, and 14 versions were sent"
    receiver.close()


def test_a_receiver_of_another_run_or_an_earlier_start_is_refused(folder: Path) -> None:
    identity = RunIdentity(secret="ab" * 32, attempt=3)
    publisher = BroadcastPublisher("shared_memory", folder, settings=ServerSettings(identity=identity))
    publisher.publish(WholeTensors(SMALL), 0)
    for transport in ("shared_memory", PULL):
        other = RunIdentity(secret="cd" * 32, attempt=3)
        receiver = WeightReceiver(transport, publisher.endpoint, "far", SMALL, identity=other)
        with pytest.raises(WeightSyncError, match="this is the learner of another run"):
            receiver.wait_for_first(PATIENCE)
        receiver.close()
        earlier = RunIdentity(secret="ab" * 32, attempt=2)
        receiver = WeightReceiver(transport, publisher.endpoint, "far", SMALL, identity=earlier)
        with pytest.raises(Exception, match="3"):
            receiver.wait_for_first(PATIENCE)
        receiver.close()
        receiver = WeightReceiver(transport, publisher.endpoint, "far", SMALL, identity=identity)
        assert receiver.wait_for_first(PATIENCE) == 0
        receiver.close()
    publisher.close()


def test_a_folder_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(ConfigError, match="other users can enter"):
        BroadcastPublisher("shared_memory", tmp_path / "weights")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_of_the_host_does_not_reach_the_socket(publisher: BroadcastPublisher) -> None:
    path = publisher.endpoint.removeprefix("ipc://")
    connect = f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})"
    command = ["python3", "-c", connect]
    done = subprocess.run(command, capture_output=True, text=True, user=65534, cwd="/", timeout=PATIENCE)
    assert done.returncode != 0
    assert "Permission denied" in done.stderr, done.stderr


def test_neither_end_is_ended_by_a_want_of_descriptors(publisher: BroadcastPublisher) -> None:
    publisher.publish(WholeTensors(SMALL), 0)
    receiver = WeightReceiver("shared_memory", publisher.endpoint, "actor-0", SMALL)
    assert receiver.wait_for_first(PATIENCE) == 0
    with all_taken():  # A limit of 0 would fail poll itself, which needs no file.
        publisher.publish(source(1, elements=10), 1)
        time.sleep(0.5)
    publisher.publish(source(2, elements=10), 2)
    tensors = policy(0, elements=10)
    assert swap_until(receiver, tensors, 2) == 2
    assert raw(tensors) == raw(policy(2, elements=10))
    receiver.close()


def test_an_epochs_files_go_with_it(publisher: BroadcastPublisher, folder: Path) -> None:
    publisher.publish(WholeTensors(SMALL), 0)
    for name in ("actor-0", "actor-1", "actor-2"):
        receiver = WeightReceiver("shared_memory", publisher.endpoint, name, SMALL)
        assert receiver.wait_for_first(PATIENCE) == 0
        receiver.close()
    until = time.monotonic() + PATIENCE
    while len(list(folder.parent.iterdir())) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert [path.name for path in folder.parent.iterdir()] == ["weights"], "the socket alone"
    assert publisher._epoch >= 3


def test_a_socket_that_the_host_cleaned_away_comes_back(publisher: BroadcastPublisher, folder: Path) -> None:
    """Members that are connected stay so; others find the socket again."""
    publisher.publish(WholeTensors(SMALL), 0)
    receiver = WeightReceiver("shared_memory", publisher.endpoint, "actor-0", SMALL)
    assert receiver.wait_for_first(PATIENCE) == 0
    shutil.rmtree(folder.parent, ignore_errors=True)
    until = time.monotonic() + PATIENCE
    while not folder.is_socket() and time.monotonic() < until:
        time.sleep(0.02)
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    late = WeightReceiver("shared_memory", publisher.endpoint, "actor-1", SMALL)
    assert late.wait_for_first(PATIENCE) == 0
    publisher.publish(source(1, elements=10), 1)
    for one in (receiver, late):
        assert swap_until(one, policy(0, elements=10), 1) == 1
        one.close()


def test_a_member_of_another_host_that_falls_silent_is_left_behind(folder: Path) -> None:
    publisher = BroadcastPublisher(
        "shared_memory", folder, deadline=5.0, settings=ServerSettings(silence=1.0)
    )
    publisher.publish(WholeTensors(SMALL), 0)
    silent = Stranger(publisher.endpoint, b"silent")
    silent.tell(encode("newest", **MEMBER))
    silent.hears("group")
    lines = events(publisher, 2)
    assert lines[0] == "stranger joined (1 other host now)"
    assert lines[1].startswith("stranger was left behind: it did not answer (0")
    receiver = WeightReceiver("shared_memory", publisher.endpoint, "actor-0", SMALL)
    assert receiver.wait_for_first(PATIENCE) == 0
    receiver.close()
    silent.end()
    publisher.close()
