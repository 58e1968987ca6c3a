"""`asyncrl pace [CONFIG.toml ...] --out FOLDER [--flags]`: train in rounds, refit the world between.

A round: train; record the newest policy in the true simulator; refit world and reward model to that; audit
the old and the new world on held-out starts. The next round trains in the world with fewer wrong verdicts.
This is the co-evolution (PACE) of WoVR, arXiv:2602.13977, between stretches of one run.

Every stage is an `asyncrl` command in a process of its own, and done when its output has its final name: a
command line that is given again goes on behind the last stage that was done.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final

import tyro

from asyncrl import registry
from asyncrl.commands.train import read_settings
from asyncrl.config.bounds import THREADS, AtLeast, Bounded
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError, RunError
from asyncrl.observability.signals import die_with_parent, interrupts_raised
from asyncrl.storage.atomic import read_json, write_text
from asyncrl.storage.run_owner import acquire

RECORDED: Final = 50_000
"""First simulator seed of the recordings."""
AUDITED: Final = 1_000
"""Number of the evaluation whose starts audits use: `asyncrl evaluate` begins at 0."""
SETTINGS: Final = "pace.json"
OWN: Final = ("--run-dir", "--updates", "--resume")
"""Flags of `asyncrl train` that the command sets."""


@dataclass(frozen=True, kw_only=True)
class PaceConfig(Bounded):
    """Train in rounds and refit the world between them. All other flags are those of `asyncrl train`."""

    out: Path
    """Folder of the run, the recordings and the worlds."""
    rounds: Annotated[int, AtLeast(1, "a run has a round.", "Use 3.", highest=999)] = 3
    """Rounds in all; a larger number continues an earlier command."""
    round_updates: Annotated[int, AtLeast(1, "a round trains.", "Use 12.", highest=1_000_000)] = 12
    """Optimizer updates of each round."""
    episodes: Annotated[int, AtLeast(1, "a refit needs episodes.", "Use 256.", highest=10_000)] = 256
    """True episodes to record in each round."""
    data: tuple[Path, ...] = ()
    """Further recordings for every refit, such as those the world was fitted on."""
    world_steps: Annotated[int, AtLeast(1, "it counts steps.", "Use 2000.")] = 2_000
    """Optimizer steps of each refit of the world."""
    reward_steps: Annotated[int, AtLeast(0, "it counts steps.", "Use 2000.")] = 2_000
    """Optimizer steps of each new reward model; 0 keeps the first world's."""
    fit_flags: str = ""
    """Further flags of `asyncrl fit world`, as one text."""
    audit_episodes: Annotated[int, AtLeast(1, "an audit has episodes.", "Use 128.", highest=100_000)] = 128
    """Held-out episodes of each audit; of simulators with stored starts divided among the tasks."""
    workers: Annotated[int, AtLeast(1, "somebody has to play.", "Use 8.", highest=THREADS)] = min(
        8, os.cpu_count() or 1
    )
    """Simulator processes."""


ARGUMENTS: Final = PaceConfig


def main(arguments: list[str]) -> int:
    """Run all rounds, or those that are left."""
    pace, rest = tyro.cli(PaceConfig, args=arguments, prog="asyncrl pace", return_unknown_args=True)
    if taken := [flag for flag in rest if flag.partition("=")[0] in OWN]:
        raise ConfigError(
            f"{taken[0]} is set by `asyncrl pace`: the run is in --out, a round has --round-updates, and the "
            "same command line continues it. Leave it out."
        )
    train = read_settings(rest)
    rounds = Rounds(pace, rest, train)
    rounds.check_settings()
    lock = acquire(pace.out)  # A second command would delete what the first one is writing.
    try:
        rows = [rounds.play(number) for number in range(1, pace.rounds + 1)]
    finally:
        lock.release()
    print("\n".join([TITLES, *map(str, rows)]))
    print(f"policy: {rounds.run}, next: asyncrl evaluate {shlex.quote(str(rounds.run))}")
    return 0


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """Shares of the episodes of an audit."""

    imagined: float
    """Successes in imagination."""
    true: float
    """Successes of the same actions in the simulator."""
    wrong: float
    """Episodes in which these differ."""

    @classmethod
    def read(cls, path: Path) -> Verdicts:
        """Read the file that `asyncrl audit --json` wrote."""
        rates = read_json(path)["audits"][0]
        names = {"imagined": "imagined_success", "true": "true_success", "wrong": "wrong"}
        return cls(**{name: rates[rate]["rate"] for name, rate in names.items()})


