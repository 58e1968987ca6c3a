"""Append records to a file from a thread of its own: a disk that is full, slow or gone holds nobody up.

add (any thread)     puts a record into a queue of bounded bytes; waits for nobody
the file's thread    consumes   the queue                  waits for: the disk
                     produces   whole records, in order    ended by:  close

A write that fails is taken back and tried again, so that no record is cut short. Records for which the queue
has no room are lost; they are counted, and the console says so once, and once more when all goes well again.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from asyncrl.observability import process_status, waits
from asyncrl.observability.waits import Count

FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 10.0
"""Seconds between two attempts to write; doubled from the first to the longest."""
STALLED_SECONDS: Final = 10.0
"""A write that takes longer is told."""
LARGEST_WRITE: Final = 1 << 20


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
        """Begin with an empty queue; the file and its folder are made with the first record.

        Args:
            path: Of the file. It is appended to when it is there.
            what: The records, for people: 'curves'.
            limit: Bytes that may wait in memory.
            lost: Counts the records that were not written.
            tell: Receives a line when records begin to be late, and when all are written again.
            write: Writes bytes to a file descriptor and returns how many.
        """
        self._path, self._what, self._limit, self._lost = path, what, limit, lost
        self._tell, self._write = tell, write
        self._file: int | None = None
        self._whole: int | None = None
        """Bytes of the file that are whole records, after a write that failed and could not be taken back."""
        # Everything below is shared between the threads and guarded by this condition.
        self._changed = threading.Condition()
        self._queue = deque[bytes]()
        self._bytes, self._lost_now = 0, 0
        self._began: float | None = None
        """Of the write under way."""
        self._late = False
        """The records are late, and `tell` knows."""
        self._behind = False
        """A wait for the records was in vain, and not all are written since."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"writer of {what}", daemon=True)
        self._thread.start()

    def add(self, record: bytes) -> None:
        """Append a record soon. It is lost, and counted, when too much waits already."""
        with self._changed:
            fits = self._bytes + len(record) <= self._limit and not self._closing
            if fits:
                self._queue.append(record)
                self._bytes += len(record)
                self._changed.notify_all()
            else:
                self._lost_now += 1
        if not fits:
            waits.count(self._lost)
        if self._began is not None and time.monotonic() - self._began > STALLED_SECONDS:
            self._tell_late("the disk does not answer")

    def settle(self, seconds: float) -> bool:
        """Wait until all records are written, at most so long, and not at all after a wait that was in vain.

        Returns:
            Whether all are written.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._late or self._behind, seconds)
            self._behind = bool(self._queue)
            return not self._queue

    def close(self, seconds: float) -> None:
        """Write what waits, for at most so long, and stop. What is not written then is lost and counted."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)
        with self._changed:
            left = len(self._queue)
        if left:
            waits.count(self._lost, left)
            self._tell(f"{left} {self._what} were not written to {self._path}: the disk took none of them")

    # --- the file's thread ---

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while records := self._next():
            with process_status.activity(f"writing {self._what}"):
                problem = self._append(b"".join(records))
            with self._changed:
                self._began = None
                if problem is None:
                    for record in records:
                        self._queue.popleft()
                        self._bytes -= len(record)
                    self._behind = self._behind and bool(self._queue)
                    self._changed.notify_all()
            if problem is None:
                pause = FIRST_PAUSE
                self._tell_over()
                continue
            self._tell_late(problem.strerror or str(problem))
            with self._changed:
                if self._closing:
                    break
                self._changed.wait_for(lambda: self._closing, pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        if self._file is not None:
            os.close(self._file)

    def _next(self) -> list[bytes]:
        """Wait for records; none when the file is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)  # Idle: it has no deadline.
            records, size = list[bytes](), 0
            for record in self._queue:
                if records and size + len(record) > LARGEST_WRITE:
                    break
                records.append(record)
                size += len(record)
            self._began = time.monotonic() if records else None
            return records

    def _append(self, content: bytes) -> OSError | None:
        """Write all of it, or nothing; returns why nothing."""
        try:
            file = self._file = self._open() if self._file is None else self._file
            end = os.lseek(file, 0, os.SEEK_END)
        except OSError as error:
            return error
        try:
            written = 0
            while written < len(content):
                written += self._write(file, content[written:])
        except OSError as error:
            self._take_back(file, end)
            return error
        return None

    def _take_back(self, file: int, end: int) -> None:
        """Cut off what a failed write left, now or before the next attempt, and open the file anew then."""
        self._file, self._whole = None, end
        try:
            os.ftruncate(file, end)
            os.close(file)
            self._whole = None
        except OSError:
            pass  # The next attempt cuts it off, before it writes.

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Not blocking: a named pipe of this name would hold the thread for ever.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(f"{self._path.name} is not a regular file")
            if self._whole is not None:
                os.ftruncate(file, self._whole)
                self._whole = None
        except OSError:
            os.close(file)
            raise
        return file

    # --- any thread ---

    def _tell_late(self, why: str) -> None:
        with self._changed:
            if self._late:
                return
            self._late = True
            self._changed.notify_all()
        self._tell(
            f"{self._what} are late: {self._path} cannot be written ({why}). The run goes on; up to "
            f"{self._limit >> 20} MiB of them wait in memory, and what comes then is lost"
        )

    def _tell_over(self) -> None:
        with self._changed:
            if not self._late or self._queue:
                return
            self._late, lost, self._lost_now = False, self._lost_now, 0
        self._tell(f"{self._what} are written again; {lost} were lost")
