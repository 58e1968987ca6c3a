"""What PPO gains in ManiSkill: a small policy that pushes too short is trained where it plays.

    python benchmarks/maniskill_training.py OUT --workers 12        extra maniskill; a GPU, or much patience
    python benchmarks/maniskill_training.py OUT --plot curve.png    the same, and draws it (extra benchmarks)

The expert of PushCube is made to stop short (`--expert.place-offset`), and a fresh policy imitates it. PPO
then trains that policy in the simulator. Both are judged by held-out seeds, sampled and greedy. What is in
OUT is not made again, so that an interrupted run goes on.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import tyro

ROOT = Path(__file__).resolve().parents[1]
SIMULATOR = ("--simulator", "maniskill_push_cube")
FLAWS = (
    "--expert.place-offset",
    "-0.165",
    "0",
    "--expert.place-spread",
    "0.02",
    "--expert.noise",
    "0",
    "0.1",
)
GAIN = 0.30
"""Share of episodes by which sampled success has to rise."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Record, imitate, train, evaluate."""

    out: Annotated[Path, tyro.conf.Positional]
    workers: int = 8
    demonstrations: int = 600
    steps: int = 3000
    """Optimizer steps of the imitation."""
    updates: int = 30
    seeds: tuple[int, ...] = (0,)
    horizon: int = 24
    """Steps of an episode: three decisions."""
    image_size: int = 64
    episodes: int = 256
    """Of each evaluation."""
    plot: Path | None = None
    """Picture of the episodes' success while training, and of the evaluations."""


def program(done: Path, log: Path, *arguments: str) -> None:
    """Run ``asyncrl`` unless what it makes is there; its output goes to a file."""
    if done.exists():
        return
    print(" ".join(["asyncrl", *arguments]), flush=True)
    with log.open("w") as text:
        subprocess.run(
            [sys.executable, "-m", "asyncrl", *arguments],
            cwd=ROOT,
            stdout=text,
            stderr=subprocess.STDOUT,
            check=True,
        )


def judge(settings: Settings, policy: Path, name: str) -> list[dict[str, Any]]:
    """Evaluate sampled and greedy; returns both results' ``overall``."""
    found = []
    for temperature in ("1", "0"):
        answer = settings.out / f"{name}_{temperature}.json"
        play = (*SIMULATOR, "--horizon", str(settings.horizon), "--workers", str(settings.workers))
        count = ("--episodes", str(settings.episodes), "--temperature", temperature, "--json", str(answer))
        program(answer, answer.with_suffix(".log"), "evaluate", str(policy), *play, *count)
        found.append(json.loads(answer.read_text())["overall"])
    return found


def base(settings: Settings) -> Path:
    """Record the expert and imitate it; returns the policy's folder."""
    data, policy, workers = settings.out / "data", settings.out / "policy", str(settings.workers)
    shown = ("--image-size", str(settings.image_size), "--horizon", str(settings.horizon))
    count = ("--episodes", str(settings.demonstrations), "--workers", workers, "--out", str(data))
    program(data / "part-00000.h5", settings.out / "data.log", "collect", *SIMULATOR, *shown, *count, *FLAWS)
    fit = ("--data", str(data), "--steps", str(settings.steps), "--out", str(policy))
    program(policy / "config.json", settings.out / "policy.log", "fit", "policy", *fit)
    return policy


def train(settings: Settings, policy: Path, seed: int) -> Path:
    """Train by PPO; returns the run's folder."""
    run = settings.out / f"run{seed}"
    world = ("--world", "maniskill_push_cube", "--simulator.horizon", str(settings.horizon))
    size = ("--simulator.workers", str(settings.workers), "--actor.slots", str(8 * settings.workers))
    batch = ("--algorithm.groups-per-update", "16", "--algorithm.group-size", "8")
    which = ("--updates", str(settings.updates), "--seed", str(seed), "--run-dir", str(run))
    start = ("train", "configs/tabletop_true_ppo.toml", "--policy", str(policy))
    program(run / "finished", settings.out / f"run{seed}.log", *start, *world, *size, *batch, *which)
    (run / "finished").touch()
    return run


def plot(settings: Settings, before: list[dict[str, Any]], after: dict[int, list[dict[str, Any]]]) -> None:
    """Draw success of the episodes that each update learned from, and sampled success by held-out seeds."""
    assert settings.plot is not None
    import_module("matplotlib").use("Agg")  # Of the extra `benchmarks`, and of this function alone.
    figure, axis = import_module("matplotlib.pyplot").subplots(figsize=(6.5, 4))
    ends = [(0, before[0], "imitation"), *((settings.updates, found[0], "PPO") for found in after.values())]
    for update, found, name in ends:
        bars = [[100 * (found["rate"] - found["low"])], [100 * (found["high"] - found["rate"])]]
        label = f"{name}, {settings.episodes} held-out seeds"
        axis.errorbar([update], [100 * found["rate"]], yerr=bars, marker="o", capsize=4, label=label)
    for seed in after:
        printed = (settings.out / f"run{seed}.log").read_text()
        rows = re.findall(r"^ +(\d+) +([\d.]+)%", printed, re.M)
        line = [float(share) for _, share in rows]
        axis.plot([int(update) for update, _ in rows], line, color="grey", label="training episodes")
    axis.set(xlabel="update", ylabel="success (%)", ylim=(0, 100))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(settings.plot, dpi=110)


def main() -> int:
    """Run what is missing and print the table; code 1 when the gain is smaller than claimed."""
    given = tyro.cli(Settings, description=__doc__)
    settings = Settings(**{**vars(given), "out": given.out.absolute()})
    settings.out.mkdir(parents=True, exist_ok=True)
    policy = base(settings)
    before = judge(settings, policy, "before")
    after = {seed: judge(settings, train(settings, policy, seed), f"after{seed}") for seed in settings.seeds}
    rows = [("imitation", before)]
    rows += [(f"PPO, {settings.updates} updates, seed {seed}", found) for seed, found in after.items()]
    holds = all(
        found[0]["rate"] - before[0]["rate"] >= GAIN and found[0]["low"] > before[0]["high"]
        for found in after.values()
    )
    if settings.plot:
        plot(settings, before, after)
    print("\n| PushCube | sampled, 95 % interval | greedy |\n|---|---|---|")
    for name, found in rows:
        shown = [f"{100 * r['rate']:.1f} [{100 * r['low']:.1f}, {100 * r['high']:.1f}]" for r in found]
        print(f"| {name} | {' | '.join(shown)} |")
    print(f"a gain of {100 * GAIN:.0f} points with intervals apart: {'yes' if holds else 'no'}")
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