@dataclass(frozen=True, kw_only=True)
class Round:
    """Result of a round."""

    number: int
    old: Verdicts
    """Of the world that was trained in."""
    new: Verdicts
    """Of the refitted world."""

    @property
    def improved(self) -> bool:
        """True if the refitted world has fewer wrong verdicts; a tie keeps the old one."""
        return self.new.wrong < self.old.wrong

    def __str__(self) -> str:
        shares = self.old.imagined, self.old.true, self.old.wrong, self.new.wrong
        imagined, true, old, new = (f"{share:.1%}" for share in shares)
        kept = "new" if self.improved else "old"
        return f"{self.number:>5} {imagined:>9} {true:>7} {old:>17} {new:>7}  {kept}"


TITLES: Final = f"{'round':>5} {'imagined':>9} {'true':>7} {'wrong, old world':>17} {'new':>7}  next world"


class Rounds:
    """The stages of a command line and their outputs."""

    def __init__(self, pace: PaceConfig, train_flags: Sequence[str], train: TrainConfig) -> None:
        from asyncrl.evaluation.evaluate import simulator_of_tasks
        from asyncrl.launch.named_models import folder_part
        from asyncrl.storage.assets import simulator_named, start_states_path, world_folder
        from asyncrl.worlds.start_states import load_start_states

        if registry.names_code(train.world) or simulator_named(train.world):
            raise ConfigError(
                f"--world {train.world} cannot be refitted: it is a simulator or a class of your own. Name a "
                "folder or a shipped world."
            )
        self.pace, self._flags, self._train = pace, list(train_flags), train
        self.run = pace.out / "run"
        self._world, first = train.world, world_folder(train.world)
        about = first / "world.json"
        self._first_version = int(read_json(about).get("version", 0)) if about.is_file() else 0
        reward = train.reward or (str(first) if not pace.reward_steps else "")
        self._reward = ["--reward", reward] if reward else []
        self._starts = start_states_path(train.start_states, folder_part(train.world))
        states = load_start_states(self._starts, keyframes=train.keyframes)
        tasks = sorted({state.task for state in states})
        self._simulator = train.evaluation.simulator or simulator_of_tasks(tasks)
        if not self._simulator:
            raise ConfigError(
                f"no built-in simulator has the task {tasks[0]!r} of {self._starts}, so nothing true can be "
                "recorded. Name one: --evaluation.simulator package.module:Class."
            )

    def check_settings(self) -> None:
        """Write the settings into the folder, or compare them with those it was begun with."""
        own = asdict(replace(self.pace, rounds=1, workers=1, data=(), out=Path()))
        asked = json.loads(json.dumps(own | {"train": self._flags}, default=str))
        path = self.pace.out / SETTINGS
        if not path.is_file():
            if self.pace.out.is_dir() and any(self.pace.out.iterdir()):
                raise ConfigError(f"--out {self.pace.out} holds other files. Choose a new folder.")
            self.pace.out.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(asked, indent=1) + "\n")
        begun = read_json(path)
        for name, value in asked.items():
            if begun.get(name) != value:
                raise ConfigError(
                    f"--out {self.pace.out} was begun with {name} {begun.get(name)}, not {value}. Give the "
                    "same command line to continue it, or choose a new folder."
                )

    def play(self, number: int) -> Round:
        """Do the stages of a round that are left, and train in the better world from then on."""
        folder = self.pace.out / f"round-{number:03d}"
        folder.mkdir(exist_ok=True)
        policy = self._train_to(number * self.pace.round_updates)
        self._make(folder / "recordings", lambda out: [self._record(number, policy, out)])
        self._make(folder / "world", lambda out: self._refit(number, folder, out))
        audits = {}
        for name, world in (("old", self._world), ("new", str(folder / "world"))):
            path = folder / f"{name}.json"
            self._make(path, lambda out, world=world: [self._audit(policy, world, out)])
            audits[name] = Verdicts.read(path)
        result = Round(number=number, **audits)
        print(f"{TITLES}\n{result}", flush=True)
        if result.improved:
            self._world = str(folder / "world")
        return result

    def _make(self, path: Path, commands: Callable[[Path], list[list[str]]]) -> None:
        """Run the commands that write an output, unless it is there; it gets its name when they are done."""
        if path.exists():
            return
        part = path.with_name(f"part-{path.name}")
        if part.is_dir():
            shutil.rmtree(part)
        for arguments in commands(part):
            run_command(arguments)
        part.rename(path)

    def _train_to(self, updates: int) -> str:
        """Train to an update unless it was reached; returns its checkpoint as --policy takes it."""
        from asyncrl.storage import checkpoint

        if updates not in checkpoint.kept(self.run):
            begun = checkpoint.latest(self.run) is not None
            if self.run.exists() and not begun:
                shutil.rmtree(self.run)  # It ended before its first checkpoint.
            models = ["--world", self._world, *self._reward, "--start-states", str(self._starts)]
            place = ["--run-dir", str(self.run), "--updates", str(updates)]
            run_command(["train", *self._flags, *place, *models, *(["--resume"] if begun else [])])
        kept = checkpoint.kept(self.run)
        if updates not in kept:
            raise RunError(f"training stopped before update {updates}. The same command line continues it.")
        name, _ = registry.split(self._train.policy)
        return f"{name}@{kept[updates]}" if name else str(kept[updates])

    def _record(self, number: int, policy: str, out: Path) -> list[str]:
        seed = RECORDED + (number - 1) * self.pace.episodes
        return [
            *("collect", "--out", str(out), "--policy", policy, *self._simulator_flags()),
            *("--episodes", str(self.pace.episodes), "--seed", str(seed)),
            *("--temperature", str(self._train.algorithm.temperature)),
        ]

    def _refit(self, number: int, folder: Path, out: Path) -> list[list[str]]:
        recorded = [str(path) for path in sorted(folder.parent.glob("round-*/recordings"))]
        data = ["--data", *recorded, *map(str, self.pace.data), "--device", self._train.device]
        world = [
            *("fit", "world", "--refine", self._world, "--out", str(out), *data),
            *("--steps", str(self.pace.world_steps), "--version", str(self._first_version + number)),
            *shlex.split(self.pace.fit_flags),
        ]
        steps = ["--steps", str(self.pace.reward_steps)]
        return [world] if self._reward else [world, ["fit", "reward", "--world", str(out), *data, *steps]]

    def _audit(self, policy: str, world: str, out: Path) -> list[str]:
        models = ["--world", world, *self._reward, *self._simulator_flags()]
        return ["audit", policy, *models, *self._audit_starts, "--json", str(out)]

    @cached_property
    def _audit_starts(self) -> list[str]:
        from asyncrl.simulators.build import SimulatorSource

        settings = self._train.evaluation.simulator_settings
        spec = SimulatorSource(name=self._simulator, settings=settings).spec()
        if spec.trials:
            return ["--trials", str(min(spec.trials, -(-self.pace.audit_episodes // len(spec.tasks))))]
        return ["--episodes", str(self.pace.audit_episodes), "--seed", str(AUDITED)]

    def _simulator_flags(self) -> list[str]:
        settings = self._train.evaluation.simulator_settings
        own = ["--simulator-settings", *settings] if settings else []
        workers = ["--workers", str(self.pace.workers), "--device", self._train.device]
        return ["--simulator", self._simulator, *own, *workers]


def run_command(arguments: Sequence[str]) -> None:
    """Run an `asyncrl` command in a process group of its own that ends with this process.

    SIGINT, SIGTERM and SIGHUP interrupt the command, which then saves what it can.
    """
    print(f"\n$ asyncrl {shlex.join(arguments)}", flush=True)
    command, parent = [sys.executable, "-m", "asyncrl", *arguments], os.getpid()
    with interrupts_raised():
        child = subprocess.Popen(  # noqa: S603
            command, process_group=0, preexec_fn=lambda: die_with_parent(parent)
        )
        try:
            code = child.wait()
        except KeyboardInterrupt:
            os.killpg(child.pid, signal.SIGINT)
            child.wait()
            raise RunError(
                f"stopped during `asyncrl {arguments[0]}`. The same command line continues."
            ) from None
    if code:
        raise RunError(
            f"`asyncrl {shlex.join(arguments)}` ended with exit code {code}. Its own message is above; the "
            "same command line continues with it."
        )
