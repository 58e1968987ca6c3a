"""Run actions that may block for ever, and end each before a deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from asyncrl.errors import WeightSyncError, first_line
from asyncrl.observability.signals import BlockingThread
from asyncrl.weights.interface import Link

ABORT_SECONDS = 10.0
"""Longest wait for an aborted link; NCCL needs about half a second."""
POLL_SECONDS = 0.02
"""Seconds between two checks of a bounded action."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


def run_bounded(
    action: Callable[[], T],
    *,
    seconds: float,
    what: str,
    given_up: Callable[[], str],
    progress: Callable[[], int] = lambda: 0,
    wait: Callable[[float], object] | None = None,
    wake: Callable[[], None] = lambda: None,
) -> T:
    """Run `action` on a thread of its own, which is abandoned if it does not end.

    Args:
        seconds: Deadline, counted from the last change of `progress`.
    """
    done = threading.Event()
    result: list[T] = []
    problem: list[Exception] = []

    def run() -> None:
        try:
            result.append(action())
        except Exception as error:
            problem.append(error)  # raised below, on the caller's thread
        finally:
            done.set()
            wake()

    BlockingThread(run, f"weights: {what}").start()
    wait = wait or done.wait
    until, reached = time.monotonic() + seconds, progress()
    while not done.is_set():
        wait(POLL_SECONDS)
        if done.is_set():
            break
        if (now := progress()) != reached:
            until, reached = time.monotonic() + seconds, now
        if reason := given_up():
            raise WeightSyncError(f"{what} was given up: {reason}.")
        if time.monotonic() > until:
            raise WeightSyncError(f"{what} did not end within {seconds:g} s: a member does not take part.")
    if problem:
        raise WeightSyncError(f"{what} failed: {first_line(problem[0])}") from problem[0]
    return result[0]


class TransportSession:
    """The link of the current epoch. Used by one thread."""

    def __init__(
        self,
        seconds: float,
        given_up: Callable[[], str],
        wait: Callable[[float], object] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._how: dict[str, Any] = {"seconds": seconds, "given_up": given_up, "wait": wait, "wake": wake}
        self._link: Link | None = None

    @property
    def formed(self) -> bool:
        """True if there is a link."""
        return self._link is not None

    def _run(self, what: str, action: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        return run_bounded(action, what=what, progress=progress, **self._how)

    def form(self, what: str, make: Callable[[], Link]) -> None:
        """Make the link; all members do at the same time."""
        self._link = self._run(what, make)

    def use(self, what: str, action: Callable[[Link], None]) -> None:
        """Broadcast over the link."""
        link = self._link
        assert link is not None
        self._run(what, lambda: action(link), lambda: getattr(link, "moved", 0))

    def drop(self) -> None:
        """Abort and free the link, without blocking for long or failing."""
        if self._link is None:
            return
        # Freed where it is aborted: its destructor joins threads of its own, and may wait as well.
        links, self._link = [self._link], None
        try:
            run_bounded(
                lambda: links.pop().abort(), seconds=ABORT_SECONDS, what="ending a weight link", given_up=str
            )
        except WeightSyncError as error:
            _log.warning("%s Its memory is not freed.", error)
