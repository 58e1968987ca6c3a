"""Signals and limits of a process: stop requests, exit, open files."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from asyncrl.errors import end_at_once, handle_signals

# --- stop requests ---

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopFlag:
    """Set by SIGINT, SIGTERM or SIGHUP (a lost terminal); later ones change nothing."""

    def __init__(self) -> None:
        self.requested, self._reported, self._signal = False, "", ""

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested, self._signal = True, self._signal or signal.Signals(number).name

    def pop_events(self) -> list[str]:
        """Return the message for the user, once, after the first signal."""
        reported, self._reported = self._reported, self._signal
        return [f"stopping after {self._signal}: saving what was learned"] if self._signal != reported else []

    @contextmanager
    def listening(self) -> Iterator[StopFlag]:
        """Handle these signals within the block; main thread only."""
        # A SIGHUP that is ignored from the start stays so: that is how `nohup` works.
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heeded = [number for number in _ENDING if not (ignored and number == signal.SIGHUP)]
        before = {number: signal.signal(number, self._note) for number in heeded}
        try:
            yield self
        finally:
            for number, former in before.items():
                signal.signal(number, former)


# --- the signals of a command, but where a `StopFlag` listens ---

_SAME_REQUEST: Final = 1.0  # Seconds within which signals are one: torchrun repeats the terminal's.
_asked = -math.inf  # When the command was first asked to end.
_held = _late = 0  # Depth of `held` blocks, and the signal that arrived in one.


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt of the signal; at a second one, or while modules are imported, end at once."""
    global _asked, _late
    if (now := time.monotonic()) - _asked < _SAME_REQUEST:
        return
    again, _asked = _asked > 0, now
    # An interrupted import fails in ways of its own, and has nothing to save.
    if again or (not _held and _imports(frame)):
        end_at_once(number)
    if _held:
        _late = number
    else:
        raise KeyboardInterrupt(number)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def repeat_lost(lost: sys.UnraisableHookArgs) -> None:
    """Send a signal again whose KeyboardInterrupt was lost in a destructor (`sys.unraisablehook`)."""
    global _asked
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    _asked = -math.inf
    threading.Timer(0.01, os.kill, (os.getpid(), *lost.exc_value.args)).start()


@contextmanager
def held() -> Iterator[None]:
    """Let `interrupt` raise at the end of the block, so that the block completes; main thread only."""
    global _held, _late
    _held += 1
    try:
        yield
    finally:
        _held -= 1
        if _late and not _held:
            number, _late = _late, 0
            raise KeyboardInterrupt(number)


def held_signal() -> int:
    """Return the signal that arrived in a `held` block; 0: none."""
    return _late


@contextmanager
def starting_child() -> Iterator[None]:
    """Keep the terminal's signals from processes that the block starts, also while these import modules."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # Its start would unblock them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        with held():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- ends ---

_exit_code: int | None = None


# A call that may block for ever runs on a `BlockingThread`, which is abandoned at its deadline. If it returns
# while Python ends, Python up to 3.13 ends the thread where it asks for the interpreter; within a destructor
# of torch's that aborts the process (SIGABRT), and torchrun ends the other ranks. With such a thread a
# process therefore ends after Python's exit handlers.


class BlockingThread(threading.Thread):
    """Daemon thread for a call into a library that may block for ever."""

    def __init__(self, call: Callable[[], object], name: str) -> None:
        super().__init__(target=call, name=name, daemon=True)


def expect_exit(code: int) -> int:
    """Register the exit code and return it; the last call of a program."""
    global _exit_code
    _exit_code = code
    return code


# Exit handlers run in reverse order: a program imports this module before those that register others.
@atexit.register
def _end() -> None:
    if _exit_code is None:
        return
    # Python is about to restore the defaults, which would change the exit code.
    handle_signals(signal.SIG_IGN)
    if not any(isinstance(thread, BlockingThread) for thread in threading.enumerate()):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError, ValueError):  # Closed, or without a reader.
            stream.flush()
    os._exit(_exit_code)


def die_with_parent(parent: int) -> None:
    """Make this process end when the process `parent` does, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # It died before the call.
        os._exit(1)


# --- file descriptors ---

REMEDY: Final = (
    "This process may open no more files. Raise its limit (ulimit -n) before the run is started, or see what "
    "holds them: ls -l /proc/PID/fd, and for connections ss -tnp."
)


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # Some systems have a lower limit of their own.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def exhausted(error: BaseException) -> bool:
    """Return True if an error means that this process, or the system, has no free file descriptor."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
