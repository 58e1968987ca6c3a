"""Does a world that is refitted on the policy's true episodes beat one that stays as it is?

    python benchmarks/coevolution.py run OUT --base DATA/places DATA/rollouts --flags="--device cuda"
    python benchmarks/coevolution.py rows OUT >rows.jsonl         a line per policy that was judged
    python benchmarks/coevolution.py table OUT                    or a file of such lines
    python benchmarks/coevolution.py plot OUT coevolution.png     likewise; needs matplotlib

Every arm trains the shipped policy in `tabletop` for 40 updates, asynchronously, on several seeds. Every 6
updates the policy is judged in the simulator at the same 256 held-out starts, sampled as in training, and
its imagination is audited: imagined minus true success of the same actions, and wrong verdicts. True
episodes that an arm spends are counted: those of its refits, those by which *early stopping* chooses a
checkpoint of the frozen run, or those on which *true episodes alone* trains, with no world at all. No arm has
held-out starts. Arms with key frames begin half of their groups there: those of --keyframes until the first
round, those of the round's true episodes after it.

Audits of the frozen run, and one of the shipped policy (version 0), also say what each guard would have made
of its successes: `table` ends with the correlation of reward and truth under each.

Every result appears whole or not at all, so that this can be cut and continued; a run goes on at its last
checkpoint. Arms and seeds are flags: a part of them is a run of its own, and `table` prints what is there.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import coevolution_report as report
import tyro
from measuring import commit
from simulator_training import program

from asyncrl.storage.run_folder import has_checkpoint

UPDATES: Final = 40
EVERY: Final = 6
GROUP: Final = 8
"""Episodes of a group."""
ROWS: Final = 64
"""Episodes that an audit imagines together."""
CHOOSING_SEED: Final = 7
"""Of the starts by which early stopping chooses; others than those that judge."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What is trained otherwise."""

    flags: tuple[str, ...] = ()
    """Beside those of `Run`."""
    rounds: int = 0
    """Of refits, among which the true episodes are shared out."""
    every: int = EVERY
    """Updates between two of them."""
    keyframes: bool = False
    """Whether half of the groups begin at key frames."""
    true_only: bool = False
    """Whether it trains in the simulator, as long as its true episodes last."""
    true_episodes: int = 0
    """That it may spend in all; 0: as many as `Run` says."""


