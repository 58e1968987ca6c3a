"""Where files go that a user may delete at any time: they are made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """Return XDG_CACHE_HOME/asyncrl, or ~/.cache/asyncrl where that is not set; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "asyncrl"
