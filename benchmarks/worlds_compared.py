"""Three kinds of worlds of one table: how well and fast they imagine, and what training in each is worth.

    python benchmarks/worlds_compared.py run OUT --flags="--device cuda"     measure what is not yet in OUT
    python benchmarks/worlds_compared.py table OUT                           Markdown table, and the claim

Every world gets the same first frames and actions of held-out episodes of the true simulator; PSNR and
verdicts are those of world_quality.py. Frames per second are of whole decisions on the CPU, in rounds in
which the worlds take turns, the median. A run is ``asyncrl train --world WORLD --inline --seed S`` with
defaults for all else (ten updates). It is judged in the simulator at held-out starts, sampled as in
training and greedy, as is the policy that all begin with. The claim: after every run the 95 % interval
(Wilson) of the sampled success lies above that of the policy before.

Every result appears whole or not at all, so that this can be cut and continued; a run goes on at its last
checkpoint.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import tyro
import world_quality
from measuring import commit
from simulator_training import program, rate

from asyncrl.config.run import TrainConfig
from asyncrl.fitting.loading import load_recordings
from asyncrl.launch.environment import build_world_model, with_world_defaults
from asyncrl.records import CHUNK
from asyncrl.storage.asset_paths import world_folder
from asyncrl.storage.run_folder import has_checkpoint

BEFORE: Final = "before"
TEMPERATURES: Final = {"sampled": "1", "greedy": "0"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Measure, train and evaluate what is not in the folder yet."""

    out: Annotated[Path, tyro.conf.Positional]
    worlds: tuple[str, ...] = ("tabletop", "tabletop_opensora", "tabletop_evac")
    """Shipped names or folders, each with a reward model."""
    seeds: tuple[int, ...] = (0, 1, 2)
    policy: str = "tabletop"
    """Policy that training begins with."""
    start_states: str = "tabletop"
    """Where episodes begin; a shipped world that has its own begins there."""
    recorded: int = 128
    """Held-out episodes that every world imagines again."""
    horizons: tuple[int, ...] = (8, 32, 64)
    """Steps at which the bands of PSNR end."""
    slots: int = 16
    """Episodes imagined at once while speed is measured."""
    rounds: int = 5
    """Of the measurement of speed."""
    episodes: int = 256
    """Of each evaluation."""
    jobs: int = 1
    """Runs side by side."""
    workers: int = os.cpu_count() or 1
    """Simulator processes."""
    device: str = "cpu"
    """Where episodes are imagined again; speed is always that of the CPU."""
    limit: float = 7200.0
    """Seconds that one program may take."""
    flags: str = ""
    """Further flags of `asyncrl train`, as in --flags="--device cuda"."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Print the results as a Markdown table; code 1 when the claim does not hold."""

    out: Annotated[Path, tyro.conf.Positional]


def label(world: str) -> str:
    """What files and rows of a world are called."""
    return Path(world).name


def place(name: str) -> str:
    """A file or folder as programs find it that run elsewhere; a shipped name as it is."""
    return str(Path(name).absolute()) if Path(name).exists() else name


