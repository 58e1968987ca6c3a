"""Episodes from one actor process to one that decodes them: shared memory against the ipc socket.

    python benchmarks/replay_transport.py

No disk: the server decodes (checksums and all), holds a group's episodes until it is complete, as the replay
does, and acknowledges them. The two ways take turns; the table has medians and the median of the ratios.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import tyro
import zmq
from replay_episodes import make_group

from asyncrl.messaging.shared_memory import Rings
from asyncrl.messaging.sockets import bind_router, ipc_endpoint, private_folder
from asyncrl.messaging.wire import decode, encode
from asyncrl.records import Episode, episode_arrays
from asyncrl.replay.connection import Connection
from asyncrl.replay.outbox import Outbox

GROUP = 8
IN_FLIGHT = 2 * GROUP
"""Unacknowledged episodes from which on the actor waits."""
RING = 256 * 2**20
DEADLINE = 60.0
"""Seconds for one receipt."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of episodes."""

    decisions: int
    image: int
    video: int
    """Video frames."""
    groups: int
    """Groups in one round."""


SIZES = {
    "tabletop: 6 decisions of 64 px": Size(decisions=6, image=64, video=0, groups=100),
    "large: 32 decisions of 224 px": Size(decisions=32, image=224, video=0, groups=8),
    "video: 64 frames of 256 px": Size(decisions=8, image=256, video=64, groups=4),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure both ways."""

    rounds: int = 7
    """Rounds of each way; one more before them is not counted."""


def serve(endpoint: str) -> None:
    """Be the server: what the replay does between its socket and its store."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket, rings = bind_router(context, endpoint), Rings(RING)
    held: list[Episode] = []
    print("ready", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        if not socket.poll(100):
            continue
        peer, *frames = socket.recv_multipart(copy=False)
        message = decode([frame.buffer for frame in frames], rings.get(peer.bytes))
        answers = []
        if message.kind in ("hello", "ping"):
            answers = [encode("welcome", boot="0", known=True)]
        elif message.kind == "ring":
            reason = rings.announced(peer.bytes, message.fields)
            answers = [encode("ring_answer", mapped=not reason, reason=reason)]
        elif message.kind == "bye":
            rings.forget(peer.bytes)
        elif message.episode is not None:
            held.append(message.episode)
            if len(held) == GROUP:
                ids = [episode.episode_id for episode in held]
                answers = [encode("receipt", episode_id=i, status="stored", reason="") for i in ids]
                held.clear()
        for answer in answers:
            with suppress(zmq.ZMQError):  # The actor of the last round has left.
                socket.send_multipart([peer.bytes, *answer])


@contextmanager
def served() -> Iterator[str]:
    """Run the server in a process of its own; yields its endpoint."""
    folder = private_folder()
    endpoint = ipc_endpoint(folder)
    server = subprocess.Popen([sys.executable, __file__, "--serve", endpoint], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield endpoint
    finally:
        server.kill()
        server.communicate()
        shutil.rmtree(folder)


def send(endpoint: str, episodes: list[Episode], groups: int, shared_bytes: int) -> float:
    """Send `groups` times the episodes; returns the seconds until the last one was acknowledged."""
    link = Connection(endpoint, "actor", "actor-0", 0)
    outbox = Outbox(link, shared_bytes, print)

    awaited = {"ring_answer"} if shared_bytes else set[str]()

    def exchange(most: int) -> None:
        deadline = time.monotonic() + DEADLINE
        while len(outbox) > most or not link.server_id or awaited:
            assert time.monotonic() < deadline, "no answer"
            outbox.send_due()
            for message in link.exchange(0.05):
                outbox.handle(message)
                awaited.discard(message.kind)
        outbox.send_due()

    def push(number: int) -> None:
        for episode in episodes:
            outbox.add(dataclasses.replace(episode, episode_id=os.urandom(16).hex(), group_id=str(number)))
            exchange(IN_FLIGHT - 1)

    try:
        exchange(0)
        for number in range(2):  # Meets the ring, and touches its pages.
            push(number)
        exchange(0)
        began = time.perf_counter()
        for number in range(groups):
            push(number)
        exchange(0)
        seconds = time.perf_counter() - began
        link.send_now("bye")
        return seconds
    finally:
        link.close()
        outbox.close()


def measure(size: Size, rounds: int) -> tuple[list[float], list[float], float]:
    """Return MB/s of each round by shared memory and by socket, and the MB of an episode."""
    random = np.random.default_rng(0)
    video = random.integers(0, 256, (size.video, size.image, size.image, 3), np.uint8)
    group = make_group(0, size=GROUP, decisions=size.decisions, image=size.image)
    episodes = [dataclasses.replace(episode, video=video.copy()) for episode in group]
    megabytes = sum(array.nbytes for array in episode_arrays(episodes[0]).values()) / 1e6
    shared: list[float] = []
    socket: list[float] = []
    with served() as endpoint:
        for place in range(rounds + 1):
            for speeds, ring in ((shared, RING), (socket, 0)):
                seconds = send(endpoint, episodes, size.groups, ring)
                if place:
                    speeds.append(size.groups * GROUP * megabytes / seconds)
    return shared, socket, megabytes


def main() -> None:
    """Measure all sizes."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    settings = tyro.cli(Settings)
    print(f"{'':<32}{'MB/episode':>11}{'shared MB/s':>13}{'socket MB/s':>13}{'ratio':>7}{'ratios':>14}")
    for name, size in SIZES.items():
        shared, socket, megabytes = measure(size, settings.rounds)
        ratios = sorted(a / b for a, b in zip(shared, socket, strict=True))
        print(
            f"{name:<32}{megabytes:>11.2f}{statistics.median(shared):>13.0f}{statistics.median(socket):>13.0f}"
            f"{statistics.median(ratios):>7.2f}{f'{ratios[0]:.2f} to {ratios[-1]:.2f}':>14}"
        )


if __name__ == "__main__":
    main()
