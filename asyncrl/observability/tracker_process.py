"""Run one tracker of a run: read its rows from metrics.jsonl and hand them to accelerate's tracker.

    python -m asyncrl.observability.tracker_process NAME RUN_DIR SENT      started by `trackers`

input      a line, the command that started the run; its end is the run's end
output     "took STEP", "lost STEP WHY", "refused WHY": one line each
error      what the tracker prints, in RUN/logs/tracker-NAME.log

SENT is the size of metrics.jsonl when the tracker was started: what comes behind it is sent.
Once the input has ended, the kernel ends this process after END_SECONDS, whatever its library is doing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import first_line
from asyncrl.observability import process_status
from asyncrl.observability.curves import is_result
from asyncrl.observability.metrics_training import EVAL_SUCCESS, EVAL_VERSION
from asyncrl.observability.run_facts import flat
from asyncrl.storage.bounded_json import load_json, parse_json
from asyncrl.storage.regular_files import LINE_BYTES, open_regular
from asyncrl.storage.version_pictures import SHEET, VIDEOS, picture_name, read_picture

POLL: Final = 0.5
"""Seconds between two looks for new rows."""
END_SECONDS: Final = 60
"""Time to send what is left and to finish, after the run's end."""
NICENESS: Final = 5
LONGEST_VALUE: Final = 250
"""Characters of a setting that are sent; MLflow's older stores take no more."""
_TAKE_LISTS: Final = ("swanlab", "wandb")
"""Trackers that take several pictures under one name, always; the others take one."""
PROJECT: Final = "asyncrl"
"""Under which the trackers group the runs."""


def main(name: str, run_dir: Path, sent: int) -> int:
    """Send rows until the run is over; return 0, or 1 when the tracker cannot begin."""
    answers = _own_output()
    os.nice(NICENESS)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    process_status.publish_as(run_dir, f"tracker-{name}")
    command = sys.stdin.buffer.readline().decode(errors="replace").strip()
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), name="end of the run", daemon=True).start()
    try:
        with process_status.activity(f"beginning with {name}"):
            tracker = begin(name, run_dir, command)
    except BaseException as error:
        logging.exception("%s cannot begin", name)
        _answer(answers, f"refused {_why(error)}")
        return 1
    held_back, newest = Filter(), 0
    for row in rows_of(run_dir / "metrics.jsonl", sent, over):
        step = row["step"]
        newest = max(newest, step)
        try:
            with process_status.activity(f"sending update {step} to {name}"):
                tracker.log(held_back(row), step=newest)  # Trackers take no step back.
                if EVAL_SUCCESS.name in row:
                    send_sheet(tracker, run_dir, step, newest)
        except Exception as error:  # This process's boundary to a library: the learner says it.
            logging.exception("%s did not take update %d", name, step)
            _answer(answers, f"lost {step} {_why(error)}")
            continue
        _answer(answers, f"took {step}")
    with process_status.activity(f"finishing {name}"):
        tracker.finish()
    return 0


def begin(name: str, run_dir: Path, command: str) -> Any:
    """Build accelerate's tracker, begin a run with it and tell it the settings and the start command.

    Args:
        name: One of `trackers.PACKAGES`.
        run_dir: Of the run, whose name the tracker's run gets.
        command: With which it was started.
    """
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)  # What accelerate logs through asks it which rank this is: the only one.
    first, options = _call(name, run_dir, command)
    tracker = LOGGER_TYPE_TO_CLASS[name](first, **options)
    tracker.start()
    settings = flat(load_json(run_dir / "config.json", dict))
    plain = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in settings.items()}
    tracker.store_init_configuration({k: shortened(v) for k, v in (plain | {"command": command}).items()})
    return tracker


def send_sheet(tracker: Any, run_dir: Path, version: int, step: int) -> None:
    """Show the sheet of a measured version, where one was drawn and the tracker takes pictures or files.

    Args:
        tracker: As of `begin`.
        run_dir: Of the run.
        version: That was measured.
        step: Update under which the tracker gets it.
    """
    try:
        content = read_picture(run_dir, version, SHEET)
    except FileNotFoundError:
        return  # With --evaluation.movies 0 there is none.
    if hasattr(tracker, "log_images"):
        import numpy as np
        from PIL import Image

        with Image.open(BytesIO(content), formats=("PNG",)) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
        shown = [pixels] if tracker.name in _TAKE_LISTS else pixels
        tracker.log_images({"eval/sheet": shown}, step=step)
    elif hasattr(tracker, "log_artifact"):
        path = run_dir / picture_name(version, SHEET)
        tracker.log_artifact(str(path), VIDEOS)


