"""Make, find and describe the folder of a run.

runs/2025-01-31_12-00-00/
  config.json       settings of the run; `asyncrl train .../config.json` repeats it
  metrics.jsonl     one row per update          logs/          output of every process
  tensorboard/      the same as curves          checkpoints/   resumable states, `best`
  replay/           episodes (HDF5)             videos/        imagined and evaluated episodes
  lock, identity.json (`run_owner`)             provenance.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Final

from asyncrl import __version__
from asyncrl.config.run import TrainConfig, to_json
from asyncrl.errors import ConfigError
from asyncrl.observability import metrics_training as m
from asyncrl.storage import run_owner
from asyncrl.storage.assets import kept
from asyncrl.storage.atomic import write_text
from asyncrl.storage.run_owner import RunIdentity, RunLock
from asyncrl.storage.untrusted import check_types, kind_of, load_json, make_folder, parse_row, reading

TIME = "{time}"
REPLAY = "replay"
SETTINGS: Final = "config.json"
METRICS: Final = "metrics.jsonl"
SUB_FOLDERS = ("logs", "checkpoints", REPLAY, "videos")
FOLDERS: Final = (*SUB_FOLDERS, "tensorboard", "processes", "true", "worlds")
FILES: Final = ("config.json", "metrics.jsonl", "replay/replay.json", "replay/ledger.log", "replay/lock")
LOGS: Final = ("logs/*.log", "processes/*")


@dataclass(frozen=True, kw_only=True)
class ClaimedRun:
    """A run folder owned by this process."""

    path: Path
    identity: RunIdentity
    lock: RunLock


def claim(config: TrainConfig, again: Path | None = None) -> ClaimedRun:
    """Own the run's folder, which is made unless it is resumed, and write its config.json."""
    fresh = again is None and not config.resume
    folder = again or (locate(config) if config.resume else _make(config.run_dir))
    try:
        lock = run_owner.acquire(folder)
        if fresh and any(path.name != run_owner.LOCK for path in folder.iterdir()):
            raise _not_empty(folder)  # Another run began in it at the same time.
        identity = run_owner.next_attempt(folder)
        for name in SUB_FOLDERS:
            make_folder(folder / name)
        if again is None:
            # A run repeated from its config.json starts afresh, so `resume` is no setting of the run.
            write_text(folder / "config.json", to_json(dataclasses.replace(config, resume=False)))
    except OSError as error:
        raise _unwritable(folder, error) from None
    return ClaimedRun(path=folder.resolve(), identity=identity, lock=lock)


def check_free(config: TrainConfig) -> None:
    """Check that the run to resume is not alive, and that its lock and identity can be read."""
    if config.resume:
        if (owner := run_owner.owner(folder := locate(config))) is not None:
            raise run_owner.in_use(folder, owner)
        run_owner.check_files(folder)


def check_folder(run_dir: Path) -> None:
    """Check the kinds of files and folders that a run needs, if they exist; readers check the content."""
    logs = [path for pattern in LOGS for path in sorted(run_dir.glob(pattern))]
    expected = dict.fromkeys((*(run_dir / name for name in FILES), *logs), "a file")
    for path, wanted in (dict.fromkeys((run_dir / name for name in FOLDERS), "a folder") | expected).items():
        found = kind_of(path) or "a file"
        if os.path.lexists(path) and found != wanted:
            why = ": what the run writes must stay in its folder" if found == "a link" else ""
            raise ConfigError(f"{path} is {found}, where {wanted} of the run is expected{why}. Move it away.")


def _make(template: str) -> Path:
    folder = _fresh(template)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=TIME not in template)
    except OSError as error:
        if isinstance(error, FileExistsError) and TIME in template and folder.is_dir():
            return _make(template)  # Another run has taken the name.
        raise _unwritable(folder, error) from None
    return folder


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    if isinstance(error, FileExistsError):  # One of the parents is a file.
        error = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return ConfigError(f"--run-dir {folder} cannot be written ({error.strerror}). Choose another folder.")


def locate(config: TrainConfig) -> Path:
    """Return the folder that the run would use now."""
    return _to_resume(config) if config.resume else _fresh(config.run_dir)


