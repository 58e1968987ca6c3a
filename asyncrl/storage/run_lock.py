"""One owner per run folder: a lock that ends with the processes that hold it.

    RUN/lock      pid, host and time of rank 0, for people; the lock itself is the kernel's (flock)

Rank 0 takes the lock exclusively, writes who it is, and from then on shares it with the run's other processes
(`join`). Whoever wants to begin needs it exclusively, which no two can have, and nobody while one process of
a run still lives. A folder that is copied is not locked, because a lock belongs to the file and not its name.

Network file systems carry flock as a lock on bytes. Where one does not, a heartbeat stands in: rank 0 writes
the file's time every few seconds, and a file whose time stands still belongs to nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.observability import process_status, waits
from asyncrl.storage.untrusted import open_regular

NAME: Final = "lock"
LEAVE_DEADLINE: Final = 20.0
"""Seconds that what is left of a run whose rank 0 died has to end."""
HEARTBEAT_EVERY: Final = 5.0
HEARTBEAT_LOST: Final = 60.0
"""Seconds without a heartbeat after which its writer counts as gone."""
_POLL: Final = 0.1
_MOMENT: Final = 2.0
"""Seconds after which a lock that is taken is not one of those that are held for a moment only."""
_MAX_BYTES: Final = 4096
_UNSUPPORTED: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class FolderInUse(ConfigError):
    """Another process has the run folder."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Rank 0 of a run, as it wrote itself into the lock."""

    pid: int
    started: int
    """See `process_status.started`."""
    host: str
    since: float
    """Seconds since 1970."""

    @property
    def here(self) -> bool:
        """Whether it is a process of this host."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        """Say who and since when, for a message."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {when}"


class RunLock:
    """The lock of one run folder, held by this process until `release` or its end."""

    def __init__(self, run_dir: Path, handle: int, *, owns: bool, heartbeat: bool = False) -> None:
        """Use `acquire` or `join`."""
        self.run_dir = run_dir
        self._handle, self._owns = handle, owns
        self._ended = threading.Event()
        if heartbeat:
            beat = threading.Thread(target=self._beat, name="run folder heartbeat", daemon=True)
            beat.start()

    def release(self) -> None:
        """Give the folder up. May be called twice."""
        self._ended.set()
        if self._handle >= 0:
            if self._owns:
                os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        """Release: a lock that nobody holds on to is nobody's."""
        self.release()

    def _beat(self) -> None:
        path = self.run_dir / NAME
        while not self._ended.wait(HEARTBEAT_EVERY):
            with contextlib.suppress(
                OSError
            ):  # A file system that is away for a moment; the next one counts.
                os.utime(path)


def acquire(run_dir: Path) -> RunLock:
    """Become the owner of a run folder; waits for what is left of an owner that died.

    Raises:
        FolderInUse: Another one is alive, or processes of a dead one do not end.
        ConfigError: The lock file cannot be opened.
    """
    handle = _open(run_dir)
    try:
        with waits.waiting(waits.OWNER, LEAVE_DEADLINE):
            supported = _wait_for(handle, run_dir)
        if supported is None and (found := owner(run_dir)) is not None:
            raise in_use(run_dir, found)
        _write(handle)
        if supported:
            _share(handle, run_dir)
    except BaseException:
        os.close(handle)
        raise
    return RunLock(run_dir, handle, owns=True, heartbeat=supported is None)


def _wait_for(handle: int, run_dir: Path) -> bool | None:
    """Take the lock exclusively; None where the file system knows no locks."""
    began = time.monotonic()
    while (supported := _take(handle, fcntl.LOCK_EX)) is False:
        found, waited = _read(run_dir), time.monotonic() - began
        # Nobody wrote itself in: one who begins at this moment, or only asks who has it.
        over = waited > _MOMENT if found is None else _alive(found) or waited > LEAVE_DEADLINE
        if over:
            raise in_use(run_dir, found)
        time.sleep(_POLL)
    return supported


def _share(handle: int, run_dir: Path) -> None:
    """Turn the exclusive lock into a shared one."""
    until = time.monotonic() + _MOMENT
    while not _take(handle, fcntl.LOCK_SH) and time.monotonic() < until:
        time.sleep(_POLL)
    found = _read(run_dir)
    if found is None or found.pid != os.getpid():
        raise in_use(run_dir, found)


