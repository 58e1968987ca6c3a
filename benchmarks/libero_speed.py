"""How fast LIBERO is played: a decision whose last frame alone is drawn, one worker against two, memory.

    python benchmarks/libero_speed.py
    python benchmarks/libero_speed.py --settings scene=light multisampling=false reflections=false

The first table is CPU time in this process, which other work on the host hardly changes; the second is wall
time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import numpy as np

os.environ.setdefault("LP_NUM_THREADS", "0")  # Mesa draws in the thread that asks: a core per worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import stored_start
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.pool_worker import PlaceArrays

CHUNK = 8


def actions_of(rng: np.random.Generator) -> np.ndarray:
    """Draw a decision of calm motion: ``[8, 7]`` float32."""
    return np.concatenate([rng.uniform(-0.3, 0.3, (CHUNK, 6)), np.full((CHUNK, 1), -1.0)], 1).astype(
        np.float32
    )


def decision_milliseconds(source: SimulatorSource, rounds: int) -> dict[str, float]:
    """Return CPU milliseconds of a decision with every, the last and no frame drawn: medians, in turns."""
    simulator = source.build()
    rng, found = np.random.default_rng(0), {"every frame": [], "last frame": [], "no frame": []}
    simulator.reset([0], [stored_start(simulator.spec, 0, 0)])
    for _ in range(rounds):
        for name, drawn in (("every frame", range(CHUNK)), ("last frame", (CHUNK - 1,)), ("no frame", ())):
            began = time.process_time()
            for step, action in enumerate(actions_of(rng)):
                simulator.step([0], action[None], draw=step in drawn)
            found[name].append((time.process_time() - began) * 1e3)
    simulator.close()
    return {name: statistics.median(values) for name, values in found.items()}


def episodes_per_minute(
    source: SimulatorSource, workers: int, episodes: int, decisions: int
) -> tuple[float, list[float]]:
    """Play episodes of equal length in as many processes; return their rate and each process's peak in MB."""
    with SimulatorPool(source, workers, steps=CHUNK) as pool:
        for slot in range(pool.slots):  # Building the scenes does not count.
            pool.reset(slot, stored_start(pool.spec, 0, 49))
        waiting = pool.slots
        while waiting:
            waiting -= len(pool.ready(120.0))
        rng, begun, done = np.random.default_rng(0), 0, 0
        left = [0] * pool.slots
        began = time.perf_counter()
        free = list(range(pool.slots))
        while done < episodes:
            for slot in free:
                if left[slot]:
                    pool.step(slot, actions_of(rng), past_success=True)
                elif begun < episodes:
                    pool.reset(slot, stored_start(pool.spec, 0, begun))
                    begun, left[slot] = begun + 1, decisions + 1
            free = []
            for answer in pool.ready(120.0):
                free.append(answer.slot)
                left[answer.slot] -= 1
                done += left[answer.slot] == 0
        rate = episodes / (time.perf_counter() - began) * 60
        return rate, [peak_megabytes(member.process.pid) for member in pool._members]  # type: ignore[union-attr]


def peak_megabytes(process: int | None) -> float:
    """Return the most memory that a process has had."""
    line = next(x for x in Path(f"/proc/{process}/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulator", default="libero_spatial")
    parser.add_argument("--settings", nargs="*", default=[])
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--decisions", type=int, default=8)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    source = SimulatorSource(
        name=arguments.simulator, settings=tuple(arguments.settings), image_size=arguments.image_size
    )
    spec = source.spec()
    print(
        f"{spec.name}, {', '.join(spec.cameras)} at {spec.image_size} pixels, {arguments.settings or 'stock'}"
    )
    times = decision_milliseconds(source, arguments.rounds)
    for name, value in times.items():
        share = value / times["every frame"]
        print(f"a decision of {CHUNK} steps, {name + ' drawn':<18} {value:6.0f} CPU ms, {share:.2f}x")
    rates = []
    for workers in arguments.workers:
        rate, peaks = episodes_per_minute(source, workers, arguments.episodes, arguments.decisions)
        rates.append(rate)
        memory = ", ".join(f"{peak:.0f}" for peak in peaks)
        print(
            f"{workers} workers: {rate:.1f} episodes of {arguments.decisions} decisions a minute, "
            f"{rate / rates[0]:.2f}x; peak memory {memory} MB; shared pictures "
            f"{PlaceArrays.nbytes(spec, CHUNK) / 2**20:.1f} MB each"
        )


if __name__ == "__main__":
    main()
