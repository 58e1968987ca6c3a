"""Send a run's rows to trackers (Weights & Biases, MLflow, ...), each in a process of its own.

tracker's process    reads RUN/metrics.jsonl and hands its rows to accelerate's tracker; prints a line about
                     each problem; its input ends with the run
tracker's thread     forwards these lines to the console; ended by the process's end
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ConfigError, first_line
from asyncrl.observability import process_status, waits
from asyncrl.observability.metrics import Readings
from asyncrl.observability.metrics_training import EVAL_SUCCESS, EVAL_VERSION
from asyncrl.storage.untrusted import load_json, make_folder, open_regular, parse_row, read_bytes, reading

ALWAYS: Final = "tensorboard"  # by `logger`
PACKAGES: Final = {
    name: name.replace("_", "-")
    for name in ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")
}
"""Tracker of accelerate, and its package -> name for pip."""
CLOSE_SECONDS: Final = 20.0  # for all trackers, after the run
END_SECONDS: Final = 60
"""Longest life of a tracker's process after the run, enforced by the kernel's alarm."""
POLL: Final = 0.5
LONGEST_VALUE: Final = 250  # characters of a setting in older MLflow
PROJECT: Final = "asyncrl"  # group of the runs in trackers
_REFUSED: Final = "refused "
_TAKE_LISTS: Final = ("swanlab", "wandb")  # of pictures
_RANKS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_names(names: Sequence[str]) -> None:
    """Check the names of --log-with."""
    known = [ALWAYS, *PACKAGES]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--log-with names {name!r}, which is no tracker that accelerate knows. Choose of: "
                f"{', '.join(known)}."
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"--log-with is {' '.join(names)}, with a name twice. Name each tracker once.")


def check_installed(names: Sequence[str]) -> None:
    """Check before a run begins that its trackers are installed."""
    specs = {name: importlib.util.find_spec(name) for name in names if name in PACKAGES}
    # A folder of that name, such as a tracker's output, has no origin.
    missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]
    if missing:
        packages = " ".join(PACKAGES[name] for name in missing)
        raise ConfigError(
            f"--log-with names {', '.join(missing)}, which is not installed. Install it with: pip install "
            f"{packages}. Or leave it out: TensorBoard's files and metrics.jsonl are written in any case."
        )


# --- in the learner ---


class Trackers(contextlib.AbstractContextManager["Trackers"]):
    """The trackers of one run, as a context manager that receives rows by `note`."""

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        tell: Callable[[str], None],
        *,
        command: str = "",
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """Start a process for each tracker but `ALWAYS`; it gets the rows after those in metrics.jsonl.

        `tell` receives a line when one fails, ends, or recovers.
        """
        self._seconds = close_seconds
        self._all, rows = list[_Tracker](), run_dir / "metrics.jsonl"
        sent = rows.stat().st_size if rows.exists() else 0  # By earlier starts of the run.
        for name in [name for name in names if name != ALWAYS]:
            try:
                self._all.append(_Tracker(name, run_dir, tell, [str(sent), command]))
            except OSError as error:
                tell(f"{name} could not be started ({error}). The run goes on without it")

    def note(self, step: int, values: Readings) -> None:
        """Count a row that a tracker will never take."""
        if gone := sum(tracker.gone for tracker in self._all):
            waits.count(waits.LOST_TRACKED, gone)

    def close(self) -> None:
        """Give the trackers a bounded time for the remaining rows, then end them. May be called twice."""
        until = time.monotonic() + self._seconds
        trackers, self._all = self._all, []
        for tracker in trackers:
            tracker.end_input()
        with waits.waiting(waits.TRACKERS, self._seconds):
            for tracker in trackers:
                tracker.close(max(0.1, until - time.monotonic()))

    def __exit__(self, *error: object) -> None:
        self.close()


class _Tracker:
    def __init__(self, name: str, run_dir: Path, tell: Callable[[str], None], arguments: list[str]) -> None:
        self.gone = False
        """Whether the process ended, or refused to begin."""
        self._closing = self._killed = False
        self._name, self._tell, self._log_path = name, tell, run_dir / "logs" / f"tracker-{name}.log"
        make_folder(self._log_path.parent)
        log = open_regular(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", __name__, name, run_dir, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment_of_tracker(os.environ),
                start_new_session=True,  # Ctrl-C in the terminal is the run's; it ends when its input does.
            )
        finally:
            os.close(log)
        self._thread = threading.Thread(target=self._listen, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def end_input(self) -> None:
        self._closing = True
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._killed = True
            self._process.kill()
            self._process.wait()
            self._tell(
                f"{self._name} was ended: {seconds:.0f} s after the run it had not finished, and updates may "
                "be missing there. metrics.jsonl has them"
            )
        self._thread.join(1.0)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        reason = ""
        with self._process.stdout as lines:
            for line in lines:  # Ended by the process's end.
                text = line.decode(errors="replace").strip()
                if text.startswith(_REFUSED):
                    reason = text.removeprefix(_REFUSED)
                    break
                self._tell(text)
        self.gone = True
        code = self._process.wait() if not reason else 1
        if self._killed or (self._closing and code == 0):
            return
        reason = reason or f"its process ended with exit code {code}"
        self._tell(
            f"{self._name} gets nothing any more ({reason}). The run goes on; "
            f"metrics.jsonl has every update, and {self._log_path} what the tracker said"
        )


def environment_of_tracker(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a tracker's process: without torchrun's ranks, and without a GPU."""
    kept = {k: v for k, v in environ.items() if k not in _RANKS and not k.startswith("TORCHELASTIC_")}
    path = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), str(Path(__file__).parents[2])]))
    return kept | {
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }


