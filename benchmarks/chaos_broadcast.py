"""Kills an actor in the middle of a broadcast of weights, again and again, and watches all others.

    python benchmarks/chaos_broadcast.py --transport nccl --devices cuda:0 cuda:1 cuda:2 cuda:3 --gigabytes 4

The learner (first device) multiplies matrices without a pause and publishes; the other devices have an actor
each. A kill counts when the victim had not taken the version that was being sent. The table:

    stall       longest step of the learner while an actor dies, and the median without
    survivors   from the kill until every other actor holds that version or a newer one
    successor   from its start until the respawned actor holds the newest version
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
import tyro

from asyncrl.observability import process_status
from asyncrl.weights.publisher import BroadcastPublisher, build_publisher


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Kill actors in the middle of broadcasts."""

    transport: str = "gloo"
    devices: tuple[str, ...] = ("cpu", "cpu", "cpu")
    gigabytes: float = 0.25
    kills: int = 10
    seed: int = 0
    deadline: float = 60.0


def tensors_of(settings: Settings, device: str) -> dict[str, torch.Tensor]:
    """A few large bfloat16 tensors."""
    each = int(settings.gigabytes * 1e9 / 2 / 4)
    return {f"layer.{i}": torch.full((each,), 0.5, dtype=torch.bfloat16, device=device) for i in range(4)}


def act(settings: Settings, endpoint: str, index: int, held: Synchronized[int]) -> None:
    """Swap weights in as they come; `held` says which version there is."""
    from asyncrl.weights.interface import ChannelClosed
    from asyncrl.weights.receiver import build_receiver

    torch.set_num_threads(1)
    device = settings.devices[index]
    tensors = tensors_of(settings, device)
    receiver = build_receiver(
        settings.transport, endpoint, f"actor-{index}", tensors, device, settings.deadline
    )
    try:
        receiver.wait_for_first(settings.deadline)
        while True:
            held.value = receiver.swap_into(tensors)
            time.sleep(0.002)
    except ChannelClosed:
        receiver.close()


class Fleet:
    """The actors."""

    def __init__(self, settings: Settings, endpoint: str) -> None:
        self.settings, self.endpoint = settings, endpoint
        self.context = multiprocessing.get_context("spawn")
        self.held: dict[int, Synchronized[int]] = {}
        self.processes: dict[int, BaseProcess] = {}
        for index in range(1, len(settings.devices)):
            self.start(index)

    def start(self, index: int) -> None:
        """Start (again) the actor on device number `place`."""
        held: Synchronized[int] = self.context.Value("q", -1)  # pyright: ignore[reportAssignmentType]
        arguments = (self.settings, self.endpoint, index, held)
        process = self.context.Process(target=act, args=arguments, daemon=True)
        process.start()
        self.held[index], self.processes[index] = held, process

    def all_hold(self, version: int, but: int = 0) -> bool:
        """Whether all actors (except the one called `but`) hold at least this version."""
        return all(held.value >= version for index, held in self.held.items() if index != but)


class Learner:
    """Steps without a pause, so that whoever makes it wait is seen."""

    def __init__(self, settings: Settings, publisher: BroadcastPublisher) -> None:
        self.publisher, self.version = publisher, -1
        self.tensors = tensors_of(settings, settings.devices[0])
        size = 4096 if settings.devices[0] != "cpu" else 512
        self.matrix = torch.randn(size, size, device=settings.devices[0])
        self.steps: list[float] = []

    def publish(self) -> None:
        """Publish the next version; counts as a step."""
        self.version += 1
        self._timed(lambda: self.publisher.publish(self.tensors, self.version))

    def step(self) -> None:
        """Make one step."""
        self._timed(self._multiply)

    def until(self, true: Callable[[], bool], seconds: float, what: str) -> float:
        """Step until something is true; returns the seconds."""
        began = time.monotonic()
        while not true():
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"{what} did not happen within {seconds:g} s")
            self.step()
        return time.monotonic() - began

    def _multiply(self) -> None:
        result = self.matrix @ self.matrix
        if result.is_cuda:
            torch.cuda.synchronize()

    def _timed(self, action: Callable[[], None]) -> None:
        began = time.monotonic()
        action()
        self.steps.append(time.monotonic() - began)


def broadcasting(run_dir: Path) -> bool:
    """Whether the publisher's thread is sending now."""
    return any(
        "broadcasting" in activity.what
        for process in process_status.read(run_dir)
        for activity in process.activities
    )


def strike(settings: Settings, learner: Learner, fleet: Fleet, run_dir: Path, chance: random.Random) -> str:
    """Kill one actor in a broadcast; returns a row of the table, or '' when it came too late."""
    newest, victim = learner.version + 1, chance.choice(sorted(fleet.processes))
    for _ in range(20):
        learner.step()
    calm, learner.steps = statistics.median(learner.steps), []
    learner.publish()
    until = time.monotonic() + settings.deadline
    while not broadcasting(run_dir) and time.monotonic() < until:
        pass
    time.sleep(chance.uniform(0.0, 0.003) * settings.gigabytes)
    pid = fleet.processes[victim].pid
    assert pid is not None
    took = fleet.held[victim].value >= newest
    os.kill(pid, signal.SIGKILL)
    still = broadcasting(run_dir)
    survivors = learner.until(
        lambda: fleet.all_hold(newest, but=victim), settings.deadline, f"version {newest} at the survivors"
    )
    longest = max(learner.steps)
    fleet.processes[victim].join(10)
    fleet.start(victim)
    successor = learner.until(lambda: fleet.all_hold(newest), settings.deadline, "the successor's weights")
    if took or not still:
        return ""
    return (
        f"| {newest} | actor-{victim} | {1e3 * calm:.1f} | {1e3 * longest:.1f} | {survivors:.2f} | "
        f"{successor:.1f} |"
    )


def main() -> None:
    """Kill until enough kills counted; print the table and its medians."""
    settings = tyro.cli(Settings, description=__doc__)
    print(f"{' '.join(sys.argv)}   torch {torch.__version__}\n")
    chance = random.Random(settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        process_status.publish_as(run_dir, "learner-0")
        publisher = build_publisher(
            settings.transport, run_dir / "weights", device=settings.devices[0], deadline=settings.deadline
        )
        learner, fleet = Learner(settings, publisher), Fleet(settings, publisher.endpoint)
        learner.publish()
        learner.until(lambda: fleet.all_hold(0), 2 * settings.deadline, "version 0 everywhere")
        rows, tries = list[str](), 0
        print("| version | killed | step ms | longest step ms | survivors s | successor s |")
        print("|---" * 6 + "|", flush=True)
        while len(rows) < settings.kills and tries < 5 * settings.kills:
            tries += 1
            if row := strike(settings, learner, fleet, run_dir, chance):
                rows.append(row)
                print(row, flush=True)
        publisher.close()
        for process in fleet.processes.values():
            process.join(10)
            process.kill()
    report(rows, tries)


def report(rows: list[str], tries: int) -> None:
    """Print medians and maxima of the last three columns."""
    columns = list(zip(*([float(cell) for cell in row.split("|")[3:7]] for row in rows), strict=True))
    names = ("step ms", "longest step ms", "survivors s", "successor s")
    print(f"\n{len(rows)} kills in the middle of a broadcast ({tries} tries)")
    for name, values in zip(names, columns, strict=True):
        print(f"{name}: median {statistics.median(values):.2f}, max {max(values):.2f}")


if __name__ == "__main__":
    main()
