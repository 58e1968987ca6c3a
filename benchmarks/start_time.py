"""How long a run takes from its start until it is loaded, decides, and has made its first two updates.

    python benchmarks/start_time.py                                    the shipped models on the CPU
    python benchmarks/start_time.py --gpus 0,1 --full models/random    full size with random weights

Runs of `torchrun_scripts/train.sh` with --learner.compile, one after the other on the same devices:

    empty cache     nothing was compiled before
    filled cache    again, with the cache that the run before it left

Seconds count from the start of the command. *Loaded*: all processes have their models. *First decision*: an
actor has made one, for which it compiles with --imagination.compile. The last line is the ratio of both.

With --phases each run is ended in order after its second update, and a second table says how long each
process was in which phase of torch's compiler. Only *waiting for compilers*, processes that torch starts for
as many processors as there are, gets shorter with more of these.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import torch
import tyro
from full_size import ROOT, full_size_flags
from measuring import commit, heading, table

from asyncrl.devices.tensors import INDUCTOR, TRITON
from asyncrl.errors import RunError
from asyncrl.observability import process_status

MILESTONES: Final = ("loaded", "first decision", "first update", "second update")
FIRST_DECISION: Final = "peak memory after the first decision"
"""What an actor writes into its log then."""
LOADING: Final = ("loading models", "")
POLL: Final = 0.1
PHASES: Final = {
    "forward": "_compile.compile_inner",
    "backward": "backward._backward_impl",
    "tracing": "bytecode_tracing",
    "passes over graphs": "_recursive_joint_graph_passes",
    "writing code": "GraphLowering.codegen",
    "waiting for compilers": "async_compile.wait",
    "choosing kernels": "CachingAutotuner.benchmark_all_configs",
}
"""Forward and backward graphs, with all that follows, which is of both; as torch calls it."""
ENDS_COMPILING: Final = "TorchDynamo compilation metrics:"
"""What torch logs when a process ends, with a line for each of its phases behind it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time the start of a run."""

    gpus: str = ""
    """CUDA_VISIBLE_DEVICES of the runs; one rank each. Empty: one rank on the CPU."""
    full: str = ""
    """Folder of a policy and a world of full size with random weights; written where they are not there."""
    flags: str = ""
    """Further flags of `asyncrl train`."""
    placement: str = "auto"
    out: str = ""
    """Folder for runs and caches; default: a temporary one."""
    limit: float = 900.0
    """Seconds that a run may take to its second update, and to its end with --phases."""
    phases: bool = False
    """Also say in which phases of the compiler the time goes."""
    json: str = ""
    """Also write the numbers here."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One run."""

    cache: str
    seconds: dict[str, float] = field(default_factory=dict)
    """Milestone -> seconds since the start."""
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """Process -> phase -> seconds."""
    ending: float = 0.0
    """Seconds from the wish to end until all was saved and torchrun had ended; 0: it was killed."""


def command_of(settings: Settings, run_dir: Path) -> list[str]:
    ranks = len(settings.gpus.split(",")) if settings.gpus else 1
    models = full_size_flags(Path(settings.full)) if settings.full else []
    fast = ["--imagination.compile"] if settings.gpus else []
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *(str(ROOT / "torchrun_scripts" / "train.sh"), *models, *fast, *shlex.split(settings.flags)),
        "--learner.compile",
        # Every decision counts, so that an update evaluates all of them whatever the rewards are.
        *("--algorithm.entropy-coef", "1e-6"),
        *("--placement", settings.placement, "--updates", "100000", "--checkpoint-every", "100000"),
        *("--run-dir", str(run_dir)),
    ]


@contextmanager
def started(
    command: list[str], cache: Path, settings: Settings, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {name: value for name, value in os.environ.items() if name not in (INDUCTOR, TRITON)}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XDG_CACHE_HOME": str(cache),
    }
    if settings.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = settings.gpus
    if settings.phases:
        environment["TORCH_LOGS"] = "dynamo"
    with log.open("w") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()  # Its children end with it. In order it would first write a checkpoint.
            process.wait(60)