# --- in the tracker's process ---


def main(name: str, run_dir: Path, sent: int, command: str) -> int:
    """Send the rows after the first `sent` bytes until the run is over; 1 if the tracker cannot begin."""
    from asyncrl.observability.logger import WithoutZeros

    console = os.dup(1)  # Output of a library goes where its errors go.
    os.set_inheritable(console, False)
    os.dup2(2, 1)
    os.nice(5)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    process_status.publish_as(run_dir, f"tracker-{name}")
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), name="end of the run", daemon=True).start()
    try:
        with process_status.activity(f"beginning with {name}"):
            tracker = _begin(name, run_dir, command)
    except BaseException as error:
        logging.exception("%s cannot begin", name)
        _say(console, f"{_REFUSED}{_reason(error)}")
        return 1
    shown, newest, lost = WithoutZeros(), 0, 0
    for row in rows_of(run_dir / "metrics.jsonl", sent, over):
        step = row["step"]
        newest = max(newest, step)
        try:
            with process_status.activity(f"sending update {step} to {name}"):
                tracker.log(shown(numbers_of(row)), step=newest)  # Trackers take no step back.
                if EVAL_SUCCESS.name in row:
                    send_sheet(tracker, run_dir, step, newest)
        except Exception as error:  # This process's boundary to a library: the learner's console reports it.
            logging.exception("%s did not take update %d", name, step)
            waits.count(waits.LOST_TRACKED)
            if not lost:
                _say(console, f"{name} does not take update {step} ({_reason(error)}). The run goes on")
            lost += 1
        else:
            if lost:
                _say(console, f"{name} takes updates again; {lost} are missing there")
            lost = 0
    with process_status.activity(f"finishing {name}"):
        tracker.finish()
    return 0


def _begin(name: str, run_dir: Path, command: str) -> Any:
    """Begin a run of accelerate's tracker, with the run's name, settings and start command."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    from asyncrl.observability.logger import flat

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
    settings = flat(load_json(run_dir / "config.json")) | {"command": command}
    plain = {
        k: v if isinstance(v, bool | int | float) else str(v)[:LONGEST_VALUE] for k, v in settings.items()
    }
    tracker.store_init_configuration(plain)
    return tracker


def send_sheet(tracker: Any, run_dir: Path, version: int, step: int) -> None:
    """Send the sheet of a measured version, if one was drawn and the tracker takes pictures or files."""
    from asyncrl.observability.logger import SHEET, VIDEOS, picture_name

    path = run_dir / picture_name(version, SHEET)
    if not path.exists():  # It could not be drawn.
        return
    if hasattr(tracker, "log_images"):
        from io import BytesIO

        import numpy as np
        from PIL import Image

        with Image.open(BytesIO(read_bytes(path)), formats=("PNG",)) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
        shown = [pixels] if tracker.name in _TAKE_LISTS else pixels
        tracker.log_images({"eval/sheet": shown}, step=step)
    elif hasattr(tracker, "log_artifact"):
        tracker.log_artifact(str(path), VIDEOS)


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
    while not path.exists() and not over.wait(POLL):
        pass
    with contextlib.suppress(FileNotFoundError), reading(path) as file:
        while True:
            last = over.is_set()
            file.seek(at)
            line = file.readline()
            if line.endswith(b"\n"):
                at += len(line)
                row = parse_row(line)
                if row is not None and type(row.get("step")) is int:
                    yield row
            elif last:
                return
            else:
                over.wait(POLL)  # Idle until a whole row or the end comes.


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
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
