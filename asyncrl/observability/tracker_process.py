"""Process of one tracker: hands a run's rows from metrics.jsonl to accelerate's tracker.

    python -m asyncrl.observability.tracker_process NAME RUN_DIR SENT      started by `trackers`

input      the command that started the run, as a line; its end is the run's end
output     lines for the console, or "refused REASON"
SENT       size of metrics.jsonl at the start: later rows are sent
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import first_line
from asyncrl.observability import process_status, waits
from asyncrl.observability.logger import LARGEST_PICTURE, SHEET, VIDEOS, WithoutZeros, flat, picture_name
from asyncrl.observability.metrics_training import EVAL_SUCCESS, EVAL_VERSION
from asyncrl.storage.untrusted import LINE_BYTES, load_json, open_regular, parse_json, read_bytes

END_SECONDS: Final = 60
"""Longest life of the process after the run, enforced by the kernel's alarm."""
POLL: Final = 0.5
LONGEST_VALUE: Final = 250  # characters of a setting in older MLflow
PROJECT: Final = "asyncrl"  # group of the runs in trackers
_TAKE_LISTS: Final = ("swanlab", "wandb")  # of pictures


def main(name: str, run_dir: Path, sent: int) -> int:
    """Send rows until the run is over; returns 0, or 1 if the tracker cannot begin."""
    console = os.dup(1)  # Output of a library goes where its errors go.
    os.set_inheritable(console, False)
    os.dup2(2, 1)
    os.nice(5)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    process_status.publish_as(run_dir, f"tracker-{name}")
    command = sys.stdin.buffer.readline().decode(errors="replace").strip()
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), name="end of the run", daemon=True).start()
    lost = LostRows(name, partial(_say, console))
    try:
        with process_status.activity(f"beginning with {name}"):
            tracker = begin(name, run_dir, command)
    except BaseException as error:
        logging.exception("%s cannot begin", name)
        _say(console, f"refused {_reason(error)}")
        return 1
    shown, newest = WithoutZeros(), 0
    for row in rows_of(run_dir / "metrics.jsonl", sent, over):
        step = row["step"]
        newest = max(newest, step)
        try:
            with process_status.activity(f"sending update {step} to {name}"):
                tracker.log(shown(numbers_of(row)), step=newest)  # Trackers take no step back.
                if EVAL_SUCCESS.name in row:
                    send_sheet(tracker, run_dir, step, newest)
            lost.end()
        except Exception as error:  # This process's boundary to a library: the learner's console reports it.
            logging.exception("%s did not take update %d", name, step)
            lost.add(step, _reason(error))
    with process_status.activity(f"finishing {name}"):
        tracker.finish()
    return 0


class LostRows:
    """Lines for the console: at the first row that a tracker refuses, and when it takes rows again."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self._name, self._say, self._lost = name, say, 0

    def add(self, step: int, reason: str) -> None:
        """Count a row that raised an error."""
        waits.count(waits.LOST_TRACKED)
        if not self._lost:
            self._say(f"{self._name} does not take update {step} ({reason}). The run goes on")
        self._lost += 1

    def end(self) -> None:
        """Report the first row that is taken after lost ones."""
        if self._lost:
            self._say(f"{self._name} takes updates again; {self._lost} are missing there")
            self._lost = 0


def begin(name: str, run_dir: Path, command: str) -> Any:
    """Begin a run of accelerate's tracker, with the run's name, settings and start command."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)  # accelerate's logging asks it for the rank.
    run = run_dir.name
    # Most classes take the project first, some the run itself.
    of_project: dict[str, dict[str, Any]] = {
        "comet_ml": {},
        "mlflow": {"run_name": run, "description": command},
        "swanlab": {"experiment_name": run, "logdir": str(run_dir / "swanlab")},
        "trackio": {"name": run},
        "wandb": {"name": run, "dir": str(run_dir), "notes": command},
    }
    of_run: dict[str, dict[str, Any]] = {
        "aim": {"logging_dir": str(run_dir.parent), "experiment": PROJECT},
        "clearml": {},
        "dvclive": {"dir": str(run_dir / "dvclive")},
    }
    first, options = (PROJECT, of_project[name]) if name in of_project else (run, of_run[name])
    tracker = LOGGER_TYPE_TO_CLASS[name](first, **options)
    tracker.start()
    settings = flat(load_json(run_dir / "config.json", dict)) | {"command": command}
    plain = {
        k: v if isinstance(v, bool | int | float) else str(v)[:LONGEST_VALUE] for k, v in settings.items()
    }
    tracker.store_init_configuration(plain)
    return tracker


def send_sheet(tracker: Any, run_dir: Path, version: int, step: int) -> None:
    """Send the sheet of a measured version, if one was drawn and the tracker takes pictures or files."""
    try:
        content = read_bytes(run_dir / picture_name(version, SHEET), LARGEST_PICTURE)
    except FileNotFoundError:
        return  # It could not be drawn.
    if hasattr(tracker, "log_images"):
        import numpy as np
        from PIL import Image

        with Image.open(BytesIO(content), formats=("PNG",)) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
        shown = [pixels] if tracker.name in _TAKE_LISTS else pixels
        tracker.log_images({"eval/sheet": shown}, step=step)
    elif hasattr(tracker, "log_artifact"):
        tracker.log_artifact(str(run_dir / picture_name(version, SHEET)), VIDEOS)


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a row that are finite numbers; those of a measurement name its version."""
    numbers = {
        name: float(value)
        for name, value in row.items()
        if name not in ("step", "time") and type(value) in (int, float) and math.isfinite(value)
    }
    return numbers | ({EVAL_VERSION.name: float(row["step"])} if EVAL_SUCCESS.name in numbers else {})


def rows_of(path: Path, at: int, over: threading.Event) -> Iterator[dict[str, Any]]:
    """Yield rows with a ``step`` of a growing metrics.jsonl, from byte `at` on, until `over`."""
    while True:
        last = over.is_set()
        lines, at = _new_lines(path, at)
        for line in lines:
            try:
                row = parse_json(line, dict)
            except ValueError:
                continue  # A damaged line is no row (`logger.cut_rows_after`).
            if type(row.get("step")) is int:
                yield row
        if not lines:
            if last:
                return
            over.wait(POLL)  # Idle until a row or the end comes.


def _new_lines(path: Path, at: int) -> tuple[list[bytes], int]:
    """Read whole lines from position `at` on, and return their end. A line may still be cut short."""
    try:
        handle = open_regular(path)
    except OSError:
        return [], at
    with os.fdopen(handle, "rb") as file:
        file.seek(at)
        content = file.read(LINE_BYTES)
    whole = content[: content.rfind(b"\n") + 1]
    if not whole and len(content) == LINE_BYTES:
        return [b""], at + LINE_BYTES  # Longer than any row: skipped.
    return whole.splitlines(keepends=True), at + len(whole)


def _wait_for_end(over: threading.Event) -> None:
    """Read the input to its end, the run's; from then on the kernel's alarm runs."""
    # Not through Python's buffer: an interpreter that ends while a thread holds its lock aborts.
    while os.read(sys.stdin.fileno(), 1):
        pass
    signal.alarm(END_SECONDS)
    over.set()


def _say(console: int, line: str) -> None:
    """Write a line, shorter than a pipe takes at once."""
    with contextlib.suppress(BrokenPipeError):  # The learner is gone; the remaining rows are sent.
        os.write(console, line.encode("utf-8", "replace")[:500].replace(b"\n", b" ") + b"\n")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:300]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
