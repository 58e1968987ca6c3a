"""Processes of a run: activity of every thread, published in shared memory; hangs.

run/processes/actor-1          process id; for each thread activity, start and allowed seconds; totals of
                               `waits.WAITS` and `waits.COUNTS`
run/processes/actor-1.stacks   stacks of its threads, at each `dump_stacks`
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from asyncrl.observability.metrics import Metric
from asyncrl.observability.signals import exhausted
from asyncrl.storage.untrusted import make_folder, open_regular, read_bytes, remove

GRACE: Final = 60.0  # Seconds beyond a wait's deadline, which progress renews, until it counts as a hang
FOLDER: Final = "processes"
STACKS: Final = ".stacks"
_MAGIC: Final = b"ARLPROC1"
_HEAD: Final = struct.Struct("<8sQQ")  # magic, process id, its start
_ROW: Final = struct.Struct("<d d 24s 88s")
"""Since (0: an unused or changing row), allowed seconds (0: any), thread, activity."""
_ROWS: Final = 16
TOTALS: Final = 40  # Total numbers of a process: of `waits.WAITS` from 0 on, of `waits.COUNTS` from the end
_TOTALS: Final = struct.Struct(f"<{TOTALS}d")
_COUNTED_FROM: Final = _HEAD.size + _ROWS * _ROW.size
_SIZE: Final = _COUNTED_FROM + _TOTALS.size


@dataclass(frozen=True, kw_only=True)
class ThreadActivity:
    """One thread's activity."""

    thread: str
    what: str
    seconds: float  # since it began
    allowed: float  # seconds, extended by `progress`; 0: any

    @property
    def overdue(self) -> bool:
        """True if it takes longer than allowed."""
        return 0 < self.allowed < self.seconds


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of a run."""

    role: str
    pid: int
    alive: bool
    activities: tuple[ThreadActivity, ...]  # one per thread

    @property
    def main(self) -> ThreadActivity | None:
        """Activity of the main thread, if it published one."""
        return next((activity for activity in self.activities if activity.thread == "MainThread"), None)


class _StatusFile:
    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        remove(fresh)
        handle = open_regular(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.write(handle, _HEAD.pack(_MAGIC, os.getpid(), started(os.getpid())).ljust(_SIZE, b"\0"))
            self._memory = mmap.mmap(handle, _SIZE)
        finally:
            os.close(handle)
        fresh.replace(path)
        self._rows: dict[int, int] = {}  # thread's identifier -> its row
        self._lock = threading.Lock()

    def write(self, what: str, began: float, allowed: float) -> None:
        """Set the row of this thread, if one is free."""
        with self._lock:  # Rows of ended threads are free again: Python reuses their numbers.
            row = self._rows.setdefault(threading.get_ident(), len(self._rows))
        if row >= _ROWS:
            return
        begin = _HEAD.size + row * _ROW.size
        name = threading.current_thread().name.encode()[:24]
        content = _ROW.pack(began if what else 0.0, allowed, name, what.encode()[:88])
        self._memory[begin : begin + 8] = bytes(8)
        self._memory[begin + 8 : begin + _ROW.size] = content[8:]
        self._memory[begin : begin + 8] = content[:8]

    def add(self, index: int, amount: float) -> None:
        with self._lock:
            total = struct.unpack_from("<d", self._memory, _COUNTED_FROM + 8 * index)[0]
            struct.pack_into("<d", self._memory, _COUNTED_FROM + 8 * index, total + amount)


class _Now(threading.local):
    what, allowed, began = "", 0.0, 0.0
    extended = 0.0  # allowed seconds since it began, with `progress`


_own_file: _StatusFile | None = None
_run_dir = Path()
_stacks: TextIO | None = None
_early = dict[int, float]()  # totals from before `publish_as`
_now = _Now()


def publish_as(run_dir: Path, role: str) -> None:
    """Publish the activities of this process from now on, as `role` of the run in `run_dir`."""
    global _own_file, _run_dir, _stacks
    path = run_dir / FOLDER / role
    _own_file, _run_dir = _StatusFile(path), run_dir
    while _early:
        _own_file.add(*_early.popitem())
    handle = open_regular(path.with_name(role + STACKS), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    before, _stacks = _stacks, os.fdopen(handle, "a")
    faulthandler.register(signal.SIGUSR1, file=_stacks, all_threads=True, chain=False)
    if before is not None:
        before.close()


@contextmanager
def activity(what: str, allowed: float = 0.0) -> Iterator[None]:
    """Publish the activity of this thread within the block, then the previous one; 0 allows any time."""
    before = (_now.what, _now.allowed)
    set_activity(what, allowed)
    try:
        yield
    finally:
        set_activity(*before)


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One kind of wait."""

    name: str  # activity that the process publishes
    owner: str  # process and thread that waits
    deadline: str  # a flag, or seconds
    ended_by: str  # usual end, in a healthy run
    then: str  # consequence at the deadline
    total: int  # index among the totals
    metric: Metric


@contextmanager
def waiting(wait: Wait, allowed: float = 0.0, about: str = "") -> Iterator[None]:
    """Publish and time a wait; GRACE after `allowed` seconds it counts as a hang (0: never)."""
    began = time.monotonic()
    with activity(wait.name + about, allowed + GRACE if allowed else 0.0):
        try:
            yield
        finally:
            count(wait.total, time.monotonic() - began)


