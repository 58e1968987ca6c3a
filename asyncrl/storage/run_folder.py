"""Make or find the folder of a run, with its sub-folders and config.json.

runs/2025-01-31_12-00-00/
  config.json       what the run was started with; `asyncrl train .../config.json` repeats it
  metrics.jsonl     one row per update          logs/          output of every process
  tensorboard/      the same as curves          checkpoints/   resumable states
  replay/           episodes (HDF5)             videos/        imagined and evaluated episodes
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from asyncrl.config.loading import to_json
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.storage.atomic import write_text

TIME = "{time}"
REPLAY = "replay"
SUB_FOLDERS = ("logs", "checkpoints", REPLAY, "videos")


def create(config: TrainConfig) -> Path:
    """Make (or with `--resume` find) the run's folder and write its config.json.

    Returns:
        Absolute path.

    Raises:
        ConfigError: the folder exists without `--resume`, nothing can be resumed, or it cannot be written.
    """
    folder = locate(config)
    try:
        for name in SUB_FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        # A run repeated from its config.json starts afresh, so `resume` is no setting of the run.
        write_text(folder / "config.json", to_json(dataclasses.replace(config, resume=False)))
    except OSError as error:
        raise ConfigError(
            f"--run-dir {folder} cannot be written ({error.strerror}). Choose another folder."
        ) from None
    return folder.resolve()


def locate(config: TrainConfig) -> Path:
    """Say which folder the run would use now; makes nothing.

    Raises:
        ConfigError: the folder exists without `--resume`, or nothing can be resumed.
    """
    return _to_resume(config) if config.resume else _fresh(config.run_dir)


def newest(run_root: Path) -> Path:
    """Find the run that was started last, by the age of its config.json.

    Raises:
        ConfigError: there is none in `run_root`.
    """
    runs = sorted(run_root.glob("*/config.json"), key=lambda path: path.stat().st_mtime_ns)
    if not runs:
        raise ConfigError(
            f"--resume was given, but there is no run in {run_root}. Leave it out, or name a run "
            "with --run-dir."
        )
    return runs[-1].parent


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
        raise ConfigError(
            f"--run-dir {folder} already exists and is not empty, and a new run would mix with it. "
            "To continue it add --resume, or choose another folder."
        )
    return folder


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
