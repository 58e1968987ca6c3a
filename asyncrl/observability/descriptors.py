"""Have enough file descriptors, and some in reserve for when others have taken all."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator
from typing import Final

REMEDY: Final = (
    "This process may open no more files. Raise its limit (ulimit -n) before the run is started, or see what "
    "holds them: ls -l /proc/PID/fd, and for connections ss -tnp."
)
RESERVED: Final = 8


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems have a lower limit of their own.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def exhausted(error: BaseException) -> bool:
    """Whether an error means that this process, or the system, has no free file descriptor."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


class Reserve:
    """Open files that stand for none, and are closed to make room for a moment. Any thread may use it."""

    def __init__(self, number: int = RESERVED) -> None:
        """Open as many as `number`, or as can be had."""
        self._number, self._lock = number, threading.Lock()
        self._held: list[int] = []
        self._fill()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Give the descriptors to others within the block."""
        with self._lock:
            self._release()
            try:
                yield
            finally:
                self._fill()

    def close(self) -> None:
        """Give them back for good."""
        with self._lock:
            self._number = 0
            self._release()

    def _release(self) -> None:
        while self._held:
            os.close(self._held.pop())

    def _fill(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._held) < self._number:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
