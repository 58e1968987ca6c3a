"""The owner of a run folder, one at a time, and the secret of its processes.

    RUN/lock             pid, host and start of rank 0, for people; the lock itself is the kernel's (flock)
    RUN/identity.json    mode 0600: a random secret, the number of starts, and the folder it was made for

Rank 0 takes the lock exclusively, records itself there, and shares it with the run's other processes
(`join`). Another run needs it exclusively, so it waits until no process of the first run lives.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError
from asyncrl.observability import process_status, waits
from asyncrl.storage.atomic import check_private, read_small, write_private
from asyncrl.storage.untrusted import check_types, open_regular, parse_json, take_lock

LOCK: Final = "lock"
IDENTITY: Final = "identity.json"
LEAVE_DEADLINE: Final = 20.0  # Seconds that the processes of a dead rank 0 have to end
_POLL: Final = 0.1
_MOMENT: Final = 2.0  # Longest time in seconds for which `owner` or a starting run holds the lock
_SECRET_BYTES: Final = 32
_DELETE: Final = "Delete it: the run gets a new one at its next start, and actors elsewhere join again."


# --- lock ---


class FolderInUse(ConfigError):
    """Another process owns the run folder."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Rank 0 of a run, as written into the lock."""

    pid: int
    started: int  # as `process_status.started`
    host: str
    since: float

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {when}"

    def lives(self) -> bool:
        """Return False if the process has ended; one of another host counts as alive."""
        return self.host != socket.gethostname() or process_status.started(self.pid) == self.started


class RunLock:
    """Lock of a run folder, held until `release` or the end of this process."""

    def __init__(self, handle: int, *, owns: bool) -> None:
        self._handle, self._owns = handle, owns

    def release(self) -> None:
        """Give the folder up. May be called twice."""
        if self._handle >= 0:
            if self._owns:
                os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        self.release()


def acquire(run_dir: Path) -> RunLock:
    """Become the owner of a run folder; waits for the processes of an owner that died."""
    handle = _open(run_dir)
    try:
        with process_status.waiting(waits.OWNER, LEAVE_DEADLINE):
            began = time.monotonic()
            while not take_lock(run_dir / LOCK, handle):
                found, waited = _read(run_dir), time.monotonic() - began
                # Without an owner in the file, another process starts or asks at this moment.
                if waited > _MOMENT if found is None else found.lives() or waited > LEAVE_DEADLINE:
                    raise in_use(run_dir, found)
                time.sleep(_POLL)
        pid, host = os.getpid(), socket.gethostname()
        me = Owner(pid=pid, started=process_status.started(pid), host=host, since=time.time())
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(asdict(me)).encode() + b"\n", 0)
        _share(handle, run_dir)  # Another run may take it while it changes from exclusive to shared.
        if (found := _read(run_dir)) != me:
            raise in_use(run_dir, found)
    except BaseException:
        os.close(handle)
        raise
    return RunLock(handle, owns=True)


def join(run_dir: Path) -> RunLock:
    """Share the lock as a process of the same run."""
    handle = _open(run_dir)
    if not _share(handle, run_dir):
        os.close(handle)
        raise in_use(run_dir, _read(run_dir))
    return RunLock(handle, owns=False)


def owner(run_dir: Path) -> Owner | None:
    """Read the owner of a run folder; None without one."""
    if (found := _read(run_dir)) is None or not found.lives():
        return None
    if found.host == socket.gethostname():
        return found
    handle = _open(run_dir)
    try:
        return None if take_lock(run_dir / LOCK, handle) else found
    finally:
        os.close(handle)


def left_by(run_dir: Path) -> Owner | None:
    """Read the owner of a run folder that died; None if it was released, or its owner lives."""
    return _read(run_dir) if owner(run_dir) is None else None


@contextmanager
def kept_unowned(run_dir: Path, what: str) -> Iterator[None]:
    """Lock runs out of a folder while a command changes it; its last owner's entry stays."""
    found = owner(run_dir)
    handle = _open(run_dir)
    try:
        if found is not None or not take_lock(run_dir / LOCK, handle):
            raise FolderInUse(f"{what} would change a folder that is in use: {in_use(run_dir, found)}")
        yield
    finally:
        os.close(handle)


