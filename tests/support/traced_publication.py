"""Which functions one publication passes through: `python -m support.traced_publication KIND OUT`."""

import json
import multiprocessing
import sys
import threading
from pathlib import Path

import torch

import asyncrl
from asyncrl.messaging.sockets import private_folder
from asyncrl.weights.packing import WholeTensors
from asyncrl.weights.publisher import BroadcastPublisher
from asyncrl.weights.receiver import WeightReceiver
from support.weights import swap_until

PACKAGE = str(Path(asyncrl.__file__).parent)
SEEN = set[tuple[str, int]]()
TENSORS = {"body": torch.zeros(1000)}
TRACING = threading.Event()


def trace() -> None:
    """Trace this thread and all that are started later."""
    threading.setprofile(record)
    sys.setprofile(record)


def record(frame, event, _) -> None:
    code = frame.f_code
    named = code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<"
    if event == "call" and TRACING.is_set() and named:
        SEEN.add((code.co_filename, code.co_firstlineno))


def act(kind, endpoint, pipe) -> None:
    trace()
    receiver = WeightReceiver(kind, endpoint, "actor", TENSORS)
    swap_until(receiver, TENSORS, 1)
    pipe.send("has the first")
    pipe.recv()
    TRACING.set()
    swap_until(receiver, TENSORS, 2)
    TRACING.clear()
    pipe.send(sorted(SEEN))
    pipe.recv()  # Of a receiver that left at once nobody knows that it held the version.


if __name__ == "__main__":
    trace()
    publisher = BroadcastPublisher("shared_memory", private_folder() / "weights")
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process
    child(target=act, args=(sys.argv[1], publisher.endpoint, theirs), daemon=True).start()
    publisher.publish(WholeTensors(TENSORS), 1)
    mine.recv()
    TRACING.set()
    mine.send("go on")
    publisher.publish(WholeTensors(TENSORS), 2)
    publisher.wait_for_first(2, 30.0)
    TRACING.clear()
    Path(sys.argv[2]).write_text(json.dumps(sorted(SEEN | set(map(tuple, mine.recv())))))
    publisher.close()
