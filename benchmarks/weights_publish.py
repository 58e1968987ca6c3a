"""What publishing weights takes, against a plain broadcast of the same bytes; and what it takes from others.

    python benchmarks/weights_publish.py --devices cuda:0 cuda:1 cuda:2 cuda:3
    python benchmarks/weights_publish.py --devices cuda:0 cuda:1 cuda:2 cuda:3 --learner-ranks 2
    python benchmarks/weights_publish.py --devices cpu cpu cpu --gigabytes 0.05 --lora-gigabytes 0.01

The first `--learner-ranks` devices learn, the others act; an actor may share a learner's GPU. Real publisher,
real receivers in processes of their own, names and shapes of OpenVLA-OFT, float32 masters. "publish" is the
time from the call of `publish` until the receipts of all actors are there, with nothing else on the GPUs;
"broadcast" the part of it from the announcement on. Stalls: learner and actors multiply matrices and wait for
each step of about 10 ms, once without versions and once with one per `--every` seconds; what a version takes
is the time by which the second loop is slower. The shares are at one version per `--every` seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
import tyro
from weights_parties import (
    Kind,
    Masters,
    Paces,
    Shapes,
    Work,
    act,
    join_learners,
    learn,
    raw_broadcast,
    raw_copy,
    shapes_of,
)

from asyncrl.messaging.sockets import private_folder
from asyncrl.observability.metrics_system import WEIGHTS_SECONDS
from asyncrl.weights.publisher import BroadcastPublisher


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Publish to actors and time it."""

    devices: tuple[str, ...] = ("cpu", "cpu", "cpu")
    learner_ranks: int = 1
    gigabytes: float = 15.0
    lora_gigabytes: float = 0.22
    rounds: int = 10
    every: float = 5.0
    """Seconds between two versions while stalls are measured."""
    seconds: float = 20.0
    """Length of each of the two loops that are compared."""
    deadline: float = 60.0
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one kind of weights. Milliseconds, but for the shares."""

    kind: Kind
    tensors: int
    gigabytes: float
    transport: str
    raw: float
    publish_median: float
    publish_max: float
    ratio: float
    """Median publish / raw."""
    broadcast: float
    """Median from the announcement to the last receipt."""
    swap: float
    """Median until the device is done."""
    publish_call: float
    """Longest time of the learner's thread in `publish`."""
    learner_step: float
    learner_longest: float
    learner_per_version: float
    learner_share: float
    actor_step: float
    """This and the following: of the actor that lost most."""
    actor_longest: float
    actor_per_version: float
    actor_share: float
    actor_swap_call: float
    """Longest time of an actor's thread in a swap."""


