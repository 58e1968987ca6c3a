"""`asyncrl runs list|compare|gc`: look over the runs of a folder, and clean up after them.

Only recognised files are deleted, none of a running run, and no run can begin in a folder during that.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import tyro

from asyncrl.config.bounds import AtLeast, Bounded
from asyncrl.config.help import subcommands
from asyncrl.errors import ConfigError
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.replay_tools.episodes import NOTHING, table, warn
from asyncrl.storage import run_folder, run_owner
from asyncrl.storage.run_folder import State, summarise
from asyncrl.storage.run_owner import FolderInUse
from asyncrl.storage.untrusted import kind_of, remove

OLDER: Final = "older checkpoints"
UNFINISHED: Final = "unfinished checkpoints"
_CHECKPOINT: Final = re.compile(r"update_(\d{6,})")
_PART: Final = ".tmp"


@dataclass(frozen=True, kw_only=True)
class _Look(Bounded):
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = Path("runs")
    """Folder of runs, or one run."""

    def runs(self) -> list[Path]:
        return run_folder.runs_in(self.folder.expanduser())


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A file or folder of a run that can be deleted."""

    path: Path
    kind: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Gc(_Look):
    """List the files of ended runs that can be deleted; --yes deletes them.

    What can go: checkpoints but the newest ones and the best, and unfinished ones. Running runs, and all that
    is not recognised, are left alone. `asyncrl replay prune` deletes groups.
    """

    keep_checkpoints: Annotated[int, AtLeast(1, "a run goes on from the newest.", "Use 1.")] = 1
    """Newest checkpoints of each run that stay."""
    yes: bool = False
    """Delete it."""

    def run(self) -> int:
        """List, and with --yes delete; 1 when something could not be deleted."""
        states = {run: summarise(run).state for run in self.runs()}
        found = {run: self._leftovers(run, state) for run, state in states.items()}
        self._print(states, found)
        listed = [one.path for leftovers in found.values() for one in leftovers]
        left = [path for path in listed if path.exists()] if self.yes else []
        for path in left:
            warn(f"{path} could not be deleted. Delete it as its owner.")
        return int(bool(left))

    def _leftovers(self, run: Path, state: State) -> list[Leftover]:
        if self.yes and state is not State.RUNNING:
            try:
                with run_owner.kept_unowned(run, "runs gc"):
                    found = list(leftovers_of(run, state, self.keep_checkpoints))
                    for one in found:
                        _delete(one)
                return found
            except FolderInUse as error:
                warn(str(error))
        return list(leftovers_of(run, state, self.keep_checkpoints))

    def _print(self, states: Mapping[Path, State], found: Mapping[Path, Sequence[Leftover]]) -> None:
        rows = [("run", "state", "what", "number", "MB")]
        for run, leftovers in found.items():
            for kind in (OLDER, UNFINISHED):
                if sizes := [one.nbytes for one in leftovers if one.kind == kind]:
                    rows.append((run.name, states[run].value, kind, str(len(sizes)), _mb(sum(sizes))))
        if len(rows) > 1:
            print(table(rows))
        if running := [run.name for run, state in states.items() if state is State.RUNNING]:
            print(f"left alone, for it runs: {', '.join(running)}")
        total = sum(one.nbytes for leftovers in found.values() for one in leftovers)
        hint = "; --yes does it" if total and not self.yes else ""
        print(f"{'deleted' if self.yes else 'would free'} {_mb(total)} MB in {self.folder}{hint}", flush=True)


def leftovers_of(run: Path, state: State, keep: int) -> Iterator[Leftover]:
    """Yield the leftovers of a run that has ended; none of a running one."""
    if state is not State.RUNNING and kind_of(run / "checkpoints") == "a folder":
        yield from _checkpoints(run / "checkpoints", keep)


def _checkpoints(folder: Path, keep: int) -> Iterator[Leftover]:
    """Yield unfinished checkpoints and those before the newest; a link, like 'best', keeps its target."""
    paths = [path for path in sorted(folder.iterdir()) if kind_of(path) == "a folder"]
    for path in paths:
        unfinished = path.suffix == _PART and _CHECKPOINT.fullmatch(path.stem)
        if unfinished or path.name in run_folder.LEFT_BY_EVALUATOR:
            yield Leftover(path=path, kind=UNFINISHED, nbytes=folder_bytes(path, freed=True))
    complete = sorted((int(match[1]), path) for path in paths if (match := _CHECKPOINT.fullmatch(path.name)))
    if complete and not run_folder.is_whole(newest := complete[-1][1]):
        warn(f"{newest} is not whole, so that the checkpoints before it stay")
        return
    named = {path.resolve() for path in folder.iterdir() if path.is_symlink()}
    for _, path in complete[:-keep]:
        if path.resolve() not in named:
            yield Leftover(path=path, kind=OLDER, nbytes=folder_bytes(path, freed=True))


