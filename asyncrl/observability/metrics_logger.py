"""Write a run's numbers to metrics.jsonl, TensorBoard and the console.

Files are written by threads of their own (`background_file`): a disk that is full or hangs makes rows and
curves late, in the end lost and counted, but the learner goes on.

The console shows one row per update, with a header that comes again every 20 rows:

    update  success  lag avg/max       kl    clip     grad  groups/min  waiting learner/actors       eta
        41    62.5%      1.2 / 2   0.0031    4.1%     0.84        11.3                 3% / 0%   1:52:10
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Protocol, TextIO

from asyncrl.observability import console_stream, curves, waits
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability.background_file import BackgroundFile
from asyncrl.observability.metrics import Metric, Readings, reduce
from asyncrl.observability.process_log import CONSOLE
from asyncrl.observability.run_facts import NO_FACTS, RunFacts
from asyncrl.storage.atomic import replacing
from asyncrl.storage.bounded_json import read_rows

_console = logging.getLogger(CONSOLE)
HEADER_EVERY = 20
"""Console rows between two headers."""
_WINDOW = 20
"""Updates whose pace the remaining time is estimated from."""
ROW_SECONDS = 1.0
"""Longest wait of the learner for its row to be written."""
CLOSE_SECONDS = 5.0
ROWS_LIMIT = 64 << 20
"""Bytes of rows that wait in memory while the disk takes none: those of about 10,000 updates."""
CURVES_LIMIT = 16 << 20
_BOLD, _RED, _END = "\033[1m", "\033[31m", "\033[0m"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the console row, right-aligned."""

    title: str
    width: int
    text: Callable[[Readings], str]


def _cell(pattern: str, *needed: Metric) -> Callable[[Readings], str]:
    """Fill the parts of `pattern` ('a / b') with one value each; '-' is one that is absent, or all."""
    parts = list(zip(pattern.split(" / "), needed, strict=True))

    def text(row: Readings) -> str:
        known = any(x in row for x in needed)
        return " / ".join(part.format(row[x]) if x in row else "-" for part, x in parts) if known else "-"

    return text


def _grad(row: Readings) -> str:
    value = row.get(m.GRAD_NORM)
    return "-" if value is None else f"{value:.2f}" if value < 10_000 else f"{value:.1e}"


COLUMNS = (
    Column(title="success", width=7, text=_cell("{:.1%}", m.SUCCESS_ONCE)),
    Column(title="lag avg/max", width=11, text=_cell("{:.1f} / {:.0f}", s.LAG_MEAN, s.LAG_MAX)),
    Column(title="kl", width=7, text=_cell("{:.4f}", m.APPROX_KL)),
    Column(title="clip", width=6, text=_cell("{:.1%}", m.CLIP_FRACTION)),
    Column(title="grad", width=7, text=_grad),
    Column(title="groups/min", width=10, text=_cell("{:.1f}", s.GROUPS_PER_MINUTE)),
    Column(
        title="waiting l/a",  # Learner, actors.
        width=11,
        text=_cell("{:.0%} / {:.0%}", s.LEARNER_WAITING, s.ACTORS_WAITING),
    ),
    Column(title="live/useful", width=11, text=_cell("{:.0%} / {:.0%}", s.LIVE_SLOTS, s.USEFUL_STEPS)),
)
"""The columns between 'update' and 'eta'."""
TRUTH = Column(title="true [95 %] @update", width=19, text=lambda row: _truth(row))
"""The last one, in a run that measures the true success: of which update it is stands behind it."""
LEFT_OUT = ("live/useful", "clip", "grad", "waiting l/a", "kl")
"""What a narrow terminal does without, the first of these first. A file or a pipe gets all columns."""


def _truth(row: Readings) -> str:
    if m.EVAL_SUCCESS not in row:
        return "-"
    low, high = row[m.EVAL_LOW], row[m.EVAL_HIGH]
    return f"{row[m.EVAL_SUCCESS]:.0%} [{low:.0%}, {high:.0%}] @{row[m.EVAL_VERSION]:.0f}"


