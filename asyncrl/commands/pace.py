"""`asyncrl pace [CONFIG.toml ...] --out FOLDER [--flags]`: train in rounds, refit the world between.

A round: train; record the newest policy in the true simulator; refit world and reward model to that; audit
the old and the new world on held-out starts. The next round trains in the world with fewer wrong verdicts.
This is the co-evolution (PACE) of WoVR, arXiv:2602.13977, between stretches of one run.

Every stage is an `asyncrl` command in a process of its own, and done when its output has its final name: a
command line given again continues after the last completed stage.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import tyro

from asyncrl import registry
from asyncrl.commands.evaluate import WORKERS, Workers
from asyncrl.commands.train import read_settings
from asyncrl.config.bounds import AtLeast, Bounded
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError, RunError, first_line
from asyncrl.observability.signals import die_with_parent
from asyncrl.storage.assets import simulator_named, start_states_path, world_folder
from asyncrl.storage.atomic import read_json, write_text
from asyncrl.storage.run_owner import acquire
from asyncrl.storage.untrusted import check_types

RECORDED: Final = 50_000  # First simulator seed of the recordings
AUDITED: Final = 1_000  # Number of the evaluation whose starts audits use: `asyncrl evaluate` begins at 0
SETTINGS: Final = "pace.json"
OWN: Final = ("--run-dir", "--updates", "--resume")  # Flags of `asyncrl train` that the command sets


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
    workers: Workers = WORKERS
    """Simulator processes."""


TITLES: Final = f"{'round':>5} {'imagined':>9} {'true':>7} {'wrong, old world':>17} {'new':>7}  next world"


def main(arguments: list[str]) -> int:
    """Run all remaining rounds."""
    pace, rest = tyro.cli(PaceConfig, args=arguments, prog="asyncrl pace", return_unknown_args=True)
    if taken := [flag for flag in rest if flag.partition("=")[0] in OWN]:
        raise ConfigError(
            f"{taken[0]} is set by `asyncrl pace`: the run is in --out, a round has --round-updates, and the "
            "same command line continues it. Leave it out."
        )
    rounds = Rounds(pace, rest, read_settings(rest))
    rounds.check_settings()
    lock = acquire(pace.out)  # A second command would delete what the first one is writing.
    try:
        rows = [rounds.play(number) for number in range(1, pace.rounds + 1)]
    finally:
        lock.release()
    print("\n".join([TITLES, *rows]))
    print(f"policy: {rounds.run}, next: asyncrl evaluate {shlex.quote(str(rounds.run))}")
    return 0


def rates_of(audit: Path) -> list[float]:
    """Return the shares of imagined successes, true ones and wrong verdicts of `asyncrl audit --json`."""
    try:
        rates, names = read_json(audit)["audits"][0], ("imagined_success", "true_success", "wrong")
        found = {name: rates[name]["rate"] for name in names}
        check_types(found, dict.fromkeys(names, float))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{audit} is no audit ({first_line(error)}). Delete it to audit again.") from error
    return list(found.values())


class Rounds:
    """The stages of a command line and their outputs."""

    def __init__(self, pace: PaceConfig, train_flags: Sequence[str], train: TrainConfig) -> None:
        from asyncrl.evaluation.success_rate import simulator_of_tasks
        from asyncrl.launch.named_models import folder_part
        from asyncrl.simulators.interface import SimulatorSource
        from asyncrl.worlds.start_states import load_start_states

        if registry.names_code(train.world) or simulator_named(train.world):
            raise ConfigError(
                f"--world {train.world} cannot be refitted: it is a simulator or a class of your own. Name a "
                "folder or a shipped world."
            )
        self.run = pace.out / "run"
        self._pace, self._flags, self._train, self._world = pace, list(train_flags), train, train.world
        first = world_folder(train.world)
        about = first / "world.json"
        self._first_version = int(read_json(about).get("version", 0)) if about.is_file() else 0
        reward = train.reward or (str(first) if not pace.reward_steps else "")
        self._reward = ["--reward", reward] if reward else []
        self._starts = start_states_path(train.start_states, folder_part(train.world))
        states = load_start_states(self._starts, keyframes=train.keyframes)
        tasks, settings = sorted({state.task for state in states}), train.evaluation.simulator_settings
        simulator = train.evaluation.simulator or simulator_of_tasks(tasks)
        if not simulator:
            raise ConfigError(
                f"no built-in simulator has the task {tasks[0]!r} of {self._starts}, so nothing true can be "
                "recorded. Name one: --evaluation.simulator package.module:Class."
            )
        own = ["--simulator-settings", *settings] if settings else []
        workers = ["--workers", str(pace.workers), "--device", train.device]
        self._simulator = ["--simulator", simulator, *own, *workers]
        spec = SimulatorSource(name=simulator, settings=settings).spec()
        self._audited = ["--episodes", str(pace.audit_episodes), "--seed", str(AUDITED)]
        if spec.trials:
            self._audited = ["--trials", str(min(spec.trials, -(-pace.audit_episodes // len(spec.tasks))))]

    def check_settings(self) -> None:
        """Write the settings into the folder, or compare them with the earlier ones."""
        out, path = self._pace.out, self._pace.out / SETTINGS
        own = asdict(replace(self._pace, rounds=1, workers=1, data=(), out=Path()))
        asked = json.loads(json.dumps(own | {"train": self._flags}, default=str))
        if not path.is_file():
            if out.is_dir() and any(out.iterdir()):
                raise ConfigError(f"--out {out} holds other files. Choose a new folder.")
            out.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(asked, indent=1) + "\n")
        begun = read_json(path)
        for name, value in asked.items():
            if begun.get(name) != value:
                raise ConfigError(
                    f"--out {out} was begun with {name} {begun.get(name)}, not {value}. Give the "
                    "same command line to continue it, or choose a new folder."
                )

    def play(self, number: int) -> str:
        """Run the remaining stages of a round and choose the better world for the next; return a row."""
        folder = self._pace.out / f"round-{number:03d}"
        folder.mkdir(exist_ok=True)
        policy = self._train_to(number * self._pace.round_updates)
        self._record(folder / "recordings", policy, number)
        self._refit(folder / "world", number)
        audit, found = ["audit", policy, *self._reward, *self._simulator, *self._audited], []
        for name, world in (("old", self._world), ("new", str(folder / "world"))):
            path = folder / f"{name}.json"
            _make(path, [[*audit, "--world", world, "--json", str(_part(path))]])
            found.append(rates_of(path))
        (imagined, true, old), (*_, new) = found
        if new < old:  # A tie keeps the old one.
            self._world = str(folder / "world")
        row = f"{number:>5} {imagined:>9.1%} {true:>7.1%} {old:>17.1%} {new:>7.1%}  "
        row += "new" if new < old else "old"
        print(f"{TITLES}\n{row}", flush=True)
        return row

    def _train_to(self, updates: int) -> str:
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

    def _record(self, out: Path, policy: str, number: int) -> None:
        episodes, temperature = self._pace.episodes, self._train.algorithm.temperature
        seed = RECORDED + (number - 1) * episodes
        collect = ["collect", "--out", str(_part(out)), "--policy", policy, *self._simulator]
        sizes = ["--episodes", str(episodes), "--seed", str(seed), "--temperature", str(temperature)]
        _make(out, [[*collect, *sizes]])

    def _refit(self, out: Path, number: int) -> None:
        part, pace = str(_part(out)), self._pace
        recorded = sorted(pace.out.glob("round-*/recordings"))
        data = ["--data", *map(str, [*recorded, *pace.data]), "--device", self._train.device]
        version = ["--version", str(self._first_version + number), *shlex.split(pace.fit_flags)]
        world = ["fit", "world", "--refine", self._world, "--out", part, "--steps", str(pace.world_steps)]
        reward = ["fit", "reward", "--world", part, "--steps", str(pace.reward_steps), *data]
        _make(out, [[*world, *data, *version], *([] if self._reward else [reward])])


def _part(path: Path) -> Path:
    return path.with_name(f"part-{path.name}")


def _make(path: Path, commands: list[list[str]]) -> None:
    if path.exists():
        return
    if _part(path).is_dir():
        shutil.rmtree(_part(path))
    for arguments in commands:
        run_command(arguments)
    _part(path).rename(path)


def run_command(arguments: Sequence[str]) -> None:
    """Run an `asyncrl` command in a process group of its own that ends with this process."""
    print(f"\n$ asyncrl {shlex.join(arguments)}", flush=True)
    command, parent = [sys.executable, "-m", "asyncrl", *arguments], os.getpid()
    child = subprocess.Popen(  # noqa: S603
        command, process_group=0, preexec_fn=lambda: die_with_parent(parent)
    )
    try:
        code = child.wait()
    except KeyboardInterrupt as ended:  # By SIGTERM and SIGHUP too: the command saves what it can.
        with contextlib.suppress(ProcessLookupError):  # It may have ended by itself.
            os.killpg(child.pid, signal.SIGINT)
        child.wait()
        ended.add_note(f"stopped during `asyncrl {arguments[0]}`. The same command line continues.")
        raise
    if code:
        raise RunError(
            f"`asyncrl {shlex.join(arguments)}` ended with exit code {code}. Its own message is above; the "
            "same command line continues with it."
        )
