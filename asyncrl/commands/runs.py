"""`asyncrl runs list|compare|disk|gc`: look over the runs of a folder, and clean up after them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import tyro

from asyncrl.commands.runs_gc import MB, Gc, folder_bytes
from asyncrl.config.bounds import Bounded
from asyncrl.errors import ConfigError
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.replay_tools.text import NOTHING, table
from asyncrl.storage.run_state import (
    METRICS,
    RunSummary,
    is_run,
    newest_rows,
    runs_in,
    settings_of,
    summarise,
)

PARTS: Final = ("replay", "checkpoints", "videos", "logs")
"""Folders of a run whose sizes `disk` shows apart."""
COMPARED: Final = (
    *(m.SUCCESS_ONCE, m.EVAL_SUCCESS, m.RETURN, m.APPROX_KL, m.CLIP_FRACTION, m.GRAD_NORM, m.ENTROPY_LOSS),
    *(s.LAG_MEAN, s.GROUPS_PER_MINUTE, s.LEARNER_WAITING, s.ACTORS_WAITING),
)
"""Metrics that `compare` shows without --all."""
NOT_COMPARED: Final = ("run_dir", "resume")
"""Settings that differ in any two runs."""
LEFT_OUT: Final = ("started",)
"""Columns that `list` does without in a narrow terminal."""
LONG_AGO: Final = 300 * 86_400
"""Seconds after which a date has its year instead of the time of day."""

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")]


@dataclass(frozen=True, kw_only=True)
class List(Bounded):
    """List the runs of a folder: when each began, what became of it, how far it is, success, disk."""

    folder: Folder = Path("runs")
    """Folder of runs, or one run."""
    json: bool = False
    """Print JSON: a list with more digits."""

    def run(self) -> int:
        """Print a row per run, the one started last at the end."""
        runs = [summarise(path) for path in runs_in(self.folder.expanduser())]
        if self.json:
            print(json.dumps([_as_dict(run) for run in runs], indent=2))
            return 0
        rows = [("run", "started", "state", "updates", "imagined", "true", "MB")]
        rows += [
            (
                run.path.name,
                when(run.started),
                run.state.value,
                f"{run.version}/{run.updates}",
                _percent(run.imagined_success),
                _percent(run.true_success),
                f"{folder_bytes(run.path) / MB:.1f}",
            )
            for run in runs
        ]
        print(table(rows, LEFT_OUT) if runs else f"There are no runs in {self.folder}.")
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
    json: bool = False
    """Print JSON: settings and metrics, each with a value per run."""

    def run(self) -> int:
        """Print a table of settings and one of metrics."""
        runs = [path.expanduser() for path in self.runs]
        if len(runs) < 2:
            raise ConfigError("One run cannot be compared. Name two or more: asyncrl runs compare A B")
        for path in runs:
            if not is_run(path):
                raise ConfigError(
                    f"{path} is not the folder of a run: it has no config.json. Check the path."
                )
        settings = differing([dict(_flat(settings_of(path))) for path in runs])
        found = [measured | update for update, measured in (newest_rows(path / METRICS) for path in runs)]
        metrics = self._metrics(found)
        if self.json:
            names = [str(path) for path in runs]
            print(json.dumps({"runs": names, "settings": settings, "metrics": metrics}, indent=2))
            return 0
        names = [path.name for path in runs]
        names = names if len(set(names)) == len(names) else [str(path) for path in runs]
        print(_side_by_side("setting", names, settings) if settings else "The settings are the same.")
        print(f"\n{_side_by_side('last', names, metrics)}" if metrics else "\nThere are no metrics yet.")
        return 0

    def _metrics(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        names = dict.fromkeys(["step", *(metric.name for metric in COMPARED)])
        if self.all:
            names = dict.fromkeys([*names, *(name for row in rows for name in row if name != "time")])
        found = {name: [row.get(name) for row in rows] for name in names}
        return {name: values for name, values in found.items() if any(value is not None for value in values)}


@dataclass(frozen=True, kw_only=True)
class Disk(Bounded):
    """Say how much of the disk each run of a folder takes, in MB (1e6 bytes)."""

    folder: Folder = Path("runs")
    """Folder of runs, or one run."""
    json: bool = False
    """Print JSON: bytes."""

    def run(self) -> int:
        """Print a row per run, and their sum."""
        found = {path.name: parts_of(path) for path in runs_in(self.folder.expanduser())}
        if self.json:
            print(json.dumps([{"run": name, **parts} for name, parts in found.items()], indent=2))
            return 0
        columns = (*PARTS, "other", "all")
        rows = [("run", *columns)]
        rows += [(name, *(f"{parts[one] / MB:.1f}" for one in columns)) for name, parts in found.items()]
        sums = (sum(parts[one] for parts in found.values()) for one in columns)
        rows.append(("all", *(f"{nbytes / MB:.1f}" for nbytes in sums)))
        print(table(rows) if found else f"There are no runs in {self.folder}.")
        return 0


_named = tyro.conf.subcommand
ARGUMENTS: Any = tyro.conf.FlagCreatePairsOff[
    Annotated[List, _named(name="list")]
    | Annotated[Compare, _named(name="compare")]
    | Annotated[Disk, _named(name="disk")]
    | Annotated[Gc, _named(name="gc")]
]
"""What the command takes; tab completion reads it too."""
NAMES: Final = ("list", "compare", "disk", "gc")


def main(arguments: list[str]) -> int:
    """Run one of them; without a name, and with a folder alone, `list`."""
    if not arguments or (arguments[0] not in NAMES and arguments[0] not in ("-h", "--help")):
        arguments = ["list", *arguments]
    wanted: Any = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl runs")
    return wanted.run()


def parts_of(run: Path) -> dict[str, int]:
    """Add up the bytes of a run's folders, of the rest, and of all."""
    parts = {name: folder_bytes(run / name) for name in PARTS if not (run / name).is_symlink()}
    parts = dict.fromkeys(PARTS, 0) | parts
    everything = folder_bytes(run)
    return parts | {"other": max(0, everything - sum(parts.values())), "all": everything}


def differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings that are not the same in all runs; None stands for one that a run does not have."""
    names = dict.fromkeys(name for of_run in settings for name in of_run if name not in NOT_COMPARED)
    found = {name: [of_run.get(name) for of_run in settings] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def when(seconds: float) -> str:
    """Write a time in at most 11 columns: with the time of day, or long ago with the year."""
    pattern = "%m-%d %H:%M" if 0 <= time.time() - seconds < LONG_AGO else "%Y-%m-%d"
    return time.strftime(pattern, time.localtime(seconds))


def _side_by_side(title: str, names: Sequence[str], values: Mapping[str, Sequence[Any]]) -> str:
    rows = [(name, *map(_text, of_runs)) for name, of_runs in values.items()]
    return table([(title, *names), *rows])


def _text(value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:.5g}"
    return value if isinstance(value, str) and value else json.dumps(value)


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.1%}"


def _flat(settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{section}{name}.")
        else:
            yield section + name, value


def _as_dict(run: RunSummary) -> dict[str, Any]:
    return {
        "run": str(run.path),
        "state": run.state.value,
        "started": run.started,
        "version": run.version,
        "updates": run.updates,
        "imagined_success": run.imagined_success,
        "true_success": run.true_success,
        "bytes": folder_bytes(run.path),
        "problem": run.problem,
    }