def columns_in(width: int, columns: tuple[Column, ...] = COLUMNS) -> tuple[Column, ...]:
    """Choose those of `columns` that fit into a terminal of `width`; at least those not in `LEFT_OUT`."""
    chosen = columns
    for title in LEFT_OUT:
        if len(header(chosen)) > width:
            chosen = tuple(column for column in chosen if column.title != title)
    return chosen


def header(columns: Sequence[Column] = COLUMNS) -> str:
    """Write the console's header line."""
    titles = [f"{'update':>6}", *(f"{column.title:>{column.width}}" for column in columns), f"{'eta':>8}"]
    return "  ".join(titles)


def render(step: int, values: Readings, eta: float, columns: Sequence[Column] = COLUMNS) -> str:
    """Write one console row.

    Args:
        step: Update it is about.
        values: Its values; an absent one shows as '-'.
        eta: Seconds until the run ends; NaN when nobody can know.
        columns: Those that are shown.
    """
    cells = [f"{step:>6}", *(f"{column.text(values):>{column.width}}" for column in columns)]
    return "  ".join([*cells, f"{duration(eta):>8}"])


def duration(seconds: float) -> str:
    """Write seconds as h:mm:ss, '-' for NaN.

    >>> duration(6730)
    '1:52:10'
    """
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class RowReader(Protocol):
    """Who is told of every row."""

    def note(self, step: int, values: Readings) -> None:
        """Hear of an update's numbers, which will soon be in metrics.jsonl; returns at once."""
        ...