def folder_bytes(folder: Path, *, freed: bool = False) -> int:
    """Sum the sizes of a folder's files, each once; if `freed`, without those that have a name elsewhere."""
    sizes: dict[tuple[int, int], int] = {}
    for above, _, names in os.walk(folder):
        for name in names:
            try:
                found = (Path(above) / name).lstat()
            except FileNotFoundError:  # A live run deletes files.
                continue
            if not freed or found.st_nlink == 1:
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def _delete(one: Leftover) -> None:
    """A half-deleted checkpoint must not look like a complete one."""
    try:
        path = one.path
        if one.kind == OLDER:
            path = one.path.with_name(one.path.name + _PART)
            one.path.rename(path)
        remove(path)
    except OSError as error:
        warn(f"{one.path}: {error.strerror}")


COMPARED: Final = (
    *(m.SUCCESS_ONCE, m.EVAL_SUCCESS, m.RETURN, m.APPROX_KL, m.CLIP_FRACTION, m.GRAD_NORM, m.ENTROPY_LOSS),
    *(s.LAG_MEAN, s.GROUPS_PER_MINUTE, s.LEARNER_WAITING, s.ACTORS_WAITING),
)
"""Metrics that `compare` shows without --all."""
LONG_AGO: Final = 300 * 86_400  # Seconds after which a date has its year instead of the time of day


@dataclass(frozen=True, kw_only=True)
class List(_Look):
    """List the runs of a folder: when each began, what became of it, how far it is, success, disk."""

    json: bool = False
    """Print JSON: a list with more digits, sizes in bytes."""

    def run(self) -> int:
        """Print a row per run, the one started last at the end."""
        runs = [summarise(path) for path in self.runs()]
        if self.json:
            names = ("started", "version", "updates", "imagined_success", "true_success", "problem")
            listed = [
                {"run": str(run.path), "state": run.state.value, "bytes": folder_bytes(run.path)}
                | {name: getattr(run, name) for name in names}
                for run in runs
            ]
            print(json.dumps(listed, indent=2))
            return 0
        rows: list[tuple[str, ...]] = [("run", "started", "state", "updates", "imagined", "true", "MB")]
        for run in runs:
            rates = (run.imagined_success, run.true_success)
            shares = [NOTHING if rate is None else f"{rate:.1%}" for rate in rates]
            place = (run.path.name, _when(run.started), run.state.value, f"{run.version}/{run.updates}")
            rows.append((*place, *shares, _mb(folder_bytes(run.path))))
        print(table(rows) if runs else f"There are no runs in {self.folder}.")
        for run in runs:
            if run.problem:
                print(f"{run.path.name}: {run.problem}", file=sys.stderr)
        return 0


@dataclass(frozen=True, kw_only=True)
class Compare(Bounded):
    """Compare runs: the settings that differ, and the metrics of their last updates."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Folders of two runs or more."""
    all: bool = False
    """All metrics, not only those that are looked at first."""

    def run(self) -> int:
        """Print a table of settings and one of metrics."""
        runs = [path.expanduser() for path in self.runs]
        if len(runs) < 2:
            raise ConfigError("One run cannot be compared. Name two or more: asyncrl runs compare A B")
        for path in runs:
            if not run_folder.is_run(path):
                raise ConfigError(
                    f"{path} is not the folder of a run: it has no config.json. Check the path."
                )
        settings = _columns([dict(_flat(run_folder.settings_of(path))) for path in runs])
        settings = {name: row for name, row in settings.items() if any(value != row[0] for value in row)}
        newest = [run_folder.newest_rows(path / run_folder.METRICS) for path in runs]
        metrics = _columns([measured | update for update, measured in newest])
        shown = dict.fromkeys(["step", *(metric.name for metric in COMPARED), *(metrics if self.all else ())])
        metrics = {name: metrics[name] for name in shown if name in metrics}
        names = [str(path) for path in runs]
        if len({path.name for path in runs}) == len(runs):
            names = [path.name for path in runs]
        for title, values, nothing in (
            ("setting", settings, "The settings are the same."),
            ("last", metrics, "There are no metrics yet."),
        ):
            rows = [(name, *map(_text, of_runs)) for name, of_runs in values.items()]
            text = table([(title, *names), *rows]) if rows else nothing
            print(text if title == "setting" else f"\n{text}")
        return 0


COMMANDS: Final = {"list": List, "compare": Compare, "gc": Gc}
ARGUMENTS: Any = tyro.conf.FlagCreatePairsOff[subcommands(COMMANDS)]


def main(arguments: list[str]) -> int:
    """Run one of them; without a name, and with a folder alone, `list`."""
    if not arguments or arguments[0] not in (*COMMANDS, "-h", "--help"):
        arguments = ["list", *arguments]
    wanted: Any = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl runs")
    return wanted.run()


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row if name not in ("run_dir", "resume", "time"))
    return {name: [row.get(name) for row in rows] for name in names}


def _when(seconds: float) -> str:
    pattern = "%m-%d %H:%M" if 0 <= time.time() - seconds < LONG_AGO else "%Y-%m-%d"
    return time.strftime(pattern, time.localtime(seconds))


def _text(value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:.5g}"
    return value if isinstance(value, str) and value else json.dumps(value)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"


def _flat(settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{section}{name}.")
        else:
            yield section + name, value
