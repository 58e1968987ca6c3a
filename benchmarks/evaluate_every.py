"""What does --evaluate-every cost the default run, and what did the rest of a change cost it?

    git worktree add --detach ../before 0443edd
    python benchmarks/evaluate_every.py --other ../before

In each round the same job is trained without and with --evaluate-every, and by the other checkout, one
after the other, the order turned around in every second round. A reading is the seconds from the first
update's row to the last one's: loading is not in it, nor what the end of a run waits for (its last version's
result). The ratio of a round divides two readings of that round; the result is the median over rounds, with
the smallest and the largest. Use cores that do nothing else.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import tyro
from measuring import heading, table

ROOT: Final = Path(__file__).parents[1]
OFF: Final = "off"
ON: Final = "on"
BEFORE: Final = "other checkout"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time the default run with and without --evaluate-every."""

    other: Path | None = None
    """Folder of another checkout, whose run has no --evaluate-every."""
    updates: int = 6
    """Of each run; at least 2. The first is not timed."""
    every: int = 5
    """--evaluate-every of the runs that have it."""
    rounds: int = 3
    """Times that every run is made."""
    flags: str = ""
    """Further flags of `asyncrl train` for all runs, split at spaces."""
    json: str = ""
    """Also write the numbers here."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Of one run, in seconds."""

    updates: float
    """From the first update's row to the last one's."""
    whole: float
    """From the start of the command to its end."""


def read(tree: Path, arguments: list[str], run_dir: Path) -> Reading:
    """Train once with the code of `tree`.

    Raises:
        RuntimeError: The run failed, or made fewer than two updates; its last lines are told.
    """
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "train", *arguments, "--run-dir", str(run_dir)],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    whole = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{tree}: code {done.returncode}:\n{done.stdout[-2000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows if "train/loss" in row]
    if len(times) < 2:
        raise RuntimeError(f"{tree}: {len(times)} updates; two are needed:\n{done.stdout[-2000:]}")
    return Reading(updates=times[-1] - times[0], whole=whole)


def measure(settings: Settings) -> dict[str, list[Reading]]:
    """Make all runs, and say each reading when it is there."""
    common = ["--updates", str(settings.updates), *settings.flags.split()]
    kinds = {
        OFF: (ROOT, common),
        ON: (ROOT, [*common, "--evaluate-every", str(settings.every)]),
    }
    if settings.other is not None:
        kinds[BEFORE] = (settings.other.resolve(), common)
    readings: dict[str, list[Reading]] = {kind: [] for kind in kinds}
    for turn in range(settings.rounds):
        for kind in list(kinds)[:: 1 if turn % 2 == 0 else -1]:
            tree, arguments = kinds[kind]
            with tempfile.TemporaryDirectory() as folder:
                reading = read(tree, arguments, Path(folder) / "run")
            readings[kind].append(reading)
            print(
                f"round {turn + 1}, {kind}: {reading.updates:.1f} s, whole {reading.whole:.1f} s", flush=True
            )
    return readings


def ratios(readings: dict[str, list[Reading]], above: str, below: str) -> list[float]:
    """Of each round, the updates' seconds of one kind of run by another's."""
    return [a.updates / b.updates for a, b in zip(readings[above], readings[below], strict=True)]


def report(readings: dict[str, list[Reading]]) -> str:
    """A line per comparison."""
    pairs = [(ON, OFF), *([(OFF, BEFORE)] if BEFORE in readings else [])]
    lines = []
    for above, below in pairs:
        found = ratios(readings, above, below)
        spread = f"{min(found):.3f}-{max(found):.3f}"
        lines.append((f"{above} / {below}", f"{statistics.median(found):.3f}", spread))
    return table(["seconds of the updates", "median", "of rounds"], lines)


def main() -> None:
    """Measure, print the table."""
    settings = tyro.cli(Settings, description=__doc__)
    print(heading(torch.device("cpu")))
    readings = measure(settings)
    print(f"\n{report(readings)}")
    if settings.json:
        named = {kind: [vars(reading) for reading in some] for kind, some in readings.items()}
        Path(settings.json).write_text(json.dumps(named, indent=1) + "\n")


if __name__ == "__main__":
    main()
