"""What training in a simulator gains: GRPO and PPO on --world tabletop_true, judged at held-out starts.

    python benchmarks/simulator_training.py run OUT --jobs 2      train and evaluate what is not yet in OUT
    python benchmarks/simulator_training.py table OUT             Markdown table, and whether the claim holds

A run is ``asyncrl train configs/tabletop_true_ALGORITHM.toml --inline --replay.max-lag L --seed S``: from
update L on every batch is exactly L versions old, and a run repeats itself. Each is judged by 256 episodes at
starts that no training plays, at temperature 1, as is the policy it began with. The claim: in every run
success rises by 15 points at least, and the 95 % intervals (Wilson) before and after do not overlap.

One run takes about ten minutes of two quiet CPU cores; what is there is not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "before.json"
GAIN = 0.15
"""Share of episodes by which success has to rise."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train and evaluate every run that is not in the folder yet."""

    out: Annotated[Path, tyro.conf.Positional]
    algorithms: tuple[str, ...] = ("grpo", "ppo")
    lags: tuple[int, ...] = (0, 2)
    seeds: tuple[int, ...] = (0, 1, 2)
    jobs: int = 1
    """Runs side by side."""
    episodes: int = 256
    """Of each evaluation."""
    limit: float = 7200.0
    """Seconds that one program may take."""
    flags: tuple[str, ...] = ()
    """Further flags of `asyncrl train`."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Print the results as a Markdown table; code 1 when the claim does not hold."""

    out: Annotated[Path, tyro.conf.Positional]


def program(limit: float, log: Path, *arguments: str) -> None:
    """Run ``asyncrl`` with its output in a file; raises when it fails or takes more than `limit` seconds."""
    with log.open("w") as text:
        subprocess.run(
            [sys.executable, "-m", "asyncrl", *arguments],
            cwd=ROOT,
            stdout=text,
            stderr=subprocess.STDOUT,
            timeout=limit,
            check=True,
        )


def judge(run: Run, policy: str, answer: Path) -> None:
    """Evaluate a policy at held-out starts; the result appears whole or not at all."""
    partial = answer.with_suffix(".partial")
    flags = ["--episodes", str(run.episodes), "--temperature", "1", "--json", str(partial.absolute())]
    program(run.limit, answer.with_suffix(".log"), "evaluate", policy, *flags)
    partial.replace(answer)


def cell(run: Run, algorithm: str, lag: int, seed: int) -> str:
    """Train once and judge; returns one line."""
    name = f"{algorithm}-lag{lag}-seed{seed}"
    answer, folder = run.out / f"{name}.json", (run.out / "runs" / name).absolute()
    if not answer.exists():
        flags = ["--inline", "--replay.max-lag", str(lag), "--seed", str(seed), "--run-dir", str(folder)]
        config = f"configs/tabletop_true_{algorithm}.toml"
        program(run.limit, run.out / f"{name}.train.log", "train", config, *flags, *run.flags)
        judge(run, str(folder), answer)
    return f"{name}: {rate(answer)}"


def rate(answer: Path) -> str:
    """The success of an evaluation with its interval, in percent."""
    found = overall(answer)
    return f"{100 * found['rate']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def overall(answer: Path) -> dict[str, Any]:
    """Success over all tasks: rate, low, high, in [0, 1]."""
    return json.loads(answer.read_text())["overall"]


def run_all(run: Run) -> int:
    """Judge the shipped policy, then train and judge what is missing."""
    (run.out / "runs").mkdir(parents=True, exist_ok=True)
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    print(f"{' '.join(sys.argv)}   commit {head.stdout.strip() or 'unknown'}", flush=True)
    if not (run.out / BEFORE).exists():
        judge(run, "tabletop", run.out / BEFORE)
    print(f"before: {rate(run.out / BEFORE)}", flush=True)
    cells = [(a, lag, seed) for seed in run.seeds for a in run.algorithms for lag in run.lags]
    with ThreadPoolExecutor(run.jobs) as pool:
        for done in as_completed([pool.submit(cell, run, *one) for one in cells]):
            print(done.result(), flush=True)
    return table(run.out)


def table(out: Path) -> int:
    """Print what was found; 0 when every run gained enough."""
    before = overall(out / BEFORE)
    answers = sorted(path for path in out.glob("*-lag*-seed*.json"))
    print(f"\nbefore training: {rate(out / BEFORE)}\n")
    print("| run | success, 95 % interval | points | claim |\n|---|---|---|---|")
    holds = bool(answers)
    for answer in answers:
        after = overall(answer)
        fits = after["rate"] - before["rate"] >= GAIN and after["low"] > before["high"]
        holds &= fits
        gained = 100 * (after["rate"] - before["rate"])
        print(f"| {answer.stem} | {rate(answer)} | {gained:+.1f} | {'holds' if fits else 'does not hold'} |")
    return int(not holds)


def main() -> int:
    """Run or print."""
    chosen = tyro.extras.subcommand_cli_from_dict({"run": Run, "table": Table})
    return run_all(chosen) if isinstance(chosen, Run) else table(chosen.out)


if __name__ == "__main__":
    sys.exit(main())