MANY: Final = UPDATES // EVERY
LONGER: Final = ("--pace.world-steps", "1000", "--pace.reward-steps", "500", "--pace.held-out", "0.5")
"""A refit that a GPU has time for, which is judged by half of a round's episodes."""
ARMS: Final[dict[str, Arm]] = {
    "frozen": Arm(),
    "kl": Arm(flags=("--algorithm.kl-coef", "0.05")),
    "lasting": Arm(flags=("--guard.kind", "lasting")),
    "kl, lasting": Arm(flags=("--algorithm.kl-coef", "0.05", "--guard.kind", "lasting")),
    "probability": Arm(flags=("--guard.kind", "probability")),
    "second": Arm(flags=("--guard.kind", "second")),
    "key frames": Arm(keyframes=True),
    "true episodes alone": Arm(true_only=True),
    "refit": Arm(rounds=MANY),
    "refit once": Arm(rounds=1, every=2 * EVERY),
    "refit, own memories": Arm(flags=("--pace.own-memory", "0.5"), rounds=MANY),
    "refit, world only": Arm(flags=("--pace.reward-steps", "0"), rounds=MANY),
    "refit, reward only": Arm(flags=("--pace.world-steps", "0"), rounds=MANY),
    "refit, longer": Arm(flags=LONGER, rounds=MANY),
    "refit, lasting": Arm(flags=("--guard.kind", "lasting"), rounds=MANY),
    "refit, key frames": Arm(rounds=MANY, keyframes=True),
    "refit, lasting, key frames": Arm(flags=("--guard.kind", "lasting"), rounds=MANY, keyframes=True),
    "refit, 64 true": Arm(rounds=MANY, true_episodes=64),
    "refit, 1024 true": Arm(rounds=MANY, true_episodes=1024),
    "refit, longer, 1024 true": Arm(flags=LONGER, rounds=MANY, true_episodes=1024),
    "true episodes alone, 1024": Arm(true_only=True, true_episodes=1024),
}
"""By name. *Early stopping* is of the frozen run, afterwards."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train, judge and audit what is not in the folder yet."""

    out: Annotated[Path, tyro.conf.Positional]
    arms: tuple[str, ...] = tuple(ARMS)
    seeds: tuple[int, ...] = (0, 1, 2)
    true_episodes: int = 256
    """That an arm with refits, and early stopping, may spend in all, where its name does not say it."""
    base: tuple[str, ...] = ()
    """--pace.base: recordings that the world was fitted on."""
    keyframes: str = ""
    """Folder of start states and key frames (`asyncrl fit starts`, `fit keyframes`), for --start-states of
    the arms that begin there."""
    updates: int = UPDATES
    """Of every arm that imagines."""
    groups: int = 16
    """--algorithm.groups-per-update; --algorithm.group-size is 8."""
    episodes: int = 256
    """Of each evaluation and audit."""
    judged: tuple[int, ...] = ()
    """Versions that are judged, as in 12 24 40; none: all that were kept, one every 6 updates. Early stopping
    chooses among them too."""
    jobs: int = 1
    """Runs side by side."""
    workers: int = 1
    """Simulator processes of each."""
    limit: float = 7200.0
    """Seconds that one program may take."""
    flags: str = ""
    """Further flags of `asyncrl train`."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Print the results as lines of JSON."""

    out: Annotated[Path, tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Print the results as Markdown tables."""

    source: Annotated[Path, tyro.conf.Positional]
    """Folder of results, or a file of lines."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw the results."""

    source: Annotated[Path, tyro.conf.Positional]
    """Folder of results, or a file of lines."""
    picture: Annotated[Path, tyro.conf.Positional]
    arms: tuple[str, ...] = tuple(ARMS)


def flags_of(run: Run, name: str) -> list[str]:
    """Flags of an arm."""
    arm = ARMS[name]
    sizes = ["--algorithm.groups-per-update", str(run.groups), "--algorithm.group-size", str(GROUP)]
    flags = [*arm.flags, *sizes, "--updates", str(updates_of(run, arm))]
    if arm.true_only:
        return [*flags, "--world", "tabletop_true"]
    if arm.keyframes:
        given = ["--start-states", run.keyframes] if run.keyframes else []
        flags += ["--keyframe-share", "0.5", *given]
    if arm.rounds:
        spent = spent_by(run, arm)
        flags += ["--pace.every", str(arm.every), "--pace.episodes", str(spent // arm.rounds)]
        flags += ["--pace.budget", str(spent), *(["--pace.base", *run.base] if run.base else [])]
    return flags


def spent_by(run: Run, arm: Arm) -> int:
    """True episodes that an arm may spend in all."""
    return arm.true_episodes or run.true_episodes


def updates_of(run: Run, arm: Arm) -> int:
    """Updates of an arm: of true episodes alone so many as there are episodes for."""
    return max(1, spent_by(run, arm) // (run.groups * GROUP)) if arm.true_only else run.updates


def folder_name(arm: str, seed: int) -> str:
    """What files of a run are called."""
    return f"{arm.replace(', ', '-').replace(' ', '_')}.seed{seed}"


def train(run: Run, arm: str, seed: int) -> Path:
    """Train once, from the last checkpoint if it was cut; returns the run's folder."""
    name = folder_name(arm, seed)
    folder = (run.out / "runs" / name).absolute()
    done = folder.with_name(f"{name}.done")
    if not done.exists():
        resumed = ["--resume"] if has_checkpoint(folder) else []
        if not resumed:
            shutil.rmtree(folder, ignore_errors=True)
        flags = ["--seed", str(seed), "--run-dir", str(folder), *resumed]
        flags += ["--checkpoint-every", str(EVERY), "--keep-checkpoints", "100"]
        program(
            run.limit,
            run.out / f"{name}.train.log",
            *("train", *flags, *flags_of(run, arm), *shlex.split(run.flags)),
        )
        done.touch()
    return folder


def versions(run: Run, folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a training that are judged, by version."""
    found = {int(path.name.rpartition("_")[2]): path for path in folder.glob("checkpoints/update_*[0-9]")}
    last = max(found, default=0)
    chosen = {*run.judged, last} if run.judged else set(found)  # the end is judged in any case
    return {version: found[version] for version in sorted(found.keys() & chosen)}


def measure(run: Run, answer: Path, *arguments: str) -> None:
    """Write the JSON of `asyncrl evaluate` or `audit`, whole or not at all, where it is missing."""
    if answer.exists():
        return
    partial = answer.with_suffix(".partial")
    program(
        run.limit,
        answer.with_suffix(".log"),
        *(*arguments, "--episodes", str(run.episodes), "--workers", str(max(1, run.workers))),
        *("--json", str(partial.absolute())),
    )
    partial.replace(answer)


def judge(run: Run, arm: str, seed: int, folder: Path) -> None:
    """Evaluate and audit the checkpoints, where that was not done; then choose, of the frozen run's."""
    name = folder_name(arm, seed)
    for version, path in versions(run, folder).items():
        answer = run.out / f"{name}.update{version:02d}.evaluate.json"
        measure(run, answer, "evaluate", str(path), "--temperature", "1")
    world = ["--world", "tabletop"] if ARMS[arm].true_only else []  # Others are audited in their own.
    flags = ["--every-checkpoint", "--versions", *map(str, versions(run, folder)), *world]
    flags += ["--rows", str(ROWS)]
    flags += ["--signals"] if arm == "frozen" else []
    measure(run, run.out / f"{name}.audit.json", "audit", str(folder), *flags)
    if arm == "frozen":
        judged = versions(run, folder)
        each = replace(run, episodes=run.true_episodes // len(judged))
        for version, path in judged.items():
            measure(
                each,
                run.out / f"{name}.update{version:02d}.choose.json",
                *("evaluate", str(path), "--temperature", "1", "--seed", str(CHOOSING_SEED)),
            )


def audit_shipped(run: Run) -> str:
    """Audit the policy that all begin with; returns a line."""
    flags = ("tabletop", "--signals", "--rows", str(ROWS))
    measure(run, run.out / f"{report.SHIPPED}.audit.json", "audit", *flags)
    return "the shipped policy is audited"


def cell(run: Run, arm: str, seed: int) -> str:
    """Train and judge one run; returns a line."""
    folder = train(run, arm, seed)
    judge(run, arm, seed, folder)
    judged = [row for row in rows_of(run.out) if (row.arm, row.seed) == (arm, seed)]
    return f"{arm}, seed {seed}: {' '.join(f'{row.rate:.0f}' for row in judged)}"


def run_all(run: Run) -> int:
    """Make all that is missing, then print the tables."""
    (run.out / "runs").mkdir(parents=True, exist_ok=True)
    print(f"python {shlex.join(sys.argv)}   commit {commit()}", flush=True)
    with ThreadPoolExecutor(run.jobs) as pool:
        parts = [pool.submit(cell, run, arm, seed) for seed in run.seeds for arm in run.arms]
        parts += [pool.submit(audit_shipped, run)] * ("frozen" in run.arms)
        for ended in as_completed(parts):
            print(ended.result(), flush=True)
    return print_tables(run.out)


def rows_of(source: Path) -> list[report.Row]:
    """Read what was measured: a folder of results, or a file of rows."""
    return report.read(source, {folder_name(arm, 0).removesuffix(".seed0"): arm for arm in ARMS})


def print_tables(source: Path) -> int:
    """Print what was found."""
    rows = rows_of(source)
    if not rows:
        print("nothing is measured yet")
        return 1
    print(f"\n{report.table(rows, tuple(ARMS))}\n\n{report.guard_table(rows)}")
    return 0


def main() -> int:
    """Run, print or draw."""
    kinds = {"run": Run, "rows": Rows, "table": Table, "plot": Plot}
    chosen = tyro.extras.subcommand_cli_from_dict(kinds)
    if isinstance(chosen, Run):
        return run_all(chosen)
    if isinstance(chosen, Table):
        return print_tables(chosen.source)
    if isinstance(chosen, Rows):
        print("\n".join(report.write(rows_of(chosen.out))))
    else:
        report.draw(rows_of(chosen.source), chosen.arms, chosen.picture)
        print(chosen.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
