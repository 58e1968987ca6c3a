"""The file `evaluations.jsonl` of a run: how often its policy succeeded in the true simulator, by version.

One line per evaluated version, written by the process that measures, read by the learner and by anyone else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncrl.storage.atomic import append_record, keep_records, read_records

NAME: Final = "evaluations.jsonl"


@dataclass(frozen=True, kw_only=True)
class EvaluatedVersion:
    """What was measured of one policy version."""

    version: int
    """Updates that the policy had; 0: what the run began with."""
    time: float
    """When it was known, in seconds since 1970."""
    seconds: float
    """That it took."""
    simulator: str
    temperature: float
    successes: int
    episodes: int
    success: float
    """Share of the episodes, in [0, 1]; `low` and `high` are the ends of its 95 % Wilson interval."""
    low: float
    high: float
    steps: float
    """Mean steps to success; 0 when no episode succeeded."""
    best: bool
    """Whether no version before it succeeded more often."""
    skipped: int = 0
    """Versions before it that were due but never measured: the one before took too long."""
    sheet: str = ""
    """Picture of true and imagined episodes, below the run's folder; empty: none was drawn."""
    movie: str = ""
    """The same as a movie."""

    def __str__(self) -> str:
        interval = f"[{self.low:.1%}, {self.high:.1%}]"
        return f"{self.success:.1%} {interval} of {self.episodes} (version {self.version})"


def is_due(version: int, every: int, last: int) -> bool:
    """Tell whether a version above 0 is measured; `every` 0: none is.

    >>> [version for version in range(1, 13) if is_due(version, 5, 12)]
    [5, 10, 12]
    """
    return every > 0 and (version % every == 0 or version == last)


def append(run_dir: Path, row: EvaluatedVersion) -> None:
    """Add a line; raises OSError when it cannot be written."""
    append_record(run_dir / NAME, row)


def read(run_dir: Path) -> list[EvaluatedVersion]:
    """Return all that can be read, oldest first; a line that is torn or something else is left out."""
    return read_records(run_dir / NAME, EvaluatedVersion)


def cut_after(run_dir: Path, version: int) -> None:
    """Remove what was measured of later versions: a resumed run makes them anew."""
    keep_records(run_dir / NAME, EvaluatedVersion, lambda row: row.version <= version)
