"""The file `evaluations.jsonl` of a run: how often its policy succeeded in the true simulator, by version.

One line per evaluated version, written by the process that measures, read by the learner and by anyone else.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from asyncrl.storage.atomic import replacing
from asyncrl.storage.bounded_json import check_types, read_rows

NAME: Final = "evaluations.jsonl"
_NUMBER: Final = (int, float)
_TYPES: Final = {"int": int, "float": _NUMBER, "str": str, "bool": bool}


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
    """Add a line, behind one that was torn too; raises OSError when it cannot be written."""
    with (run_dir / NAME).open("ab+") as file:
        torn = False
        if file.tell():
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        line = json.dumps(asdict(row), allow_nan=False) + "\n"
        file.write(("\n" if torn else "").encode() + line.encode())


def read(run_dir: Path) -> list[EvaluatedVersion]:
    """Return all that can be read, oldest first; a line that is torn or something else is left out."""
    path = run_dir / NAME
    return list(_rows(path)) if path.is_file() else []


def cut_after(run_dir: Path, version: int) -> None:
    """Remove what was measured of later versions: a resumed run makes them anew."""
    kept = [row for row in read(run_dir) if row.version <= version]
    if (run_dir / NAME).exists():
        with replacing(run_dir / NAME) as part:
            part.write_text("".join(json.dumps(asdict(row)) + "\n" for row in kept), encoding="utf-8")


def _rows(path: Path) -> Iterator[EvaluatedVersion]:
    for _, row in read_rows(path):
        if row is not None and (found := _checked(row)) is not None:
            yield found


def _checked(row: dict[str, Any]) -> EvaluatedVersion | None:
    known = {field.name: _TYPES[str(field.type)] for field in fields(EvaluatedVersion)}
    if row.keys() != known.keys():
        return None
    try:
        check_types(row, known)
    except ValueError:
        return None
    numbers = [value for value in row.values() if isinstance(value, float)]
    return EvaluatedVersion(**row) if all(map(math.isfinite, numbers)) else None
