"""Send a run's rows to trackers (Weights & Biases, MLflow, ...), each in a process of its own.

learner's thread     note: expects an answer for a row; returns at once
tracker's process    (`tracker_process`) reads RUN/metrics.jsonl, and answers a line per row
tracker's thread     reads these lines; reports late and failed rows; ended by the process's end

A library that blocks, raises or kills its process does so there: the learner goes on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from asyncrl.errors import ConfigError
from asyncrl.observability import waits
from asyncrl.observability.metrics import Readings
from asyncrl.storage.untrusted import make_folder, open_regular

ALWAYS: Final = "tensorboard"
"""Written in any case, by `logger`."""
PACKAGES: Final = {
    name: name.replace("_", "-")
    for name in ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")
}
"""Tracker of accelerate, and its package -> name for pip."""
LATE_SECONDS: Final = 60.0
"""Age at which a row that a tracker has not taken is reported."""
CLOSE_SECONDS: Final = 20.0
"""Time for all trackers to finish after the run."""
_PENDING: Final = 10_000
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


class Trackers:
    """The trackers of one run, as a context manager that receives rows by `note`."""

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        tell: Callable[[str], None],
        *,
        command: str = "",
        late_seconds: float = LATE_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """Start a process for each tracker but `ALWAYS`; it gets the rows after those in metrics.jsonl.

        `tell` receives a line when one is late, fails, ends, or recovers.
        """
        self._seconds = close_seconds
        self._all, rows = list[_Tracker](), run_dir / "metrics.jsonl"
        sent = rows.stat().st_size if rows.exists() else 0  # By earlier starts of the run.
        for name in [name for name in names if name != ALWAYS]:
            try:
                self._all.append(_Tracker(name, run_dir, tell, sent, command, late_seconds))
            except OSError as error:
                tell(f"{name} could not be started ({error}). The run goes on without it")

    def note(self, step: int, values: Readings) -> None:
        """Receive a row; see `RowReader`."""
        for tracker in self._all:
            tracker.note(step)

    def close(self) -> None:
        """Give the trackers a bounded time for the remaining rows, then end them. May be called twice."""
        until = time.monotonic() + self._seconds
        trackers, self._all = self._all, []
        for tracker in trackers:
            tracker.end_input()
        with waits.waiting(waits.TRACKERS, self._seconds):
            for tracker in trackers:
                tracker.close(max(0.1, until - time.monotonic()))

    def __enter__(self) -> Trackers:
        """Close at the end of a `with` block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()


class _Tracker:
    """Process of one tracker, and the thread that reads its answers."""

    def __init__(
        self,
        name: str,
        run_dir: Path,
        tell: Callable[[str], None],
        sent: int,
        command: str,
        late_seconds: float,
    ) -> None:
        self._name, self._tell, self._late_seconds = name, tell, late_seconds
        self._log_path = run_dir / "logs" / f"tracker-{name}.log"
        self._lock = threading.Lock()
        """Guards the fields up to the process."""
        self._pending: deque[tuple[int, float]] = deque(maxlen=_PENDING)
        """Unanswered rows: update and time."""
        self._lost = 0
        """Rows it did not take, since it last recovered."""
        self._late = self._failing = self._gone = self._closing = self._killed = False
        self._process = _start(name, run_dir, self._log_path, sent)
        with contextlib.suppress(OSError):  # If it has ended, its thread reports it.
            # Shorter than a pipe's buffer (`logger.LONGEST_COMMAND`), so that this does not block.
            self._input.write(command.replace("\n", " ").encode() + b"\n")
            self._input.flush()
        self._thread = threading.Thread(target=self._listen, name=f"tracker {name}", daemon=True)
        self._thread.start()

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def note(self, step: int) -> None:
        """Expect an answer for a row."""
        now, text = time.monotonic(), ""
        with self._lock:
            if self._gone:
                waits.count(waits.LOST_TRACKED)
                return
            self._pending.append((step, now))
            oldest, since = self._pending[0]
            if not self._late and now - since > self._late_seconds:
                self._late = True
                text = (
                    f"{self._name} is late: it has not taken update {oldest} after {now - since:.0f} s. The "
                    "run goes on, and its rows wait in metrics.jsonl"
                )
        if text:
            self._tell(text)

    def end_input(self) -> None:
        """End the input of the process: there are no further rows."""
        with self._lock:
            self._closing = True
        with contextlib.suppress(OSError):  # If it has ended, its thread reports it.
            self._input.close()

    def close(self, seconds: float) -> None:
        """Wait for the end of the process, then kill it."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            with self._lock:
                left, self._killed = len(self._pending), True
            self._process.kill()
            self._process.wait()
            self._tell(
                f"{self._name} was ended: {seconds:.0f} s after the run it had not finished, and {left} "
                "updates may be missing there. metrics.jsonl has them"
            )
        self._thread.join(1.0)

    # --- the tracker's thread ---

    def _listen(self) -> None:
        assert self._process.stdout is not None
        reason = ""
        with self._process.stdout as answers:
            for line in answers:  # Ended by the process's end.
                kind, _, rest = line.decode(errors="replace").strip().partition(" ")
                number, _, failure = rest.partition(" ")
                if kind in ("took", "lost") and number.isdecimal():
                    self._on_answer(int(number), failure if kind == "lost" else "")
                elif kind == "refused":
                    reason = rest
                    break
        self._on_end(reason)

    def _on_answer(self, step: int, failure: str) -> None:
        text = ""
        with self._lock:
            while self._pending and self._pending[0][0] <= step:
                self._pending.popleft()
            if failure:
                waits.count(waits.LOST_TRACKED)
                self._lost += 1
                if not self._failing:
                    text = f"{self._name} does not take update {step} ({failure}). The run goes on"
            elif self._failing:
                text = f"{self._name} takes updates again; {self._lost} are missing there"
                self._lost = 0
            self._failing = bool(failure)
            if self._late and not self._pending:
                text = text or f"{self._name} has all updates again"
                self._late = False
        if text:
            self._tell(text)

    def _on_end(self, reason: str) -> None:
        """Handle the end of the process, or its refusal to begin."""
        with self._lock:
            self._gone, left = True, len(self._pending)
            self._pending.clear()
            if left:
                waits.count(waits.LOST_TRACKED, left)
            if self._killed:
                return
        if not reason:
            code = self._process.wait()
            if self._closing and code == 0 and not left:
                return
            reason = f"its process ended with exit code {code}"
        self._tell(
            f"{self._name} gets nothing any more ({reason}). The run goes on; "
            f"metrics.jsonl has every update, and {self._log_path} what the tracker said"
        )


def _start(name: str, run_dir: Path, log_path: Path, sent: int) -> subprocess.Popen[bytes]:
    make_folder(log_path.parent)
    log = open_regular(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "asyncrl.observability.tracker_process", name, run_dir, str(sent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment_of_tracker(os.environ),
            start_new_session=True,  # Ctrl-C in the terminal is the run's; it ends when its input does.
        )
    finally:
        os.close(log)


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
