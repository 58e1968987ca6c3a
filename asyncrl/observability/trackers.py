"""Send a run's rows to trackers (Weights & Biases, MLflow, ...), each in a process of its own.

A tracker's process reads RUN/metrics.jsonl and hands its rows to accelerate's tracker; its input ends with
the run. It prints one line when it cannot begin or first fails, which the learner shows with its next row.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ConfigError, first_line
from asyncrl.observability import process_status, waits
from asyncrl.observability.metrics import Readings
from asyncrl.observability.metrics_training import EVAL_SUCCESS, EVAL_VERSION
from asyncrl.storage.untrusted import load_json, make_folder, open_regular, parse_row, reading

ALWAYS: Final = "tensorboard"  # by `logger`
PACKAGES: Final = {
    name: name.replace("_", "-")
    for name in ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")
}
"""Tracker of accelerate, and its package -> name for pip."""
CLOSE_SECONDS: Final = 20.0  # for all trackers, after the run
END_SECONDS: Final = 60  # Longest life of a tracker's process after the run, enforced by the kernel's alarm
POLL: Final = 0.5
LONGEST_VALUE: Final = 250  # characters of a setting in older MLflow
PROJECT: Final = "asyncrl"  # group of the runs in trackers
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
        """Start a process for each tracker but `ALWAYS`; it gets rows added to metrics.jsonl from now on."""
        self._seconds, self._all, rows = close_seconds, list[_Tracker](), run_dir / "metrics.jsonl"
        sent = rows.stat().st_size if rows.exists() else 0  # By earlier starts of the run.
        for name in dict.fromkeys(name for name in names if name != ALWAYS):
            try:
                self._all.append(_Tracker(name, run_dir, tell, [str(sent), command]))
            except OSError as error:
                tell(f"{name} could not be started ({error}). The run goes on without it")

    def note(self, step: int, values: Readings) -> None:
        """Print the trackers' lines, and count the row as lost for a tracker that has ended."""
        for tracker in self._all:
            tracker.listen()
            if tracker.gone:
                waits.count(waits.LOST_TRACKED)

    def close(self) -> None:
        """Give the trackers a bounded time for the remaining rows, then end them. May be called twice."""
        until = time.monotonic() + self._seconds
        trackers, self._all = self._all, []
        for tracker in trackers:
            tracker.input.close()
        with process_status.waiting(waits.TRACKERS, self._seconds):
            for tracker in trackers:
                tracker.close(max(0.1, until - time.monotonic()))

    def __exit__(self, *error: object) -> None:
        self.close()


class _Tracker:
    def __init__(self, name: str, run_dir: Path, tell: Callable[[str], None], arguments: list[str]) -> None:
        self.gone = False  # The process ended.
        self._name, self._tell, self._log_path = name, tell, run_dir / "logs" / f"tracker-{name}.log"
        make_folder(self._log_path.parent)
        log = open_regular(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # Without torchrun's ranks, and without a GPU.
        environ = {k: v for k, v in os.environ.items() if k not in _RANKS and "TORCHELASTIC" not in k}
        path = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), str(Path(__file__).parents[2])]))
        environ |= {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", __name__, name, run_dir, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C in the terminal is the run's; it ends when its input does.
            )
        finally:
            os.close(log)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input, self._lines = self._process.stdin, self._process.stdout
        os.set_blocking(self._lines.fileno(), False)

    def listen(self) -> None:
        code = self._process.poll()
        for line in self._lines.readlines() if not self.gone else ():  # Each was written at once.
            self._tell(
                f"{self._name} {line.decode(errors='replace').strip()}. The run goes on: {self._log_path}"
            )
        if code is not None and not self.gone:
            self.gone = True
            self._lines.close()
            if code:
                how = f"its process ended with exit code {code}"
                self._tell(f"{self._name} gets nothing any more ({how}). The run goes on: {self._log_path}")

    def close(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self.gone = True
            self._lines.close()
            self._tell(
                f"{self._name} was ended: {seconds:.0f} s after the run it had not finished, and updates may "
                "be missing there. metrics.jsonl has them"
            )
        self.listen()


# --- in the tracker's process ---


def main(name: str, run_dir: Path, sent: int, command: str) -> None:
    """Send the rows after the first `sent` bytes until the run is over."""
    from asyncrl.observability.logger import WithoutZeros

    console = os.dup(1)  # Output of a library goes where its errors go.
    os.set_inheritable(console, False)
    os.dup2(2, 1)
    os.nice(5)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    process_status.publish_as(run_dir, f"tracker-{name}")
    process_status.set_activity(f"beginning with {name}")
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), name="end of the run", daemon=True).start()
    try:
        tracker = _begin(name, run_dir, command)
    except BaseException as error:
        _report(console, "gets nothing any more", error)
        return
    shown, newest, failed = WithoutZeros(), 0, False
    for row in rows_of(run_dir / "metrics.jsonl", sent, over):
        step = row["step"]
        newest = max(newest, step)
        process_status.set_activity(f"sending update {step} to {name}")
        try:
            tracker.log(shown(numbers_of(row)), step=newest)  # Trackers take no step back.
        except Exception as error:  # This process's boundary to a library.
            waits.count(waits.LOST_TRACKED)
            _report(None if failed else console, f"does not take update {step}", error)
            failed = True
    process_status.set_activity(f"finishing {name}")
    tracker.finish()


