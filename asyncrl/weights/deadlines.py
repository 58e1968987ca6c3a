"""Run actions that may block for ever, and end each with its result or a `WeightSyncError` before a deadline.

A link need not notice a dead peer, so whatever is done with one is done here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from asyncrl.errors import WeightSyncError, first_line
from asyncrl.observability.signals import BlockingThread
from asyncrl.weights.transports.interface import CountsPieces, Link

ABORT_SECONDS = 10.0
"""Longest wait for an aborted link; NCCL needs about half a second."""
POLL_SECONDS = 0.02
"""How often a bounded action asks whether it has become pointless."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


def run_bounded(
    action: Callable[[], T],
    *,
    seconds: float,
    what: str,
    given_up: Callable[[], str],
    progress: Callable[[], int] = lambda: 0,
) -> T:
    """Run `action` on a thread of its own, and leave it there when it does not end.

    Args:
        action: May block for ever.
        seconds: Deadline, counted from the last progress.
        what: Name of the action, for the error.
        given_up: Asked again and again; a non-empty answer is why there is no point in waiting on.
        progress: Another number than before says that the action goes on.

    Raises:
        WeightSyncError: `action` raised, did not end in time, or was given up.
    """
    done = threading.Event()
    result: list[T] = []
    problem: list[Exception] = []

    def run() -> None:
        try:
            result.append(action())
        except Exception as error:
            problem.append(error)  # raised below, on the thread that asked
        finally:
            done.set()

    BlockingThread(run, f"weights: {what}").start()
    until, reached = time.monotonic() + seconds, progress()
    while not done.wait(POLL_SECONDS):
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
    """The link of the epoch under way, when there is one. Used by one thread."""

    def __init__(self, seconds: float, given_up: Callable[[], str]) -> None:
        """Begin without a link.

        Args:
            seconds: Deadline of forming it and of each broadcast.
            given_up: Why the epoch has no future; empty while it has one.
        """
        self._seconds, self._given_up = seconds, given_up
        self._session: Link | None = None

    @property
    def formed(self) -> bool:
        """Whether there is a link."""
        return self._session is not None

    @property
    def link(self) -> Link | None:
        """The link, for what takes no time."""
        return self._session

    def form(self, what: str, make: Callable[[], Link]) -> None:
        """Make the link, all members at the same time.

        Raises:
            WeightSyncError: See `run_bounded`.
        """
        self._session = run_bounded(make, seconds=self._seconds, what=what, given_up=self._given_up)

    def use(self, what: str, action: Callable[[Link], None]) -> None:
        """Broadcast over the link.

        Raises:
            WeightSyncError: See `run_bounded`.
        """
        link = self._session
        assert link is not None
        run_bounded(
            lambda: action(link),
            seconds=self._seconds,
            what=what,
            given_up=self._given_up,
            progress=lambda: link.moved if isinstance(link, CountsPieces) else 0,
        )

    def drop(self) -> None:
        """Abort and free the link, if there is one, without ever blocking for long or failing."""
        if self._session is None:
            return
        # Freed where it is aborted: its destructor joins threads of its own, and may wait as well.
        links, self._session = [self._session], None
        try:
            run_bounded(
                lambda: links.pop().abort(), seconds=ABORT_SECONDS, what="ending a weight link", given_up=str
            )
        except WeightSyncError as error:
            _log.warning("%s Its memory is not freed.", error)