def write_whole(file: Path, content: object) -> None:
    """Write JSON so that the file appears when it is complete."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content) + "\n")
    partial.replace(file)


def recordings_in(run: Run) -> Path:
    """Record the held-out episodes, if that was not done; returns their folder."""
    folder, partial = run.out / "recordings", run.out / "recordings.partial"
    if not folder.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
        world_quality.record(partial, world_quality.Settings(episodes=run.recorded, workers=run.workers))
        partial.rename(folder)
    return folder


def imagine_recorded(run: Run) -> None:
    """Write PSNR and verdicts of every world that lacks them."""
    missing = [world for world in run.worlds if not (run.out / f"{label(world)}.quality.json").exists()]
    recordings = load_recordings([recordings_in(run)]) if missing else None
    for world in missing:
        print(f"\n{world}", flush=True)
        assert recordings is not None
        settings = world_quality.Settings(world=world, device=run.device, horizons=run.horizons)
        measured = world_quality.measure(settings, recordings)
        write_whole(run.out / f"{label(world)}.quality.json", measured)


@torch.inference_mode()
def measure_speed(run: Run) -> None:
    """Write frames per second of all worlds, which take turns, unless they are there."""
    answer = run.out / "speed.json"
    if answer.exists() and set(json.loads(answer.read_text())) >= {label(world) for world in run.worlds}:
        return
    began = {}
    for name in run.worlds:
        config, _ = with_world_defaults(TrainConfig(world=name, start_states=run.start_states))
        made = build_world_model(config, torch.device("cpu"))
        began[label(name)] = made.world, made.world.start([made.starts[0]] * run.slots, decisions=1)
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(run.slots, CHUNK, 7, generator=generator) * 2 - 1
    taken: dict[str, list[float]] = {name: [] for name in began}
    for _ in range(run.rounds + 1):
        for name, (world, state) in began.items():
            start = time.perf_counter()
            world.imagine(state, actions, list(range(run.slots)))
            taken[name].append(time.perf_counter() - start)
    frames = CHUNK * run.slots  # the first round warms up
    write_whole(answer, {name: frames / statistics.median(times[1:]) for name, times in taken.items()})


def judge(run: Run, policy: str, name: str) -> None:
    """Evaluate a policy at held-out starts, sampled and greedy, where that was not done."""
    for how, temperature in TEMPERATURES.items():
        answer = run.out / f"{name}.{how}.json"
        if answer.exists():
            continue
        partial = answer.with_suffix(".partial")
        flags = {"episodes": run.episodes, "temperature": temperature, "workers": run.workers}
        text = [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
        log = answer.with_suffix(".log")
        program(run.limit, log, "evaluate", policy, *text, "--json", str(partial.absolute()))
        partial.replace(answer)


def train(run: Run, world: str, seed: int) -> str:
    """Train once, from the last checkpoint if it was cut, and judge; returns one line."""
    name = f"{label(world)}.seed{seed}"
    folder = (run.out / "runs" / name).absolute()
    done = folder.with_suffix(f"{folder.suffix}.done")
    if not done.exists():
        resumed = ["--resume"] if has_checkpoint(folder) else []
        if not resumed:
            shutil.rmtree(folder, ignore_errors=True)
        flags = ["--world", place(world), "--policy", place(run.policy), "--inline", "--seed", str(seed)]
        flags += ["--start-states", place(run.start_states), "--run-dir", str(folder), *resumed]
        program(run.limit, run.out / f"{name}.train.log", "train", *flags, *shlex.split(run.flags))
        done.touch()
    judge(run, str(folder), name)
    return f"{name}: {successes(run.out, name)}"


def successes(out: Path, name: str) -> str:
    """Sampled and greedy success with intervals, in percent, as two cells."""
    return " | ".join(rate(out / f"{name}.{how}.json") for how in TEMPERATURES)


def run_all(run: Run) -> int:
    """Measure and train what is missing, then print the table."""
    for world in run.worlds:
        world_folder(world)  # a missing one is an error before hours of work
    (run.out / "runs").mkdir(parents=True, exist_ok=True)
    print(f"python {shlex.join(sys.argv)}   commit {commit()}", flush=True)
    imagine_recorded(run)
    measure_speed(run)
    judge(run, place(run.policy), BEFORE)
    print(f"\n{BEFORE}: {successes(run.out, BEFORE)}", flush=True)
    cells = [(world, seed) for seed in run.seeds for world in run.worlds]
    with ThreadPoolExecutor(run.jobs) as pool:
        for ended in as_completed([pool.submit(train, run, *one) for one in cells]):
            print(ended.result(), flush=True)
    return table(run.out)


def sampled(out: Path, name: str) -> dict[str, Any]:
    """Success over all tasks of a policy that samples: rate, low, high, in [0, 1]."""
    return json.loads((out / f"{name}.sampled.json").read_text())["overall"]


def world_cells(out: Path, world: str, speed: float) -> list[str]:
    """What a world is like: PSNR by band, its autoencoder's, verdicts, frames per second."""
    quality = json.loads((out / f"{world}.quality.json").read_text())
    bands, verdict = quality["picture"], quality["reward"]
    psnr, own = (" / ".join(f"{band[key]:.1f}" for band in bands) for key in ("psnr", "psnr_vae"))
    share = f"{100 * verdict['imagined_precision']:.0f} / {100 * verdict['imagined_recall']:.0f}"
    return [psnr, own, share, f"{speed:.1f}"]


def table(out: Path) -> int:
    """Print what was found; 0 when every run in every world ended apart from the policy before."""
    speeds = json.loads((out / "speed.json").read_text())
    first = json.loads((out / f"{next(iter(speeds))}.quality.json").read_text())["picture"]
    ends = [0, *(band["horizon"] for band in first)]
    bands = " / ".join(f"{low + 1}-{high}" for low, high in pairwise(ends))
    titles = [
        "world",
        f"PSNR of steps {bands}, dB",
        "of its autoencoder alone",
        "verdicts, precision / recall",
    ]
    titles += ["frames/s, CPU", "seed", "sampled success, 95 % interval", "greedy", "apart from before"]
    print(f"\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    print(f"| (before training) | | | | | | {successes(out, BEFORE)} | |")
    before, apart = sampled(out, BEFORE), []
    for world, speed in speeds.items():
        cells = [world, *world_cells(out, world, speed)]
        for file in sorted(out.glob(f"{world}.seed*.greedy.json")):
            name = file.name.removesuffix(".greedy.json")
            apart.append(sampled(out, name)["low"] > before["high"])
            seed, answer = name.rpartition("seed")[2], "yes" if apart[-1] else "no"
            print(f"| {' | '.join(cells)} | {seed} | {successes(out, name)} | {answer} |")
            cells = [""] * len(cells)
    holds = bool(apart) and all(apart)
    print(f"\n{sum(apart)} of {len(apart)} runs apart: the claim {'holds' if holds else 'does not hold'}")
    return int(not holds)


def main() -> int:
    """Run or print."""
    chosen = tyro.extras.subcommand_cli_from_dict({"run": Run, "table": Table})
    return run_all(chosen) if isinstance(chosen, Run) else table(chosen.out)


if __name__ == "__main__":
    sys.exit(main())
