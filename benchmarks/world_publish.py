"""How long a version of the world takes from the learner's process into the actors, against a plain copy.

    python benchmarks/world_publish.py
    python benchmarks/world_publish.py --actors 1 3 --gigabytes 1 --rounds 9 --json world_publish.json

A real publisher and real receivers in processes of their own, over the transport that carries worlds in a
run (`launch/world_channel.py`): once what a refit of the shipped world replaces, once a world of so many
gigabytes. "publish to swap" is the time from the call of `publish` until the last actor holds the version in
its own tensors, with actors that ask for it all the time; a real one swaps between two decisions, so that it
takes up to a decision longer. "copy" copies the same bytes once within the host's memory, in this process and
in the same round. Stages are the publisher's, and overlap with what actors do. Nothing here reads the disk.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import tyro
from measuring import heading, table
from torch import Tensor

from asyncrl.config.pace import PaceSettings
from asyncrl.config.run import TrainConfig
from asyncrl.launch import refits
from asyncrl.launch.world_channel import TRANSPORT
from asyncrl.messaging.sockets import private_folder
from asyncrl.weights.publisher import BroadcastPublisher, build_publisher
from asyncrl.weights.receiver import build_receiver

CPU: Final = torch.device("cpu")
STAGES: Final = ("packing", "summing", "announcing", "broadcasting", "receipts")
WIDTH: Final = 2048
"""Of the matrices of the large world: 16 MiB each, as those of published transformers."""
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Publish worlds to actors and time it."""

    actors: tuple[int, ...] = (1, 3)
    gigabytes: float = 1.0
    """Of the large world; 0: only the shipped one."""
    rounds: int = 9
    deadline: float = 120.0
    """Seconds that anything may take."""
    json: Path | None = None
    """File for the figures."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one world and so many actors: medians over the rounds, in milliseconds."""

    world: str
    tensors: int
    megabytes: float
    actors: int
    copy: float
    publish_to_swap: float
    ratio: float
    """Median of the rounds' publish to swap / copy."""
    publish_to_swap_longest: float
    swap: float
    """Copy from the receiver's buffers into the actor's tensors, of the slowest actor."""
    stages: dict[str, float]


def shipped_world() -> dict[str, Tensor]:
    """Load what a refit of the shipped world replaces, as an actor of a run holds it."""
    config = TrainConfig(device="cpu", pace=PaceSettings(every=6))
    return refits.tensors_of(config, refits.first_world(config), CPU)


def large_world(gigabytes: float) -> dict[str, Tensor]:
    """Make float32 matrices of so many gigabytes together, and a vector beside each."""
    count = max(1, round(gigabytes * 1e9 / (4 * WIDTH * WIDTH)))
    found = {f"world.transformer.{n}.weight": torch.full((WIDTH, WIDTH), 0.01) for n in range(count)}
    return found | {f"world.transformer.{n}.bias": torch.full((WIDTH,), 0.01) for n in range(count)}


def act(pipe: Connection, name: str, deadline: float) -> None:
    """Join the channels that come through the pipe, and swap versions in until None comes."""
    torch.set_num_threads(1)
    while (order := pipe.recv()) is not None:
        endpoint, shapes = order
        tensors = {n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in shapes.items()}
        receiver = build_receiver(TRANSPORT, endpoint, name, tensors, deadline=deadline)
        held = -1
        while not receiver.ended:
            receiver.wait_newer(held, 0.1)
            began = time.monotonic()
            if (version := receiver.swap_into(tensors)) != held:
                now = time.monotonic()
                held = version
                # The last number of the last tensor says that this is the version's content.
                pipe.send((version, now, now - began, float(tensors[min(tensors)].flatten()[-1])))
        receiver.close()
        pipe.send(None)


