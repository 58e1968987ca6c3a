"""What torchrun runs in chaos runs: training as ever, plus notes of what was acknowledged and learned from.

Each process appends to the file that CHAOS_NOTES names; one `write` per note, so that a kill tears none. The
learner does not go beyond the version in the file beside it, so that the run lasts as long as the kills.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from asyncrl.messaging.wire import Message
from asyncrl.records import Episode
from asyncrl.replay.client import ZmqLearnerPort
from asyncrl.replay.outbox import Outbox

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
                note(receipt=message["episode_id"], status=message["status"], group=int(waiting.group_id))
        handle(outbox, message)

    return noting


def wait_at_the_gate(version: int) -> None:
    gate, until = Path(os.environ["CHAOS_NOTES"]).with_name("gate"), time.monotonic() + GATE_DEADLINE
    while version >= int(gate.read_text()) and time.monotonic() < until:
        time.sleep(0.02)


def note_batches(sample: Any) -> Any:
    waited = dict[int, float]()

    def noting(port: ZmqLearnerPort, *, groups: int, version: int, timeout: float) -> list[list[Episode]]:
        wait_at_the_gate(version)
        began = time.monotonic()
        try:
            batch = sample(port, groups=groups, version=version, timeout=timeout)
        finally:
            waited[version] = waited.get(version, 0.0) + time.monotonic() - began
        episodes = [episode for group in batch for episode in group]
        ids, oldest = [e.episode_id for e in episodes], min(e.oldest_version for e in episodes)
        note(batch=ids, version=version, oldest=oldest, waited=waited[version])
        return batch

    return noting


if "CHAOS_NOTES" in os.environ:  # Not when something merely looks at this file.
    Outbox.handle = note_receipts(Outbox.handle)
    ZmqLearnerPort.sample = note_batches(ZmqLearnerPort.sample)

if __name__ == "__main__":
    from asyncrl.cli import torchrun_main

    torchrun_main()
