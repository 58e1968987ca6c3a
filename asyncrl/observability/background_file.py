"""Append records to a file from a thread, so that a full, slow or lost disk blocks no caller.

The file's thread consumes a queue of bounded memory and writes whole records, in order, until `close`. A
failed write is undone and repeated. Records beyond the queue's limit are lost and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate, islice, takewhile
from pathlib import Path
from typing import Final

from asyncrl.observability import process_status, waits
from asyncrl.observability.waits import Count
from asyncrl.storage.untrusted import open_regular

PAUSE: Final = 0.5  # seconds between two attempts
STALLED_SECONDS: Final = 10.0  # a longer write is reported
LARGEST_WRITE: Final = 1 << 20
CONSOLE: Final = "asyncrl.console"
_LOG_LIMIT: Final = 4 << 20
_LOG_CLOSE_SECONDS: Final = 2.0
_log = logging.getLogger(__name__)


class BackgroundFile:
    """A file to which whole records are appended."""

    def __init__(
        self,
        path: Path,
        what: str,
        *,
        limit: int,
        lost: Count,
        tell: Callable[[str], None],
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        """Start with an empty queue of at most `limit` bytes; the file is made with the first record."""
        self._path, self._what, self._limit, self._lost = path, what, limit, lost
        self._tell, self._write = tell, write
        self._file: int | None = None
        self._whole: int | None = None  # bytes of whole records in the file before the last write
        self._changed = threading.Condition()  # guards the fields below
        self._queue, self._bytes, self._lost_now = deque[bytes](), 0, 0
        self._began: float | None = None  # start of the current write
        self._late = self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"writer of {what}", daemon=True)
        self._thread.start()

    def add(self, record: bytes) -> None:
        """Queue a record; it is lost and counted if the queue is full."""
        with self._changed:
            if fits := self._bytes + len(record) <= self._limit and not self._closing:
                self._queue.append(record)
                self._bytes += len(record)
                self._changed.notify_all()
            else:
                self._lost_now += 1
        if not fits:
            waits.count(self._lost)
        if (began := self._began) is not None and time.monotonic() - began > STALLED_SECONDS:
            self._on_failure("the disk does not answer")

    def settle(self, seconds: float) -> bool:
        """Wait at most `seconds`, less if writing fails; returns True if all is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._late, seconds)
            return not self._queue

    def close(self, seconds: float) -> None:
        """Write the queue within `seconds`, and stop. The rest is lost and counted. May be called twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)
        if left := len(self._queue):
            waits.count(self._lost, left)
            self._tell(f"{left} {self._what} were not written to {self._path}: the disk took none of them")

    def _on_failure(self, reason: str) -> None:
        with self._changed:
            reported, self._late = self._late, True
            self._changed.notify_all()
        if not reported:
            self._tell(
                f"{self._what} are late: {self._path} cannot be written ({reason}). The run goes on; up to "
                f"{self._limit >> 20} MiB of them wait in memory, and later ones are lost"
            )

    # --- the file's thread ---

    def _run(self) -> None:
        while records := self._next():
            try:
                with process_status.activity(f"writing {self._what}"):
                    self._append(b"".join(records))
            except OSError as error:
                self._began = None
                self._on_failure(error.strerror or str(error))
                with self._changed:
                    if self._closing:
                        break
                    self._changed.wait_for(lambda: self._closing, PAUSE)
            else:
                self._pop(records)
        if self._file is not None:
            os.close(self._file)

    def _next(self) -> list[bytes]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)  # Idle: it has no deadline.
            sizes = accumulate(map(len, self._queue))
            count = sum(1 for _ in takewhile(lambda size: size <= LARGEST_WRITE, sizes))
            self._began = time.monotonic() if self._queue else None
            return list(islice(self._queue, max(1, count)))

    def _append(self, content: bytes) -> None:
        # All of it or, with an error, nothing.
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                self._cut(self._file)
            self._whole = os.lseek(self._file, 0, os.SEEK_END)
            while content:
                content = content[self._write(self._file, content) :]
        except OSError:
            if self._file is not None:
                file, self._file = self._file, None
                with contextlib.suppress(OSError):  # The next attempt cuts it, before it writes.
                    self._cut(file)
                with contextlib.suppress(OSError):
                    os.close(file)
            raise

    def _cut(self, file: int) -> None:
        if self._whole is not None and self._whole < os.fstat(file).st_size:
            os.ftruncate(file, self._whole)

    def _pop(self, records: list[bytes]) -> None:
        with self._changed:
            self._began = None
            for record in records:
                self._queue.popleft()
                self._bytes -= len(record)
            self._changed.notify_all()
            if not self._late or self._queue:
                return
            self._late, lost, self._lost_now = False, self._lost_now, 0
        self._tell(f"{self._what} are written again; {lost} were lost")


# --- the log of a process ---


class _FileHandler(logging.Handler):
    def __init__(self, file: BackgroundFile) -> None:
        super().__init__(logging.INFO)
        self._file = file
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._file.add((self.format(record) + "\n").encode(errors="backslashreplace"))


@contextlib.contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Append INFO records and an exception's traceback to a file; warnings go to standard error too."""
    file = BackgroundFile(
        path, f"lines of {path.name}", limit=_LOG_LIMIT, lost=waits.DROPPED_LINES, tell=lambda line: None
    )
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    console.addFilter(lambda record: record.name != __name__)
    handlers, package = (_FileHandler(file), console), logging.getLogger("asyncrl")
    before, package.propagate = (package.level, package.propagate), False
    package.setLevel(logging.INFO)
    for handler in handlers:
        package.addHandler(handler)
    _log.info("process %d begins, %s", os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z"))
    try:
        yield
    except Exception:
        _log.exception("process %d failed", os.getpid())
        raise
    finally:
        for handler in handlers:
            package.removeHandler(handler)
        package.setLevel(before[0])
        package.propagate = before[1]
        file.close(_LOG_CLOSE_SECONDS)