class MetricsLogger:
    """Writes what a run measured. Opened by the learner only.

    A row is in its file when `write` returns, unless the disk needs longer than ROW_SECONDS.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        updates: int,
        resume_step: int = 0,
        log_every: int = 1,
        evaluates: bool = False,
        about: RunFacts = NO_FACTS,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the run's files; what an interrupted run wrote after `resume_step` is cut off.

        Args:
            run_dir: Folder of the run.
            updates: Update after which the run ends.
            resume_step: Update that the run continues from; 0 for a new run.
            log_every: Updates folded into one console row.
            evaluates: Whether `write_evaluation` will be called: rows then say what it was told last.
            about: How the run was started, for TensorBoard.
            stream: Console; standard output when None.
            clock: Seconds since 1970.
        """
        self._updates = updates
        self._log_every = log_every
        self._stream = sys.stdout if stream is None else stream
        self._colour = self._stream.isatty() and not os.environ.get("NO_COLOR")
        self._clock = clock
        began = clock()
        self._pace: deque[tuple[int, float]] = deque([(resume_step, began)], maxlen=_WINDOW + 1)
        self._unshown: list[Readings] = []
        self._rows_shown = 0
        self._all_columns = (*COLUMNS, TRUTH) if evaluates else COLUMNS
        self._columns: tuple[Column, ...] = ()
        self._noted: dict[Metric, float] = {}
        """What stands in every row until it is something else."""
        self._evaluated: dict[Metric, float] = {}
        """What is known of the newest version that was measured in the true simulator."""
        console_stream.keep_in(run_dir / "logs" / "console.log")
        path = run_dir / "metrics.jsonl"
        if wrong := cut_rows_after(path, resume_step):
            self.banner(
                f"{path} had {wrong} damaged lines, which are not rows of an update; they are left out"
            )
        self._rows = BackgroundFile(
            path, "rows of metrics.jsonl", limit=ROWS_LIMIT, lost=waits.LOST_ROWS, tell=self.banner
        )
        self._curves = BackgroundFile(
            curves.event_file(run_dir / "tensorboard"),
            "curves",
            limit=CURVES_LIMIT,
            lost=waits.LOST_CURVES,
            tell=self.banner,
        )
        self._encoder = curves.Curves()
        told = curves.beginning(resume_step + 1, began, settings=about.settings, command=about.command)
        self._curves.add(told)
        self.readers: list[RowReader] = []
        """Who is told of every row, such as trackers."""

    def write(self, step: int, values: Mapping[Metric, float]) -> None:
        """Record one update everywhere; the console shows every `log_every`-th and the last one.

        Args:
            step: The update, counted from 1 over all resumes.
            values: What was measured.
        """
        now = self._clock()
        values = {**self._noted, **values}
        for reader in self.readers:  # First, for a tracker may answer for the row as soon as it is written.
            reader.note(step, {**values, **self._evaluated})
        self._record(step, values, now)
        with waits.waiting(waits.ROW, ROW_SECONDS):
            self._rows.settle(ROW_SECONDS)
        self._pace.append((step, now))
        self._unshown.append(values)
        if step % self._log_every == 0 or step >= self._updates:
            self._show(step, reduce(self._unshown))
            self._unshown.clear()

    def write_evaluation(
        self,
        step: int,
        values: Mapping[Metric, float],
        pictures: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Record what was measured of an earlier update: in a line and a point of their own, at that update.

        Args:
            step: The update; the console's rows say it from now on.
            values: What was measured of it, in metrics that `write` is never given.
            pictures: Name of a card of TensorBoard -> content of a PNG or GIF file.
        """
        now = self._clock()
        self._record(step, values, now)
        for tag, content in pictures.items():
            try:
                self._curves.add(curves.picture(step, tag, content, now))
            except ValueError as error:
                self.banner(f"TensorBoard does not get {tag} of update {step}: {error}")
        if step >= self._evaluated.get(m.EVAL_VERSION, 0):
            self._evaluated = {**values, m.EVAL_VERSION: float(step)}

    def note(self, values: Mapping[Metric, float]) -> None:
        """Put values into every later row, until they are noted anew."""
        self._noted |= values

    def banner(self, text: str) -> None:
        """Print something that is not a row, such as what the run consists of or that an actor came back."""
        self._print(text, _BOLD)

    def close(self) -> None:
        """Finish the files, as far as the disk allows it in CLOSE_SECONDS. Safe to call twice."""
        until = time.monotonic() + CLOSE_SECONDS
        self._rows.close(CLOSE_SECONDS)
        self._curves.close(max(0.1, until - time.monotonic()))

    def __enter__(self) -> MetricsLogger:
        """Close at the end of a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, whatever happened."""
        self.close()

    def _record(self, step: int, values: Mapping[Metric, float], now: float) -> None:
        # JSON has no NaN and no infinity; null is what every reader understands.
        finite = {x.name: value if math.isfinite(value) else None for x, value in values.items()}
        row = json.dumps({"step": step, "time": round(now, 3)} | finite) + "\n"
        self._rows.add(row.encode())
        self._curves.add(self._encoder.scalars(step, values, now))

    def _show(self, step: int, values: Readings) -> None:
        columns = self._all_columns
        if self._stream.isatty():
            columns = columns_in(shutil.get_terminal_size().columns, columns)
        if self._rows_shown % HEADER_EVERY == 0 or columns != self._columns:
            self._print(header(columns), _BOLD)
            self._columns = columns
        self._rows_shown += 1
        sound = math.isfinite(values.get(m.GRAD_NORM, 0.0))
        shown = {**values, **self._evaluated}
        self._print(render(step, shown, self._eta(), columns), "" if sound else _RED)

    def _eta(self) -> float:
        (first, began), (last, now) = self._pace[0], self._pace[-1]
        return (self._updates - last) * (now - began) / (last - first) if last > first else math.nan

    def _print(self, text: str, colour: str) -> None:
        _console.info(text)
        print(f"{colour}{text}{_END}" if self._colour and colour else text, file=self._stream, flush=True)


def cut_rows_after(path: Path, step: int) -> int:
    """Remove the rows of updates after `step` from a metrics.jsonl, and a row that a crash cut short.

    Returns:
        How many damaged lines were removed besides; the last one counts only when it is a whole line.

    Raises:
        OSError: It is no regular file, or cannot be read or written.
    """
    if not path.exists():
        return 0
    wrong = 0
    with replacing(path) as part, part.open("wb") as kept:
        for line, row in read_rows(path):
            at = row.get("step") if row is not None else None
            if type(at) is not int:
                wrong += not line or line.endswith(b"\n")
            elif at <= step:
                kept.write(line)
    return wrong
