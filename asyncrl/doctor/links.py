"""Measure a broadcast between every pair of GPUs in GB/s; name pairs that fail or hang.

A child process per device sends {"ready": true}, then answers each [number of the pair, rank in it] by
{"seconds": [one for each way]} or {"problem": text}. A child of a hanging pair is killed and replaced:
nothing else ends a hanging driver call.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
import torch.distributed as dist

from asyncrl.devices.tensors import pick_device
from asyncrl.doctor.checks import Examination, Finding, broken, ok, warning
from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.launch.children import redirect_output
from asyncrl.observability.signals import die_with_parent, starting_child

DEADLINE: Final = 60.0  # Seconds; a pair that might not end within them is not begun
START_DEADLINE: Final = 60.0  # seconds to import torch and reach the device
PAIR_DEADLINE: Final = 15.0
KILL_DEADLINE: Final = 2.0
GPU_BYTES, GPU_TIMES = 64 << 20, 8
CPU_BYTES, CPU_TIMES = 8 << 20, 1
ROUNDS: Final = 3  # Measured sends of each way, after one that sets connections up
ADVICE: Final = {
    "gloo": "Look for a firewall on loopback, or for what else keeps this host busy.",
    "nccl": "See why with: NCCL_DEBUG=INFO asyncrl doctor (NCCL's words go to stderr). Often an NVLink or "
    "fabric manager that is not up (nvidia-smi topo -m, nvidia-smi nvlink -s), PCIe ACS or an IOMMU "
    "between GPUs (try NCCL_P2P_DISABLE=1), or too little /dev/shm; CUDA_VISIBLE_DEVICES leaves a GPU out.",
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Rates of one pair, or its problem."""

    pair: str  # like 'cuda:0 - cuda:1'
    rates: tuple[float, ...] = ()  # GB/s of each way; empty if it failed, or for a single GPU
    problem: str = ""
    tested: bool = True  # False if no time was left


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings that all pairs share."""

    folder: str  # Private folder in which the ends of a pair meet
    size: int  # ends of a link: 2, or 1 for a single GPU
    bytes: int
    times: int  # broadcasts of as many bytes per send
    seconds: float  # deadline of a pair


def check_links(examination: Examination) -> Finding:
    """Measure all pairs of GPUs; on a CPU, two processes of this host."""
    try:
        on_gpu = pick_device(examination.config.device).type == "cuda"
    except ConfigError:  # Reported by the check of the placement.
        on_gpu = False
    if on_gpu:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return judge("GPU links", measure(devices, GPU_BYTES, GPU_TIMES), GPU_BYTES, "nccl")
    return judge("CPU link", measure(["cpu", "cpu"], CPU_BYTES, CPU_TIMES), CPU_BYTES, "gloo")


def judge(name: str, results: Sequence[Result], nbytes: int, backend: str) -> Finding:
    """Summarise the pairs as a finding."""
    if list(results) == [Result(pair=results[0].pair)]:
        return ok(name, f"{backend} forms a group on {results[0].pair}, which is alone")
    seen = f"{backend}, {nbytes >> 20} MiB each way"
    if rates := [(rate, result.pair) for result in results for rate in result.rates]:
        lowest, pair = min(rates)
        seen += f": lowest {lowest:.3g} GB/s ({pair})"
    each = [f"{r.pair} {'/'.join(f'{x:.3g}' for x in r.rates)}" for r in results if r.rates]
    if len(each) > 1:
        seen += f"; all: {', '.join(each)}"
    if failed := [f"{result.pair} {result.problem}" for result in results if result.problem]:
        seen += f"; {len(failed)} of {len(results)} failed: {'; '.join(failed)}."
        return broken(name, seen, ADVICE[backend])
    if untested := [result.pair for result in results if not result.tested]:
        advice = "Start it again with fewer GPUs: CUDA_VISIBLE_DEVICES."
        return warning(name, f"{seen}; there was no time for {', '.join(untested)}.", advice)
    return ok(name, seen)


# ---- the child -------------------------------------------------------------------------------------


def serve(connection: Connection, parent: int, device: str, plan: Plan) -> None:
    """Serve pairs until the parent closes its end; this process ends with the parent's."""
    if "NCCL_DEBUG" in os.environ:
        os.dup2(2, 1)  # NCCL prints to stdout, which belongs to the report.
    else:
        redirect_output(f"{plan.folder}/log")
    die_with_parent(parent)

    def answer(action: Callable[[], dict[str, object]]) -> None:
        try:
            found = action()
        except Exception as error:  # Every error of a driver is a finding, which the parent reports.
            found = {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        connection.send_bytes(json.dumps(found).encode())

    def touch() -> dict[str, object]:
        torch.set_num_threads(1)
        torch.zeros(1, device=device).sum().item()
        return {"ready": True}

    with suppress(EOFError, BrokenPipeError):
        answer(touch)
        while True:
            number, rank = json.loads(connection.recv_bytes())
            answer(lambda n=number, r=rank: {"seconds": exchange(plan, n, r, device)})


def exchange(plan: Plan, number: int, rank: int, device: str) -> list[float]:
    """Broadcast from each end of a pair; returns the median seconds of each way."""
    on = torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if on.type == "cuda" else "gloo",
        init_method=f"file://{plan.folder}/{number}",
        rank=rank,
        world_size=plan.size,
        timeout=timedelta(seconds=plan.seconds),
    )
    medians = []
    for way in range(plan.size):
        buffer = torch.full((plan.bytes,), 1 + way if rank == way else 0, dtype=torch.uint8, device=on)
        seconds = []
        for _ in range(1 + ROUNDS):
            begin = time.perf_counter()
            for _ in range(plan.times):
                dist.broadcast(buffer, src=way)
            buffer[-1].item()  # Waits for the device.
            seconds.append(time.perf_counter() - begin)
        if not bool((buffer == 1 + way).all()):
            raise WeightSyncError("what arrived is not what was sent.")
        medians.append(statistics.median(seconds[1:]))
    dist.barrier()  # Neither end frees its memory while the other may still read it.
    dist.destroy_process_group()
    return medians


