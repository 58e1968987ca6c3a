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
"""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.loading import to_json
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.storage import run_identity, run_lock
from asyncrl.storage.atomic import write_text
from asyncrl.storage.regular_files import make_folder
from asyncrl.storage.run_identity import RunIdentity
from asyncrl.storage.run_lock import RunLock

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
