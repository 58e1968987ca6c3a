"""Does a world that is refitted on the policy's true episodes beat one that stays as it is?

    python benchmarks/coevolution.py run OUT --base DATA/places DATA/rollouts --flags="--device cuda"
    python benchmarks/coevolution.py table OUT
    python benchmarks/coevolution.py plot OUT coevolution.png     needs the extra 'benchmarks' (matplotlib)

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

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import tyro
from measuring import commit
from simulator_training import program

from asyncrl.evaluation.evaluate import SuccessRate
from asyncrl.pace import rounds
from asyncrl.storage.run_folder import has_checkpoint

UPDATES: Final = 40
EVERY: Final = 6
GROUP: Final = 8
"""Episodes of a group."""
ROWS: Final = 64
"""Episodes that an audit imagines together."""
SHIPPED: Final = "shipped"
"""Name of the policy that all begin with."""
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
THRESHOLD: Final = 0.7
"""--actor.success-threshold of the default run."""
GUARDS: Final[dict[str, Callable[[dict[str, float]], tuple[float, float]]]] = {
    "none": lambda signals: (1.0, 1.0),
    "lasting": lambda signals: (float(1.0 - signals["last frame"] >= THRESHOLD), 1.0),
    "probability": lambda signals: (1.0 - signals["best frame"], 1.0),
    "second": lambda signals: (1.0, 1.0 - signals["second draw: verdict"]),
}
"""By name: reward and weight that a guard gives a success with these signals. Approximate: a success that is
none under *lasting* would have gone on, and *probability* pays the first score, not the best."""


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
class Table:
    """Print the results as Markdown tables."""

    out: Annotated[Path, tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw the results."""

    out: Annotated[Path, tyro.conf.Positional]
    picture: Annotated[Path, tyro.conf.Positional]


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
    flags = [
        "--every-checkpoint",
        "--versions",
        *map(str, versions(run, folder)),
        "--rows",
        str(ROWS),
        *world,
    ]
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


def cell(run: Run, arm: str, seed: int) -> str:
    """Train and judge one run; returns a line."""
    folder = train(run, arm, seed)
    judge(run, arm, seed, folder)
    return f"{arm}, seed {seed}: {' '.join(rates(run.out, folder_name(arm, seed)))}"


def run_all(run: Run) -> int:
    """Make all that is missing, then print the tables."""
    (run.out / "runs").mkdir(parents=True, exist_ok=True)
    print(f"python {shlex.join(sys.argv)}   commit {commit()}", flush=True)
    with ThreadPoolExecutor(run.jobs) as pool:
        if "frozen" in run.arms:
            flags = ("tabletop", "--signals", "--rows", str(ROWS))
            pool.submit(measure, run, run.out / f"{SHIPPED}.audit.json", "audit", *flags)
        cells = [pool.submit(cell, run, arm, seed) for seed in run.seeds for arm in run.arms]
        for ended in as_completed(cells):
            print(ended.result(), flush=True)
    return table(run.out)


def answers(out: Path, name: str, kind: str) -> dict[int, dict[str, Any]]:
    """Read what was measured of a run, by version."""
    found = {}
    for path in sorted(out.glob(f"{name}.update*.{kind}.json")):
        version = int(path.name.removesuffix(f".{kind}.json").rpartition("update")[2])
        found[version] = json.loads(path.read_text())
    return found


def audits(out: Path, name: str) -> dict[int, dict[str, Any]]:
    """Read the audits of a run, by version."""
    file = out / f"{name}.audit.json"
    found = json.loads(file.read_text())["audits"] if file.exists() else []
    return {int(one["name"].rpartition(" ")[2]): one for one in found}


def rates(out: Path, name: str) -> list[str]:
    """True success of each judged version, in percent."""
    return [f"{100 * one['overall']['rate']:.0f}" for one in answers(out, name, "evaluate").values()]


def audited(out: Path, name: str) -> tuple[list[str], list[str]]:
    """Imagined minus true success of the same actions, in points, and wrong verdicts in percent."""
    found = list(audits(out, name).values())
    gaps = [100 * (one["imagined_success"]["rate"] - one["true_success"]["rate"]) for one in found]
    return [f"{gap:+.0f}" for gap in gaps], [f"{100 * one['wrong']['rate']:.0f}" for one in found]


def stopped_early(out: Path, name: str) -> str:
    """Judge the checkpoint of the frozen run that its share of the true episodes calls the best."""
    choices = answers(out, name, "choose")
    if not choices:
        return ""
    best = max(choices, key=lambda version: (choices[version]["overall"]["rate"], version))
    chosen = answers(out, name, "evaluate")[best]["overall"]
    return f"{interval(chosen)} (version {best})"


