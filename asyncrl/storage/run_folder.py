"""Make or find the folder of a run, with its sub-folders and config.json.

runs/2025-01-31_12-00-00/
  config.json       what the run was started with; `asyncrl train .../config.json` repeats it
  metrics.jsonl     one row per update          logs/          output of every process
  tensorboard/      the same as curves          checkpoints/   resumable states
  replay/           episodes (HDF5)             videos/        imagined and evaluated episodes
  lock              who runs it (`run_lock`)    identity.json  its secret (`run_identity`)
  provenance.json   how each start came about (`provenance`)
  balance.json      what learners and actors needed, at the end (`launch.balance`)

`claim` first takes the lock: what is alive is never touched.

Tell of a run's folder what became of the run, reading little, and nothing of unbounded size.

running: its owner lives (`run_lock`). finished: it ended in order, and made all its updates. stopped: it
ended in order before, because it was asked to, failed with an error, or had nothing left to learn. dead: its
owner is gone and never gave the folder up: it was killed, or its host went down.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from asyncrl.config.loading import MOST_BYTES, existing_settings, to_json
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status
from asyncrl.storage import run_identity, run_lock
from asyncrl.storage.atomic import write_text
from asyncrl.storage.run_identity import RunIdentity
from asyncrl.storage.run_lock import RunLock
from asyncrl.storage.untrusted import LINES_BYTES, kind_of, load_json, make_folder, parse_json, reading

TIME = "{time}"
REPLAY = "replay"
SUB_FOLDERS = ("logs", "checkpoints", REPLAY, "videos")


@dataclass(frozen=True, kw_only=True)
class ClaimedRun:
    """A run folder that belongs to this process."""

    path: Path
    """Absolute."""
    identity: RunIdentity
    """Of this start of the run."""
    lock: RunLock
    """Held until it is released or this process ends."""


def claim(config: TrainConfig, again: Path | None = None) -> ClaimedRun:
    """Make (or with `--resume` find) the run's folder, become its owner and write its config.json.

    Raises:
        FolderInUse: A process of the run lives. Nothing was changed.
        ConfigError: The folder exists without `--resume`, nothing can be resumed, or it cannot be written.
    """
    if again is not None:
        folder = again
    elif config.resume:
        folder = locate(config)
    else:
        folder = _make(config.run_dir)
    try:
        lock = run_lock.acquire(folder)
        if (
            again is None
            and not config.resume
            and any(path.name != run_lock.NAME for path in folder.iterdir())
        ):
            raise _not_empty(folder)  # Another run began in it at the same time.
        identity = run_identity.next_attempt(folder)
        for name in SUB_FOLDERS:
            make_folder(folder / name)
        if again is None:
            # A run repeated from its config.json starts afresh, so `resume` is no setting of the run.
            write_text(folder / "config.json", to_json(dataclasses.replace(config, resume=False)))
    except OSError as error:
        raise _unwritable(folder, error) from None
    return ClaimedRun(path=folder.resolve(), identity=identity, lock=lock)


def check_free(config: TrainConfig) -> None:
    """Check early, before models are loaded, that the run to resume is not alive; `claim` is what counts.

    Raises:
        FolderInUse: It is.
        ConfigError: As for `locate`.
    """
    if config.resume and (owner := run_lock.owner(folder := locate(config))) is not None:
        raise run_lock.in_use(folder, owner)


def _make(template: str) -> Path:
    """Make the folder of a new run; of two that ask for one name at the same time one gets the next."""
    while True:
        folder = _fresh(template)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from None
        try:
            folder.mkdir(exist_ok=TIME not in template)
        except OSError as error:
            if isinstance(error, FileExistsError) and TIME in template:
                continue  # Somebody was quicker.
            raise _unwritable(folder, error) from None
        return folder


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    if isinstance(error, FileExistsError):  # What `mkdir` says of a file among the upper folders.
        error = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return ConfigError(f"--run-dir {folder} cannot be written ({error.strerror}). Choose another folder.")


def locate(config: TrainConfig) -> Path:
    """Say which folder the run would use now; makes nothing.

    Raises:
        ConfigError: the folder exists without `--resume`, or nothing can be resumed.
    """
    return _to_resume(config) if config.resume else _fresh(config.run_dir)


def parent_of(config: TrainConfig) -> Path:
    """Say in which folder the run's will be, or is; absolute."""
    path = Path(config.run_dir).expanduser().absolute()
    while TIME in str(path):
        path = path.parent
    return path if TIME in config.run_dir else path.parent


def newest(run_root: Path) -> Path:
    """Find the run that was started last, by the age of its config.json, among those that nobody runs.

    Raises:
        ConfigError: there is none in `run_root`.
    """
    runs = sorted(run_root.glob("*/config.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    alive: list[str] = []
    for config in runs:
        owner = run_lock.owner(config.parent)
        if owner is None:
            return config.parent
        alive.append(f" {config.parent} is in use by {owner}.")
    raise ConfigError(
        f"--resume was given, but there is no run to resume in {run_root}.{''.join(alive[:3])} Leave it out, "
        "or name a run with --run-dir."
    )


def has_checkpoint(run_dir: Path) -> bool:
    """Whether a run wrote a checkpoint (checkpoints/update_000040); unfinished ones (.tmp) do not count."""
    return any(path.suffix != ".tmp" for path in (run_dir / "checkpoints").glob("update_*"))


def _fresh(template: str) -> Path:
    folder = Path(template.replace(TIME, time.strftime("%Y-%m-%d_%H-%M-%S"))).expanduser()
    if TIME in template:  # Two runs may start within one second.
        first, count = folder, 1
        while folder.exists():
            count += 1
            folder = first.with_name(f"{first.name}_{count}")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--run-dir {folder} is a file. Choose another folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise _not_empty(folder)
    return folder


def _not_empty(folder: Path) -> ConfigError:
    return ConfigError(
        f"--run-dir {folder} already exists and is not empty, and a new run would mix with it. "
        "To continue it add --resume, or choose another folder."
    )


def _to_resume(config: TrainConfig) -> Path:
    folder = Path(config.run_dir).expanduser()
    if TIME in config.run_dir:
        if TIME in str(folder.parent):
            raise ConfigError(
                f"--run-dir {config.run_dir} has {TIME} in the name of an upper folder, so --resume cannot "
                "tell which run is meant. Name the run's folder with --run-dir."
            )
        folder = newest(folder.parent)
    elif not (folder / "config.json").is_file():
        state = "is not the folder of a run: it has no config.json" if folder.is_dir() else "does not exist"
        raise ConfigError(f"--resume was given, but --run-dir {folder} {state}. Check the path.")
    if not has_checkpoint(folder):
        others = [path for path in sorted(folder.parent.glob("*")) if path != folder and has_checkpoint(path)]
        hint = f" {others[-1]} has one: name it with --run-dir." if others else ""
        raise ConfigError(
            f"--resume was given, but {folder} has no checkpoint yet: the run ended before its first one. "
            f"Start again without --resume, with a smaller --checkpoint-every.{hint}"
        )
    return folder


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
