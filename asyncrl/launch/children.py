"""Child processes of a rank: spawned, respawned when they die, ended with the run. No torch.

States of a child, as `Supervisor.poll` returns them:

    RUNNING ── exit code 0, or `stop` ──► FINISHED
       │  ▲
      dies └── back-off over ── BACKING_OFF ── died too often ──► RunError
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from tqdm import tqdm

from asyncrl.errors import AsyncRLError, RunError
from asyncrl.observability import waits
from asyncrl.observability.signals import StopFlag, die_with_parent, expect_exit, raise_limit, starting_child
from asyncrl.storage.untrusted import open_regular

REPLAY: Final = "replay"  # the child that keeps the episodes
POLL_INTERVAL: Final = 0.05
MAX_BACK_OFF: Final = 30.0
HEALTHY_SECONDS: Final = 600.0  # Life of a child after which earlier deaths are forgotten
QUICK_SECONDS: Final = 10.0  # Life of a child below which the next pause is twice as long
KILL_DEADLINE: Final = 5.0

_BLOCK = r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+\S.*(?:\n[ \t]+\S.*)*"
_CHAIN = r"\n\n(?:The above exception was|During handling of).*\n\n"
_TRACEBACK = re.compile(
    rf"^(?:{_BLOCK}(?:{_CHAIN}{_BLOCK})*|Fatal Python error: .*(?:\n.+|\n(?=\n\S)){{0,20}})", re.M
)


def run_child(name: str, target: str, args: tuple[object, ...], log_path: str) -> None:
    """Send all output to the log, tie this process's life to its parent's, then call ``target(*args)``."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    redirect_output(log_path)
    die_with_parent(parent.pid)
    # The lock of its own is a semaphore of the system, which stays behind when this process is killed.
    tqdm.set_lock(threading.RLock())
    raise_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    print(f"--- {name} starts, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(*args)
    expect_exit(0)


def redirect_output(log_path: str) -> None:
    """Append standard output and error, also those of C libraries, to a file; lines are written at once."""
    log = open_regular(Path(log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    os.close(log)
    faulthandler.enable()


class Supervisor:
    """Runs one child process and respawns it when it dies; used by one thread, whose end ends the child."""

    def __init__(
        self,
        name: str,
        target: str,
        args: tuple[object, ...],
        log_path: Path,
        max_respawns: int,
        back_off: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the child in `target` ('package.module:function'); respawns wait at least `back_off` s."""
        self.name, self.respawns, self.finished = name, 0, False
        self._deaths = self._quick_deaths = 0  # In a row.
        self._call, self._log_path = (target, args, str(log_path)), log_path
        self._max_respawns, self._back_off, self._clock = max_respawns, back_off, clock
        self._due: float | None = None  # time of the next respawn
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        self._child = self._spawn()

    @property
    def pid(self) -> int:
        """Process id of the newest child, dead or alive."""
        assert self._child.pid is not None
        return self._child.pid

    def poll(self) -> None:
        """Set `finished`, or respawn a dead child once its back-off is over; raises if it died too often."""
        if self._due is not None and self._clock() >= self._due:
            self._due = None
            self.respawns += 1
            waits.count(waits.RESPAWNS)
            self._child = self._spawn()
        if self.finished or self._due is not None or self._child.exitcode is None:
            return
        if self._child.exitcode == 0:
            self.finished = True
            return
        if not self._log_path.parent.is_dir():
            raise RunError(
                f"{self._log_path.parents[1]}, the folder of the run, is gone: renamed or deleted while "
                "the run wrote into it. Put it back, and go on with --resume."
            )
        lived = self._clock() - self._born
        self._deaths = 1 if lived >= HEALTHY_SECONDS else self._deaths + 1
        self._quick_deaths = 0 if lived >= QUICK_SECONDS else self._quick_deaths + 1
        if self._deaths > self._max_respawns:
            raise RunError(self._death_report(self._child.exitcode))
        self._due = self._clock() + min(self._back_off * 2 ** max(0, self._quick_deaths - 1), MAX_BACK_OFF)

    def wait(self, deadline: float) -> bool:
        """Wait at most `deadline` seconds for the child's end; False if it still runs."""
        self._child.join(deadline)
        return self._child.exitcode is not None

    def stop(self, deadline: float) -> int:
        """End the child for good: SIGTERM, and after `deadline` seconds SIGKILL; returns its exit code."""
        self._due, self.finished = None, True
        for end, seconds in ((self._child.terminate, deadline), (self._child.kill, KILL_DEADLINE)):
            if self._child.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    end()
                self._child.join(seconds)
        if self._child.exitcode is None:
            raise RunError(
                f"{self.name} (process {self.pid}) outlived SIGKILL by {KILL_DEADLINE:g} s; it hangs inside "
                "the operating system, often in a GPU driver or a network file system. End it by hand."
            )
        return self._child.exitcode

    def _spawn(self) -> BaseProcess:
        # Daemonic: a parent that ends by an error takes its children along instead of waiting for them.
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=run_child, args=(self.name, *self._call), name=self.name, daemon=True)
        with starting_child():  # The terminal signals the whole group; only the learner answers.
            child.start()
        self._born = self._clock()
        return child

    def _death_report(self, exit_code: int) -> str:
        log = self._log_path.read_bytes()[self._log_start :] if self._log_path.exists() else b""
        cause = first_traceback(log.decode(errors="replace"))
        if sentence := re.search(r"^asyncrl\.errors\.\w+: (.+)\Z", cause, re.M):
            cause = sentence[1]
        times = "1 time" if self._deaths == 1 else f"{self._deaths} times in a row"
        ending = f"with exit code {exit_code}"
        if exit_code < 0:
            ending = f"by {signal.Signals(-exit_code).name}"
            ending += ", which is what the operating system sends when memory runs out" * (exit_code == -9)
        return (
            f"{self.name} died {times} (allowed respawns: {self._max_respawns}), last {ending}."
            + (f" Its first error:\n\n{cause}\n" if cause else " It left no traceback.")
            + f"\nSee {self._log_path} for everything it printed."
        )


def first_traceback(log: str) -> str:
    """Return the first traceback or crash report of the interpreter in a log, with chained errors; or ''."""
    match = _TRACEBACK.search(log)
    return match[0].rstrip() if match else ""


class ChildProcesses:
    """Children of one rank, supervised by a thread, so that they come back during long updates too."""

    def __init__(
        self,
        stop: StopFlag,
        tell: Callable[[str], None] = print,
        news: Callable[[], list[str]] = list,
        report_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Begin without children; `poll` prints `news`, and reports (once) or raises a lost child's error."""
        self._stop, self._tell, self._news = stop, tell, news
        self._report_failure = report_failure
        self.failure: RunError | None = None
        self._supervisors: list[Supervisor] = []
        self._respawns_reported: dict[str, int] = {}
        self._requests = queue.SimpleQueue[tuple[Callable[[], Supervisor], Future[None]]]()
        self._ending = self._reported = False
        self._polling = threading.Lock()  # Never held while waiting for a child.
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="children", daemon=True)
        self._thread.start()

    def spawn(self, make: Callable[[], Supervisor]) -> None:
        """Spawn a child, which is respawned when it dies; errors of `make` propagate."""
        done = Future[None]()
        self._requests.put((make, done))
        done.result()  # The thread, with which the child would end, spawns in milliseconds or fails.

    def poll(self) -> bool:
        """Report respawns and news; returns True if the run shall stop. The learner's `stop_requested`."""
        if self.failure is not None:
            if self._report_failure is None:
                raise self.failure
            if not self._reported:
                self._reported = True
                self._report_failure(str(self.failure))
        for child in list(self._supervisors):
            if child.respawns > self._respawns_reported.get(child.name, 0):
                self._respawns_reported[child.name] = child.respawns
                self._tell(f"{child.name} died and came back (respawn {child.respawns}); see its log")
        for line in self._news():
            self._tell(line)
        return self._stop.requested

    def run_until_done(self, over: Callable[[], bool]) -> None:
        """Poll until all children have finished, a stop is requested, or the run is `over` without them."""
        while not (over() or self.poll()):
            children = list(self._supervisors)
            if children and all(child.finished for child in children):
                return
            time.sleep(POLL_INTERVAL)

    def end(self, deadline: float) -> None:
        """Let the children end by themselves for `deadline` seconds in all, then end the others."""
        with self._polling:
            self._ending = True
        until = time.monotonic() + deadline
        for child in reversed(self._supervisors):
            child.wait(max(0.0, until - time.monotonic()))
            child.stop(1.0)
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(queue.Empty):
                self._spawn(*self._requests.get(timeout=POLL_INTERVAL))
            with self._polling:
                try:
                    for child in [] if self._ending or self.failure else self._supervisors:
                        child.poll()
                except RunError as error:  # Raised or reported by the next `poll` of the rank.
                    self.failure = error

    def _spawn(self, make: Callable[[], Supervisor], done: Future[None]) -> None:
        try:
            child = make()
        except Exception as error:  # The thread's boundary: raised by `spawn`.
            done.set_exception(error)
            return
        self._supervisors.append(child)
        done.set_result(None)


def log_errors(action: Callable[[], object], tell: Callable[[str], None]) -> None:
    """Run one step of the shutdown; an error is logged, so that the other steps follow."""
    try:
        action()
    except AsyncRLError as error:
        tell(f"while ending the run: {error}")