def imagined_nothing(folder: Path) -> int:
    """Count the true episodes of a run that trained on nothing else; 0: it imagined."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((folder / "config.json").read_text())
    if config["world"] != "tabletop_true":
        return 0
    algorithm = config["algorithm"]
    return sum("train/loss" in row for row in rows) * algorithm["groups_per_update"] * algorithm["group_size"]


def interval(found: dict[str, Any]) -> str:
    """Write a rate with its interval, in percent."""
    rate = SuccessRate.of(found["successes"], found["episodes"])
    return f"{100 * rate.rate:.1f} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]"


def table(out: Path) -> int:
    """Print what was found: a row per run."""
    names = sorted({path.name.partition(".update")[0] for path in out.glob("*.update*.evaluate.json")})
    if not names:
        print("nothing is measured yet")
        return 1
    judged = list(answers(out, names[0], "evaluate"))
    at = "/".join(map(str, judged))
    titles = ["arm", f"true success after {at} updates, %", "at the end, 95 % interval"]
    titles += ["imagined minus true, points", "wrong verdicts, %", "true episodes", "accepted"]
    print(f"\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for name in names:
        last = list(answers(out, name, "evaluate").values())[-1]["overall"]
        gaps, wrong = audited(out, name)
        made = rounds.read(out / "runs" / name)
        spent = sum(row.episodes for row in made) or imagined_nothing(out / "runs" / name)
        accepted = sum(row.accepted for row in made)
        cells = [name, " ".join(rates(out, name)), interval(last), " ".join(gaps), " ".join(wrong)]
        print(f"| {' | '.join(cells)} | {spent} | {accepted} of {len(made)} |")
        if early := stopped_early(out, name):
            print(f"| {name}, stopped early | | {early} | | | {len(judged)} x | |")
    print_guards(out)
    return 0


def print_guards(out: Path) -> None:
    """Print what guards would have made of the successes of frozen runs: a row per audit with signals."""
    names = [SHIPPED, *sorted({path.name.partition(".audit")[0] for path in out.glob("frozen.*.audit.json")})]
    print(f"\n| audit | {' | '.join(GUARDS)} |\n{'|---' * (1 + len(GUARDS))}|")
    for name in names:
        file = out / f"{name}.audit.json"
        for one in json.loads(file.read_text())["audits"] if file.exists() else []:
            cells = [f"{correlation(one['episodes'], guard):.2f}" for guard in GUARDS]
            print(f"| {name}, {one['name']} | {' | '.join(cells)} |")


def correlation(episodes: Sequence[dict[str, Any]], guard: str) -> float:
    """Of reward and truth under a guard, over audited episodes, each with the guard's weight."""
    kept = [GUARDS[guard](one["signals"]) if one["imagined"] else (0.0, 1.0) for one in episodes]
    rewards, weights = np.array(kept).T
    true = np.array([one["true"] for one in episodes], float)
    deviations = np.cov(np.stack([rewards, true]), aweights=weights)
    return float(deviations[0, 1] / np.sqrt(deviations[0, 0] * deviations[1, 1]))


def plot(chosen: Plot) -> int:
    """Draw true success, imagined minus true and wrong verdicts by update: of every arm the seeds' mean."""
    import_module("matplotlib").use("Agg")  # Of the extra `benchmarks`, and of this function alone.
    _, axes = import_module("matplotlib.pyplot").subplots(1, 3, figsize=(15, 4))
    for arm in ARMS:
        names = [
            path.name.partition(".update")[0] for path in chosen.out.glob(f"{folder_name(arm, 0)[:-1]}*")
        ]
        found = [one for name in sorted(set(names)) if (one := curves(chosen.out, name))]
        for axis, number in zip(axes, range(3), strict=True) if found else ():
            shared = sorted(set.intersection(*(set(one) for one in found)))
            means = [sum(one[version][number] for one in found) / len(found) for version in shared]
            axis.plot(shared, means, marker="o", label=f"{arm} ({len(found)})")
    for axis, title in zip(
        axes, ("true success, %", "imagined minus true, points", "wrong verdicts, %"), strict=True
    ):
        axis.set(xlabel="updates", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7, title="arm (seeds)")
    axes[0].figure.tight_layout()
    axes[0].figure.savefig(chosen.picture, dpi=120)
    print(chosen.picture)
    return 0


def curves(out: Path, name: str) -> dict[int, tuple[float, float, float]]:
    """Return the numbers of a run by version: true success, imagined minus true, wrong verdicts."""
    judged = answers(out, name, "evaluate")
    return {
        version: (
            100 * judged[version]["overall"]["rate"],
            100 * (one["imagined_success"]["rate"] - one["true_success"]["rate"]),
            100 * one["wrong"]["rate"],
        )
        for version, one in audits(out, name).items()
        if version in judged
    }


def main() -> int:
    """Run, print or draw."""
    chosen = tyro.extras.subcommand_cli_from_dict({"run": Run, "table": Table, "plot": Plot})
    if isinstance(chosen, Run):
        return run_all(chosen)
    return plot(chosen) if isinstance(chosen, Plot) else table(chosen.out)


if __name__ == "__main__":
    sys.exit(main())
