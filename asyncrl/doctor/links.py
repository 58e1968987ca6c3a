"""Measure a broadcast between every pair of GPUs in GB/s; name pairs that fail or hang.

A child process per device (`link_member`) does what this one says, one pair after the other. A child whose
pair hangs is killed and made anew for its next pair, because nothing else ends a hanging driver call.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from asyncrl.doctor.findings import Examination, Finding, broken, ok, warning
from asyncrl.doctor.link_member import Task, serve
from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.launch.placement import pick_device

DEADLINE: Final = 60.0
"""Seconds in which pairs are begun; one that might not end before is left out and named."""
START_DEADLINE: Final = 60.0
"""Seconds that a child has to import torch and to reach its device."""
PAIR_DEADLINE: Final = 15.0
KILL_DEADLINE: Final = 2.0
"""Seconds the operating system has to end a killed child, before it is left alone."""
GPU_BYTES, GPU_TIMES = 64 << 20, 8
CPU_BYTES, CPU_TIMES = 8 << 20, 1
WHAT_TO_DO: Final = {
    "shared_memory": "Look for what else keeps this host busy.",
    "nccl": "See why with: NCCL_DEBUG=INFO asyncrl doctor (NCCL's words go to stderr). Often an NVLink or "
    "fabric manager that is not up (nvidia-smi topo -m, nvidia-smi nvlink -s), PCIe ACS or an IOMMU "
    "between GPUs (try NCCL_P2P_DISABLE=1), or too little /dev/shm; CUDA_VISIBLE_DEVICES leaves a GPU out.",
}
Serve = Callable[[Connection, int, str, str], None]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What is known of one pair."""

    pair: str
    """For people, like 'cuda:0 - cuda:1'."""
    rates: tuple[float, ...] = ()
    """GB/s of each way; empty when it failed, or for a GPU that is alone."""
    problem: str = ""
    tested: bool = True
    """False: there was no time left for it."""


def check_links(examination: Examination) -> Finding:
    """Measure all pairs of GPUs; on a CPU, two processes of this host."""
    import torch

    try:
        on_gpu = pick_device(examination.config.device).type == "cuda"
    except ConfigError:  # The line about the placement says so.
        on_gpu = False
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if on_gpu else ["cpu", "cpu"]
    nbytes, times = (GPU_BYTES, GPU_TIMES) if on_gpu else (CPU_BYTES, CPU_TIMES)
    results = measure(devices, nbytes, times)
    return judge(
        "GPU links" if on_gpu else "CPU link", results, nbytes, "nccl" if on_gpu else "shared_memory"
    )


def judge(name: str, results: Sequence[Result], nbytes: int, carrier: str) -> Finding:
    """Sum the pairs up in a finding."""
    rates = [(rate, result.pair) for result in results for rate in result.rates]
    seen = f"{carrier}, {nbytes >> 20} MiB each way"
    if list(results) == [Result(pair=results[0].pair)]:
        return ok(name, f"{carrier} forms a group on {results[0].pair}, which is alone")
    if rates:
        lowest, pair = min(rates)
        seen += f": lowest {lowest:.3g} GB/s ({pair})"
    each = [f"{r.pair} {'/'.join(f'{x:.3g}' for x in r.rates)}" for r in results if r.rates]
    if len(each) > 1:
        seen += f"; all: {', '.join(each)}"
    if failed := [result for result in results if result.problem]:
        named = "; ".join(f"{result.pair} {result.problem}" for result in failed)
        return broken(name, f"{seen}; {len(failed)} of {len(results)} failed: {named}.", WHAT_TO_DO[carrier])
    if untested := [result.pair for result in results if not result.tested]:
        advice = "Start it again with fewer GPUs: CUDA_VISIBLE_DEVICES."
        return warning(name, f"{seen}; there was no time for {', '.join(untested)}.", advice)
    return ok(name, seen)


def measure(
    devices: Sequence[str],
    nbytes: int,
    times: int,
    *,
    deadline: float = DEADLINE,
    pair_deadline: float = PAIR_DEADLINE,
    serve: Serve = serve,
) -> list[Result]:
    """Measure every pair of devices, or one device with itself when it is alone.

    Args:
        devices: 'cuda:N', or 'cpu' several times.
        nbytes: Size of the buffer.
        times: A send is this many broadcasts of it.
        deadline: Seconds. A pair that might not end within them is not begun.
        pair_deadline: Seconds of one pair, once its children have started.
        serve: What a child does, `link_member.serve`.
    """
    until = time.monotonic() + deadline
    # Neighbours first: pairs of one sick device do not take the time of all the others.
    pairs = sorted(combinations(range(len(devices)), 2), key=lambda pair: pair[1] - pair[0]) or [(0,)]
    results = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-doctor-") as folder:
        processes = _LinkProcesses(devices, Path(folder), serve)
        try:
            processes.start(range(len(devices)))
            for number, pair in enumerate(pairs):
                name = " - ".join(_names(devices)[index] for index in pair)
                if time.monotonic() + pair_deadline > until:
                    results.append(Result(pair=name, tested=False))
                    continue
                task = Task(
                    number=number,
                    folder=folder,
                    rank=0,
                    size=len(pair),
                    bytes=nbytes,
                    times=times,
                    seconds=pair_deadline,
                )
                tasks = [replace(task, rank=rank) for rank in range(len(pair))]
                results.append(_measure_pair(processes, name, pair, tasks))
        finally:
            processes.end()
    return results


