"""Let a run outlive its console: a reader that left (`| head`), a terminal that is lost or stands still.

Within `steady_console` what is written to stdout and stderr goes there as long as somebody takes it. Lines
that nobody takes go to a file of the run instead (`keep_in`), which says when and why it begins; those that
it does not take either are dropped and counted (`log/dropped_lines`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from asyncrl.observability import waits

STALLED_SECONDS: Final = 5.0
"""How long a line waits for a console that takes nothing; the next ones do not wait until it does."""
_AT_ONCE: Final = select.PIPE_BUF
"""Bytes that a pipe which can be written takes without waiting."""
_GONE: Final = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)

_kept_in: Path | None = None
_status = ""
"""The line that is shown below all others, on a terminal."""
_lock = threading.RLock()
"""Of what is written: standard output and standard error may be one terminal."""
_CLEARED: Final = "\r\033[K"
"""To the line's beginning, and nothing behind it."""


def show_status(text: str) -> None:
    """Draw a line below all others on the terminal of standard output; where that is none, do nothing.

    Args:
        text: Shorter than the terminal is wide; empty: take the line away.
    """
    global _status
    stream = sys.stdout
    if isinstance(stream, ConsoleStream) and stream.isatty():
        with _lock:
            if text or _status:
                _status = text
                stream.draw(_CLEARED + text)


def keep_in(path: Path) -> None:
    """Choose the file of lines that the console does not take; it is made with the first of them."""
    global _kept_in
    _kept_in = path


class ConsoleStream(io.TextIOBase):
    """Writes lines to a file descriptor, and never fails or waits for long."""

    def __init__(self, stream: TextIO) -> None:
        """Take the place of `stream`, whose descriptor is used.

        Raises:
            OSError: it has none.
        """
        self._stream, self._descriptor = stream, stream.fileno()
        self._line = ""
        self._gone, self._stalled, self._said = False, False, False
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the text."""
        return self._stream.encoding

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Tell that it can be written to."""
        return True

    def write(self, text: str, /) -> int:
        """Write whole lines at once; the rest waits for its end, or for `flush`."""
        with _lock:
            whole, newline, self._line = (self._line + text).rpartition("\n")
            if newline:
                self._put(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Write what waits for the end of its line."""
        with _lock:
            text, self._line = self._line, ""
            if text:
                self._put(text)

    def draw(self, text: str) -> None:
        """Write text that may get lost: nothing is kept elsewhere of what the terminal does not take."""
        with contextlib.suppress(OSError):
            if not self._gone and not self._stalled:
                self._written(text.encode(self.encoding, errors="backslashreplace"))

    def _put(self, text: str) -> None:
        shown = f"{_CLEARED}{text}{_status}" if _status and self.isatty() else text
        try:
            if not self._gone and self._written(shown.encode(self.encoding, errors="backslashreplace")):
                return
            why = "nobody reads it"
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno in _GONE:
                self._leave()
        self._keep(text, why)

    def _written(self, content: bytes) -> bool:
        """Write to the console; False when it takes nothing, or no more."""
        until = time.monotonic() + (0.0 if self._stalled else STALLED_SECONDS)
        while content:
            left = max(0.0, until - time.monotonic())
            if not self._poll.poll(1000 * left):
                self._stalled = True
                return False
            content = content[os.write(self._descriptor, content[:_AT_ONCE]) :]
        self._stalled = False
        return True

    def _leave(self) -> None:
        """Give the console up, also for what writes past this object: libraries, and Python at its end."""
        self._gone = True
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)
            os.close(nowhere)

    def _keep(self, text: str, why: str) -> None:
        if _kept_in is not None:
            if not self._said:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                text = f"--- {now}: the console takes no lines ({why}); they follow here\n{text}"
            with contextlib.suppress(OSError):
                _append(_kept_in, text)
                self._said = True
                return
        waits.count(waits.DROPPED_LINES, text.count("\n"))


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Neither a link is followed nor the reader of a named pipe waited for.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags, 0o666)
    try:
        os.write(file, text.encode(errors="backslashreplace"))
    finally:
        os.close(file)


@contextlib.contextmanager
def steady_console() -> Iterator[None]:
    """Make stdout and stderr outlive their readers within the block, where they are files."""
    before = (sys.stdout, sys.stderr)
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        with contextlib.suppress(OSError, AttributeError, ValueError):
            stream.flush()
            setattr(sys, name, ConsoleStream(stream))
    try:
        yield
    finally:
        for name, stream in zip(("stdout", "stderr"), before, strict=True):
            with contextlib.suppress(OSError, ValueError):
                getattr(sys, name).flush()
            setattr(sys, name, stream)