# ---- the parent ------------------------------------------------------------------------------------


def measure(
    devices: Sequence[str],
    nbytes: int,
    times: int,
    *,
    deadline: float = DEADLINE,
    pair_deadline: float = PAIR_DEADLINE,
    serve: Callable[[Connection, int, str, Plan], None] = serve,
) -> list[Result]:
    """Measure every pair of devices, or a single device with itself, by a buffer of `nbytes`."""
    until = time.monotonic() + deadline
    # Neighbours first: pairs of one sick device do not take the time of all the others.
    pairs = sorted(combinations(range(len(devices)), 2), key=lambda pair: pair[1] - pair[0]) or [(0,)]
    several = len(set(devices)) < len(devices)
    names = [device + f" process {index}" * several for index, device in enumerate(devices)]
    results = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-doctor-") as folder:
        plan = Plan(folder=folder, size=len(pairs[0]), bytes=nbytes, times=times, seconds=pair_deadline)
        children = {index: _Child(names[index], on, plan, serve) for index, on in enumerate(devices)}
        try:
            for number, pair in enumerate(pairs):
                name = " - ".join(names[index] for index in pair)
                if time.monotonic() + pair_deadline > until:
                    results.append(Result(pair=name, tested=False))
                    continue
                for index in set(pair) - children.keys():
                    children[index] = _Child(names[index], devices[index], plan, serve)
                try:
                    rates = _measure_pair([children[index] for index in pair], plan, number)
                    results.append(Result(pair=name, rates=rates))
                except WeightSyncError as error:
                    results.append(Result(pair=name, problem=str(error)))
                    for index in pair:
                        children.pop(index).kill()
        finally:
            for child in children.values():
                child.kill()
    return results


def _measure_pair(ends: Sequence[_Child], plan: Plan, number: int) -> tuple[float, ...]:
    until = time.monotonic() + START_DEADLINE
    for child in ends:
        if not child.ready:
            child.receive(until, "did not start")
            child.ready = True
    for rank, child in enumerate(ends):
        child.send([number, rank])
    until = time.monotonic() + plan.seconds
    answers = [child.receive(until, "hangs")["seconds"] for child in ends]
    if len(ends) == 1:
        return ()
    return tuple(plan.bytes * plan.times / max(seconds) / 1e9 for seconds in zip(*answers, strict=True))


class _Child:
    def __init__(self, name: str, device: str, plan: Plan, serve: Callable[..., None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._name, self.ready = name, False
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, os.getpid(), device, plan)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        with starting_child():
            self._process.start()
        theirs.close()

    def send(self, message: list[int]) -> None:
        try:
            self._pipe.send_bytes(json.dumps(message).encode())
        except OSError:
            raise self._ended() from None

    def receive(self, until: float, otherwise: str) -> dict[str, Any]:
        if not self._pipe.poll(max(0.0, until - time.monotonic())):
            raise WeightSyncError(f"{otherwise} ({self._name} gave no answer in time)")
        try:
            answer = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None
        if "problem" in answer:
            raise WeightSyncError(f"failed ({self._name}: {answer['problem']})")
        return answer

    def _ended(self) -> WeightSyncError:
        self._process.join(KILL_DEADLINE)
        code = self._process.exitcode
        return WeightSyncError(f"failed (the process of {self._name} ended with code {code})")

    def kill(self) -> None:
        """Kill it; a process that hangs inside the operating system is abandoned."""
        self._pipe.close()
        self._process.kill()
        self._process.join(KILL_DEADLINE)
