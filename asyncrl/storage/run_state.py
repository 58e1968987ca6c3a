"""Tell of a run's folder what became of the run, reading little, and nothing of unbounded size.

running: its owner lives (`run_lock`). finished: it ended in order, and made all its updates. stopped: it
ended in order before, because it was asked to, failed with an error, or had nothing left to learn. dead: its
owner is gone and never gave the folder up: it was killed, or its host went down.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from asyncrl.config.loading import MOST_BYTES, existing_settings
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status
from asyncrl.storage import run_lock
from asyncrl.storage.bounded_json import load_json, parse_json
from asyncrl.storage.regular_files import LINES_BYTES, kind_of, reading

SETTINGS: Final = "config.json"
METRICS: Final = "metrics.jsonl"
TAIL_BYTES: Final = 4 * 2**20
"""Of the end of a metrics.jsonl, which is all that is read of it: hundreds of updates."""


_MEASURED: Final = f'"{m.EVAL_SUCCESS.name}"'.encode()


class State(Enum):
    """What became of a run; see the beginning of this file."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run in a few words."""

    path: Path
    state: State
    started: float
    """When its settings were written: seconds since 1970. A resume writes them again."""
    last_row: dict[str, Any]
    """Of an update in metrics.jsonl; empty before the first one."""
    updates: int
    """That it shall make; 0: its settings cannot be read."""
    true_success: float | None
    """The newest that was measured during the run; None: none."""
    problem: str = ""
    """What could not be read."""

    @property
    def version(self) -> int:
        """Updates that it made."""
        return self.last_row.get("step", 0)

    @property
    def imagined_success(self) -> float | None:
        """Of the last update."""
        return _number(self.last_row.get(m.SUCCESS_ONCE.name))


def is_run(folder: Path) -> bool:
    """Tell whether a folder, which is no link, holds a run: it has a file of settings."""
    return kind_of(folder) == "a folder" and (folder / SETTINGS).is_file() and not kind_of(folder / SETTINGS)


def runs_in(folder: Path) -> list[Path]:
    """Return the runs of a folder, the one started last at the end; of a run's own folder, itself.

    Raises:
        ConfigError: There is no such folder.
    """
    if is_run(folder):
        return [folder]
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder that holds runs. Name it behind the command: asyncrl runs list FOLDER"
        )
    runs = [path for path in sorted(folder.iterdir()) if is_run(path)]
    return sorted(runs, key=lambda path: (path / SETTINGS).stat().st_mtime)


def settings_of(folder: Path) -> dict[str, Any]:
    """Read the settings of a run, also of an earlier version, as a nested table with present names.

    Raises:
        ConfigError: They cannot be read.
    """
    path = folder / SETTINGS
    try:
        return existing_settings(load_json(path, dict, MOST_BYTES), TrainConfig())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}), so it is not known what the run is.") from None


def summarise(folder: Path) -> RunSummary:
    """Say how far a run is and what became of it; what cannot be read is named, and not known."""
    problem, updates = "", 0
    last, measured = dict[str, Any](), dict[str, Any]()
    try:
        found = settings_of(folder).get("updates")
        updates = found if type(found) is int else 0
        last, measured = newest_rows(folder / METRICS)
    except (OSError, ConfigError) as error:
        problem = str(error)
    try:
        state = state_of(folder, finished=bool(updates) and last.get("step", 0) >= updates)
    except ConfigError as error:  # Its lock cannot be asked. What may be alive counts as alive.
        state, problem = State.RUNNING, str(error)
    return RunSummary(
        path=folder,
        state=state,
        started=(folder / SETTINGS).stat().st_mtime,
        last_row=last,
        updates=updates,
        true_success=_number(measured.get(m.EVAL_SUCCESS.name)),
        problem=problem,
    )


def state_of(folder: Path, *, finished: bool) -> State:
    """Tell what became of a run."""
    if run_lock.owner(folder) is not None:
        return State.RUNNING
    if run_lock.left_by(folder) is not None:
        return State.DEAD
    if not (folder / run_lock.NAME).exists():  # Nobody tells; what its processes say is left.
        processes = process_status.read(folder)
        if any(process.alive for process in processes):
            return State.RUNNING
        if processes and not finished:
            return State.DEAD
    return State.FINISHED if finished else State.STOPPED


def newest_rows(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the newest row of an update in a metrics.jsonl, and the newest of a true measurement.

    A measurement has a row of its own, with the number of an earlier update.

    Returns:
        Both rows; empty for one that the end of the file does not have.

    Raises:
        OSError: It is no regular file, or cannot be read.
    """
    try:
        with reading(path, LINES_BYTES) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")
    except FileNotFoundError:
        return {}, {}
    update: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    for line in reversed(lines[size > TAIL_BYTES : -1]):  # The first may lack its begin, the last its end.
        if _MEASURED in line:
            measured = measured or _row(line)
        else:
            update = update or _row(line)
        if update and measured:
            break
    return update, measured


def _row(line: bytes) -> dict[str, Any]:
    """Read a row; empty for one that a crash or a disk damaged."""
    try:
        row = parse_json(line, dict)
    except ValueError:
        return {}
    return row if type(row.get("step")) is int else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
