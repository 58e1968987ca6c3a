"""Write a run's numbers to metrics.jsonl and TensorBoard, by threads (`background_file`), and the console."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TextIO

import numpy as np
from numpy.typing import NDArray

from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status, waits
from asyncrl.observability.background_file import CONSOLE, BackgroundFile
from asyncrl.observability.metrics import Metric, Readings
from asyncrl.observability.terminal import COLUMNS, TRUTH, Column, columns_in, header, render
from asyncrl.storage.atomic import replacing
from asyncrl.storage.untrusted import parse_row, reading

_console = logging.getLogger(CONSOLE)
HEADER_EVERY: Final = 20  # console rows
_WINDOW: Final = 20  # updates whose pace gives the remaining time
ROW_SECONDS: Final = 1.0  # longest wait of the learner for its row
CLOSE_SECONDS: Final = 5.0
ROWS_LIMIT: Final = 64 << 20  # Bytes of rows that wait while the disk takes none: 10,000 updates
CURVES_LIMIT: Final = 16 << 20
_TAGS: Final = {m.SUCCESS_ONCE.name: "Success/imagined", m.EVAL_SUCCESS.name: "Success/true"}  # sort first
LONGEST_COMMAND: Final = 4000  # characters of a start command that are kept

# --- settings and command of a run ---


def flat(table: Mapping[str, Any], section: str = "") -> dict[str, object]:
    """Return nested settings by flag, each list as one text."""
    found = dict[str, object]()
    for key, value in table.items():
        name = section + key.replace("_", "-")
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        else:
            found[name] = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return found


def start_command() -> str:
    """Return the command that started this process, as typed; a long one is cut."""
    program, *arguments = sys.argv
    first = "asyncrl" if Path(program).name in ("asyncrl", "__main__.py") else program
    ranks = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else ""
    launcher = f"torchrun --nproc-per-node {ranks} " if ranks and first != "asyncrl" else ""
    text = launcher + shlex.join([first, *arguments])
    return text if len(text) <= LONGEST_COMMAND else f"{text[: LONGEST_COMMAND - 3]}..."


# --- TensorBoard ---


class WithoutZeros:
    """Leaves out metrics that have always been 0, unless they measure the policy, where 0 is informative."""

    def __init__(self) -> None:
        self._begun = set[str]()

    def __call__(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the values that are shown."""
        results = ("env/", "eval/")
        self._begun |= {name for name, value in values.items() if value or name.startswith(results)}
        return {name: value for name, value in values.items() if name in self._begun}


class _EventFile:
    def __init__(self, add: Callable[[bytes], None]) -> None:
        self._add, self._records = add, bytearray()

    def write(self, content: bytes) -> None:
        self._records += content

    def flush(self) -> None:
        if self._records:
            content, self._records = bytes(self._records), bytearray()
            self._add(content)

    close = flush


