"""What the world model's approximations do to training: true success after runs that differ in nothing else.

    python benchmarks/approximation_training.py run OUT --parallel 32    train and evaluate what OUT lacks
    python benchmarks/approximation_training.py table OUT                Markdown table; OUT may be a file

A run is `asyncrl train --inline` with the default recipe. Runs of one seed share start states, groups and
noise seeds; every run has two cores of its own. A setting is named memory-decoder-steps, as in latents-tiny-2
(0 steps = as many as the world's folder says); `untrained` evaluates the policy that all runs begin with.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tqdm import tqdm

from asyncrl.errors import ConfigError
from asyncrl.evaluation.evaluate import SuccessRate

UNTRAINED = "untrained"
DEFAULT = (
    *(UNTRAINED, "frames-full-0", "latents-full-0", "latents-tiny-0"),
    *("frames-full-3", "frames-full-2", "frames-full-1"),
    *("latents-tiny-3", "latents-tiny-2", "latents-tiny-1"),
)
StoredEpisode = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train and evaluate every setting and seed that OUT has no result of."""

    out: Annotated[Path, tyro.conf.Positional]
    settings: tuple[str, ...] = DEFAULT
    """memory-decoder-steps, or untrained."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of training."""
    parallel: int = 1
    """Runs side by side."""
    cores: int = 2
    """Cores of a run, its own as long as parallel times cores are there."""
    episodes: int = 256
    """Held-out episodes of an evaluation in the true simulator."""
    evaluation_seed: int = 0
    """Which held-out episodes."""
    seconds: float = 1e9
    """Start no further run after this time."""
    run_seconds: float = 3600.0
    """End a training or an evaluation that takes longer."""
    policy: str = "tabletop"
    """Policy that all runs begin with."""
    flags: str = ""
    """Further flags for every training, as in --flags="--updates 4"."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Print results as a Markdown table."""

    out: Annotated[Path, tyro.conf.Positional]


@dataclass(frozen=True)
class Cell:
    """One training run."""

    setting: str
    seed: int

    @property
    def name(self) -> str:
        """Names its files."""
        return f"{self.setting}-seed{self.seed}"


def cells(config: Run) -> list[Cell]:
    """Seed by seed, so that a grid that was cut short can be compared; the untrained policy needs one."""
    found = [Cell(setting, seed) for seed in config.seeds for setting in config.settings]
    return [cell for cell in found if cell.setting != UNTRAINED or cell.seed == config.seeds[0]]


def flags_of(config: Run, cell: Cell) -> list[str]:
    """The flags of a training run, without its folder.

    Raises:
        ConfigError: The setting's name is not memory-decoder-steps.
    """
    parts = cell.setting.split("-")
    if len(parts) != 3 or not parts[2].isdecimal():
        raise ConfigError(
            f"--settings {cell.setting} is not memory-decoder-steps. Use for example latents-tiny-2, or "
            f"{UNTRAINED}."
        )
    names = ("imagination.memory", "imagination.decoder", "imagination.steps")
    own = [text for name, part in zip(names, parts, strict=True) for text in (f"--{name}", part)]
    common = ["--inline", "--device", "cpu", "--policy", config.policy, "--replay.keep-video-every", "0"]
    return [*common, "--seed", str(cell.seed), *own, *shlex.split(config.flags)]


