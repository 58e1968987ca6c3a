"""Send a run's rows to trackers (Weights & Biases, MLflow, ...), each in a process of its own.

tracker's process    (`tracker_process`) reads RUN/metrics.jsonl; prints a line about each problem
tracker's thread     forwards these lines to the console; ended by the process's end
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError
from asyncrl.observability import waits
from asyncrl.observability.metrics import Readings
from asyncrl.storage.untrusted import make_folder, open_regular

ALWAYS: Final = "tensorboard"  # by `logger`
PACKAGES: Final = {
    name: name.replace("_", "-")
    for name in ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")
}
"""Tracker of accelerate, and its package -> name for pip."""
CLOSE_SECONDS: Final = 20.0  # for all trackers, after the run
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
                self._all.append(_Tracker(name, run_dir, tell, [str(sent)], command))
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
    def __init__(
        self, name: str, run_dir: Path, tell: Callable[[str], None], arguments: list[str], command: str
    ) -> None:
        self.gone = False
        """Whether the process ended, or refused to begin."""
        self._closing = self._killed = False
        self._name, self._tell, self._log_path = name, tell, run_dir / "logs" / f"tracker-{name}.log"
        make_folder(self._log_path.parent)
        log = open_regular(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "asyncrl.observability.tracker_process", name, run_dir, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment_of_tracker(os.environ),
                start_new_session=True,  # Ctrl-C in the terminal is the run's; it ends when its input does.
            )
        finally:
            os.close(log)
        assert self._process.stdin is not None
        self._input = self._process.stdin
        with contextlib.suppress(OSError):  # If it has ended, its thread reports it.
            # Shorter than a pipe's buffer (`logger.LONGEST_COMMAND`), so that this does not block.
            self._input.write(command.replace("\n", " ").encode() + b"\n")
            self._input.flush()
        self._thread = threading.Thread(target=self._listen, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def end_input(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # If it has ended, its thread reports it.
            self._input.close()

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
                if text.startswith("refused "):
                    reason = text.removeprefix("refused ")
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
