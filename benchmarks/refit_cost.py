"""What a round of refits costs on few cores, and what it takes from the training beside it.

    python benchmarks/refit_cost.py OUT
    python benchmarks/refit_cost.py OUT --flags="--device cuda" --fitter-device cuda
    python benchmarks/refit_cost.py OUT --cores 0 1 --episodes 256 --minutes 8 --json refit_cost.json

An asynchronous run of the shipped models with --pace.every, bound to `--cores` with all of its processes, is
watched in turns: without a round, with one, and without one again. Where there shall be none, the fitter is
stopped by a signal; it uses no core then and goes on later. Updates per hour are counted from the first
update of a turn to its last. Then the training is ended, and the next round is made alone on the same cores.
The parts of a round are what the fitter says that it does, in any of its threads: parts that it does at once
count each. With `--fitter-cores` the fitter is bound to others, as where it has a device of its own.

All of it takes about `--minutes`: a round that is not over when its time is, is said to be not over. Old
recordings for --pace.base are made in OUT first, and used again; that is not counted.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final

import torch
import tyro
from measuring import heading, table
from simulator_training import program

from asyncrl.launch.fitter import ROLE
from asyncrl.observability import process_status
from asyncrl.pace import rounds

LOOK_EVERY: Final = 0.1
"""Seconds between two looks."""
IDLE: Final = "waiting for a version"
"""How the fitter's activity begins while it makes no round."""
FIRST_SEED: Final = 120_000
"""Of the old recordings: those of the shipped world's begin there too."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure the cost of rounds."""

    out: Annotated[Path, tyro.conf.Positional]
    cores: tuple[int, ...] = ()
    """Of the run with all its processes. None: the first two that this process may use."""
    fitter_cores: tuple[int, ...] = ()
    """Of the fitter. None: those of the run."""
    fitter_device: str = "cpu"
    """--pace.device: cpu, cuda or auto."""
    episodes: int = 256
    """--pace.episodes."""
    base_episodes: int = 384
    """Old episodes for --pace.base, recorded first; 0: none."""
    groups: int = 4
    """--algorithm.groups-per-update: less than usual, for more updates to count."""
    turn: float = 60.0
    """Seconds without a round, each of two times."""
    minutes: float = 8.0
    """Of all together, but for the recordings."""
    alone: bool = True
    """Make a round alone at the end."""
    flags: str = ""
    """Further flags of `asyncrl train`."""
    json: Path | None = None
    """File for the figures."""


@dataclass(kw_only=True)
class Turn:
    """Some time of the run."""

    name: str
    seconds: float = 0.0
    over: bool = True
    """Whether what it was for came to its end in time."""
    updates: int = 0
    between: float = 0.0
    """Seconds from the first update to the last."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each of the activities of the fitter's threads."""

    @property
    def updates_per_hour(self) -> float:
        """Return how many there would be in an hour; not a number where two were not seen."""
        return 3600 * (self.updates - 1) / self.between if self.updates > 1 else float("nan")