def shortened(value: str | float) -> str | float:
    """Cut a text to what every tracker takes as a parameter."""
    return value[:LONGEST_VALUE] if isinstance(value, str) else value


def _call(name: str, run_dir: Path, command: str) -> tuple[str, dict[str, Any]]:
    """What a tracker's class is called with: for most the project first, for some the run itself."""
    run = run_dir.name
    project: dict[str, dict[str, Any]] = {
        "comet_ml": {},
        "mlflow": {"run_name": run, "description": command},
        "swanlab": {"experiment_name": run, "logdir": str(run_dir / "swanlab")},
        "trackio": {"name": run},
        "wandb": {"name": run, "dir": str(run_dir), "notes": command},
    }
    if name in project:
        return PROJECT, project[name]
    own: dict[str, dict[str, Any]] = {
        "aim": {"logging_dir": str(run_dir.parent), "experiment": PROJECT},
        "dvclive": {"dir": str(run_dir / "dvclive")},
    }
    return run, own.get(name, {})


class Filter:
    """Leaves out what is no number, and a metric until it was something else than 0, as in `curves`.

    What was measured of an earlier update (`MetricsLogger.write_evaluation`) comes with `EVAL_VERSION`.
    """

    def __init__(self) -> None:
        self._begun = set[str]()

    def __call__(self, row: dict[str, Any]) -> dict[str, float]:
        """Return the metrics of a row that are sent."""
        found = {}
        for name, value in row.items():
            if name in ("step", "time") or type(value) not in (int, float) or not math.isfinite(value):
                continue
            if value or name in self._begun or is_result(name):
                self._begun.add(name)
                found[name] = float(value)
        evaluated = {EVAL_VERSION.name: float(row["step"])} if EVAL_SUCCESS.name in found else {}
        return found | evaluated


def rows_of(path: Path, at: int, over: threading.Event) -> Iterator[dict[str, Any]]:
    """Read a metrics.jsonl as it grows, until the run is over and its last row was read.

    Args:
        path: Of the file; it may be there only later.
        at: Byte from which on it is read.
        over: Set when no row will come any more.

    Yields:
        Whole rows with a number ``step``.
    """
    while True:
        last = over.is_set()
        lines, at = _new_lines(path, at)
        for line in lines:
            try:
                row = parse_json(line, dict)
            except ValueError:
                continue  # A damaged line is no row for anybody (`metrics_logger.cut_rows_after`).
            if type(row.get("step")) is int:
                yield row
        if last and not lines:
            return
        if not lines:
            over.wait(POLL)  # Idle until a row or the end comes.


def _new_lines(path: Path, at: int) -> tuple[list[bytes], int]:
    """Read whole lines behind position `at`, and return where they end. A line may still be cut short."""
    try:
        handle = open_regular(path)
    except OSError:
        return [], at
    with os.fdopen(handle, "rb") as file:
        file.seek(at)
        content = file.read(LINE_BYTES)
    whole = content[: content.rfind(b"\n") + 1]
    if not whole and len(content) == LINE_BYTES:
        return [b""], at + LINE_BYTES  # Longer than any row of ours: skipped.
    return whole.splitlines(keepends=True), at + len(whole)


def _wait_for_end(over: threading.Event) -> None:
    """Read the input to its end, the run's; from then on the kernel counts."""
    # Not through Python's buffer: an interpreter that ends while a thread holds its lock aborts.
    while os.read(sys.stdin.fileno(), 1):
        pass
    signal.alarm(END_SECONDS)
    over.set()


def _own_output() -> int:
    """Keep the output for answers: what a library prints goes where its errors go."""
    answers = os.dup(1)
    os.set_inheritable(answers, False)
    os.dup2(2, 1)
    return answers


def _answer(answers: int, line: str) -> None:
    """Write a line, whole: it is shorter than what a pipe takes at once."""
    with contextlib.suppress(BrokenPipeError):  # The learner is gone; what is left is sent all the same.
        os.write(answers, line.encode("utf-8", "replace")[:500].replace(b"\n", b" ") + b"\n")


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:300]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
