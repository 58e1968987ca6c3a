"""Measure the checkpoints of a run that goes on: the newest one that is due, and never one twice.

consumes   run/checkpoints/update_*     looks for them, and is waited for by nobody
produces   run/evaluations.jsonl, run/checkpoints/best

A checkpoint is held by links to its files while it is measured, so that the run may delete it meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.evaluation import evaluations_file
from asyncrl.evaluation.evaluate import Evaluation
from asyncrl.evaluation.evaluations_file import EvaluatedVersion, is_due
from asyncrl.storage import checkpoint
from asyncrl.storage.checkpoint import clean_up, keep_as_best, keep_copy
from asyncrl.storage.run_folder import HELD
from asyncrl.storage.untrusted import remove

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What came of one version."""

    result: Evaluation
    sheet: str = ""
    """See `EvaluatedVersion`."""
    movie: str = ""


Measure = Callable[[int, Path | None], Measured]
"""Called with a version and the folder of its policy; None: the one that the run began with."""


class RunCheckpoints:
    """Finds what is due in one run and has it measured. Used by one thread of one process."""

    def __init__(
        self,
        run_dir: Path,
        measure: Measure,
        *,
        every: int,
        last: int,
        simulator: str,
        temperature: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin; what was already measured is not measured again."""
        self._run_dir, self._measure, self._every, self._last = run_dir, measure, every, last
        self._simulator, self._temperature, self._clock = simulator, temperature, clock
        self._folder = run_dir / checkpoint.FOLDER
        self._rows = evaluations_file.read(run_dir)
        clean_up(run_dir)

    def round(self) -> bool:
        """Measure one version, if one is due; returns whether one was.

        Raises:
            AsyncRLError: It cannot be measured.
            OSError: The result cannot be written.
        """
        known = {row.version for row in self._rows}
        newest = max(known, default=-1)
        due = [v for v in checkpoint.kept(self._run_dir) if v > newest and is_due(v, self._every, self._last)]
        if not known:  # What the run began with comes first, also when training was faster.
            self._evaluate(0, None)
            return True
        if not due:
            return False
        version, held = max(due), self._folder / HELD
        try:
            keep_copy(checkpoint.kept(self._run_dir)[version], held)
        except (FileNotFoundError, KeyError):  # Deleted since: a newer one is there.
            return False
        try:
            self._evaluate(version, held)
        finally:
            remove(held)
        return True

    def _evaluate(self, version: int, folder: Path | None) -> None:
        began = self._clock()
        measured = self._measure(version, folder)
        rate, now = measured.result.overall, self._clock()
        before = self._rows[-1].version if self._rows else 0
        row = EvaluatedVersion(
            version=version,
            time=now,
            seconds=now - began,
            simulator=self._simulator,
            temperature=self._temperature,
            successes=rate.successes,
            episodes=rate.episodes,
            success=rate.rate,
            low=rate.low,
            high=rate.high,
            steps=measured.result.mean_steps if rate.successes else 0.0,
            best=all(rate.rate >= row.success for row in self._rows),
            skipped=sum(is_due(v, self._every, self._last) for v in range(before + 1, version)),
            sheet=measured.sheet,
            movie=measured.movie,
        )
        if row.best and folder is not None:
            keep_as_best(folder)
        evaluations_file.append(self._run_dir, row)
        self._rows.append(row)
        _log.info("true success %s, %.1f s", row, row.seconds)