def end_in_order(process: subprocess.Popen[bytes], run_dir: Path, limit: float) -> float:
    (learner,) = (found for found in process_status.read(run_dir) if found.role == "learner-0")
    began = time.monotonic()
    os.kill(learner.pid, signal.SIGINT)
    process.wait(limit)
    return time.monotonic() - began


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def reached(run_dir: Path) -> set[str]:
    found: set[str] = set()
    processes = process_status.read(run_dir)
    actors = [process for process in processes if process.role.startswith("actor-")]
    if actors and not any(a.activities and a.activities[0].what in LOADING for a in actors):
        found.add("loaded")
    if any(FIRST_DECISION in log.read_text() for log in (run_dir / "logs").glob("actor-*.log")):
        found |= {"loaded", "first decision"}
    return found | set(MILESTONES[2 : 2 + len(rows_of(run_dir))])


def phases_of(text: str) -> dict[str, float]:
    r"""Read what torch logged at the end of a process; nothing where it compiled nothing.

    With the package tabulate there are blanks between name and seconds, else a comma.

    >>> phases_of("I1 utils.py:9] TorchDynamo compilation metrics:\\nI1 utils.py:9] bytecode_tracing, 1.5000")
    {'tracing': 1.5}
    >>> phases_of("TorchDynamo compilation metrics:\\nI1 utils.py:9] async_compile.wait      8.7079   ")
    {'waiting for compilers': 8.7079}
    """
    names = {theirs: ours for ours, theirs in PHASES.items()}
    found = re.findall(r"([\w.]+)(?:,| +) *([\d.]+) *$", text.rpartition(ENDS_COMPILING)[2], re.MULTILINE)
    return {names[name]: float(seconds) for name, seconds in found if name in names}


def measure(settings: Settings, out: Path, cache: str, *, folder: Path) -> Start:
    run_dir = out / cache
    command = command_of(settings, run_dir)
    print(f"{cache} cache: {shlex.join(command)}", flush=True)
    log, seconds = out / f"{run_dir.name}.log", dict[str, float]()
    began = time.monotonic()
    with started(command, folder, settings, log) as process:
        while len(seconds) < len(MILESTONES):
            now = time.monotonic() - began
            seconds |= {name: now for name in reached(run_dir) if name not in seconds}
            if process.poll() is not None or now > settings.limit:
                print(log.read_text()[-4000:])
                raise RunError(f"The run came to {sorted(seconds)} in {now:.0f} s (--limit); see {log}.")
            time.sleep(POLL)
        ending = end_in_order(process, run_dir, settings.limit) if settings.phases else 0.0
    logs = {"learner-0": log} | {path.stem: path for path in (run_dir / "logs").glob("actor-*.log")}
    phases = {name: phases_of(path.read_text()) for name, path in sorted(logs.items())}
    found = Start(cache=cache, seconds=seconds, phases=phases, ending=ending)
    print(f"  {found}", flush=True)
    return found


def report(starts: list[Start]) -> str:
    titles = ["cache", *MILESTONES, "ending"]
    lines = [
        [start.cache]
        + [f"{start.seconds[name]:.1f}" for name in MILESTONES]
        + [f"{start.ending:.1f}" if start.ending else "-"]
        for start in starts
    ]
    empty, filled = starts
    ratios = ", ".join(f"{name} {filled.seconds[name] / empty.seconds[name]:.2f}" for name in MILESTONES)
    text = [table(titles, lines), "", f"filled / empty: {ratios}"]
    if any(phases for start in starts for phases in start.phases.values()):
        text += ["", table(["cache", "process", *PHASES], list(phase_lines(starts)))]
    return "\n".join(text)


def phase_lines(starts: list[Start]) -> Iterator[list[object]]:
    for start in starts:
        for process, phases in start.phases.items():
            seconds = [f"{phases[name]:.1f}" if name in phases else "-" for name in PHASES]
            yield [start.cache, process, *seconds]


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    print(heading(torch.device("cuda" if settings.gpus else "cpu")), flush=True)
    out = Path(settings.out or tempfile.mkdtemp(prefix="start-time-"))
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="cache-", dir=out))
    starts = [measure(settings, out, cache, folder=folder) for cache in ("empty", "filled")]
    print("\n" + report(starts))
    if settings.json:
        content = {"commit": commit(), **asdict(settings), "runs": [asdict(start) for start in starts]}
        Path(settings.json).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