class Curves:
    """Curves of one TensorBoard file: tensorboardX passes its records to a `BackgroundFile`."""

    _SCHEME: Final = "asyncrl"

    def __init__(
        self,
        folder: Path,
        first_step: int,
        tell: Callable[[str], None],
        *,
        settings: Mapping[str, object] = MappingProxyType({}),
        command: str = "",
    ) -> None:
        """Begin a file that voids points of earlier files from `first_step` on."""
        from tensorboardX import SummaryWriter
        from tensorboardX.record_writer import register_writer_factory

        self._tell, self._shown = tell, WithoutZeros()
        register_writer_factory(self._SCHEME, self)  # Its `open` is called within the next line.
        self._writer = SummaryWriter(
            f"{self._SCHEME}:{folder}", purge_step=first_step, max_queue=0, flush_secs=1
        )
        self._events: Any = self._writer.file_writer
        if command:
            self._writer.add_text("run/command", f"    {command}", first_step)
        if settings:
            rows = "\n".join(f"| {k} | {str(v).replace('|', ' ')} |" for k, v in settings.items())
            self._writer.add_text("run/settings", f"| setting | value |\n|---|---|\n{rows}", first_step)

    def directory_check(self, path: str) -> None:
        """Do nothing: the folder is made with the file."""

    def open(self, path: str) -> _EventFile:
        """Open the file that tensorboardX writes to."""
        self._file = BackgroundFile(
            Path(path.removeprefix(f"{self._SCHEME}:")),
            "curves",
            limit=CURVES_LIMIT,
            lost=waits.LOST_CURVES,
            tell=self._tell,
        )
        return _EventFile(self._file.add)

    def write(self, step: int, values: Readings, now: float) -> None:
        """Add an update's numbers, of the time `now` (seconds since 1970)."""
        from tensorboardX.proto import summary_pb2

        proto: Any = summary_pb2
        shown = self._shown({metric.name: value for metric, value in values.items()})
        points = [proto.Summary.Value(tag=_TAGS.get(x, x), simple_value=value) for x, value in shown.items()]
        self._events.add_summary(proto.Summary(value=points), step, now)

    def add_picture(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        """Add a picture ``[H, W, 3]``."""
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Finish the file, within `seconds`. Safe to call twice."""
        self._writer.close()
        self._file.close(seconds)


# --- the logger ---


class MetricsLogger(contextlib.AbstractContextManager["MetricsLogger"]):
    """Writes a learner's metrics; `write` returns when the row is in its file, or earlier on a slow disk."""

    def __init__(
        self,
        run_dir: Path,
        *,
        updates: int,
        resume_step: int = 0,
        evaluates: bool = False,
        settings: Mapping[str, object] = MappingProxyType({}),
        command: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._updates = updates
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._pace: deque[tuple[int, float]] = deque([(resume_step, clock())], maxlen=_WINDOW + 1)
        self._began = self._pace[0][1]
        self._rows_shown = 0
        self._all_columns = (*COLUMNS, TRUTH) if evaluates else COLUMNS
        self._columns: tuple[Column, ...] = ()
        self._evaluated: dict[Metric, float] = {}
        """Result of the newest version that was measured in the true simulator."""
        path = run_dir / "metrics.jsonl"
        if wrong := cut_rows_after(path, resume_step):
            self.banner(
                f"{path} had {wrong} damaged lines, which are not rows of an update; they are left out"
            )
        self._rows = BackgroundFile(
            path, "rows of metrics.jsonl", limit=ROWS_LIMIT, lost=waits.LOST_ROWS, tell=self.banner
        )
        self._curves = Curves(
            run_dir / "tensorboard", resume_step + 1, self.banner, settings=settings, command=command
        )
        self.readers: list[Callable[[int, Readings], None]] = []
        """Called with step and values of every row; they return at once."""

    def write(self, step: int, values: Readings) -> None:
        """Record an update, counted from 1, and show it on the console."""
        now = self._clock()
        self._record(step, values, now)
        with process_status.waiting(waits.ROW, ROW_SECONDS):
            self._rows.settle(ROW_SECONDS)
        self._pace.append((step, now))
        self._show(step, values)
        for reader in self.readers:
            reader(step, {**values, **self._evaluated})

    def write_evaluation(self, step: int, values: Readings) -> None:
        """Record the measurement of an earlier update."""
        self._record(step, values, self._clock())
        if step >= self._evaluated.get(m.EVAL_VERSION, 0):
            self._evaluated = {**values, m.EVAL_VERSION: float(step)}

    def add_picture(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        """Show a picture ``[H, W, 3]`` in TensorBoard."""
        self._curves.add_picture(step, name, pixels)

    @property
    def seconds(self) -> float:
        """Seconds since the log was opened."""
        return self._clock() - self._began

    def banner(self, text: str) -> None:
        """Print a line, such as the parts of the run or the return of an actor; the log has it too."""
        _console.info(text)
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Finish the files, as far as the disk allows it in CLOSE_SECONDS. Safe to call twice."""
        until = time.monotonic() + CLOSE_SECONDS
        self._rows.close(CLOSE_SECONDS)
        self._curves.close(max(0.1, until - time.monotonic()))

    def __exit__(self, *error: object) -> None:
        self.close()

    def _record(self, step: int, values: Readings, now: float) -> None:
        # JSON has no NaN and no infinity; null is what every reader understands.
        finite = {x.name: value if math.isfinite(value) else None for x, value in values.items()}
        self._rows.add((json.dumps({"step": step, "time": round(now, 3)} | finite) + "\n").encode())
        self._curves.write(step, values, now)

    def _show(self, step: int, values: Readings) -> None:
        columns = self._all_columns
        if self._stream.isatty():
            columns = columns_in(shutil.get_terminal_size().columns, columns)
        if self._rows_shown % HEADER_EVERY == 0 or columns != self._columns:
            self.banner(header(columns))
            self._columns = columns
        self._rows_shown += 1
        (first, began), (last, now) = self._pace[0], self._pace[-1]
        eta = (self._updates - last) * (now - began) / (last - first) if last > first else math.nan
        self.banner(render(step, {**values, **self._evaluated}, eta, columns))


def cut_rows_after(path: Path, step: int) -> int:
    """Remove rows of later updates and damaged lines; return the count of damaged ones, except torn ends."""
    if not path.exists():
        return 0
    wrong = 0
    with reading(path) as file, replacing(path) as part, part.open("wb") as kept:
        for line in file:
            row = parse_row(line) or {}
            if type(row.get("step")) is not int:
                wrong += line.endswith(b"\n")
            elif row["step"] <= step:
                kept.write(line)
    return wrong
