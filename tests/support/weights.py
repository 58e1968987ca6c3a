"""Policies of a few tensors, an actor process that receives them, and how to compare their bytes."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.messaging.sockets import private_folder
from asyncrl.weights.interface import Receiver
from asyncrl.weights.packing import WholeTensors
from asyncrl.weights.publisher import BroadcastPublisher
from asyncrl.weights.receiver import WeightReceiver
from support.ranks import FORKS

SHAPES = {"even": (4, 6), "odd": (5, 3), "one_row": (1, 7), "large": (257, 33), "line": (11,)}
TYPES = dict.fromkeys(SHAPES, torch.bfloat16) | {"line": torch.float32}
ELEMENTS = 1_000_000
PATIENCE = 30.0


@contextlib.contextmanager
def channel_folder() -> Iterator[Path]:
    """Name a channel's socket, in a private folder that is removed at the end."""
    folder = private_folder()
    try:
        yield folder / "weights"
    finally:
        shutil.rmtree(folder)


def masters() -> dict[str, Tensor]:
    """Float32 values, most of which bfloat16 has to round, and a NaN, an infinity and a subnormal."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    found["odd"][4, 2], found["odd"][0, 0], found["large"][256, 32] = torch.nan, -torch.inf, 1e-40
    return found


def events(publisher: BroadcastPublisher, count: int) -> list[str]:
    """Wait for so many lines about receivers from elsewhere."""
    lines, until = list[str](), time.monotonic() + PATIENCE
    while len(lines) < count and time.monotonic() < until:
        lines += publisher.server.pop_events()
        time.sleep(0.02)
    return lines


def wait_for_all(publisher: BroadcastPublisher, version: int, actors: int, timeout: float = PATIENCE) -> None:
    """Wait until so many actors hold a version or a newer one."""
    until = time.monotonic() + timeout
    while sum(held >= version for held in publisher.versions_held().values()) < actors:
        assert time.monotonic() < until, publisher.versions_held()
        with publisher.server.changed:
            publisher.server.changed.wait(0.02)


class Actor:
    """The test's handle of an actor process."""

    def __init__(self) -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=actor, args=(theirs,), daemon=True)
        self.process.start()

    def ask(self, order: object) -> object:
        self.pipe.send(order)
        return self.answer()

    def answer(self) -> object:
        assert self.pipe.poll(2 * PATIENCE), f"actor process {self.process.pid} does not answer"
        return self.pipe.recv()

    def join(
        self,
        endpoint: str,
        name: str,
        transport: str = "shared_memory",
        device: str = "cpu",
        deadline: float = 1.0,
        tensors: bool = True,
    ) -> None:
        """Join a channel, as an actor or, without tensors, as a relay of another host."""
        assert self.ask((transport, endpoint, name, device, deadline, tensors)) == "joined"

    def has(self, version: int) -> bool:
        """Wait until it has that version, and compare every bit."""
        return self.ask(version) == (version, raw(policy(version)))

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


def policy(seed: int, elements: int = ELEMENTS, device: str = "cpu") -> dict[str, torch.Tensor]:
    """A float32, a bfloat16 and an int64 tensor, all decided by the seed."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "body": torch.randn(elements, generator=generator),
        "head.weight": torch.randn(5, 7, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(seed),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def source(seed: int, elements: int = ELEMENTS, device: str = "cpu") -> WholeTensors:
    """What a learner publishes."""
    return WholeTensors(policy(seed, elements, device))


def actor(pipe: Connection) -> None:
    """Do what the test orders: join a channel (a tuple), wait for a version, leave."""
    torch.set_num_threads(1)
    receiver, tensors = None, {}
    while (order := pipe.recv()) is not None:
        if isinstance(order, tuple):
            transport, endpoint, name, device, deadline, swaps = order
            tensors = policy(0, device=device) if swaps else {}
            receiver = WeightReceiver(transport, endpoint, name, tensors or None, device, deadline)
            pipe.send("joined")
        elif order == "leave":
            receiver.close()
            pipe.send("left")
        elif tensors:
            pipe.send((swap_until(receiver, tensors, order), raw(tensors)))
        else:
            pipe.send(handed_on(receiver, order))


def handed_on(receiver: WeightReceiver, version: int) -> tuple[int, dict[str, bytes]]:
    """Wait until a receiver without tensors hands on `version`; return the last that it handed on."""
    held: list[tuple[int, dict[str, bytes]]] = [(-1, {})]
    until = time.monotonic() + PATIENCE
    while held[-1][0] < version and time.monotonic() < until:
        receiver.wait_newer(held[-1][0], 0.1)
        receiver.hand_on(held[-1][0], lambda tensors, number: held.append((number, raw(dict(tensors)))))
    return held[-1]


def timed_publish(publisher: BroadcastPublisher, version: int, device: str = "cpu") -> float:
    weights = source(version, device=device)
    begun = time.monotonic()
    publisher.publish(weights, version)
    return time.monotonic() - begun


def swap_until(receiver: Receiver, tensors: dict[str, torch.Tensor], version: int) -> int:
    """Swap again and again until `version` is there; return what is held when time is up."""
    until = time.monotonic() + PATIENCE
    while (held := receiver.swap_into(tensors)) < version and time.monotonic() < until:
        time.sleep(0.005)
    return held


def raw(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {n: t.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}
