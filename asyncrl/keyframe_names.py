"""Names of the key frames that travel with a version of a run's world. Imports no torch."""

from __future__ import annotations

import re
from typing import Final

_NAME: Final = re.compile(r"world-(\d{1,9})-keyframe-\d{1,9}")


def keyframe_name(version: int, row: int) -> str:
    """Return the name of a start state that is row `row` among the key frames of a version."""
    return f"world-{version}-keyframe-{row}"


def version_named(name: str) -> int | None:
    """Return with which version of the world a start state of this name travels; None: with none.

    Example:
        >>> version_named(keyframe_name(3, 17)), version_named("seed-3")
        (3, None)
    """
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None
