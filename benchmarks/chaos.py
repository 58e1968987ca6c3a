"""Whole runs whose processes are killed all the time: what recovers how fast, what is lost, doubled or stale.

    python benchmarks/chaos.py --runs 4 --kills 60 --at-once 4
    python benchmarks/chaos.py --runs 1 --kills 6 --roles actor-1 actor-2 --flags="CONFIG --policy P ..."
    python benchmarks/chaos.py --runs 1 --kills 20 --ranks 4 --roles actor-1 actor-2 --full models/random
    python benchmarks/chaos.py --runs 2 --kills 100 --takeover --roles actor-1 actor-2 replay

Each run is a real one under torchrun: a learner, actors and the replay, with random tiny models on the CPU,
or with what `--flags` name. `tests/support/chaos_run.py` says how they are hit and what is checked. The
table has one row per role and activity that was interrupted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import tyro
from full_size import run_flags

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.chaos_run import WEIGHTS, Chaos, Hit, Plan, Report  # noqa: E402
from support.tiny_models import write_models  # noqa: E402
from support.whole_runs import free_port  # noqa: E402

ACTIVITIES = {
    "loading": "starting up",
    "first weights": "starting up",
    "opening": "starting up",
    "receiving": "receiving weights",
    "weight group": "forming the weight group",
    "broadcasting": "broadcasting weights",
    "receipts": "broadcasting weights",
    "handing": "sending episodes",
    "talking": "talking to the replay",
    "imagining": "imagining",
    "credit": "waiting for credit",
    "updating": "updating",
    "first actor": "starting up",
    "take the first": "starting up",
    "waiting for a batch": "waiting for a batch",
    "sealing": "sealing a group",
    "serving": "serving",
}
"""Part of what a process said it did -> name in the table; the first that fits counts."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Kill processes of whole runs."""

    runs: int = 4
    kills: int = 60
    """Of each run."""
    updates: int = 80
    """Of each run."""
    at_once: int = 2
    """Processes that are hit in one moment."""
    ranks: int = 3
    """One learns, the others imagine."""
    parallel: int = 1
    """Runs at the same time; each wants four cores."""
    seed: int = 0
    roles: tuple[str, ...] = tuple(WEIGHTS)
    """What may be hit."""
    takeover: bool = False
    """All the time a second run tries to get the folder (`--resume`) and the address of the first. Leave out
    learner and ranks then: a run whose learner is dead may be taken over."""
    full: str = ""
    """Folder of a policy and a world of full size with random weights, in place of tiny models on the CPU;
    written where they are not there."""
    flags: str = ""
    """Flags of `asyncrl train`, behind those of --full, or in place of tiny models on the CPU."""
    deadline: float = 1500.0


def environment(folder: Path) -> dict[str, str]:
    """No torchrun variables, one thread per process, sockets below `folder`."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    (folder / "tmp").mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TMPDIR": str(folder / "tmp")}


def run(settings: Settings, number: int) -> Report:
    """Make one run."""
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as name:
        folder = Path(name)
        plan = Plan(
            kills=settings.kills,
            updates=settings.updates,
            at_once=settings.at_once,
            seed=settings.seed + number,
            ranks=settings.ranks,
            roles=settings.roles,
            deadline=settings.deadline,
        )
        named = run_flags(settings.full, settings.flags, compile=False)
        flags = named or write_models(folder / "models")
        if settings.takeover:
            flags += ["--replay.listen", f"tcp://127.0.0.1:{free_port()}"]
        variables = environment(folder)
        chaos = Chaos(plan, folder, flags, variables)
        with taking_over(chaos, flags, variables) if settings.takeover else nullcontext([]) as codes:
            report = chaos.finish()
        print(summary(number, report), flush=True)
        if settings.takeover:
            print(f"run {number}: {len(codes)} second runs, {codes.count(2)} refused", flush=True)
            assert codes.count(2) == len(codes), codes
        return report


@contextmanager
def taking_over(chaos: Chaos, flags: list[str], variables: dict[str, str]) -> Iterator[list[int]]:
    """Begin second runs in the folder and at the address of the first, while that lives; their exit codes."""
    over, codes, folder = threading.Event(), list[int](), chaos.folder
    train = [sys.executable, "-m", "asyncrl", "train"]
    attempts = (["--resume", "--run-dir", str(folder / "run")], [*flags, "--run-dir", str(folder / "other")])

    def begin() -> None:
        while not (folder / "run" / "metrics.jsonl").exists() and not over.wait(0.2):
            pass
        while not over.is_set():
            for attempt in attempts:
                done = subprocess.run([*train, *attempt], env=variables, capture_output=True, timeout=120)
                if chaos.process.poll() is None:  # A run that is over may be taken over.
                    codes.append(done.returncode)

    thread = threading.Thread(target=begin)
    thread.start()
    try:
        yield codes
    finally:
        over.set()
        thread.join()


def summary(number: int, report: Report) -> str:
    """One line about a run."""
    return (
        f"run {number}: exit code {report.returncode}, {report.versions} updates, {len(report.hits)} hits "
        f"in {report.seconds:.0f} s, {report.acknowledged} episodes acknowledged, {len(report.lost)} lost, "
        f"{len(report.doubled)} used twice, {len(report.too_old)} batches beyond the lag bound, "
        f"{len(report.left_over)} processes left, longest wait of the learner {report.longest_wait:.1f} s"
    )


def activity_of(hit: Hit) -> str:
    """Name what a process did when it was hit."""
    return next((name for part, name in ACTIVITIES.items() if part in hit.doing), "looking after its child")


def table(reports: list[Report]) -> str:
    """Rows by role and activity."""
    found = defaultdict[tuple[str, str], list[float]](list)
    for report in reports:
        for hit in report.hits:
            role = hit.role.rstrip("-0123456789")
            found[role, activity_of(hit)].append(hit.recovered if hit.recovered is not None else float("inf"))
    lines = ["| role | hit while | hits | at work again, median s | max s |", "|---" * 5 + "|"]
    for (role, doing), seconds in sorted(found.items()):
        median, longest = statistics.median(seconds), max(seconds)
        lines.append(f"| {role} | {doing} | {len(seconds)} | {median:.1f} | {longest:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Make all runs; print a line for each and the table. Exit code 1 when something was lost or left."""
    settings = tyro.cli(Settings, description=__doc__)
    print(f"{' '.join(sys.argv)}\n", flush=True)
    with ThreadPoolExecutor(settings.parallel) as pool:
        reports = list(pool.map(lambda number: run(settings, number), range(settings.runs)))
    signals = [hit.signal for report in reports for hit in report.hits]
    print(f"\n{len(signals)} hits: " + ", ".join(f"{signals.count(x)} {x}" for x in sorted(set(signals))))
    print(table(reports))
    bad = [r for r in reports if r.returncode or r.lost or r.doubled or r.too_old or r.left_over]
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
