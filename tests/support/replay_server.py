"""A replay that serves: in a thread, in a process of its own, and a socket that answers as it is told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import zmq

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings
from asyncrl.launch.roles import open_run_replay
from asyncrl.messaging.keys import ServerKeys
from asyncrl.messaging.wire import Message, decode, encode
from asyncrl.replay.client import ZmqActorPort
from asyncrl.replay.interface import ANY_FORMAT, ActorPort, EpisodeFormat, GroupGrant
from asyncrl.replay.server import serve_replay
from support import child_environment
from support.episodes import make_episode

CONFIG = TrainConfig(
    algorithm=AlgorithmSettings(group_size=2, groups_per_update=2),
    replay=ReplaySettings(max_lag=1, group_timeout=60.0),
)
SERVER = """
import sys
from pathlib import Path
from asyncrl.launch.roles import open_run_replay
from asyncrl.replay.server import serve_replay
from support.replay_server import CONFIG
replay = open_run_replay(Path(sys.argv[1]), CONFIG)
serve_replay(replay, sys.argv[2], ready=lambda: print("ready", flush=True))
"""


NOBODY = {"secret": "", "attempt": 0}
"""What a peer says of its run where there is none."""


class Served:
    """A replay in a thread of this process."""

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        config: TrainConfig = CONFIG,
        episodes: EpisodeFormat = ANY_FORMAT,
        security: ServerKeys | None = None,
    ) -> None:
        self.stop_event, ready = threading.Event(), threading.Event()
        self.thread = threading.Thread(
            target=serve_replay,
            args=(open_run_replay(folder, config, episodes=episodes), endpoint),
            kwargs={"stop_event": self.stop_event, "ready": ready.set, "security": security},
        )
        self.thread.start()
        assert ready.wait(10)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_event.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


class ScriptedSocket:
    """Delivers the messages the test puts in, and notes what is sent; the deaf take nothing."""

    def __init__(self) -> None:
        self.inbox: list[list[zmq.Frame]] = []
        self.sent: list[tuple[bytes, Message]] = []
        self.deaf: set[bytes] = set()

    def say(self, peer: bytes, kind: str, **fields: object) -> None:
        self.inbox.append([zmq.Frame(frame) for frame in (peer, *encode(kind, **fields))])

    def poll(self, wait_ms: int) -> bool:
        return bool(self.inbox)

    def recv_multipart(self, flags: int, copy: bool) -> list[zmq.Frame]:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.pop(0)

    def send_multipart(self, frames: list[bytes], flags: int, copy: bool) -> None:
        if frames[0] in self.deaf:
            raise zmq.Again
        self.sent.append((frames[0], decode(frames[1:])))

    def grants(self, peer: bytes) -> list[int]:
        return [message["number"] for to, message in self.sent if to == peer and message.kind == "grant"]


def until(port: ZmqActorPort, unacknowledged: int) -> None:
    """Serve until so many episodes are unacknowledged."""
    deadline = time.monotonic() + 15
    while port.unacknowledged != unacknowledged:
        assert time.monotonic() < deadline, f"{port.unacknowledged} unacknowledged"
        port.serve()


def push_group(port: ActorPort, grant: GroupGrant, name: str, version: int) -> None:
    for member in range(2):
        port.push(make_episode(grant.number, member, versions=(version,), actor=name))


def acquire(port: ActorPort) -> GroupGrant:
    (grant,) = port.acquire_groups(1, 10.0)
    return grant


def start_server(folder: Path, endpoint: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SERVER, str(folder), endpoint]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment())
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return server


def kill(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait(10)
    assert server.stdout is not None
    server.stdout.close()


def answer(router: zmq.Socket[bytes], port: ZmqActorPort, kind: str, **fields: object) -> Message:
    """Let the actor serve until it says `kind`, and answer that."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        port.serve()
        if router.poll(20):
            peer, *frames = router.recv_multipart()
            message = decode(frames)
            if message.kind == kind:
                reply = fields.pop("reply")
                router.send_multipart([peer, *encode(str(reply), **fields)])
                return message
    raise AssertionError(f"the actor never said {kind}")