class Cores:
    """Hands every run cores of its own; with more runs than that they share."""

    def __init__(self, parallel: int, each: int) -> None:
        allowed = sorted(os.sched_getaffinity(0))
        self.free: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
        for index in range(parallel):
            wanted = range(index * each, index * each + each)
            self.free.put({allowed[core % len(allowed)] for core in wanted})
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, arguments: list[str], log: Path, seconds: float) -> None:
        """Run `asyncrl` with some cores until it ends.

        Raises:
            RuntimeError: It failed, or was ended because it took longer than `seconds`.
        """
        cores = self.free.get_nowait()
        command = [sys.executable, "-m", "asyncrl", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": str(len(cores))}
        try:
            with log.open("a") as text:
                process = subprocess.Popen(
                    command, stdout=text, stderr=text, env=environment, start_new_session=True
                )
                self._running.add(process)
                os.sched_setaffinity(process.pid, cores)  # before it has imported anything, so threads follow
                code = _wait(process, seconds)
                self._running.discard(process)
        finally:
            self.free.put(cores)
        if code:
            why = f"took longer than {seconds:.0f} s" if code == -signal.SIGKILL else f"ended with {code}"
            raise RuntimeError(f"{arguments[0]} {why}, see {log}")

    def end(self) -> None:
        """Kill what is running, with all its children."""
        for process in list(self._running):
            _kill(process)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        return -signal.SIGKILL


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_grid(config: Run) -> None:
    """Run what is missing; a result is a line of OUT/results.jsonl, so the grid can be cut and continued."""
    config.out.mkdir(parents=True, exist_ok=True)
    for name in ("runs", "logs"):
        (config.out / name).mkdir(exist_ok=True)
    results, until = config.out / "results.jsonl", time.monotonic() + config.seconds
    missing = missing_cells(config, list(rows_of(results)) if results.exists() else [])
    cores = Cores(config.parallel, config.cores)
    with ThreadPoolExecutor(config.parallel) as pool, tqdm(total=len(missing)) as bar:
        futures = {pool.submit(run_cell, config, cell, cores, until): cell for cell in missing}
        try:
            for future in as_completed(futures):
                bar.update()
                bar.write(f"{futures[future].name}: {_kept(future, results)}")
        except BaseException:  # interrupted: the runs are in sessions of their own and would go on
            pool.shutdown(wait=False, cancel_futures=True)
            cores.end()
            raise


def _kept(future: Future[StoredEpisode], results: Path) -> str:
    """Append a result to the file; returns what it says."""
    try:
        row = future.result()
    except RuntimeError as error:
        return f"no result, will be tried again by the next call: {error}"
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return str(SuccessRate.of(row["successes"], row["episodes"]))


def missing_cells(config: Run, rows: list[StoredEpisode]) -> list[Cell]:
    """Cells without a result.

    Raises:
        ConfigError: There is a result of the same cell with other flags or episodes.
    """
    wanted = {cell: _what(config, cell) for cell in cells(config)}
    for row in rows:
        cell = Cell(row["setting"], row["seed"])
        if cell not in wanted:
            continue
        if row["what"] != wanted[cell]:
            raise ConfigError(
                f"{config.out} holds a result of {cell.name} with other settings: {row['what']} instead of "
                f"{wanted[cell]}. Use another folder."
            )
        del wanted[cell]
    return list(wanted)


def _what(config: Run, cell: Cell) -> str:
    """Everything that a result depends on, as text."""
    flags = [config.policy] if cell.setting == UNTRAINED else flags_of(config, cell)
    return shlex.join([*flags, "evaluated", str(config.episodes), str(config.evaluation_seed)])


def run_cell(config: Run, cell: Cell, cores: Cores, until: float) -> StoredEpisode:
    """Train and evaluate.

    Raises:
        RuntimeError: There is no time left, or a command failed.
    """
    began = time.monotonic()
    if began > until:
        raise RuntimeError("out of time")
    log, folder = config.out / "logs" / f"{cell.name}.log", config.out / "runs" / cell.name
    log.unlink(missing_ok=True)
    policy = config.policy
    if cell.setting != UNTRAINED:
        shutil.rmtree(folder, ignore_errors=True)  # left over from a grid that was cut
        cores.run(["train", *flags_of(config, cell), "--run-dir", str(folder)], log, config.run_seconds)
        policy = str(folder)
    trained = time.monotonic() - began
    answer = config.out / "logs" / f"{cell.name}.json"
    numbers = ["--episodes", str(config.episodes), "--seed", str(config.evaluation_seed)]
    places = ["--workers", str(config.cores), "--device", "cpu", "--json", str(answer)]
    cores.run(["evaluate", policy, *numbers, *places], log, config.run_seconds)
    overall = json.loads(answer.read_text())["overall"]
    return {
        "setting": cell.setting,
        "seed": cell.seed,
        "successes": overall["successes"],
        "episodes": overall["episodes"],
        "imagined": _imagined(folder),
        "train_seconds": round(trained, 1),
        "what": _what(config, cell),
    }


def _imagined(folder: Path) -> float | None:
    """Success that the reward model saw, mean over the second half of a run; None without a run."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return None
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    values = [
        row["env/success_once"] for row in rows[len(rows) // 2 :] if row.get("env/success_once") is not None
    ]
    return statistics.fmean(values) if values else None


def rows_of(out: Path) -> Iterator[StoredEpisode]:
    """Results of a folder or of a file of JSON lines.

    Raises:
        ConfigError: There are none.
    """
    file = out / "results.jsonl" if out.is_dir() else out
    if not file.is_file():
        raise ConfigError(f"{file} does not exist: there are no results yet. Use the command `run` first.")
    for line in file.read_text().splitlines():
        yield json.loads(line)


def table(rows: list[StoredEpisode]) -> str:
    """True success of every setting over all seeds, with a Wilson interval, and of every seed."""
    grouped: dict[str, list[StoredEpisode]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["seed"]):
        grouped[row["setting"]].append(row)
    known = [name for name in DEFAULT if name in grouped]
    text = [
        "| setting | true success | 95 % interval of the episodes | by seed | imagined | training |",
        "|---|---|---|---|---|---|",
    ]
    for name in [*known, *sorted(grouped.keys() - set(known))]:
        own = grouped[name]
        rate = SuccessRate.of(sum(row["successes"] for row in own), sum(row["episodes"] for row in own))
        seeds = ", ".join(f"{row['successes'] / row['episodes']:.1%}" for row in own)
        imagined = [row["imagined"] for row in own if row["imagined"] is not None]
        dreamt = f"{statistics.fmean(imagined):.0%}" if imagined else "-"
        minutes = statistics.fmean(row["train_seconds"] for row in own) / 60
        interval = f"{rate.low:.1%} - {rate.high:.1%}"
        training = "-" if name == UNTRAINED else f"{minutes:.1f} min"
        text.append(f"| {name} | {rate.rate:.1%} | {interval} | {seeds} | {dreamt} | {training} |")
    return "\n".join(text)


def main() -> None:
    """Run, or print."""
    try:
        chosen = tyro.extras.subcommand_cli_from_dict({"run": run_me, "table": table_me})
    except ConfigError as error:
        sys.exit(str(error))
    if chosen is not None:
        print(chosen)


def run_me(config: tyro.conf.OmitArgPrefixes[Run]) -> str:
    """Train and evaluate what is missing, and print the table."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    print(f"{' '.join(sys.argv)}   commit {commit.strip() or 'unknown'}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run_grid(config)
    return table(list(rows_of(config.out)))


def table_me(config: tyro.conf.OmitArgPrefixes[Table]) -> str:
    """Print a Markdown table."""
    return table(list(rows_of(config.out)))


if __name__ == "__main__":
    main()
