"""Keep the best version of a run in `checkpoints/best`, and put away what a killed evaluator left."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from asyncrl.storage.atomic import flush
from asyncrl.storage.bounded_json import load_json
from asyncrl.storage.regular_files import remove

FOLDER: Final = "checkpoints"
BEST: Final = "best"
"""The version that succeeded most often, the later one of two that are equal."""
HELD: Final = "evaluating"
"""The version that is being measured."""
BEFORE: Final = "best.before"
"""What `BEST` is called for the moment in which another one takes its place."""
LEFT_BY_EVALUATOR: Final = (HELD, BEFORE)
"""What a process that was killed may leave beside the checkpoints."""


def keep_as_best(held: Path) -> None:
    """Let what is held take the place of the best version; at any moment one of the two is there."""
    best, before = held.with_name(BEST), held.with_name(BEFORE)
    if best.exists():
        remove(before)
        best.rename(before)
    held.rename(best)
    flush(best.parent)
    remove(before)


def clean_up(run_dir: Path) -> None:
    """Put away what a process that was killed left; a best version that was being replaced is put back."""
    folder = run_dir / FOLDER
    best, before = folder / BEST, folder / BEFORE
    if before.exists() and not best.exists():
        before.rename(best)
    for name in LEFT_BY_EVALUATOR:
        remove(folder / name)


def forget_best_after(run_dir: Path, version: int) -> None:
    """Put away what was left, and the best version if a resumed run makes it anew."""
    clean_up(run_dir)
    best = run_dir / FOLDER / BEST
    if best.is_dir() and _version_of(best) > version:
        remove(best)


def _version_of(folder: Path) -> float:
    """Return the version of a checkpoint; infinite when it does not say."""
    try:
        found = load_json(folder / "state.json", dict)["progress"]["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf
    return found if isinstance(found, int) else math.inf
