"""Answer signals: note a wish to stop, raise or hold back an interrupt, end with the parent process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PARENT_POLL_INTERVAL = 0.5
"""Seconds between two looks after the parent where the kernel does not tell."""
_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopFlag:
    """Whether SIGINT, SIGTERM or SIGHUP (a terminal that is gone) came.

    Later ones change nothing: torchrun repeats the terminal's signal.
    """

    def __init__(self) -> None:
        self.set, self._told = False, False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.set = True

    def pop_events(self) -> list[str]:
        """Return and forget what the user is told when one came; of the thread that ends the run."""
        told, self._told = self._told, self.set
        return ["stopping: what was learned is saved first"] if self.set and not told else []

    @contextmanager
    def listening(self) -> Iterator[StopFlag]:
        """Take these signals over within the block; main thread only."""
        with _handled(self._note, *_ENDING):
            yield self


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Let SIGTERM and SIGHUP, like SIGINT, raise KeyboardInterrupt within the block; main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled(interrupt, *_ENDING):
        yield


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold back the first Ctrl-C until the end of the block; a second one interrupts at once."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # Ctrl-C raises no KeyboardInterrupt here.
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    with _handled(note, signal.SIGINT):
        yield
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    # A SIGHUP that is ignored from the start stays so: that is how `nohup` works.
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heeded = [number for number in numbers if not (ignored and number == signal.SIGHUP)]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def die_with_parent(parent: int) -> None:
    """Make this process end when the process `parent` does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # It died before the kernel was told.
            os._exit(1)
    else:
        threading.Thread(
            target=_end_after_parent, args=(parent,), name="end after parent", daemon=True
        ).start()


def _end_after_parent(parent: int) -> None:
    while os.getppid() == parent:  # Ended by the parent's death; that is its purpose, so it has no deadline.
        time.sleep(PARENT_POLL_INTERVAL)
    os._exit(1)
