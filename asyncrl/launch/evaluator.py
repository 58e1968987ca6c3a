"""The evaluator of a run with --evaluate-every: a process beside the training, and rank 0's view of it.

    learner ──checkpoints──► evaluator ──evaluations.jsonl──► rank 0: rows, curves
                                 └──► videos, checkpoints/best

evaluator   consumes   checkpoints, every LOOK_EVERY seconds    ended by: rank 0, with the run
            produces   a line per measured version              waited for by: the end of the run only

When it dies too often, training goes on without it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from asyncrl.config.loading import overlay, to_json
from asyncrl.config.run import TrainConfig
from asyncrl.errors import RunError
from asyncrl.evaluation import evaluations_file
from asyncrl.evaluation.evaluations_file import EvaluatedVersion, is_due
from asyncrl.launch.supervisor import Supervisor
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status, waits
from asyncrl.observability.metrics import Metric
from asyncrl.storage.best_checkpoint import clean_up, forget_best_after
from asyncrl.storage.bounded_json import read_rows
from asyncrl.storage.version_pictures import SHEET, read_picture

ROLE: Final = "evaluator"
LOOK_EVERY: Final = 0.5
"""Seconds between two looks, for a checkpoint and for a result."""
RESPAWNS: Final = 2
"""How often in a row it comes back when it dies."""
NICENESS: Final = 19
"""Of the evaluator and its simulators on a CPU, the lowest there is: what trains goes first."""
_SHOWN: Final = (SHEET, ".gif")
"""Kinds of files that TensorBoard shows."""
_log = logging.getLogger(__name__)


def evaluator_main(config_json: str, run_dir_text: str, local_rank: str) -> None:
    """Measure the run's versions as they come, until rank 0 ends this process."""
    import json
    import multiprocessing

    import torch

    from asyncrl.launch.evaluation import evaluation_device, open_checkpoints
    from asyncrl.launch.own_device import make_current
    from asyncrl.observability import signals
    from asyncrl.storage import run_lock

    signals.raise_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config, run_dir = (
        overlay(TrainConfig(), json.loads(config_json), "the run's settings"),
        Path(run_dir_text),
    )
    lock = run_lock.join(run_dir)
    multiprocessing.current_process().daemon = False  # So that it may have workers, which end with it.
    process_status.publish_as(run_dir, ROLE)
    process_status.set_activity("loading models", config.startup_timeout)
    device = evaluation_device(config, int(local_rank))
    make_current(device)
    if device.type == "cpu":
        os.nice(NICENESS)
        torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.callback(lock.release)
        checkpoints = open_checkpoints(config, run_dir, device, stack)
        while True:
            if not checkpoints.round():
                process_status.set_activity("waiting for a checkpoint to measure")
                time.sleep(LOOK_EVERY)


class EvaluatorProcess:
    """Rank 0's view of the evaluator. Create and use it on one thread that outlives it."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        version: int,
        report: Callable[[int, dict[Metric, float], dict[str, bytes]], None],
        local_rank: int,
    ) -> None:
        """Start the evaluator, unless --evaluate-every is 0."""
        self._config, self._run_dir, self._report = config, run_dir, report
        self._child: Supervisor | None = None
        self._looked_at = -LOOK_EVERY
        self.lost = ""
        """Why there will be no more results; empty: there may be."""
        if config.evaluate_every:
            evaluations_file.cut_after(run_dir, version)
            forget_best_after(run_dir, version)
            self._known = _reported(run_dir / "metrics.jsonl")
            self._child = Supervisor(
                ROLE,
                "asyncrl.launch.evaluator:evaluator_main",
                (to_json(config), str(run_dir), str(local_rank)),
                run_dir / "logs" / f"{ROLE}.log",
                RESPAWNS,
            )

    def poll(self) -> list[str]:
        """Report what is newly known, respawn the evaluator when it died; return lines for the console."""
        if self._child is None or time.monotonic() - self._looked_at < LOOK_EVERY:
            return []
        self._looked_at = time.monotonic()
        lines = []
        self._report_new()
        if not self.lost:
            try:
                self._child.poll()
            except RunError as error:
                self.lost = str(error)
                lines.append(f"true success is not measured any more, the training goes on: {error}")
        return lines

    def finish(self, version: int, poll: Callable[[], bool]) -> str:
        """Wait for the result of the run's last version, as long as episodes are played.

        Returns:
            Why there is none; empty: there is one, or it is not due.
        """
        due = is_due(version, self._config.evaluate_every, self._config.updates)
        if self._child is None or self.lost or not due:
            return ""
        allowed = self._config.hang_timeout
        seen, since = "", time.monotonic()
        with waits.waiting(waits.EVALUATION, allowed):
            while version not in self._known:
                if poll() or self.lost:
                    return f"version {version} was not measured" if not self.lost else ""
                doing = self._doing()
                what = doing.what if doing else ""
                # What it does has a deadline of its own, as loading has; else this wait's holds.
                if what != seen or (doing and doing.allowed and not doing.overdue):
                    since = time.monotonic()
                    process_status.progress()
                if what != seen:
                    seen = what
                    process_status.describe(f"{waits.EVALUATION.name}: {what}")
                if time.monotonic() - since > allowed:
                    return (
                        f"version {version} was not measured: nothing moved on for {allowed:g} s "
                        f"(--hang-timeout). See {self._run_dir / 'logs' / f'{ROLE}.log'}"
                    )
                time.sleep(LOOK_EVERY / 5)
        return ""

    def close(self) -> None:
        """End the evaluator, report what it had measured, and put away what it held."""
        if self._child is not None:
            self._child.stop(1.0)
            self._report_new()
            clean_up(self._run_dir)

    def _report_new(self) -> None:
        for row in evaluations_file.read(self._run_dir):
            if row.version not in self._known:
                self._known.add(row.version)
                self._report(row.version, metrics_of(row), pictures_of(self._run_dir, row))

    def _doing(self) -> process_status.ThreadActivity | None:
        """Read what the evaluator's process says that it does."""
        found = (p for p in process_status.read(self._run_dir) if p.role == ROLE and p.alive)
        return next((a for p in found for a in p.activities if a.thread == "MainThread"), None)


def _reported(rows: Path) -> set[int]:
    """Return the versions whose measurement is in metrics.jsonl."""
    found = (row for _, row in read_rows(rows) if row is not None) if rows.is_file() else ()
    return {row["step"] for row in found if m.EVAL_SUCCESS.name in row and type(row.get("step")) is int}


def pictures_of(run_dir: Path, row: EvaluatedVersion) -> dict[str, bytes]:
    """Return what TensorBoard shows of a measured version: name of the card -> content of the file.

    It shows no .mp4; and what is too large, or was taken away, is left out with a line in the process's log.
    """
    found = {}
    for tag, path in (("eval/sheet", row.sheet), ("eval/movie", row.movie)):
        suffix = Path(path).suffix
        if suffix in _SHOWN:
            try:
                found[tag] = read_picture(run_dir, row.version, suffix)
            except OSError as error:
                _log.warning("TensorBoard does not get %s of version %d: %s", tag, row.version, error)
    return found


def metrics_of(row: EvaluatedVersion) -> dict[Metric, float]:
    """Return what curves and rows say of a measured version."""
    return {
        m.EVAL_SUCCESS: row.success,
        m.EVAL_LOW: row.low,
        m.EVAL_HIGH: row.high,
        m.EVAL_EPISODES: float(row.episodes),
        m.EVAL_STEPS: row.steps,
    }
