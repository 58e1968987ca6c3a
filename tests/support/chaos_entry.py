"""What torchrun runs in chaos runs: training as ever, plus notes of what was acknowledged and learned from.

Each process appends to the file that CHAOS_NOTES names; one `write` per note, so that a kill tears none. The
learner does not go beyond the version in the file beside it, so that the run lasts as long as the kills.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from asyncrl.errors import SampleTimeout
from asyncrl.launch import followers
from asyncrl.messaging.wire import Message
from asyncrl.records import Episode
from asyncrl.replay import limiter
from asyncrl.replay.client import Outbox, ZmqLearnerPort
from asyncrl.replay.interface import BatchDescription

GATE_DEADLINE = 60.0


def note(**entry: Any) -> None:
    """Append a line."""
    handle = os.open(os.environ["CHAOS_NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, json.dumps(entry).encode() + b"\n")
    finally:
        os.close(handle)


def note_receipts(handle: Any) -> Any:
    def noting(outbox: Outbox, message: Message) -> None:
        if message.kind == "receipt" and message["status"] != "held":
            waiting = outbox._items.get(message["episode_id"])  # pyright: ignore[reportPrivateUsage]
            if waiting is not None:
                note(receipt=message["episode_id"], status=message["status"], group=waiting.number)
        handle(outbox, message)

    return noting


class Gate:
    """Holds the learner up as long as it is too far ahead of the kills."""

    def __init__(self) -> None:
        self._path = Path(os.environ["CHAOS_NOTES"]).with_name("gate")
        self._came: dict[int, float] = {}
        """Version -> when it was first here."""

    def wait(self, version: int, timeout: float) -> None:
        """Raise SampleTimeout when it is not open in time: the learner looks after its children then."""
        came, began = self._came.setdefault(version, time.monotonic()), time.monotonic()
        while version >= int(self._path.read_text()) and time.monotonic() < came + GATE_DEADLINE:
            if time.monotonic() > began + timeout:
                raise SampleTimeout("the gate is shut")
            time.sleep(0.02)


class Batches:
    """Notes every batch that the one learner rank has fetched, at the version at which it was chosen."""

    def __init__(self) -> None:
        self._gate, self._version = Gate(), 0

    def note_choice(self, choose: Any) -> Any:
        def noting(port: ZmqLearnerPort, *, groups: int, version: int, timeout: float) -> BatchDescription:
            self._gate.wait(version, timeout)
            self._version = version
            return choose(port, groups=groups, version=version, timeout=timeout)

        return noting

    def note_batch(self, fetch: Any) -> Any:
        def noting(port: ZmqLearnerPort, wanted: BatchDescription, **about: Any) -> list[list[Episode]]:
            batch = fetch(port, wanted, **about)
            episodes = [episode for group in batch for episode in group]
            ids, oldest = [e.episode_id for e in episodes], min(e.oldest_version for e in episodes)
            note(batch=ids, version=self._version, oldest=oldest)
            return batch

        return noting


if "CHAOS_NOTES" in os.environ:  # Not when something merely looks at this file.
    Outbox.handle = note_receipts(Outbox.handle)
    batches = Batches()
    ZmqLearnerPort.choose = batches.note_choice(ZmqLearnerPort.choose)
    ZmqLearnerPort.fetch = batches.note_batch(ZmqLearnerPort.fetch)
    followers.MAX_RESPAWNS = 1000
    limiter.HEARTBEAT_TIMEOUT = float(os.environ.get("CHAOS_SILENCE", "30"))

if __name__ == "__main__":
    from asyncrl.__main__ import start

    start("train")