def set_activity(what: str, allowed: float = 0.0) -> None:
    """Publish the activity of this thread from now on."""
    _now.what, _now.allowed, _now.began, _now.extended = what, allowed, time.monotonic(), allowed
    _publish()


def progress() -> None:
    """Restart the allowed time of this thread's activity."""
    if _now.allowed:
        _now.extended = time.monotonic() - _now.began + _now.allowed
        _publish()


def describe(what: str) -> None:
    """Rename this thread's activity; its start and allowed time stay."""
    _now.what = what
    _publish()


def _publish() -> None:
    if _own_file is not None:
        _own_file.write(_now.what, _now.began, _now.extended)


def count(index: int, amount: float) -> None:
    """Add to the total `index` of this process."""
    if _own_file is None:
        _early[index] = _early.get(index, 0.0) + amount
    else:
        _own_file.add(index, amount)


def totals() -> tuple[float, ...]:
    """Sum the totals of this run's processes on this host; empty before `publish_as`."""
    files = _status_files(_run_dir).values() if _own_file is not None else ()
    return tuple(map(sum, zip(*(_TOTALS.unpack_from(file, _COUNTED_FROM) for file in files), strict=True)))


def read(run_dir: Path) -> list[Process]:
    """Read the activities of a run's processes on this host; for dead ones, the last."""
    return [_process(role, content) for role, content in _status_files(run_dir).items()]


def dump_stacks(run_dir: Path) -> list[Path]:
    """Make every living process of a run append the stacks of its threads; return the files."""
    living = [process for process in read(run_dir) if process.alive]
    for process in living:
        os.kill(process.pid, signal.SIGUSR1)
    return [run_dir / FOLDER / (process.role + STACKS) for process in living]


def started(pid: int) -> int:
    """Read the start of a process in clock ticks since boot, unique with its id; 0 if unknown."""
    with contextlib.suppress(OSError):
        fields = _stat(pid)
        return 0 if fields[0] in "ZX" else int(fields[19])
    return 0


def is_gone(pid: int, began: int) -> bool:
    """Return True if process `pid`, whose `started` was `began`, has ended; False if that is unknown (0)."""
    try:
        fields = _stat(pid)
    except OSError as error:
        return began > 0 and isinstance(error, FileNotFoundError | ProcessLookupError)
    return began > 0 and (fields[0] in "ZX" or int(fields[19]) != began)


def is_stopped(pid: int) -> bool:
    """Return True if a process is halted, by SIGSTOP or a debugger."""
    with contextlib.suppress(OSError):
        return _stat(pid)[0] in "Tt"
    return False


def _stat(pid: int) -> list[str]:
    # The fields from the state on (number 3 in its manual page).
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _status_files(run_dir: Path) -> dict[str, bytes]:
    # The valid files: role -> content; none without free descriptors.
    found = {}
    for path in sorted((run_dir / FOLDER).glob("[!.]*")):
        try:
            content = read_bytes(path)
        except OSError as error:  # A restarted process replaces its file.
            if exhausted(error):
                return {}
            continue
        if len(content) == _SIZE and content[: len(_MAGIC)] == _MAGIC:
            found[path.name] = content
    return found


def _process(role: str, content: bytes) -> Process:
    _, pid, began = _HEAD.unpack_from(content)
    rows = (_ROW.unpack_from(content, _HEAD.size + number * _ROW.size) for number in range(_ROWS))
    now = time.monotonic()
    activities = tuple(
        ThreadActivity(
            thread=str(thread.rstrip(b"\0"), errors="replace"),
            what=str(what.rstrip(b"\0"), errors="replace"),
            seconds=now - since,
            allowed=allowed,
        )
        for since, allowed, thread, what in rows
        if since > 0
    )
    # In a damaged file both may be zero, and a signal to process 0 goes to the sender's group.
    alive = pid > 0 and began > 0 and not is_gone(pid, began)
    return Process(role=role, pid=pid, alive=alive, activities=activities)


# --- hangs ---

POLL_INTERVAL: Final = 1.0
STACKS_SECONDS: Final = 2.0  # for processes to write their stacks before one of them is ended


class Watchdog:
    """Ends the overdue processes of a run on this host, after dumping the stacks of all.

    An ended child is respawned like one that died; an ended learner is a failed rank of torchrun's.
    """

    def __init__(self, run_dir: Path, tell: Callable[[str], None]) -> None:
        self.run_dir, self._tell = run_dir, tell
        self.hangs = 0  # ended processes
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
        self._thread.start()

    def _check(self) -> None:
        for process in read(self.run_dir):
            late = next((activity for activity in process.activities if activity.overdue), None)
            if not process.alive or late is None:
                continue
            dump_stacks(self.run_dir)
            self._tell(
                f"{process.role} (process {process.pid}) hangs: {late.what!r} takes {late.seconds:.0f} s, "
                f"its deadline was at {late.allowed:.0f} s (--hang-timeout, or the wait's own, after the "
                f"last sign of progress). It is ended; the stacks of all processes are in "
                f"{self.run_dir / FOLDER}"
            )
            self.hangs += 1
            time.sleep(STACKS_SECONDS)
            os.kill(process.pid, signal.SIGABRT if process.pid == os.getpid() else signal.SIGKILL)

    def close(self) -> None:
        """Stop checking."""
        self._closing.set()
        self._thread.join(POLL_INTERVAL + 2 * STACKS_SECONDS)

    def _run(self) -> None:
        while not self._closing.wait(POLL_INTERVAL):
            self._check()
