"""Console of a run: lines that never fail or block it, its rows of numbers, and a status line on a terminal.

Lines that the console does not accept are counted; a run's are also in its log (`background_file`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import select
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status, waits
from asyncrl.observability.metrics import Metric, Readings

STALLED_SECONDS: Final = 5.0
"""Longest wait of a line for a blocked console; later lines do not wait until it accepts one."""
_AT_ONCE: Final = select.PIPE_BUF  # Bytes that a writable pipe takes without blocking
LINE_SECONDS: Final = 30.0
LINE_COLUMNS: Final = 80
_GONE: Final = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
_CLEARED: Final = "\r\033[K"  # moves to the line's beginning and clears it

_status = ""  # Line shown below all others, on a terminal
_lock = threading.RLock()  # Guards all writing: standard output and standard error may be one terminal


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss, NaN as '-'."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def hanging(head: str, text: str, *, least: int = 20) -> str:
    """Append `text` to `head`; on a terminal, wrap and indent it, below `head` if space is short."""
    if not sys.stdout.isatty():
        return head + text
    width = shutil.get_terminal_size().columns
    indent = len(head) if width - len(head) >= least else 4
    lines = textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False) or [""]
    first = [head + lines[0]] if indent == len(head) else [head.rstrip(), " " * indent + lines[0]]
    return "\n".join([*first, *(" " * indent + line for line in lines[1:])])


class _Lines(io.TextIOBase):
    """Replaces a stderr that is no terminal: writes a progress bar's output as lines."""

    _complete = False

    def write(self, text: str, /) -> int:
        if (line := text.strip()) and not self._complete:
            print(line, file=sys.stderr, flush=True)
        self._complete |= "100%|" in text  # A bar that is closed draws its last line again.
        return len(text)


def progress(items: Any = None, **options: Any) -> Any:
    """Return tqdm's bar, hidden below another; without a terminal, it prints a line every `LINE_SECONDS`."""
    from tqdm import tqdm

    options["disable"] = options.get("disable", False) or bool(getattr(tqdm, "_instances", ()))
    if sys.stderr.isatty():
        return tqdm(items, **{"mininterval": 1.0, "dynamic_ncols": True} | options)
    often = {"mininterval": LINE_SECONDS, "delay": LINE_SECONDS, "miniters": 1}
    return tqdm(items, **options | often | {"file": _Lines(), "ncols": LINE_COLUMNS})


class ConsoleStream(io.TextIOBase):
    """Writes lines to a file descriptor, and never fails or blocks for long."""

    def __init__(self, stream: TextIO) -> None:
        self.isatty = stream.isatty
        self._stream, self._descriptor = stream, stream.fileno()
        self._line = ""
        self._gone, self._stalled = False, False
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the encoding of the replaced stream."""
        return self._stream.encoding

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str, /) -> int:
        """Write whole lines at once; an unfinished one waits for its end or `flush`."""
        with _lock:
            whole, newline, self._line = (self._line + text).rpartition("\n")
            if newline:
                self._put(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Write a line that has no end yet."""
        with _lock:
            text, self._line = self._line, ""
            if text:
                self._put(text)

    def draw(self, text: str) -> None:
        """Write text that may get lost: it is not counted."""
        if not self._stalled:
            self._written(text)

    def _put(self, text: str) -> None:
        if not self._written(f"{_CLEARED}{text}{_status}" if _status and self.isatty() else text):
            waits.count(waits.DROPPED_LINES, text.count("\n"))

    def _written(self, text: str) -> bool:
        content = text.encode(self.encoding, errors="backslashreplace")
        until = time.monotonic() + (0.0 if self._stalled else STALLED_SECONDS)
        try:
            while content and not self._gone:
                if not self._poll.poll(1000 * max(0.0, until - time.monotonic())):
                    self._stalled = True
                    return False
                content = content[os.write(self._descriptor, content[:_AT_ONCE]) :]
        except OSError as error:
            if error.errno in _GONE:
                self._leave()
            return False
        self._stalled = False
        return not self._gone

    def _leave(self) -> None:
        """Abandon the console, also for writers that bypass this object: libraries, and Python at its end."""
        self._gone = True
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)
            os.close(nowhere)


@contextlib.contextmanager
def steady_console() -> Iterator[None]:
    """Make stdout and stderr outlive their readers within the block, if they are files."""
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


# --- rows of updates ---