def _report(console: int | None, what: str, error: BaseException) -> None:
    logging.error("it %s", what, exc_info=error)
    if console is not None:
        line = f"{what} ({type(error).__name__}: {first_line(error)[:300]})".replace("\n", " ")
        with contextlib.suppress(BrokenPipeError):  # The learner is gone; the remaining rows are sent.
            os.write(console, line.encode("utf-8", "replace") + b"\n")


def _begin(name: str, run_dir: Path, command: str) -> Any:
    # A run of accelerate's tracker, with the run's name, settings and start command.
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    from asyncrl.observability.logger import flat

    PartialState(cpu=True)  # accelerate's logging asks it for the rank.
    run = run_dir.name
    # Most classes take the project first, some the run itself.
    first, options = {
        "aim": (run, {"logging_dir": str(run_dir.parent), "experiment": PROJECT}),
        "clearml": (run, {}),
        "comet_ml": (PROJECT, {}),
        "dvclive": (run, {"dir": str(run_dir / "dvclive")}),
        "mlflow": (PROJECT, {"run_name": run, "description": command}),
        "swanlab": (PROJECT, {"experiment_name": run, "logdir": str(run_dir / "swanlab")}),
        "trackio": (PROJECT, {"name": run}),
        "wandb": (PROJECT, {"name": run, "dir": str(run_dir), "notes": command}),
    }[name]
    tracker: Any = LOGGER_TYPE_TO_CLASS[name](first, **options)
    tracker.start()
    settings = flat(load_json(run_dir / "config.json")) | {"command": command}
    tracker.store_init_configuration(
        {k: v if isinstance(v, bool | int | float) else str(v)[:LONGEST_VALUE] for k, v in settings.items()}
    )
    return tracker


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a row, and the version of a true measurement."""
    numbers = {
        name: float(value)
        for name, value in row.items()
        if name not in ("step", "time") and type(value) in (int, float) and math.isfinite(value)
    }
    return numbers | ({EVAL_VERSION.name: float(row["step"])} if EVAL_SUCCESS.name in numbers else {})


def rows_of(path: Path, at: int, over: threading.Event) -> Iterator[dict[str, Any]]:
    """Yield rows of a growing metrics.jsonl that have a ``step``, from byte `at` on, until `over`."""
    last = False
    while not last:
        last = over.is_set()
        with contextlib.suppress(FileNotFoundError), reading(path) as file:
            file.seek(at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                at += len(line)
                if (row := parse_row(line)) and type(row.get("step")) is int:
                    yield row
        over.wait(POLL)  # Idle until more rows or the end come.


def _wait_for_end(over: threading.Event) -> None:
    # Reads the input to its end, the run's; from then on the kernel's alarm runs. Not through Python's
    # buffer: an interpreter that ends while a thread holds its lock aborts.
    while os.read(sys.stdin.fileno(), 1):
        pass
    signal.alarm(END_SECONDS)
    over.set()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