class Actors:
    """The actors' processes."""

    def __init__(self, count: int, deadline: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes, self.deadline = list[Any](), list[Any](), deadline
        for number in range(count):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            self.processes.append(
                context.Process(target=act, args=(theirs, f"actor-{number}", deadline), daemon=True)
            )
            self.processes[-1].start()

    def tell(self, order: Any) -> None:
        """Tell all of them."""
        for pipe in self.pipes:
            pipe.send(order)

    def answers(self) -> list[Any]:
        """Return one answer of each."""
        found = []
        for number, pipe in enumerate(self.pipes):
            if not pipe.poll(self.deadline):
                raise SystemExit(f"actor-{number} did not answer within {self.deadline:g} s.")
            found.append(pipe.recv())
        return found

    def end(self) -> None:
        """End all of them."""
        self.tell(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def copy_seconds(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """Copy a world's bytes once within host memory, from and to memory that is there already."""
    began = time.monotonic()
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
    return time.monotonic() - began


def one_round(
    publisher: BroadcastPublisher, actors: Actors, tensors: Mapping[str, Tensor], version: int
) -> tuple[float, float]:
    """Publish a version; return the seconds until the last actor holds it, and of the slowest swap."""
    tensors[min(tensors)].flatten()[-1] = version
    time.sleep(0.05)  # All wait by now, as between two rounds of a run.
    began = time.monotonic()
    publisher.publish(tensors, version)
    answers = actors.answers()
    publisher.wait_for_first(version, actors.deadline, actors=len(answers))
    for found, _, _, content in answers:
        assert (found, content) == (version, version), f"an actor has {found} with {content}, not {version}"
    return max(at for _, at, _, _ in answers) - began, max(took for _, _, took, _ in answers)


def measure(name: str, tensors: dict[str, Tensor], count: int, settings: Settings) -> Figures:
    """Measure all rounds of one world with so many actors; one round more connects, and is not counted."""
    actors, folder = Actors(count, settings.deadline), private_folder()
    publisher = build_publisher(TRANSPORT, folder / "worlds", deadline=settings.deadline)
    shapes: Shapes = {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}
    actors.tell((publisher.endpoint, shapes))
    sources, targets = list(tensors.values()), [torch.zeros_like(t) for t in tensors.values()]
    copies, totals, swaps = list[float](), list[float](), list[float]()
    stages: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for version in range(1 + settings.rounds):
        copied = copy_seconds(sources, targets)
        total, swap = one_round(publisher, actors, tensors, version)
        if version == 0:
            continue
        copies.append(copied)
        totals.append(total)
        swaps.append(swap)
        for stage in STAGES:
            stages[stage].append(getattr(publisher.sent, stage))
    publisher.close()
    actors.answers()
    actors.end()
    shutil.rmtree(folder)
    return Figures(
        world=name,
        tensors=len(tensors),
        megabytes=sum(t.nbytes for t in sources) / 1e6,
        actors=count,
        copy=1e3 * statistics.median(copies),
        publish_to_swap=1e3 * statistics.median(totals),
        ratio=statistics.median(total / copied for total, copied in zip(totals, copies, strict=True)),
        publish_to_swap_longest=1e3 * max(totals),
        swap=1e3 * statistics.median(swaps),
        stages={stage: 1e3 * statistics.median(found) for stage, found in stages.items()},
    )


def report(found: Sequence[Figures]) -> str:
    """Return the table."""
    titles = ["world", "MB", "actors", "copy", "publish to swap", "ratio", "longest", *STAGES, "swap"]
    return table(
        titles,
        [
            [
                f.world,
                f"{f.megabytes:.4g}",
                f.actors,
                f"{f.copy:.3g} ms",
                f"{f.publish_to_swap:.4g} ms",
                f"{f.ratio:.1f}",
                f"{f.publish_to_swap_longest:.4g}",
                *(f"{f.stages[stage]:.3g}" for stage in STAGES),
                f"{f.swap:.3g}",
            ]
            for f in found
        ],
    )


def main() -> None:
    """Measure all worlds with all numbers of actors; print the table."""
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(1)
    print(heading(CPU) + f"transport {TRANSPORT}, {settings.rounds} rounds\n", flush=True)
    worlds = {"shipped": shipped_world()}
    if settings.gigabytes:
        worlds["large"] = large_world(settings.gigabytes)
    found = [measure(name, tensors, n, settings) for name, tensors in worlds.items() for n in settings.actors]
    print(report(found))
    if settings.json is not None:
        settings.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
