"""Send a run's rows to trackers (Weights & Biases, MLflow, ...), each from a process of its own.

learner's thread     note: says that a row is coming; waits for nobody
tracker's process    consumes   RUN/metrics.jsonl, from its first new row on   waits for: rows, its library
(`tracker_process`)  produces   calls of its library, a line for each row      ended by:  the end of its input
tracker's thread     consumes   these lines; tells what is late, or fails      ended by:  the process's end

A row that a tracker does not take is lost for it alone. A library that blocks, raises, kills its process or
takes signals over does so in that process: the learner neither waits for it nor ends with it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

from asyncrl.errors import ConfigError
from asyncrl.observability import waits
from asyncrl.observability.metrics import Readings
from asyncrl.storage.regular_files import make_folder, open_regular

ALWAYS: Final = "tensorboard"
"""Is written in any case, by `curves`."""
PACKAGES: Final = {
    "aim": "aim",
    "clearml": "clearml",
    "comet_ml": "comet-ml",
    "dvclive": "dvclive",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""Tracker that accelerate knows, which is also what it imports -> what pip installs."""
LATE_SECONDS: Final = 60.0
"""A row that a tracker has not taken after so long is told."""
CLOSE_SECONDS: Final = 20.0
"""Time that all trackers have to finish once the run is over."""
_PENDING: Final = 10_000
_RANKS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PACKAGE: Final = Path(__file__).parents[2]


def check_names(names: Sequence[str]) -> None:
    """Check the names of --log-with.

    Raises:
        ConfigError: One is unknown or named twice.
    """
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
    """Check before a run begins that its trackers are there.

    Raises:
        ConfigError: One is not installed; says how it is.
    """
    missing = [name for name in names if name in PACKAGES and not _is_package(name)]
    if missing:
        packages = " ".join(PACKAGES[name] for name in missing)
        raise ConfigError(
            f"--log-with names {', '.join(missing)}, which is not installed. Install it with: pip install "
            f"{packages}. Or leave it out: TensorBoard's files and metrics.jsonl are written in any case."
        )


