"""What staleness costs: algorithms and corrections at forced lags, judged by true success.

    python benchmarks/staleness.py run OUT                   train and evaluate what is not yet in OUT
    python benchmarks/staleness.py table OUT                 Markdown table; OUT may be a file of JSON lines
    python benchmarks/staleness.py plot OUT staleness.png    needs the extra 'plot' (matplotlib)

A run is `asyncrl train --inline --replay.max-lag L`: lock-step, so from update L on every batch is exactly L
versions old. Runs of one seed share start states, groups and noise; only what is named differs. At lag 0 the
corrections that weigh samples all have weight 1, so they share the run of `none`.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import tyro
from tqdm import tqdm

NO_BOUND = ("--correction.trust-region", "0")
CORRECTIONS = {
    "none": ("--correction.kind", "none", *NO_BOUND),
    "naive": ("--correction.kind", "naive", *NO_BOUND),
    "tis": ("--correction.kind", "tis", *NO_BOUND),
    "decoupled": ("--correction.kind", "decoupled", *NO_BOUND),
    "vtrace": ("--correction.kind", "vtrace", *NO_BOUND),
    "tis+region.2": ("--correction.kind", "tis", "--correction.trust-region", "0.2"),
    "tis+region.1": ("--correction.kind", "tis", "--correction.trust-region", "0.1"),
    "tis+region.05": ("--correction.kind", "tis", "--correction.trust-region", "0.05"),
    "tis+region.03": ("--correction.kind", "tis", "--correction.trust-region", "0.03"),
    "tis+region.02": ("--correction.kind", "tis", "--correction.trust-region", "0.02"),
    "tis+region.01": ("--correction.kind", "tis", "--correction.trust-region", "0.01"),
}
"""Name in the tables -> flags. What has `+region` ends with the bound of its trust region."""
DIFFERENT_AT_LAG_0 = ("none", "vtrace")
"""At lag 0 all others weigh everything with 1, so they share the run of `none`."""
DIVERGED = 0.0
"""True success of a run that stopped because its gradients were not finite."""


@dataclass(frozen=True)
class Cell:
    """One training run."""

    algorithm: str
    correction: str
    lag: int
    seed: int
    rate: float
    """Factor on the learning rate."""

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.correction}-lag{self.lag}-rate{self.rate:g}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class RunGrid:
    """Train and evaluate every cell of the grid that is not in the folder yet."""

    out: Annotated[Path, tyro.conf.Positional]
    lags: tuple[int, ...] = (0, 2, 4, 8, 16)
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = (1.0,)
    """Factors on --learning-rate."""
    learning_rate: float = 4e-5
    algorithms: tuple[str, ...] = ("grpo", "ppo")
    corrections: tuple[str, ...] = ("none", "naive", "tis", "decoupled", "vtrace")
    """Of `CORRECTIONS`."""
    jobs: int = 8
    """Runs side by side."""
    episodes: int = 256
    """Episodes of each evaluation in the true simulator."""
    evaluation_seed: int = 0
    device: str = "auto"
    seconds: float = 1e9
    """Start no further run after this time."""
    flags: str = ""
    """Further flags for every run, as in --flags="--updates 24"."""
    ppo_flags: str = ""
    """Further flags for the runs of ppo."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Print the results as a Markdown table."""

    out: Annotated[Path, tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw the results."""

    out: Annotated[Path, tyro.conf.Positional]
    image: Annotated[Path, tyro.conf.Positional]
    before: float = 0.0
    """True success before training, in percent, as a line; 0 = no line."""


@dataclass
class Results:
    """Runs of one algorithm, correction and lag."""

    success: list[float] = field(default_factory=list)
    imagined: list[float] = field(default_factory=list)
    ess: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    episodes: int = 0


def cells(grid: RunGrid) -> list[Cell]:
    found = [
        Cell(algorithm, correction, lag, seed, rate)
        for algorithm in grid.algorithms
        for correction in grid.corrections
        for lag in grid.lags
        for seed in grid.seeds
        for rate in grid.rates
        if (lag > 0 or correction in DIFFERENT_AT_LAG_0) and (algorithm == "ppo" or correction != "vtrace")
    ]
    return sorted(found, key=lambda cell: (-cell.lag, cell.seed))


def run_grid(grid: RunGrid) -> None:
    grid.out.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells(grid) if not result_file(grid.out, cell).exists()]
    until = time.monotonic() + grid.seconds
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(grid.jobs, mp_context=context) as pool, tqdm(total=len(missing)) as bar:
        futures = {pool.submit(run_cell, grid, cell, until): cell for cell in missing}
        for future in as_completed(futures):
            bar.update()
            bar.write(f"{futures[future].name}: {future.result()}")


def result_file(out: Path, cell: Cell) -> Path:
    return out / f"{cell.name}.json"


def run_cell(grid: RunGrid, cell: Cell, until: float) -> str:
    began = time.monotonic()
    if began > until:
        return "not started: out of time"
    from asyncrl.commands import evaluate
    from asyncrl.config.run import parse
    from asyncrl.errors import RunError
    from asyncrl.launch.rank import run

    folder, answer = grid.out / "runs" / cell.name, grid.out / f"{cell.name}.evaluation"
    config = parse([*flags_of(grid, cell), "--run-dir", str(folder)])
    log = grid.out / f"{cell.name}.log"
    with log.open("w") as text, contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            run(config)
        except RunError as error:
            print(error)
            return save(grid, cell, folder, {"rate": DIVERGED, "episodes": grid.episodes}, began)
        common = ["--episodes", str(grid.episodes), "--seed", str(grid.evaluation_seed), "--workers", "1"]
        temperature = ["--temperature", str(config.algorithm.temperature)]
        evaluate.main([str(folder), *common, *temperature, "--device", grid.device, "--json", str(answer)])
    return save(grid, cell, folder, json.loads(answer.read_text())["overall"], began)


def flags_of(grid: RunGrid, cell: Cell) -> list[str]:
    chosen = {
        "seed": cell.seed,
        "device": grid.device,
        "replay.max-lag": cell.lag,
        "replay.keep-video-every": 0,
        "algorithm.kind": cell.algorithm,
        "optimizer.learning-rate": cell.rate * grid.learning_rate,
    }
    own = [text for name, value in chosen.items() for text in (f"--{name}", str(value))]
    more = grid.ppo_flags if cell.algorithm == "ppo" else ""
    return ["--inline", *own, *CORRECTIONS[cell.correction], *shlex.split(grid.flags), *shlex.split(more)]


def save(grid: RunGrid, cell: Cell, folder: Path, overall: dict[str, Any], began: float) -> str:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    late = rows[len(rows) // 2 :]

    def mean(name: str) -> float:
        values = [row[name] for row in late if row.get(name) is not None]
        return sum(values) / len(values) if values else math.nan

    result = asdict(cell) | {
        "success": overall["rate"],
        "episodes": overall["episodes"],
        "updates": len(rows),
        "imagined": mean("env/success_once"),
        "ess": mean("train/actor/effective_sample_size"),
        "kl": mean("train/actor/mismatch_kl"),
        "measured_lag": mean("replay/lag_mean"),
        "seconds": round(time.monotonic() - began, 1),
        "curve": [row.get("env/success_once") for row in rows],
        "flags": flags_of(grid, cell),
    }
    partial = result_file(grid.out, cell).with_suffix(".partial")
    partial.write_text(json.dumps(result) + "\n")
    partial.replace(result_file(grid.out, cell))
    return f"true {overall['rate']:.1%} imagined {result['imagined']:.1%} ess {result['ess']:.2f}"


def lines_of(out: Path) -> list[str]:
    if out.is_file():
        return out.read_text().splitlines()
    return [path.read_text() for path in sorted(out.glob("*.json"))]


def gather(out: Path) -> dict[tuple[str, float, str, int], Results]:
    found: dict[tuple[str, float, str, int], Results] = defaultdict(Results)
    rows = [json.loads(line) for line in lines_of(out)]
    for row in rows:
        kind = row["algorithm"], row.get("rate", 1.0)
        names = {row["correction"]}
        if row["lag"] == 0 and row["correction"] == "none":
            names |= {x["correction"] for x in rows if x["algorithm"] == kind[0]} - {"vtrace"}
        for name in names:
            cell = found[*kind, name, row["lag"]]
            for key in ("success", "imagined", "ess", "kl"):
                getattr(cell, key).append(row[key])
            cell.episodes = row["episodes"]
    return found


def table(out: Path) -> str:
    found = gather(out)
    lags = sorted({lag for *_, lag in found})
    head = "| algorithm | learning rate | correction | " + " | ".join(f"lag {lag}" for lag in lags) + " |"
    rule = "|---" * (3 + len(lags)) + "|"
    kinds = sorted({(algorithm, rate) for algorithm, rate, *_ in found})
    parts = []
    for title, text in (
        ("True success in percent, mean and 95 % interval over the seeds", success_text),
        ("Effective sample size, mean over the second half of the runs", ess_text),
    ):
        lines = [f"{title}:", "", head, rule]
        for algorithm, rate in kinds:
            for correction in CORRECTIONS:
                row = [found.get((algorithm, rate, correction, lag)) for lag in lags]
                if any(row):
                    texts = " | ".join(text(cell) if cell else "" for cell in row)
                    lines.append(f"| {algorithm} | {rate:g} | {correction} | {texts} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def success_text(cell: Results) -> str:
    critical = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}
    n, mean = len(cell.success), sum(cell.success) / len(cell.success)
    if n < 2:
        return f"{100 * mean:.1f}"
    spread = math.sqrt(sum((value - mean) ** 2 for value in cell.success) / (n - 1))
    return f"{100 * mean:.1f} ± {100 * critical.get(n, 2.0) * spread / math.sqrt(n):.1f}"


def ess_text(cell: Results) -> str:
    return f"{sum(cell.ess) / len(cell.ess):.2f}"


def plot(out: Path, image: Path, before: float) -> None:
    import_module("matplotlib").use("Agg")  # Of the extra `plot`, and of this function alone.
    pyplot = import_module("matplotlib.pyplot")

    found = gather(out)
    kinds = sorted({(algorithm, rate) for algorithm, rate, *_ in found})
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(5.5 * len(kinds), 4.2), sharey=True, squeeze=False)
    for axis, (algorithm, rate) in zip(axes[0], kinds, strict=True):
        names = [name for name in CORRECTIONS if any(key[:3] == (algorithm, rate, name) for key in found)]
        for index, correction in enumerate(names):
            lags = sorted(key[3] for key in found if key[:3] == (algorithm, rate, correction))
            runs = [found[algorithm, rate, correction, lag].success for lag in lags]
            means = [100 * sum(run) / len(run) for run in runs]
            low = [mean - 100 * min(run) for mean, run in zip(means, runs, strict=True)]
            high = [100 * max(run) - mean for mean, run in zip(means, runs, strict=True)]
            places = [lag + 0.18 * (index - 2) for lag in lags]
            axis.errorbar(places, means, yerr=[low, high], marker="o", capsize=3, label=correction)
        if before:
            axis.axhline(before, color="grey", linestyle=":", label="before training")
        axis.set_title(f"{algorithm.upper()}, {rate:g} times the learning rate")
        axis.set_xlabel("forced lag (policy versions)")
        axis.set_xticks(sorted({lag for *_, lag in found}))
        axis.grid(alpha=0.3)
        axis.legend(title="correction", fontsize=8)
    axes[0][0].set_ylabel("true success after training (%)\nmean and range of the seeds")
    figure.tight_layout()
    figure.savefig(image, dpi=110)


def main() -> None:
    chosen = tyro.extras.subcommand_cli_from_dict({"run": run_me, "table": table_me, "plot": plot_me})
    if chosen is not None:
        print(chosen)


def run_me(grid: tyro.conf.OmitArgPrefixes[RunGrid]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    print(f"{' '.join(sys.argv)}   commit {commit.strip() or 'unknown'}")
    run_grid(grid)


def table_me(config: tyro.conf.OmitArgPrefixes[Table]) -> str:
    return table(config.out)


def plot_me(config: tyro.conf.OmitArgPrefixes[Plot]) -> None:
    plot(config.out, config.image, config.before)


if __name__ == "__main__":
    main()