def transport_of(learner: str, actors: Sequence[str]) -> str:
    if learner == "cpu":
        return "shared_memory"
    return "cuda_ipc" if learner in actors else "nccl"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class ChildProcesses:
    """The other processes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        ranks, context = settings.learner_ranks, multiprocessing.get_context("spawn")
        self.actors, self.learners = list[Any](), list[Any]()
        self.processes, self.port = list[BaseProcess](), free_port()

        def start(function: Any, *arguments: Any) -> Any:
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=function, args=(theirs, *arguments), daemon=True))
            self.processes[-1].start()
            return ours

        for n, device in enumerate(settings.devices[ranks:]):
            self.actors.append(start(act, f"actor-{n}", device, settings.deadline))
        self._start_learner = lambda r: start(learn, settings.devices[r], r, ranks, self.port)

    def join_learners(self) -> None:
        if (ranks := self.settings.learner_ranks) > 1:
            self.learners = [self._start_learner(rank) for rank in range(1, ranks)]
            join_learners(torch.device(self.settings.devices[0]), 0, ranks, self.port)

    def order(self, method: str, *arguments: Any) -> list[Any]:
        self.begin(method, *arguments)
        return self.answers()

    def begin(self, method: str, *arguments: Any) -> None:
        for pipe in self.actors:
            pipe.send((method, arguments))

    def answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self.actors]

    def end(self) -> None:
        for pipe in self.actors + self.learners:
            pipe.send(None)
        if self.learners:
            dist.destroy_process_group()
        for process in self.processes:
            process.join(10)
            process.kill()


def raw_seconds(processes: ChildProcesses, count: int) -> float:
    devices, times = processes.settings.devices, processes.settings.rounds
    actors = devices[processes.settings.learner_ranks :]
    remote = [n for n, device in enumerate(actors) if device == "cpu" or device != devices[0]]
    if not remote:
        return raw_copy(torch.device(devices[0]), count, times)
    port, size = free_port(), 1 + len(remote)
    for rank, n in enumerate(remote, start=1):
        processes.actors[n].send(("raw", (rank, size, port, count, times)))
    found = raw_broadcast(torch.device(devices[0]), 0, size, port, count, times)
    for n in remote:
        processes.actors[n].recv()
    return found


class Channel:
    """A publisher with all actors as members."""

    def __init__(self, processes: ChildProcesses, shapes: Shapes, dtype: torch.dtype) -> None:
        settings = processes.settings
        self.processes, self.device = processes, torch.device(settings.devices[0])
        for pipe in processes.learners:
            pipe.send((shapes, dtype))
        self.masters = Masters(shapes, dtype, self.device)
        for pipe in processes.learners:
            pipe.recv()
        transport = transport_of(settings.devices[0], settings.devices[settings.learner_ranks :])
        self.folder = private_folder()
        self.publisher: BroadcastPublisher = BroadcastPublisher(
            transport, self.folder / "weights", device=self.device, deadline=settings.deadline
        )
        processes.order("join", transport, self.publisher.endpoint, shapes, dtype)
        self.transport, self.version = transport, -1
        self.publish()
        self.await_all()

    def publish(self) -> float:
        self.version += 1
        for pipe in self.processes.learners:
            pipe.send("publish")
        began = time.monotonic()
        self.publisher.publish(self.masters, self.version)
        return time.monotonic() - began

    def await_all(self) -> None:
        held, until = self.publisher.versions_held, time.monotonic() + 4 * self.processes.settings.deadline
        while sum(version == self.version for version in held().values()) < len(self.processes.actors):
            assert time.monotonic() < until, held()
            time.sleep(0.001)

    def close(self) -> None:
        self.publisher.close()
        self.processes.order("leave")
        shutil.rmtree(self.folder)
        del self.masters, self.publisher
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def quiet_rounds(channel: Channel) -> tuple[list[float], float, float]:
    totals, broadcasts, swaps = list[float](), list[float](), list[float]()
    for _ in range(channel.processes.settings.rounds):
        if channel.device.type == "cuda":
            torch.cuda.synchronize(channel.device)
        time.sleep(0.05)  # All wait by now, as they do in a run.
        began = time.monotonic()
        channel.publish()
        channel.await_all()
        totals.append(time.monotonic() - began)
        broadcasts.append(1e3 * channel.publisher.status()[WEIGHTS_SECONDS])
        for version, took in channel.processes.order("swap"):
            assert version == channel.version, f"an actor holds version {version} of {channel.version}"
            swaps.append(took)
    return totals, statistics.median(broadcasts), statistics.median(swaps)


def busy(channel: Channel, work: Work, every: float) -> tuple[Paces, list[Paces], list[float]]:
    calls, seconds = list[float](), channel.processes.settings.seconds

    def publish(now: float) -> None:
        if every and now >= every * (len(calls) + 0.5):
            calls.append(channel.publish())

    channel.processes.begin("work_for", seconds)
    mine = work.run(seconds, publish)
    return mine, channel.processes.answers(), calls


def per_version(calm: Paces, with_versions: Paces, versions: int) -> float:
    return (with_versions.seconds - with_versions.steps * calm.mean) / max(1, versions)


def measure(processes: ChildProcesses, kind: Kind, shapes: Shapes, dtype: torch.dtype, raw: float) -> Figures:
    settings, channel = processes.settings, Channel(processes, shapes, dtype)
    totals, broadcast, swap = quiet_rounds(channel)
    work = Work(channel.device)
    work.run(min(1.0, settings.seconds))
    calm, calm_actors, _ = busy(channel, work, 0.0)
    loud, loud_actors, calls = busy(channel, work, settings.every)
    pairs = [(per_version(c, p, p.swaps), p) for c, p in zip(calm_actors, loud_actors, strict=True)]
    lost, slowest = max(pairs, key=lambda pair: pair[0])
    learner, size = per_version(calm, loud, len(calls)), channel.publisher.status()
    found = Figures(
        kind=kind,
        tensors=len(shapes),
        gigabytes=next(v for k, v in size.items() if k.name == "weights/bytes") / 1e9,
        transport=channel.transport,
        raw=1e3 * raw,
        publish_median=1e3 * statistics.median(totals),
        publish_max=1e3 * max(totals),
        ratio=statistics.median(totals) / raw,
        broadcast=broadcast,
        swap=swap,
        publish_call=1e3 * max(calls, default=0.0),
        learner_step=1e3 * calm.mean,
        learner_longest=1e3 * loud.longest,
        learner_per_version=1e3 * learner,
        learner_share=learner / settings.every,
        actor_step=1e3 * statistics.mean(c.mean for c in calm_actors),
        actor_longest=1e3 * max(p.longest for p in loud_actors),
        actor_per_version=1e3 * lost,
        actor_share=lost / settings.every,
        actor_swap_call=1e3 * slowest.swap_longest,
    )
    channel.close()
    return found


def report(found: Sequence[Figures], settings: Settings) -> None:
    print("\n| ms, unless it says otherwise |" + "".join(f" {f.kind} |" for f in found))
    print("|---" * (1 + len(found)) + "|")
    for name in asdict(found[0]):
        if name == "kind":
            continue
        values = [getattr(f, name) for f in found]
        if name.endswith("share"):
            cells = [f"{100 * v:.2f} % at one version per {settings.every:g} s" for v in values]
        else:
            cells = [v if isinstance(v, str) else f"{v:.4g}" for v in values]
        print(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |")


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if len(settings.devices) <= settings.learner_ranks:
        raise SystemExit(f"--devices names {len(settings.devices)}, of which {settings.learner_ranks} learn.")
    print(f"{' '.join(sys.argv)}   torch {torch.__version__}", flush=True)
    torch.set_num_threads(1)
    if settings.devices[0] != "cpu":
        torch.cuda.set_device(settings.devices[0])
    sizes: dict[Kind, float] = {"full": settings.gigabytes, "lora": settings.lora_gigabytes}
    layouts: dict[Kind, tuple[Shapes, torch.dtype]] = {k: shapes_of(k, size) for k, size in sizes.items()}
    processes = ChildProcesses(settings)
    raw = dict[Kind, float]()
    for kind, (shapes, dtype) in layouts.items():
        count = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
        raw[kind] = raw_seconds(processes, count)
        print(
            f"{kind}: {len(shapes)} tensors, {count / 1e9:.3g} GB, raw {1e3 * raw[kind]:.2f} ms", flush=True
        )
    processes.join_learners()
    found = list[Figures]()
    for kind, (shapes, dtype) in layouts.items():
        found.append(measure(processes, kind, shapes, dtype, raw[kind]))
        print(f"{kind}: publish {found[-1].publish_median:.1f} ms, {found[-1].ratio:.2f}x raw", flush=True)
    processes.end()
    report(found, settings)
    if settings.json:
        print(json.dumps([asdict(f) for f in found]))


if __name__ == "__main__":
    main()
