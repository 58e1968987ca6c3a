"""Which functions one publication passes through: `python -m support.traced_publication KIND OUT`."""

import json
import multiprocessing
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import torch

import asyncrl
from asyncrl.messaging.sockets import private_folder
from asyncrl.weights.interface import Receiver, WholeTensors
from asyncrl.weights.publisher import BroadcastPublisher
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.transports.in_process import build_in_process

PACKAGE = str(Path(asyncrl.__file__).parent)
SEEN = set[tuple[str, int]]()
TRACING = [False]


def record(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    if event == "call" and TRACING[0] and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
        SEEN.add((code.co_filename, code.co_firstlineno))


def trace(on: bool) -> None:
    TRACING[0] = on
    sys.setprofile(record if on else None)


def source(version: int) -> WholeTensors:
    return WholeTensors({"body": torch.full((1000,), float(version))})


def swap_until(receiver: Receiver, version: int) -> None:
    tensors = {"body": torch.zeros(1000)}
    while receiver.swap_into(tensors) < version:
        receiver.wait_newer(version - 1, 0.2)


def act(kind: str, endpoint: str, pipe: Connection) -> None:
    threading.setprofile(record)
    receiver = WeightReceiver(kind, endpoint, "actor", {"body": torch.zeros(1000)})
    swap_until(receiver, 1)
    pipe.send("has the first")
    pipe.recv()
    trace(True)
    swap_until(receiver, 2)
    trace(False)
    pipe.send(sorted(SEEN))
    pipe.recv()  # Of a receiver that left at once nobody knows that it held the version.
    receiver.close()


def between_processes(kind: str) -> None:
    threading.setprofile(record)
    publisher = BroadcastPublisher("shared_memory", private_folder() / "weights")
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=act, args=(kind, publisher.endpoint, theirs))
    child.start()
    publisher.publish(source(1), 1)
    mine.recv()
    trace(True)
    mine.send("go on")
    publisher.publish(source(2), 2)
    publisher.wait_for_first(2, 30.0)
    trace(False)
    SEEN.update(map(tuple, mine.recv()))
    mine.send("leave")
    child.join()
    publisher.close()


def in_process() -> None:
    publisher, receiver = build_in_process()
    for version in (1, 2):
        trace(version == 2)
        publisher.publish(source(version), version)
        swap_until(receiver, version)
    trace(False)


if __name__ == "__main__":
    in_process() if sys.argv[1] == "in_process" else between_processes(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(sorted(SEEN)))
