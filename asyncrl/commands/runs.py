"""`asyncrl runs [FOLDER]`: list the runs of a folder."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import tyro

from asyncrl.config.bounds import Bounded
from asyncrl.replay_tools.episodes import NOTHING, table
from asyncrl.storage import run_folder
from asyncrl.storage.run_folder import summarise

LONG_AGO: Final = 300 * 86_400  # Seconds after which a date has its year instead of the time of day


@dataclass(frozen=True, kw_only=True)
class RunsConfig(Bounded):
    """List the runs of a folder: when each began, what became of it, how far it is, success, disk."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = Path("runs")
    """Folder of runs, or one run."""
    json: bool = False
    """Print JSON: a list with more digits, sizes in bytes."""


ARGUMENTS: Any = tyro.conf.FlagCreatePairsOff[RunsConfig]


def main(arguments: list[str]) -> int:
    """Print a row per run, the one started last at the end."""
    if arguments[:1] == ["list"]:  # The name that the command had when there were others.
        arguments = arguments[1:]
    config: RunsConfig = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl runs")
    runs = [summarise(path) for path in run_folder.runs_in(config.folder.expanduser())]
    if config.json:
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
        rows.append((*place, *shares, f"{folder_bytes(run.path) / 1e6:.1f}"))
    print(table(rows) if runs else f"There are no runs in {config.folder}.")
    for run in runs:
        if run.problem:
            print(f"{run.path.name}: {run.problem}", file=sys.stderr)
    return 0


def folder_bytes(folder: Path) -> int:
    """Sum the sizes of a folder's files, each once."""
    sizes: dict[tuple[int, int], int] = {}
    for above, _, names in os.walk(folder):
        for name in names:
            try:
                found = (Path(above) / name).lstat()
            except FileNotFoundError:  # A live run deletes files.
                continue
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def _when(seconds: float) -> str:
    pattern = "%m-%d %H:%M" if 0 <= time.time() - seconds < LONG_AGO else "%Y-%m-%d"
    return time.strftime(pattern, time.localtime(seconds))