class Run:
    """A run of the shipped models, in processes of its own."""

    def __init__(self, settings: Settings, base: Path | None) -> None:
        self.folder = (settings.out / "run").absolute()
        shutil.rmtree(self.folder, ignore_errors=True)
        flags = ["--run-dir", str(self.folder), "--updates", "100000", "--pace.every", "2"]
        flags += ["--algorithm.groups-per-update", str(settings.groups)]
        flags += ["--pace.episodes", str(settings.episodes), "--pace.device", settings.fitter_device]
        flags += ["--pace.base", str(base)] if base else []
        self._log = (settings.out / "train.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "train", *flags, *shlex.split(settings.flags)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def fitter(self) -> process_status.Process | None:
        """Return the fitter's process, once it says what it does."""
        found = [one for one in process_status.read(self.folder) if one.role == ROLE and one.alive]
        return found[0] if found and found[0].activities else None

    @property
    def doing(self) -> list[str]:
        """Return what the fitter's threads say that they do."""
        fitter = self.fitter
        return [one.what for one in fitter.activities] if fitter else []

    @property
    def idle(self) -> bool:
        """Whether the fitter waits for a round."""
        return any(what.startswith(IDLE) for what in self.doing)

    @property
    def updates(self) -> int:
        """Count the updates that were logged."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def must_run(self) -> None:
        """Raise SystemExit when the run has ended."""
        if self.process.poll() is not None:
            raise SystemExit(f"The run ended: see {self._log.name}.")

    def until(self, there: Callable[[], object], what: str, seconds: float) -> None:
        """Wait for something; raises SystemExit when it does not come."""
        deadline = time.monotonic() + seconds
        while not there():
            self.must_run()
            if time.monotonic() > deadline:
                raise SystemExit(f"No {what} within {seconds:g} s: see {self._log.name}.")
            time.sleep(LOOK_EVERY)

    def tell_fitter(self, number: int, pid: int) -> None:
        """Send a signal to the fitter and to the simulators that are its children."""
        for one in (pid, *children_of(pid)):
            os.kill(one, number)

    def watch(self, name: str, seconds: float, over: Callable[[], bool] | None = None) -> Turn:
        """Watch until `over`, but no longer than `seconds`; without it, for as long as that."""
        turn, began = Turn(name=name, over=over is None), time.monotonic()
        counted, first, last, before = self.updates, 0.0, 0.0, began
        while (now := time.monotonic()) < began + seconds:
            self.must_run()
            if (newest := self.updates) > counted:
                turn.updates += newest - counted
                counted, first, last = newest, first or now, now
            if over is not None:
                for doing in [] if self.idle else self.doing:
                    turn.parts[doing] = turn.parts.get(doing, 0.0) + now - before
                if over():
                    turn.over = True
                    break
            before = now
            time.sleep(LOOK_EVERY)
        turn.seconds, turn.between = time.monotonic() - began, last - first
        return turn

    def end(self) -> None:
        """End all of its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
        self._log.close()


def children_of(pid: int) -> list[int]:
    """Return the processes that a process started."""
    return [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in _children(task)]


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:  # The thread has ended, or the kernel does not tell.
        return []


def bind(pid: int, cores: tuple[int, ...]) -> None:
    """Let all threads of a process and of its children run on these cores only."""
    for one in (pid, *children_of(pid)):
        for task in Path(f"/proc/{one}/task").iterdir():
            os.sched_setaffinity(int(task.name), cores)


def recorded(settings: Settings) -> Path | None:
    """Record old episodes like those of the shipped world, unless they are there."""
    if not settings.base_episodes:
        return None
    folder = (settings.out / f"base_{settings.base_episodes}").absolute()
    if not folder.is_dir():
        unfinished = folder.with_suffix(".tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        noise = "--expert.noise 0.02 0.1 --expert.spread 0.015 --expert.place-spread 0.025"
        size = ["--episodes", str(settings.base_episodes), "--seed", str(FIRST_SEED)]
        program(900, settings.out / "base.log", "collect", "--out", str(unfinished), *size, *noise.split())
        unfinished.rename(folder)
    return folder


def measure(settings: Settings, cores: tuple[int, ...]) -> list[Turn]:
    """Watch a run in turns; see the module."""
    base = recorded(settings)
    before = os.sched_getaffinity(0)
    ends = time.monotonic() + 60 * settings.minutes
    os.sched_setaffinity(0, cores)  # What is started now inherits it.
    run = Run(settings, base)
    os.sched_setaffinity(0, before)  # Watching takes no time from it where there are more cores.
    try:
        run.until(lambda: run.fitter, "fitter", 300)
        fitter = run.fitter
        assert fitter is not None
        run.until(lambda: run.idle or rounds_begun(run), "idle fitter", 300)
        if settings.fitter_cores:
            bind(fitter.pid, settings.fitter_cores)
        run.tell_fitter(signal.SIGSTOP, fitter.pid)
        run.until(lambda: run.updates >= 2, "second update", 600)
        found = [run.watch("without a round", settings.turn)]
        spare = ends - time.monotonic() - settings.turn
        run.tell_fitter(signal.SIGCONT, fitter.pid)
        beside = spare / 2 if settings.alone else spare
        found.append(run.watch("with a round", beside, lambda: bool(rounds.read(run.folder))))
        run.tell_fitter(signal.SIGSTOP, fitter.pid)
        found.append(run.watch("without a round", settings.turn))
        if settings.alone and found[1].over:
            found.append(round_alone(run, fitter.pid, ends - time.monotonic()))
        return found
    finally:
        run.end()


def rounds_begun(run: Run) -> bool:
    """Tell whether the fitter was quicker than we."""
    return any(what.startswith("playing") for what in run.doing)


def round_alone(run: Run, fitter: int, seconds: float) -> Turn:
    """Stop all of the run but the fitter, and let it make its next round."""
    kept = {fitter, *children_of(fitter)}
    for process in process_status.read(run.folder):
        if process.alive and process.pid not in kept:
            os.kill(process.pid, signal.SIGSTOP)
    made = len(rounds.read(run.folder))
    run.tell_fitter(signal.SIGCONT, fitter)
    return run.watch("a round alone", seconds, lambda: len(rounds.read(run.folder)) > made)


def report(found: list[Turn]) -> str:
    """Return the tables."""
    rows = [
        [
            turn.name,
            f"{turn.seconds:.0f} s" + ("" if turn.over else ", not over"),
            turn.updates,
            f"{turn.updates_per_hour:.1f}",
        ]
        for turn in found
    ]
    names = list(dict.fromkeys(part for turn in found for part in turn.parts))
    rounds_seen = [turn for turn in found if turn.parts]
    parts = [[name, *(f"{turn.parts.get(name, 0.0):.1f} s" for turn in rounds_seen)] for name in names]
    return "\n\n".join(
        [
            table(["turn", "took", "updates", "updates per hour"], rows),
            f"updates per hour with a round / without: {kept(found):.3f}",
            table(["part of a round", *(turn.name for turn in rounds_seen)], parts),
        ]
    )


def kept(found: list[Turn]) -> float:
    """Return the share of updates per hour that a round leaves."""
    calm = [turn for turn in found if turn.name == "without a round"]
    gaps, seconds = sum(max(0, turn.updates - 1) for turn in calm), sum(turn.between for turn in calm)
    return found[1].updates_per_hour * seconds / (3600 * gaps) if gaps else float("nan")


def main() -> None:
    """Measure; print the tables."""
    settings = tyro.cli(Settings, description=__doc__)
    settings.out.mkdir(parents=True, exist_ok=True)
    cores = settings.cores or tuple(sorted(os.sched_getaffinity(0))[:2])
    device = torch.device("cuda" if settings.fitter_device == "cuda" else "cpu")
    where = f"cores {cores}, fitter on {settings.fitter_device}, cores {settings.fitter_cores or cores}"
    print(heading(device) + where + f", {settings.episodes} episodes of a round\n", flush=True)
    found = measure(settings, cores)
    print(report(found))
    if settings.json is not None:
        turns = [asdict(turn) | {"updates_per_hour": turn.updates_per_hour} for turn in found]
        written = {"cores": cores, "kept": kept(found), "turns": turns}
        settings.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
