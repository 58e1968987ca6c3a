"""Write down how each start of a run came about: command, commit, versions, host, devices, times, end.

    RUN/provenance.json   {"format": 1, "left_out": 0, "starts": [{"attempt": 1, "command": ...}, ...]}

A resume adds a start. The file is for people and tools (`read`); no part of a run depends on it, so one that
cannot be read or written is said, and the run goes on.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from asyncrl import __version__
from asyncrl.errors import first_line
from asyncrl.storage.atomic import write_json
from asyncrl.storage.untrusted import check_types, load_json

NAME: Final = "provenance.json"
DAMAGED: Final = NAME + ".damaged"
FORMAT: Final = 1
MOST_BYTES: Final = 4 << 20
MOST_STARTS: Final = 256
"""The first start and the newest ones are kept; `left_out` counts the others."""
PACKAGES: Final = (
    *("torch", "transformers", "diffusers", "peft", "accelerate", "safetensors", "numpy", "h5py", "pyzmq"),
    *("tensorboardX", "mujoco"),
)
GIT_SECONDS: Final = 10.0
_KINDS: Final = {
    **dict.fromkeys(("attempt", "pid", "from_update", "to_update", "ranks"), int),
    "dirty": bool,
    "versions": dict,
    "devices": list,
}
"""Types of a start's fields; all others are texts."""
_JOBS: Final = {"SLURM_JOB_ID": "slurm", "PBS_JOBID": "pbs", "LSB_JOBID": "lsf"}
_CHECKOUT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run. Times are in UTC, as ISO 8601 writes them."""

    attempt: int
    """Number of the start, from 1 (`run_identity`)."""
    command: str
    host: str
    pid: int
    began: str
    ended: str = ""
    """Empty while it runs, and for ever when it was killed."""
    how: str = ""
    """How it ended: 'finished', 'stopped', or 'failed: ' and why."""
    from_update: int = 0
    to_update: int = 0
    """Update last written."""
    commit: str = ""
    """Of the checkout that ran; empty when it was an installed package."""
    dirty: bool = False
    """Whether tracked files of the checkout differed from the commit."""
    python: str = ""
    system: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    ranks: int = 1
    job: str = ""
    """'slurm 1234' within a job of a cluster."""


def this_start(*, attempt: int, command: str, from_update: int, ranks: int, gpus: bool = False) -> Start:
    """Describe the start of a run by this process."""
    commit, dirty = git_state(_CHECKOUT)
    return Start(
        attempt=attempt,
        command=command,
        host=socket.gethostname(),
        pid=os.getpid(),
        began=_now(),
        from_update=from_update,
        to_update=from_update,
        commit=commit,
        dirty=dirty,
        python=platform.python_version(),
        system=platform.platform(),
        versions={"asyncrl": __version__} | {name: v for name in PACKAGES if (v := _version(name))},
        devices=devices(gpus=gpus),
        ranks=ranks,
        job=next((f"{kind} {os.environ[name]}" for name, kind in _JOBS.items() if name in os.environ), ""),
    )


class Provenance:
    """Keeps the entry of a start that is under way: use it as a context. It hears of rows by `note`."""

    def __init__(self, run_dir: Path, start: Start, *, updates: int, tell: Callable[[str], None]) -> None:
        """Add the start to the run's file."""
        self._run_dir, self._start, self._updates, self._tell = run_dir, start, updates, tell
        self._step = start.from_update
        self._put(start)

    def note(self, step: int, values: object) -> None:
        """Hear of a row; see `RowReader`."""
        self._step = step

    def __enter__(self) -> Provenance:
        """Write down the end at the end of a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write down when and how it ended."""
        how = "finished" if self._step >= self._updates else "stopped"
        if error is not None and not isinstance(error, KeyboardInterrupt):
            how = f"failed: {type(error).__name__}: {first_line(error)}"
        self._put(dataclasses.replace(self._start, ended=_now(), how=how, to_update=self._step))

    def _put(self, start: Start) -> None:
        """Write an entry in place of that of the same start, or behind the others."""
        path = self._run_dir / NAME
        try:
            starts, left_out = self._others(start)
            if len(starts) >= MOST_STARTS:
                more = len(starts) + 1 - MOST_STARTS
                starts, left_out = [starts[0], *starts[1 + more :]], left_out + more
            rows = [dataclasses.asdict(x) for x in (*starts, start)]
            write_json(path, {"format": FORMAT, "left_out": left_out, "starts": rows})
        except OSError as error:
            self._tell(
                f"{path} cannot be written ({error.strerror}): this start is not in it. The run goes on"
            )

    def _others(self, start: Start) -> tuple[list[Start], int]:
        """Read the other starts, and how many were left out; a damaged file is moved away, and said."""
        path = self._run_dir / NAME
        try:
            starts, left_out = read(self._run_dir)
        except ValueError as error:
            path.replace(path.with_name(DAMAGED))
            self._tell(f"{path} is damaged ({error}): it is {DAMAGED} now, and begins anew with this start")
            return [], 0
        return [x for x in starts if (x.attempt, x.began) != (start.attempt, start.began)], left_out


def read(run_dir: Path) -> tuple[list[Start], int]:
    """Read the starts of a run, the first one first.

    Returns:
        The starts, and how many were left out between the first and the others. Nothing where there is no
        file.

    Raises:
        OSError: The file cannot be read, is no regular file, or is too large.
        ValueError: It holds something else; says what.
    """
    try:
        table = load_json(run_dir / NAME, dict, MOST_BYTES)
    except FileNotFoundError:
        return [], 0
    check_types(table, {"format": int, "left_out": int, "starts": list})
    if table["format"] != FORMAT:
        raise ValueError(f"its format is {table['format']}, and this asyncrl reads {FORMAT}")
    return [_start(row) for row in table["starts"][:MOST_STARTS]], table["left_out"]


def _start(row: Any) -> Start:
    if not isinstance(row, dict):
        raise ValueError(f"a start is a {type(row).__name__}, expected a dict")
    names = [x.name for x in dataclasses.fields(Start)]
    check_types(row, {name: _KINDS.get(name, str) for name in names})
    if not all(isinstance(text, str) for text in (*row["devices"], *row["versions"].values())):
        raise ValueError("a device or a version is no text")
    found: Any = {name: row[name] for name in names} | {"devices": tuple(row["devices"])}
    return Start(**found)


def git_state(checkout: Path) -> tuple[str, bool]:
    """Return the commit of a checkout, and whether tracked files differ from it.

    Returns:
        An empty text for a folder that is no checkout, or when git cannot say.
    """
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
            command, capture_output=True, text=True, timeout=GIT_SECONDS, env=environ, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):  # No git, or it does not trust the folder.
        return ""
    return done.stdout


def devices(*, gpus: bool) -> tuple[str, ...]:
    """Name the CPU, and the GPUs that this process sees before it, where they are asked for."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return (*(_gpus() if gpus else ()), f"{_cpu()}, {count} cores")


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