def _share(handle: int, run_dir: Path) -> bool:
    until = time.monotonic() + _MOMENT
    while not (taken := take_lock(run_dir / LOCK, handle, fcntl.LOCK_SH)) and time.monotonic() < until:
        time.sleep(_POLL)
    return taken


def _open(run_dir: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    try:
        # Writable also to ask only: a network file system locks no other files.
        return open_regular(run_dir / LOCK, flags, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{run_dir / LOCK}, the lock of the run, cannot be opened ({error.strerror}). Make it a file of "
            "this user, or delete it when no process of the run is left."
        ) from None


def _read(run_dir: Path) -> Owner | None:
    try:
        handle = _open(run_dir, os.O_RDWR)
    except ConfigError:
        return None
    try:
        row = parse_json(os.pread(handle, 4096, 0))
        check_types(row, {"pid": int, "started": int, "host": str, "since": float})
        return Owner(**row) if 0 <= row["since"] < 2**32 else None
    except (ValueError, TypeError):
        return None
    finally:
        os.close(handle)


def in_use(run_dir: Path, found: Owner | None) -> FolderInUse:
    """Return the error that names the owner of a folder."""
    return FolderInUse(
        f"{run_dir} is in use by {found or 'another process'}. Wait for its end or stop it (Ctrl-C or "
        "SIGTERM saves), or choose another run folder. Nothing was changed."
    )


# --- identity ---


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """One start of one run. A peer that knows the secret belongs to the run."""

    secret: str = field(default="", repr=False)  # 64 hex digits; empty: no process can connect
    attempt: int = 0

    def knows(self, secret: str) -> bool:
        """Compare a secret with this run's, in constant time."""
        return hmac.compare_digest(self.secret.encode(), secret.encode())

    @property
    def mark(self) -> str:
        """Public name of this start, which does not reveal the secret."""
        return hashlib.sha256(f"{self.secret}:{self.attempt}".encode()).hexdigest()[:32]


NO_RUN: Final = RunIdentity()


def check_files(run_dir: Path) -> None:
    """Check that lock and identity can be opened and read, if they exist."""
    if os.path.lexists(run_dir / LOCK):
        os.close(_open(run_dir, os.O_RDWR))
    _read_identity(run_dir)


def next_attempt(run_dir: Path) -> RunIdentity:
    """Count a start of the run in a folder that this process owns; a copied folder is another run."""
    before = _read_identity(run_dir) or RunIdentity(secret=secrets.token_hex(_SECRET_BYTES))
    found = replace(before, attempt=before.attempt + 1)
    write_private(run_dir / IDENTITY, json.dumps(asdict(found) | {"folder": _folder(run_dir)}))
    return found


def read_identity(run_dir: Path) -> RunIdentity:
    """Read the identity of a run that was started."""
    if (found := _read_identity(run_dir)) is None:
        raise ConfigError(
            f"{run_dir / IDENTITY} is missing or was made for another folder, so the run's processes cannot "
            "know each other. Start the run again with --resume."
        )
    return found


def _read_identity(run_dir: Path) -> RunIdentity | None:
    path = run_dir / IDENTITY
    try:
        row = parse_json(read_small(path).encode())
        check_types(row, {"secret": str, "attempt": int, "folder": list})
        if not 0 < row["attempt"] < 2**31 or len(bytes.fromhex(row["secret"])) != _SECRET_BYTES:
            raise ValueError
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}). {_DELETE}") from None
    except ValueError:
        raise ConfigError(f"{path} is damaged. {_DELETE}") from None
    check_private(path, _DELETE)
    (device, number, host), folder = _folder(run_dir), row["folder"]
    same = folder[1:2] == [number] and (folder[0] == device or folder[2:] not in ([], [host]))
    return RunIdentity(secret=row["secret"], attempt=row["attempt"]) if same else None


def _folder(run_dir: Path) -> list[int | str]:
    about = run_dir.stat()
    return [about.st_dev, about.st_ino, socket.gethostname()]  # Device, inode, and who numbered the device.