def join(run_dir: Path) -> RunLock:
    """Hold the folder together with its owner, as a process of the same run.

    Raises:
        FolderInUse: Another run has taken it.
    """
    handle = _open(run_dir)
    until = time.monotonic() + _MOMENT
    while _take(handle, fcntl.LOCK_SH) is False:
        if time.monotonic() > until:
            os.close(handle)
            raise in_use(run_dir, _read(run_dir))
        time.sleep(_POLL)
    return RunLock(run_dir, handle, owns=False)


@contextmanager
def owned(run_dir: Path, what: str) -> Iterator[None]:
    """Own a run folder for the time of a command that changes it.

    Raises:
        FolderInUse: The run is alive.
    """
    if not (run_dir / "config.json").exists():
        yield
        return
    try:
        lock = acquire(run_dir)
    except FolderInUse as error:
        raise FolderInUse(f"{what} would change a folder that is in use: {error}") from None
    try:
        yield
    finally:
        lock.release()


def owner(run_dir: Path) -> Owner | None:
    """Read who has a run folder; None when nobody does. Changes nothing."""
    found = _read(run_dir)
    if found is None or found.here:
        return found if found and _alive(found) else None
    handle = _open(run_dir)
    try:
        free = _take(handle, fcntl.LOCK_EX)
    finally:
        os.close(handle)
    silent = time.time() - (run_dir / NAME).stat().st_mtime > HEARTBEAT_LOST
    return None if free or (free is None and silent) else found


def left_by(run_dir: Path) -> Owner | None:
    """Read who died while it had a run folder; None when it was given up in order, or its owner lives."""
    return _read(run_dir) if owner(run_dir) is None else None


@contextmanager
def kept_unowned(run_dir: Path, what: str) -> Iterator[None]:
    """Keep a run from beginning in a folder, which nobody owns; what the lock says of its last owner stays.

    Raises:
        FolderInUse: The run is alive, or another command changes its folder.
    """
    if (found := owner(run_dir)) is not None:
        raise FolderInUse(f"{what} would change a folder that is in use: {in_use(run_dir, found)}")
    handle = _open(run_dir)
    try:
        if _take(handle, fcntl.LOCK_EX) is False:
            raise FolderInUse(f"{what} would change a folder that is in use: {in_use(run_dir, None)}")
        yield
    finally:
        os.close(handle)


def _alive(found: Owner) -> bool:
    """Whether the owner runs, as far as this host can tell: of another host's it is believed."""
    return not found.here or process_status.started(found.pid) == found.started


def _take(handle: int, kind: int) -> bool | None:
    """Try to lock; None where the file system knows no locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _open(run_dir: Path, *, create: bool = True) -> int:
    path = run_dir / NAME
    try:
        # It can be written to, also to be read only: a network file system locks no other files.
        return open_regular(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    except OSError as error:
        raise ConfigError(
            f"{path}, the lock of the run, cannot be opened ({error.strerror}). Make it a file of this user, "
            "or delete it when no process of the run is left."
        ) from None


def _write(handle: int) -> None:
    pid = os.getpid()
    row = {
        "pid": pid,
        "started": process_status.started(pid),
        "host": socket.gethostname(),
        "since": time.time(),
    }
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(row).encode() + b"\n", 0)


def _read(run_dir: Path) -> Owner | None:
    """Read who wrote itself in; None when nobody did, or the line is not whole."""
    try:
        handle = _open(run_dir, create=False)
    except ConfigError:
        return None
    try:
        row: Any = json.loads(os.pread(handle, _MAX_BYTES, 0))
        pid, started, host, since = (row[name] for name in ("pid", "started", "host", "since"))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    finally:
        os.close(handle)
    if not (isinstance(pid, int) and isinstance(started, int) and isinstance(host, str)):
        return None
    return Owner(pid=pid, started=started, host=host[:200], since=_seconds(since))


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 2**32 else 0.0


def in_use(run_dir: Path, found: Owner | None) -> FolderInUse:
    """Build the error that names who has a folder."""
    who = str(found) if found else "another process"
    return FolderInUse(
        f"{run_dir} is in use by {who}. Wait for its end or stop it (Ctrl-C or SIGTERM saves), "
        "or choose another run folder. Nothing was changed."
    )