class Column(NamedTuple):
    """One column of the console row, right-aligned."""

    title: str
    width: int
    pattern: str  # of all its metrics together, or 'a / b' of one each
    metrics: tuple[Metric, ...]

    def cell(self, row: Readings) -> str:
        """Format the metrics of a row; '-' for each absent one, or for the cell."""
        parts, values = self.pattern.split(" / "), [row.get(metric) for metric in self.metrics]
        if len(parts) < len(values):
            return "-" if None in values else self.pattern.format(*values)
        texts = ["-" if x is None else part.format(x) for part, x in zip(parts, values, strict=True)]
        if len(texts[0]) > self.width:
            texts[0] = f"{values[0]:.1e}"
        return "-" if {*texts} == {"-"} else " / ".join(texts)


COLUMNS: Final = (
    Column("success", 7, "{:.1%}", (m.SUCCESS_ONCE,)),
    Column("lag avg/max", 11, "{:.1f} / {:.0f}", (s.LAG_MEAN, s.LAG_MAX)),
    Column("kl", 7, "{:.4f}", (m.APPROX_KL,)),
    Column("clip", 6, "{:.1%}", (m.CLIP_FRACTION,)),
    Column("grad", 7, "{:.2f}", (m.GRAD_NORM,)),
    Column("groups/min", 10, "{:.1f}", (s.GROUPS_PER_MINUTE,)),
    Column("waiting l/a", 11, "{:.0%} / {:.0%}", (s.LEARNER_WAITING, s.ACTORS_WAITING)),  # Learner, actors.
    Column("live/useful", 11, "{:.0%} / {:.0%}", (s.LIVE_SLOTS, s.USEFUL_STEPS)),
)
"""Columns between 'update' and 'eta'."""
_TRUE: Final = (m.EVAL_SUCCESS, m.EVAL_LOW, m.EVAL_HIGH, m.EVAL_VERSION)
TRUTH: Final = Column("true [95 %] @update", 19, "{:.0%} [{:.0%}, {:.0%}] @{:.0f}", _TRUE)
"""Last column of a run that measures true success."""
LEFT_OUT: Final = ("live/useful", "clip", "grad", "waiting l/a", "kl")
"""Columns dropped on a narrow terminal, in this order."""


def columns_in(width: int, columns: tuple[Column, ...] = COLUMNS) -> tuple[Column, ...]:
    """Leave out columns until they fit into a terminal of `width`, at most those of `LEFT_OUT`."""
    for title in LEFT_OUT:
        if len(header(columns)) > width:
            columns = tuple(column for column in columns if column.title != title)
    return columns


def header(columns: Sequence[Column] = COLUMNS) -> str:
    """Format the header line."""
    titles = [f"{'update':>6}", *(f"{column.title:>{column.width}}" for column in columns), f"{'eta':>8}"]
    return "  ".join(titles)


def render(step: int, values: Readings, eta: float, columns: Sequence[Column] = COLUMNS) -> str:
    """Format a row; an absent value, or an `eta` (seconds) of NaN, shows as '-'."""
    cells = [f"{step:>6}", *(f"{column.cell(values):>{column.width}}" for column in columns)]
    return "  ".join([*cells, f"{duration(eta):>8}"])


# --- status line ---

STATUS_SECONDS: Final = 0.5  # pause between two drawings
_SILENT: Final = ("replay", "tracker-")  # roles that are not shown


def show_status(text: str) -> None:
    """Draw a line, shorter than the terminal, below all others; an empty one removes it."""
    global _status
    stream = sys.stdout
    if isinstance(stream, ConsoleStream) and stream.isatty():
        with _lock:
            if text or _status:
                _status = text
                stream.draw(_CLEARED + text)


class StatusLine:
    """Shows the activities of a run in a terminal's last line, from a thread.

    0:00:41  learner-0: waiting for a batch: 5 of 8 groups, 43 episodes  actor-0: ...
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._began = run_dir, time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status line", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and remove the line. May be called again."""
        self._closing.set()
        self._thread.join(2 * STATUS_SECONDS)
        show_status("")

    def _run(self) -> None:
        while not self._closing.wait(STATUS_SECONDS):
            width, elapsed = shutil.get_terminal_size().columns, time.monotonic() - self._began
            show_status(status_line(process_status.read(self._run_dir), elapsed, width))


def status_line(processes: Sequence[process_status.Process], seconds: float, width: int) -> str:
    """Write the activities of a run's processes in one line of at most `width` columns, the learner first."""
    shown = []
    for process in sorted(processes, key=lambda process: not process.role.startswith("learner")):
        if not process.role.startswith(_SILENT):
            doing = process.main.what if process.main is not None else "starting"
            shown.append(f"{process.role}: {doing if process.alive else 'ended'}")
    text = "  ".join([duration(seconds), *shown])
    return text if len(text) < width else f"{text[: width - 4]}..."
