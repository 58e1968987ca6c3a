r"""What asynchrony gains: steps per hour of the same job on the same GPUs, asynchronous and synchronous.

    python benchmarks/asynchrony.py --gpus 0 --flags="--policy models/p --world models/w --lora.rank 32"
    python benchmarks/asynchrony.py --gpus 0,1,2,3 --placement learner=0-1,actor=2-3 \
        --full models/random --compile
    python benchmarks/asynchrony.py --gpus 0,1,2,3 --placement collocated --full models/random --compile \
        --flags="--lora.rank 0" --modes asynchronous --updates 10             all weights trained

Three runs of `torchrun_scripts/train.sh` with the same flags, one after the other:

    actors alone   no update has a gradient (GRPO on a reward that never differs): the learner is free
    synchronous    the actors wait for every update; the learner alone is its time per update in this run
    asynchronous   as a user runs it

A step is one action of one episode, for which the world draws a frame. The first updates, which compile and
fill the pipeline, do not count. While the learner compiles, batches pile up that it works off afterwards, so
that it learns more than is imagined: steps per hour are the smaller of both. Both sides' idle shares are
those of the run: the learner waits for a batch, the actors for credit or weights. A run whose stored frames
do not change from decision to decision has imagined nothing, and is refused: its numbers would say nothing.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
import tyro
from full_size import run_flags
from measuring import commit, heading, table
from start_time import reached as milestones

from asyncrl.errors import RunError
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import Metric
from asyncrl.records import CHUNK
from asyncrl.replay_tools.episodes import LIGHT, replay_folder
from asyncrl.replay_tools.episodes import read_rows as read_episodes

ROOT = Path(__file__).resolve().parents[1]
SIGNAL = ["--algorithm.entropy-coef", "1e-6"]
"""Makes every decision count for the learner, whatever its advantage; without it a constant reward teaches
nothing and nothing is evaluated."""
MEMORY = (s.PEAK_MEMORY, s.LEARNER_MEMORY, s.ACTOR_MEMORY)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare asynchronous, synchronous and one-sided runs."""

    gpus: str
    """CUDA_VISIBLE_DEVICES of the runs; one rank each. Empty: one rank on the CPU."""
    full: str = ""
    """Folder of a policy and a world of full size with random weights; written where they are not there."""
    compile: bool = False
    """Compile learner and actors."""
    flags: str = ""
    """Flags of `asyncrl train` for all runs, behind those of --full: models, batch, slots."""
    placement: str = "auto"
    ranks: int = 0
    """Ranks of torchrun; 0: one for each GPU."""
    updates: int = 12
    """Of each run."""
    skip: int = 3
    """First updates that do not count."""
    modes: tuple[str, ...] = ("actors alone", "synchronous", "asynchronous")
    out: str = ""
    """Folder for the runs; default: a temporary one."""
    limit: float = 300.0
    """Seconds that one run may take after its first update, and as many that it has to come to that."""
    json: str = ""
    """Also write the numbers here."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run."""

    mode: str
    steps_per_hour: float
    """The smaller of the two below: a learner first works off what waits for it."""
    learned_per_hour: float
    """Steps of the updates that count."""
    imagined_per_hour: float
    """Steps that actors made from the first to the last of them; not a number where they do not say."""
    update_seconds: float
    learner_waiting: float
    actors_waiting: float
    mfu: float
    publish_seconds: float
    """Of a version of the weights, until all actors hold it."""
    published_bytes: float
    memory: dict[str, float]
    """Peak bytes by role."""
    rows: int
    """Updates that count."""
    loaded: float
    """Seconds from the command until all processes had their models."""
    first_update: float
    """Until the first update was made: compiled, imagined, learned."""
    seconds: float
    """Of the whole run, start included."""


def train(
    settings: Settings,
    mode: str,
    out: Path,
    *,
    name: str = "",
    variables: Mapping[str, str] = MappingProxyType({}),
    before_rank: Sequence[str] = (),
) -> Outcome:
    """Make one run and read what it wrote.

    Args:
        settings: Of all runs.
        mode: One of `Settings.modes`.
        out: Folder of the runs.
        name: Of this one's folder; empty: the mode.
        variables: Of its environment, besides this process's.
        before_rank: Command that starts each rank, before the script and its flags; none: torchrun does.
    """
    run_dir = out / (name or mode).replace(" ", "-")
    ranks = settings.ranks or (len(settings.gpus.split(",")) if settings.gpus else 1)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *(["--no-python", *before_rank] if before_rank else []),
        *(
            str(ROOT / "torchrun_scripts" / "train.sh"),
            *run_flags(settings.full, settings.flags, compile=settings.compile),
        ),
        *("--placement", settings.placement, "--updates", "100000", "--run-dir", str(run_dir)),
        *("--checkpoint-every", "100000"),
        *([] if mode == "actors alone" else SIGNAL),
        *(["--replay.max-lag", "0"] if mode == "synchronous" else []),
    ]
    print(f"{name or mode}: {shlex.join(command)}", flush=True)
    began = time.monotonic()
    until = began + settings.limit
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= variables
    if settings.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = settings.gpus
    with (out / f"{run_dir.name}.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        reached: dict[str, float] = {}
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.5)
            made, now = len(read_rows(run_dir)), time.monotonic()
            if made >= settings.updates:
                break
            if "loaded" not in reached and "loaded" in milestones(run_dir):
                reached["loaded"] = now - began
            if made and "first update" not in reached:  # Loaded and compiled.
                reached["first update"], until = now - began, now + settings.limit
        if len(read_rows(run_dir)) <= settings.skip + 1:
            subprocess.run(
                [sys.executable, "-m", "asyncrl", "status", str(run_dir), "--stacks"],
                env=environment,
                timeout=60,
            )
        # Not to the end: its checkpoint would be written, which takes longer than all updates together.
        process.kill()
        code = process.wait(60)
    seconds = time.monotonic() - began
    rows = read_rows(run_dir)
    if len(rows) <= settings.skip + 1:
        print((out / f"{run_dir.name}.log").read_text()[-4000:], flush=True)
        for part in sorted((run_dir / "logs").glob("*.log")):
            print(f"--- {part.name}\n{part.read_text()[-3000:]}", flush=True)
        raise RunError(
            f"The run '{mode}' ended with code {code} after {len(rows)} updates; nothing to compare."
        )
    if not imagines(run_dir):
        raise RunError(f"The run '{mode}' stored only frames that do not change: it imagined nothing.")
    group_size = json.loads((run_dir / "config.json").read_text())["algorithm"]["group_size"]
    return outcome(mode, rows[settings.skip :], group_size, reached, seconds)


