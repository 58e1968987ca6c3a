"""Record how each start of a run came about: command, commit, versions, host, devices, times, end.

    RUN/provenance.json   {"format": 1, "starts": [{"attempt": 1, "command": ...}, ...]}

It is for people and tools: a run goes on if it cannot be read or written.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from asyncrl import __version__
from asyncrl.errors import first_line
from asyncrl.storage.atomic import write_json
from asyncrl.storage.untrusted import check_types, load_json

NAME: Final = "provenance.json"
FORMAT: Final = 1
PACKAGES: Final = (
    *("torch", "transformers", "diffusers", "peft", "accelerate", "safetensors", "numpy", "h5py", "pyzmq"),
    *("tensorboardX", "mujoco"),
)
_JOBS: Final = {"SLURM_JOB_ID": "slurm", "PBS_JOBID": "pbs", "LSB_JOBID": "lsf"}
_CHECKOUT: Final = Path(__file__).parents[2]


def this_start(
    *, attempt: int, command: str, from_update: int, ranks: int, gpus: bool = False
) -> dict[str, Any]:
    """Describe the start of a run by this process; times are UTC in ISO 8601."""
    commit, dirty = git_state(_CHECKOUT)
    return {
        "attempt": attempt,
        "command": command,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began": _now(),
        "ended": "",
        "how": "",
        "from_update": from_update,
        "to_update": from_update,
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {"asyncrl": __version__} | {name: v for name in PACKAGES if (v := _version(name))},
        "devices": devices(gpus=gpus),
        "ranks": ranks,
        "job": next((f"{kind} {os.environ[name]}" for name, kind in _JOBS.items() if name in os.environ), ""),
    }


class Provenance:
    """Keeps the entry of the current start; a context manager that receives rows by `note`."""

    def __init__(
        self, run_dir: Path, start: dict[str, Any], *, updates: int, tell: Callable[[str], None]
    ) -> None:
        self._path, self._start, self._updates, self._tell = run_dir / NAME, start, updates, tell
        self._step = start["from_update"]
        self._put()

    def note(self, step: int, values: object) -> None:
        """Receive a row."""
        self._step = step

    def __enter__(self) -> Provenance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        how = "finished" if self._step >= self._updates else "stopped"
        if error is not None and not isinstance(error, KeyboardInterrupt):
            how = f"failed: {type(error).__name__}: {first_line(error)}"
        self._start |= {"ended": _now(), "how": how, "to_update": self._step}
        self._put()

    def _put(self) -> None:
        key = (self._start["attempt"], self._start["began"])
        try:
            rows = [row for row in read(self._path.parent) if (row["attempt"], row["began"]) != key]
            write_json(self._path, {"format": FORMAT, "starts": [*rows, self._start]})
        except (OSError, ValueError) as error:  # A damaged file is left as it is.
            reason = error.strerror if isinstance(error, OSError) else error
            self._tell(f"{self._path}: this start cannot be added ({reason}). The run goes on without")


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Read the starts of a run, oldest first; none without a file."""
    try:
        table = load_json(run_dir / NAME)
    except FileNotFoundError:
        return []
    check_types(table, {"format": int, "starts": list})
    if table["format"] != FORMAT:
        raise ValueError(f"its format is {table['format']}, and this asyncrl reads {FORMAT}")
    for row in table["starts"]:
        if not isinstance(row, dict):
            raise ValueError(f"a start is a {type(row).__name__}, expected a dict")
        check_types(row, {"attempt": int, "began": str})
    return table["starts"]


def git_state(checkout: Path) -> tuple[str, bool]:
    """Return the commit of a checkout ('' if unknown), and whether tracked files differ from it."""
    if not (checkout / ".git").exists():
        return "", False
    commit = _git(checkout, "rev-parse", "HEAD")
    return commit.strip(), bool(commit and _git(checkout, "status", "--porcelain", "--untracked-files=no"))


def _git(checkout: Path, *arguments: str) -> str:
    # A file system monitor is a program that the checkout's settings name.
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(checkout), *arguments]
    environ = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=10.0, env=environ, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):  # No git, or it does not trust the folder.
        return ""
    return done.stdout


def devices(*, gpus: bool) -> tuple[str, ...]:
    """Name the visible GPUs, if asked for, and the CPU."""
    return (*(_gpus() if gpus else ()), f"{_cpu()}, {len(os.sched_getaffinity(0))} cores")


def _gpus() -> list[str]:
    import torch

    found = list[str]()
    for index in range(torch.cuda.device_count()):
        try:
            about = torch.cuda.get_device_properties(index)
            found.append(f"{about.name}, {about.total_memory / 1e9:.0f} GB")
        except (RuntimeError, AssertionError) as error:
            found.append(f"GPU {index} does not answer ({first_line(error)})")
    return found


def _cpu() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, "") or platform.machine()
    except OSError:
        return platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