def newest(run_root: Path) -> Path:
    """Find the most recently started run that has no owner, by the age of its config.json."""
    runs = sorted(run_root.glob(f"*/{SETTINGS}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    alive = ""
    for folder in (path.parent for path in runs):
        if (owner := run_owner.owner(folder)) is None:
            return folder
        alive += f" {folder} is in use by {owner}."
    raise ConfigError(
        f"--resume was given, but there is no run to resume in {run_root}.{alive} Leave it out, or name a "
        "run with --run-dir."
    )


def _fresh(template: str) -> Path:
    folder = Path(template.replace(TIME, time.strftime("%Y-%m-%d_%H-%M-%S"))).expanduser()
    first, count = folder, 1
    while TIME in template and folder.exists():  # Two runs may start within one second.
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
        folder = newest(folder.parent)
    elif not (folder / "config.json").is_file():
        state = "is not the folder of a run: it has no config.json" if folder.is_dir() else "does not exist"
        raise ConfigError(f"--resume was given, but --run-dir {folder} {state}. Check the path.")
    if not kept(folder):
        if (owner := run_owner.owner(folder)) is not None:
            raise run_owner.in_use(folder, owner)
        raise ConfigError(
            f"--resume was given, but {folder} has no checkpoint yet: the run ended before its first one. "
            f"Start again without --resume, with a smaller --checkpoint-every."
        )
    return folder


# --- state of a run ---

TAIL_BYTES: Final = 4 * 2**20  # Bytes read of the end of a metrics.jsonl: hundreds of updates
_MEASURED: Final = f'"{m.EVAL_SUCCESS.name}"'.encode()


class State(Enum):
    """State of a run: owned; ended with all updates; ended early; or its owner died."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """State and progress of a run."""

    path: Path
    state: State
    started: float  # of the last start: seconds since 1970
    last_row: dict[str, Any]  # Last row of an update in metrics.jsonl; empty before the first one
    updates: int  # at which it ends; 0 if unknown
    true_success: float | None
    problem: str = ""

    @property
    def version(self) -> int:
        """Number of updates made."""
        return self.last_row.get("step", 0)

    @property
    def imagined_success(self) -> float | None:
        """Success of the last update."""
        return _number(self.last_row.get(m.SUCCESS_ONCE.name))


def is_run(folder: Path) -> bool:
    """Return True for a folder, not a link, with a file of settings."""
    return kind_of(folder) == "a folder" and (folder / SETTINGS).is_file() and not kind_of(folder / SETTINGS)


def runs_in(folder: Path) -> list[Path]:
    """Return the runs of a folder, the one started last at the end; for a run's own folder, itself."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder that holds runs. Name it behind the command: asyncrl runs FOLDER"
        )
    runs = [path for path in ([folder] if is_run(folder) else sorted(folder.iterdir())) if is_run(path)]
    return sorted(runs, key=lambda path: (path / SETTINGS).stat().st_mtime)


def summarise(folder: Path) -> RunSummary:
    """Read state and progress of a run, as far as its files can be read."""
    problem, updates = "", 0
    last, measured = dict[str, Any](), dict[str, Any]()
    try:
        found = load_json(folder / SETTINGS).get("updates")
        updates = found if type(found) is int else 0
        last, measured = newest_rows(folder / METRICS)
    except (OSError, ValueError) as error:
        problem = str(error) if isinstance(error, OSError) else f"{SETTINGS} cannot be read ({error})"
    try:
        finished = bool(updates) and last.get("step", 0) >= updates
        state = State.FINISHED if finished else State.STOPPED
        if run_owner.owner(folder) is not None:
            state = State.RUNNING
        elif run_owner.left_by(folder) is not None:
            state = State.DEAD
    except ConfigError as error:  # Its lock cannot be opened, so it may be alive.
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


def newest_rows(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the newest row of an update and of a true measurement in a metrics.jsonl; empty if absent."""
    try:
        with reading(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).splitlines(keepends=True)
    except FileNotFoundError:
        return {}, {}
    newest = dict[bool, dict[str, Any]]()
    for line in reversed(lines[size > TAIL_BYTES :]):  # The first may be cut.
        measured = _MEASURED in line
        if measured not in newest and (row := parse_row(line)) and type(row.get("step")) is int:
            newest[measured] = row
        if len(newest) == 2:
            break
    return newest.get(False, {}), newest.get(True, {})


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# --- checkpoints that an evaluator holds ---

VIDEOS: Final = "videos"
BEST: Final = "best"  # The version that succeeded most often, of two equal ones the later
HELD: Final = "evaluating"
BEFORE: Final = "best.replaced.tmp"  # The former `BEST` while `atomic.publish` replaces it


def is_whole(checkpoint: Path) -> bool:
    """Return True if all files of a checkpoint exist in the sizes of its state.json."""
    try:
        files = load_json(checkpoint / "state.json").get("files")
        if not isinstance(files, dict) or not files:
            return False
        check_types(files, dict.fromkeys(files, int))
        return all((checkpoint / name).stat().st_size == nbytes for name, nbytes in files.items())
    except (OSError, ValueError):
        return False


# --- starts of a run ---

PROVENANCE: Final = "provenance.json"  # ``{"format": 1, "starts": [{"attempt": 1, "command": ...}, ...]}``
PACKAGES: Final = "torch transformers diffusers peft accelerate numpy h5py pyzmq mujoco"


def record_start(
    run_dir: Path, *, attempt: int, command: str, version: int, tell: Callable[[str], None]
) -> None:
    """Add a start of a run to provenance.json; `tell` receives a line if it cannot be read or written."""
    path, versions = run_dir / PROVENANCE, {"asyncrl": __version__, "python": platform.python_version()}
    for name in PACKAGES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit, dirty = git_state(Path(__file__).parents[2])
    began = datetime.now(UTC).isoformat(timespec="milliseconds")
    start = {
        **{"attempt": attempt, "command": command, "host": socket.gethostname(), "began": began},
        **{"from_update": version, "commit": commit, "dirty": dirty, "versions": versions},
    }
    try:
        table = {"format": 1, "starts": [*read_starts(run_dir), start]}
        write_text(path, json.dumps(table, indent=2) + "\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        tell(f"{path}: this start cannot be added ({reason}). The run goes on without")


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Read the starts of a run, oldest first; empty without a file. Times are UTC in ISO 8601."""
    try:
        table = load_json(run_dir / PROVENANCE)
    except FileNotFoundError:
        return []
    starts = table.get("starts")
    known = repr(table.get("format")) == "1"  # Not true.
    if not (known and isinstance(starts, list) and all(type(x) is dict for x in starts)):
        raise ValueError("it is no list of starts in format 1")
    return starts


def git_state(checkout: Path) -> tuple[str, bool]:
    """Return the commit of a checkout ('' if unknown), and whether tracked files differ from it."""
    # A file system monitor is a program that the checkout's settings name.
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(checkout), "describe", "--always", "--dirty"]
    command += ["--exclude=*", "--abbrev=40"]  # The commit, whatever tags there are.
    environ = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    if not (checkout / ".git").exists():
        return "", False
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=10.0, env=environ, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return "", False  # No git, or it does not trust the folder.
    commit, _, dirty = done.stdout.strip().partition("-")
    return commit, bool(dirty)


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