def _is_package(name: str) -> bool:
    """Tell whether a package can be imported; a folder of its name, such as a tracker's output, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


class Trackers:
    """The trackers of one run. Use it as a context; it hears of rows by `note`."""

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
        """Start a process for each tracker; whether it can begin is told when it knows.

        Rows that are in metrics.jsonl by now were sent when they were written.

        Args:
            names: Of `PACKAGES`, or `ALWAYS`, for which nothing is done.
            run_dir: Of the run.
            tell: Receives a line when one is late, fails, ends, or is well again.
            command: With which the run was started; its settings are in its config.json.
            late_seconds: See `LATE_SECONDS`.
            close_seconds: See `CLOSE_SECONDS`.
        """
        self._seconds = close_seconds
        self._all, rows = list[_Tracker](), run_dir / "metrics.jsonl"
        sent = rows.stat().st_size if rows.exists() else 0  # By earlier starts of the run.
        for name in names:
            if name != ALWAYS:
                try:
                    self._all.append(_Tracker(name, run_dir, tell, sent, command, late_seconds))
                except OSError as error:
                    tell(f"{name} could not be started ({error}). The run goes on without it")

    def note(self, step: int, values: Readings) -> None:
        """Hear of a row; see `RowReader`."""
        for tracker in self._all:
            tracker.note(step)

    def close(self) -> None:
        """Let the trackers take what is left, for a bounded time; then end them. May be called twice."""
        until = time.monotonic() + self._seconds
        for tracker in self._all:
            tracker.say_end()
        with waits.waiting(waits.TRACKERS, self._seconds):
            for tracker in self._all:
                tracker.close(max(0.1, until - time.monotonic()))

    def __enter__(self) -> Trackers:
        """Close at the end of a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, whatever happened."""
        self.close()


@dataclass(kw_only=True)
class _State:
    """What the learner's thread and the tracker's share."""

    pending: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_PENDING))
    """Rows that the tracker has not answered for: update, and when it was written."""
    late: bool = False
    failing: bool = False
    gone: bool = False
    closing: bool = False
    lost: int = 0
    """Rows it did not take, since it was last well."""


class _Tracker:
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
        self._state = _State()
        self._lock = threading.Lock()
        """Around the state."""
        self._process = _start(name, run_dir, self._log_path, sent)
        self._closed = self._killed = False
        # Less than a pipe holds (`run_facts.LONGEST_COMMAND`), so that this waits for nobody.
        self._send(command.replace("\n", " ").encode() + b"\n")
        self._thread = threading.Thread(target=self._listen, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def note(self, step: int) -> None:
        """Expect an answer for a row."""
        now = time.monotonic()
        with self._lock:
            state = self._state
            if gone := state.gone:
                state.lost += 1
            else:
                state.pending.append((step, now))
            oldest, since = state.pending[0] if state.pending else (step, now)
            told, state.late = state.late, state.late or now - since > self._late_seconds
            late = state.late and not told
        if gone:
            waits.count(waits.LOST_TRACKED)
        elif late:
            self._tell(
                f"{self._name} is late: it has not taken update {oldest} after {now - since:.0f} s. The run "
                "goes on, and its rows wait in metrics.jsonl"
            )

    def say_end(self) -> None:
        """Tell the process that there will be no further rows."""
        with self._lock:
            self._state.closing = True
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except OSError:  # It has ended; its thread says so.
                return

    def close(self, seconds: float) -> None:
        """Wait for the end of the process, at most so long."""
        if self._closed:
            return
        self._closed = True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            with self._lock:
                left, self._killed = len(self._state.pending), True
            self._process.kill()
            self._process.wait()
            self._tell(
                f"{self._name} was ended: {seconds:.0f} s after the run it had not finished, and {left} "
                "updates may be missing there. metrics.jsonl has them"
            )
        self._thread.join(1.0)

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:  # It has ended; its thread says so.
            return

    # --- the tracker's thread ---

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:  # Ended by the process's end.
                what, _, rest = line.decode(errors="replace").strip().partition(" ")
                number, _, why = rest.partition(" ")
                if what in ("took", "lost") and number.isdecimal():
                    self._answered(int(number), why if what == "lost" else "")
                elif what == "refused":
                    self._ended(rest)
        self._ended("")

    def _answered(self, step: int, failure: str) -> None:
        with self._lock:
            state, told = self._state, ""
            while state.pending and state.pending[0][0] <= step:
                state.pending.popleft()
            if failure:
                state.lost += 1
                if not state.failing:
                    told = f"{self._name} does not take update {step} ({failure}). The run goes on"
                state.failing = True
            elif state.failing:
                told = f"{self._name} takes updates again; {state.lost} are missing there"
                state.failing, state.lost = False, 0
            if state.late and not state.pending:
                told = told or f"{self._name} has all updates again"
                state.late = False
        if failure:
            waits.count(waits.LOST_TRACKED)
        if told:
            self._tell(told)

    def _ended(self, why: str) -> None:
        """The process says that it gives up, or is over."""
        with self._lock:
            state = self._state
            if state.gone:
                return
            state.gone = True
            left, expected = len(state.pending), state.closing and not why
            state.lost += left
            state.pending.clear()
        if left:
            waits.count(waits.LOST_TRACKED, left)
        if self._killed:
            return  # Who did it says so.
        if not why:
            code = self._process.wait()
            expected = expected and code == 0 and not left
            why = f"its process ended with exit code {code}"
        if not expected:
            self._tell(
                f"{self._name} gets nothing any more ({why}). The run goes on; "
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
    """Return what a tracker's process sees: no torchrun, whose ranks it must not join, and no GPU."""
    kept = {k: v for k, v in environ.items() if k not in _RANKS and not k.startswith("TORCHELASTIC_")}
    path = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), str(_PACKAGE)]))
    return kept | {
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
