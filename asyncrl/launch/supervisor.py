"""Keeps one child process alive: starts it, respawns it with back-off, ends it.

States of a child, as `Supervisor.poll` sees them:

    RUNNING ── exit code 0, or `stop` ──► FINISHED
       │  ▲
      dies └── back-off over ── BACKING_OFF ── died too often ──► RunError

The supervising process stays light: it never imports what the child runs, so no torch and no CUDA.

Prepare a supervised child, then call the function that it was started for.

Apart from `supervisor` so that a child imports nothing else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from multiprocessing.process import BaseProcess
from pathlib import Path

from tqdm import tqdm

from asyncrl.errors import RunError
from asyncrl.observability import waits
from asyncrl.observability.signals import die_with_parent, expect_exit
from asyncrl.storage.untrusted import open_regular


def run_child(name: str, target: str, args: tuple[str, ...], log_path: str) -> None:
    """Send all output to the log, tie this process's life to its parent's, then call ``target(*args)``."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    redirect_output(log_path)
    die_with_parent(parent.pid)
    # Ctrl-C reaches the whole process group; only the learner answers it, and then ends the others in order.
    for of_the_terminal in (signal.SIGINT, signal.SIGHUP):  # They reach all processes of it.
        signal.signal(of_the_terminal, signal.SIG_IGN)
    # The lock of its own is a semaphore of the system, which stays behind when this process is killed.
    tqdm.set_lock(threading.RLock())
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


MAX_BACK_OFF = 30.0
"""Longest pause before a respawn, in seconds."""
HEALTHY_SECONDS = 600.0
"""A child that lived so long was well: deaths before it are forgotten."""
QUICK_SECONDS = 10.0
"""A child that lived shorter makes the next pause twice as long."""
KILL_DEADLINE = 5.0
"""Seconds the operating system has to end a killed child."""

_BLOCK = r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+\S.*(?:\n[ \t]+\S.*)*"
_CHAIN = r"\n\n(?:The above exception was|During handling of).*\n\n"
_TRACEBACK = re.compile(
    rf"^(?:{_BLOCK}(?:{_CHAIN}{_BLOCK})*|Fatal Python error: .*(?:\n.+|\n(?=\n\S)){{0,20}})", re.M
)


class ChildState(Enum):
    """What a supervised child is doing."""

    RUNNING = "running"
    BACKING_OFF = "backing off"
    FINISHED = "finished"


class Supervisor:
    """Runs one child process and respawns it when it dies.

    The kernel ends a child together with the *thread* that spawned it, so create and poll a supervisor on one
    thread that outlives it.
    """

    def __init__(
        self,
        name: str,
        target: str,
        args: tuple[str, ...],
        log_path: Path,
        max_respawns: int,
        back_off: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the child.

        Args:
            target: What the child calls, 'package.module:function'; imported by the child only.
            back_off: Seconds before a respawn, >= 0; doubled when it lived shorter than QUICK_SECONDS, at
                most 30.
        """
        self.name = name
        self.respawns = 0
        """How often it came back."""
        self._deaths = 0
        """In a row, of children that did not live long."""
        self._quick_deaths = 0
        self._call = (target, args, str(log_path))
        self._log_path = log_path
        self._max_respawns = max_respawns
        self._back_off = back_off
        self._clock = clock
        self._due: float | None = None
        self._stopped = False
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        self._child = self._spawn()

    @property
    def pid(self) -> int:
        """Process id of the newest child, dead or alive."""
        assert self._child.pid is not None
        return self._child.pid

    def poll(self) -> ChildState:
        """Look after the child, without waiting: respawn it when its back-off is over."""
        if self._stopped:
            return ChildState.FINISHED
        if self._due is not None:
            if self._clock() < self._due:
                return ChildState.BACKING_OFF
            self._due = None
            self.respawns += 1
            waits.count(waits.RESPAWNS)
            self._child = self._spawn()
            return ChildState.RUNNING
        if self._child.exitcode is None:
            return ChildState.RUNNING
        if self._child.exitcode == 0:
            return ChildState.FINISHED
        lived = self._clock() - self._born
        self._deaths = 1 if lived >= HEALTHY_SECONDS else self._deaths + 1
        self._quick_deaths = 0 if lived >= QUICK_SECONDS else self._quick_deaths + 1
        if self._deaths > self._max_respawns:
            raise RunError(self._death_report(self._child.exitcode))
        self._due = self._clock() + min(self._back_off * 2 ** max(0, self._quick_deaths - 1), MAX_BACK_OFF)
        return ChildState.BACKING_OFF

    def wait(self, deadline: float) -> bool:
        """Wait until the child has ended; False when it still runs after `deadline` seconds."""
        self._child.join(deadline)
        return self._child.exitcode is not None

    def stop(self, deadline: float) -> int:
        """End the child for good: ask with SIGTERM, and after `deadline` seconds end it with SIGKILL.

        Returns:
            Its exit code; ``-signal`` when a signal ended it.
        """
        self._due, self._stopped = None, True
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
        child.start()
        self._born = self._clock()
        return child

    def _death_report(self, exit_code: int) -> str:
        text = ""
        if self._log_path.exists():
            with self._log_path.open("rb") as log:
                log.seek(self._log_start)
                text = log.read().decode(errors="replace")
        times = "1 time" if self._deaths == 1 else f"{self._deaths} times in a row"
        allowed = f"(allowed respawns: {self._max_respawns})"
        head = f"{self.name} died {times} {allowed}, last {_ending(exit_code)}."
        cause = first_traceback(text)
        told = f" Its first error:\n\n{cause}\n" if cause else " It left no traceback."
        return f"{head}{told}\nSee {self._log_path} for everything it printed."


def first_traceback(log: str) -> str:
    """Find the first traceback (or crash report of the interpreter) in a log, with the errors chained to it.

    Returns:
        Its lines, or '' when there is none.
    """
    match = _TRACEBACK.search(log)
    return match[0].rstrip() if match else ""


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    known = {member.value: member.name for member in signal.Signals}
    hint = ", which is what the operating system sends when memory runs out" if exit_code == -9 else ""
    return f"by {known.get(-exit_code, f'signal {-exit_code}')}{hint}"