def _names(devices: Sequence[str]) -> list[str]:
    """Name the devices; processes that share the CPU are numbered."""
    return [name if devices.count(name) == 1 else f"{name} process {i}" for i, name in enumerate(devices)]


def _measure_pair(processes: _LinkProcesses, name: str, pair: Sequence[int], tasks: Sequence[Task]) -> Result:
    try:
        processes.start(pair)
        processes.wait_until_ready(pair)
        for index, task in zip(pair, tasks, strict=True):
            processes.tell(index, task)
        end = time.monotonic() + tasks[0].seconds
        answers = [processes.hear(index, end, "hangs") for index in pair]
    except WeightSyncError as error:
        processes.drop(pair)
        return Result(pair=name, problem=str(error))
    if len(pair) == 1:
        return Result(pair=name)
    slower = [max(seconds) for seconds in zip(*(answer["seconds"] for answer in answers), strict=True)]
    moved = tasks[0].bytes * tasks[0].times
    return Result(pair=name, rates=tuple(moved / seconds / 1e9 for seconds in slower))


class _LinkProcesses:
    """The children, by the number of their device."""

    def __init__(self, devices: Sequence[str], folder: Path, serve: Serve) -> None:
        self._devices, self._folder, self._serve = devices, folder, serve
        self._children: dict[int, tuple[Any, Connection]] = {}
        self._ready: set[int] = set()
        self._killed: list[Any] = []

    def start(self, indices: Sequence[int]) -> None:
        """Start the children that are not there; they get ready side by side."""
        context = multiprocessing.get_context("spawn")
        log = "" if "NCCL_DEBUG" in os.environ else str(self._folder / "log")
        for index in indices:
            if index not in self._children:
                ours, theirs = context.Pipe()
                arguments = (theirs, os.getpid(), self._devices[index], log)
                child = context.Process(target=self._serve, args=arguments, daemon=True)
                child.start()
                theirs.close()
                self._children[index] = (child, ours)

    def wait_until_ready(self, indices: Sequence[int]) -> None:
        """Wait until children have started.

        Raises:
            WeightSyncError: One did not within `START_DEADLINE`, or cannot reach its device.
        """
        until = time.monotonic() + START_DEADLINE
        for index in indices:
            if index not in self._ready:
                self.hear(index, until, "did not start")
                self._ready.add(index)

    def tell(self, index: int, task: Task) -> None:
        """Send a task."""
        try:
            self._children[index][1].send_bytes(json.dumps(asdict(task)).encode())
        except OSError:
            raise WeightSyncError(self._ended(index)) from None

    def hear(self, index: int, until: float, otherwise: str) -> dict[str, Any]:
        """Wait for a child's next message.

        Raises:
            WeightSyncError: It says that it failed, ended, or did not answer until then.
        """
        name, connection = _names(self._devices)[index], self._children[index][1]
        if not connection.poll(max(0.0, until - time.monotonic())):
            raise WeightSyncError(f"{otherwise} ({name} gave no answer in time)")
        try:
            answer = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            raise WeightSyncError(self._ended(index)) from None
        if "problem" in answer:
            raise WeightSyncError(f"failed ({name}: {answer['problem']})")
        return answer

    def _ended(self, index: int) -> str:
        child = self._children[index][0]
        child.join(KILL_DEADLINE)
        return f"failed (the process of {_names(self._devices)[index]} ended with code {child.exitcode})"

    def drop(self, indices: Sequence[int]) -> None:
        """Kill children without waiting: the next pair need not wait for a driver."""
        for index in indices:
            child, connection = self._children.pop(index)
            self._ready.discard(index)
            connection.close()
            child.kill()
            self._killed.append(child)

    def end(self) -> None:
        """Kill all. Whoever outlives it hangs inside the operating system and is left alone."""
        self.drop(list(self._children))
        until = time.monotonic() + KILL_DEADLINE
        for child in self._killed:
            child.join(max(0.0, until - time.monotonic()))