def read_rows(run_dir: Path) -> list[dict[str, float]]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def imagines(run_dir: Path) -> bool:
    stored = read_episodes(replay_folder(run_dir), (*LIGHT, "frames"))
    return any(np.ptp(row.episode.frames, axis=0).any() for row in stored)


def outcome(
    mode: str, rows: list[dict[str, float]], group_size: int, reached: Mapping[str, float], seconds: float
) -> Outcome:
    minutes_per_step = [
        1 / (row[s.GROUPS_PER_MINUTE.name] * group_size * row[m.EPISODE_LEN.name]) for row in rows
    ]

    def middle(metric: Metric) -> float:
        return statistics.median(row.get(metric.name, 0.0) for row in rows)

    learned, imagined = 60 / statistics.mean(minutes_per_step), imagined_per_hour(rows)
    return Outcome(
        mode=mode,
        steps_per_hour=learned if math.isnan(imagined) else min(learned, imagined),
        learned_per_hour=learned,
        imagined_per_hour=imagined,
        update_seconds=middle(s.UPDATE_SECONDS),
        learner_waiting=statistics.mean(row[s.LEARNER_WAITING.name] for row in rows),
        actors_waiting=statistics.mean(row[s.ACTORS_WAITING.name] for row in rows),
        mfu=middle(s.MFU),
        publish_seconds=middle(s.WEIGHTS_SECONDS),
        published_bytes=middle(s.WEIGHTS_BYTES),
        memory={metric.name: rows[-1][metric.name] for metric in MEMORY if metric.name in rows[-1]},
        rows=len(rows),
        loaded=reached.get("loaded", float("nan")),
        first_update=reached.get("first update", float("nan")),
        seconds=seconds,
    )


def imagined_per_hour(rows: list[dict[str, float]]) -> float:
    """Return the steps that actors made per hour between the first row and the last one that count them.

    Not a number where that cannot be told: an actor that comes back counts from zero again.
    """
    counted = [row for row in rows if s.ACTOR_DECISIONS.name in row]
    made = [row[s.ACTOR_DECISIONS.name] for row in counted]
    if len(counted) < 2 or any(later < earlier for earlier, later in pairwise(made)):
        return float("nan")
    return 3600 * CHUNK * (made[-1] - made[0]) / (counted[-1]["time"] - counted[0]["time"])


def verdict(found: dict[str, Outcome]) -> str:
    lines = []
    both = found.get("asynchronous"), found.get("synchronous")
    if both[0] and both[1]:
        lines.append(f"asynchronous / synchronous: {both[0].steps_per_hour / both[1].steps_per_hour:.2f}")
        learner = both[1].steps_per_hour / max(1 - both[1].learner_waiting, 1e-9)
        lines.append(f"learner alone: {learner:,.0f} steps/h (synchronous, without its waiting)")
        if actors := found.get("actors alone"):
            slower = min(learner, actors.steps_per_hour)
            lines.append(f"asynchronous / slower of both alone: {both[0].steps_per_hour / slower:.2f}")
    return "\n".join(lines)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    device = torch.device("cuda" if settings.gpus else "cpu")
    print(heading(device), flush=True)
    out = Path(settings.out or tempfile.mkdtemp(prefix="asynchrony-"))
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Outcome] = {}
    for mode in settings.modes:
        found[mode] = train(settings, mode, out)
        print(f"  {found[mode]}", flush=True)
    titles = [
        "",
        "steps/h",
        "learned/h",
        "imagined/h",
        "frames/s",
        "s/update",
        "learner waits",
        "actors wait",
        "MFU",
        "publish",
        "loaded s",
        "first update s",
        "updates",
    ]
    rows = [
        [o.mode, f"{o.steps_per_hour:,.0f}", f"{o.learned_per_hour:,.0f}", f"{o.imagined_per_hour:,.0f}",
         f"{o.steps_per_hour / 3600:.0f}", f"{o.update_seconds:.2f}",
         f"{o.learner_waiting:.1%}", f"{o.actors_waiting:.1%}", f"{o.mfu:.1%}",
         f"{o.published_bytes / 1e9:.3g} GB in {1e3 * o.publish_seconds:.0f} ms",
         f"{o.loaded:.0f}", f"{o.first_update:.0f}", o.rows]
        for o in found.values()
    ]  # fmt: skip
    print("\n" + table(titles, rows) + "\n\n" + verdict(found))
    for mode, result in found.items():
        print(
            mode
            + ": "
            + ", ".join(f"{name} {value / 2**30:.1f} GiB" for name, value in result.memory.items())
        )
    if settings.json:
        content = {"commit": commit(), **asdict(settings), "runs": [asdict(o) for o in found.values()]}
        Path(settings.json).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
