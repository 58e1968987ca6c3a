"""Act as one end of a link under test and measure seconds. Runs in a child of `links`.

    1. to the parent     {"ready": true}, once the device answers
    2. from the parent   a `Task` as JSON                 waits for: the parent; ended by: its end of the pipe
    3. to the parent     {"seconds": [one for each way]} or {"problem": text}; then 2 again

The link is made and used as the weight channel does it (`weights.transports`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final

from asyncrl.launch.child import redirect_output
from asyncrl.observability.signals import die_with_parent

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

ROUNDS: Final = 3
"""Measured sends of each way, after one that is not measured: the first sets connections up."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What both ends of one pair are told."""

    number: int
    """Of the pair; no other task of this examination has it."""
    folder: str
    """Private, in which the two meet."""
    rank: int
    """0 sends first, then 1."""
    size: int
    """Ends: 2, or 1 for a GPU that is alone."""
    bytes: int
    """Size of the buffer."""
    times: int
    """A send is this many broadcasts of the buffer in a row."""
    seconds: float
    """Deadline of the pair."""


def serve(connection: Connection, parent: int, device: str, log: str) -> None:
    """Do tasks until the parent closes its end.

    Args:
        connection: To the parent.
        parent: Its process id; this process ends with it.
        device: 'cpu' or 'cuda:N'.
        log: File that receives what is printed here; '' sends all of it to stderr.
    """
    if log:
        redirect_output(log)
    else:
        os.dup2(2, 1)  # NCCL prints to stdout, which belongs to the report.
    die_with_parent(parent)
    # The parent's end of the pipe closes when it has heard enough.
    with suppress(EOFError, BrokenPipeError):
        _answer(connection, lambda: _touch(device))
        while True:
            task = Task(**json.loads(connection.recv_bytes()))
            _answer(connection, lambda task=task: {"seconds": exchange(task, device)})


def _answer(connection: Connection, action: Callable[[], dict[str, object]]) -> None:
    try:
        answer = action()
    except Exception as error:  # Whatever a driver says is the finding; the parent reports it.
        answer = {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    connection.send_bytes(json.dumps(answer).encode())


def _touch(device: str) -> dict[str, object]:
    import torch

    torch.set_num_threads(1)
    torch.zeros(1, device=device).sum().item()
    return {"ready": True}


def exchange(task: Task, device: str) -> list[float]:
    """Send and receive the buffer, both ways; returns the median seconds of each way.

    Raises:
        WeightSyncError: What arrived is not what was sent.
    """
    import torch

    from asyncrl.errors import WeightSyncError
    from asyncrl.weights.interface import AllocatesBuffers, build_transport, open_store
    from asyncrl.weights.packing import build_manifest

    on = torch.device(device)
    transport = build_transport("shared_memory" if on.type == "cpu" else "nccl", on, task.seconds)
    found = []
    for way in range(task.size):
        store = open_store(f"file://{task.folder}/{task.size * task.number + way}", task.seconds)
        sends = task.rank == way
        buffer = torch.zeros(task.bytes, dtype=torch.uint8, device=on)
        if sends and isinstance(transport, AllocatesBuffers):
            buffer = transport.allocate(build_manifest({"": buffer}))[0]
        buffer.fill_(1 + way if sends else 0)
        buffers = [buffer] * task.times
        if on.type == "cuda":
            torch.cuda.synchronize(on)  # The link works on a stream of its own.
        if sends:
            link = transport.connect_root(store, task.size, (buffers, buffers))
        else:
            link = transport.connect_member(store, 1, task.size)
        found.append(_median_seconds(lambda: link.send(0) if sends else link.receive(0, buffers)))  # noqa: B023
        if not bool((buffer == 1 + way).all()):
            raise WeightSyncError("what arrived is not what was sent.")
        _meet(store, task)
        link.abort()
    return found


def _meet(store: Store, task: Task) -> None:
    """Wait until both ends are done: neither takes its memory away while the other may still read it."""
    store.set(f"done/{task.rank}", "yes")
    store.wait([f"done/{rank}" for rank in range(task.size)], timedelta(seconds=task.seconds))


def _median_seconds(action: Callable[[], None]) -> float:
    import statistics

    seconds = []
    for _ in range(1 + ROUNDS):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])
