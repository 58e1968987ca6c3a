"""Measure the checkpoints of a running run: the newest one that is due, each at most once.

consumes   run/checkpoints/update_*     by polling
produces   run/evaluations.jsonl (one line per version), run/checkpoints/best
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from asyncrl.evaluation.success_rate import Evaluation
from asyncrl.storage import checkpoint
from asyncrl.storage.atomic import publish, write_text
from asyncrl.storage.checkpoint import clean_up, keep_copy
from asyncrl.storage.run_folder import BEST, HELD
from asyncrl.storage.untrusted import read_json_lines, remove

_log = logging.getLogger(__name__)
EVALUATIONS: Final = "evaluations.jsonl"


@dataclass(frozen=True, kw_only=True)
class EvaluatedVersion:
    """True success of one policy version: a line of the file."""

    version: int  # Updates of the policy; 0: the one that the run began with
    time: float  # Of the result, in seconds since 1970
    seconds: float  # Duration of the measurement
    simulator: str
    temperature: float
    successes: int
    episodes: int
    success: float  # Share of the episodes; `low` and `high` are the ends of its 95 % Wilson interval
    low: float
    high: float
    steps: float  # Mean steps to success; 0 when no episode succeeded
    best: bool  # True if no version before it succeeded more often
    skipped: int = 0  # Due versions before it that were not measured, since the one before took too long
    sheet: str = ""  # Picture of true and imagined episodes, below the run's folder; empty: none was drawn
    movie: str = ""  # The same as a movie

    def __str__(self) -> str:
        interval = f"[{self.low:.1%}, {self.high:.1%}]"
        return f"{self.success:.1%} {interval} of {self.episodes} (version {self.version})"


def is_due(version: int, every: int, last: int) -> bool:
    """Return True if a version above 0 is to be measured; with `every` 0 none is."""
    return every > 0 and (version % every == 0 or version == last)


_TYPES: Final = {"int": int, "float": float, "str": str, "bool": bool}
_KNOWN: Final = {field.name: _TYPES[str(field.type)] for field in fields(EvaluatedVersion)}


def append_evaluation(run_dir: Path, row: EvaluatedVersion) -> None:
    """Add a line; raises OSError when it cannot be written."""
    _write(run_dir, [*read_evaluations(run_dir), row])


def read_evaluations(run_dir: Path) -> list[EvaluatedVersion]:
    """Read the lines, oldest first, without damaged ones."""
    rows = read_json_lines(run_dir / EVALUATIONS, _KNOWN)
    return [EvaluatedVersion(**{name: row[name] for name in _KNOWN}) for row in rows]


def cut_evaluations(run_dir: Path, version: int) -> None:
    """Remove the lines of later versions: a resumed run measures them again."""
    if (run_dir / EVALUATIONS).exists():
        _write(run_dir, [row for row in read_evaluations(run_dir) if row.version <= version])


def _write(run_dir: Path, rows: list[EvaluatedVersion]) -> None:
    lines = [json.dumps(asdict(row), allow_nan=False) + "\n" for row in rows]
    write_text(run_dir / EVALUATIONS, "".join(lines))


Measure = Callable[[int, Path | None], tuple[Evaluation, str, str]]
"""Measures a version from the folder of its policy, None for the one that the run began with; returns the
result, and the pictures of `EvaluatedVersion`."""


class RunCheckpoints:
    """Finds the due checkpoints of one run and has them measured. Used by one thread of one process."""

    def __init__(
        self, run_dir: Path, measure: Measure, *, every: int, last: int, simulator: str, temperature: float
    ) -> None:
        """Read the earlier results, which are not measured again."""
        self._run_dir, self._measure, self._every, self._last = run_dir, measure, every, last
        self._simulator, self._temperature = simulator, temperature
        self._folder = run_dir / checkpoint.FOLDER
        self._rows = read_evaluations(run_dir)
        clean_up(run_dir)

    def round(self) -> bool:
        """Measure one version if one is due; return True if one was."""
        known = {row.version for row in self._rows}
        newest = max(known, default=-1)
        due = [v for v in checkpoint.kept(self._run_dir) if v > newest and is_due(v, self._every, self._last)]
        if not known:  # The initial policy comes first, also when training was faster.
            self._evaluate(0, None)
            return True
        if not due:
            return False
        version, held = max(due), self._folder / HELD
        try:  # Held by links to its files, so that the run may delete it at the same time.
            keep_copy(checkpoint.kept(self._run_dir)[version], held)
        except (FileNotFoundError, KeyError):  # Deleted since: a newer one is there.
            return False
        try:
            self._evaluate(version, held)
        finally:
            remove(held)
        return True

    def _evaluate(self, version: int, folder: Path | None) -> None:
        began = time.time()
        result, sheet, movie = self._measure(version, folder)
        rate, now = result.overall, time.time()
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
            steps=result.mean_steps if rate.successes else 0.0,
            best=all(rate.rate >= row.success for row in self._rows),
            skipped=sum(is_due(v, self._every, self._last) for v in range(before + 1, version)),
            sheet=sheet,
            movie=movie,
        )
        if row.best and folder is not None:
            publish(folder, folder.with_name(BEST))
        append_evaluation(self._run_dir, row)
        self._rows.append(row)
        _log.info("true success %s, %.1f s", row, row.seconds)
