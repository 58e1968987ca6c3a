"""The pictures of a version that was measured in the true simulator, below the run's folder.

videos/update_000005.png            sheet
videos/update_000005.gif (or .mp4)  movie
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from asyncrl.storage.untrusted import open_regular

VIDEOS: Final = "videos"
SHEET: Final = ".png"
LARGEST: Final = 8 << 20
"""Bytes of a picture that is shown elsewhere than in its file."""


def picture_name(version: int, suffix: str) -> str:
    """Name a version's file below the run's folder.

    >>> picture_name(5, SHEET)
    'videos/update_000005.png'
    """
    return f"{VIDEOS}/update_{version:06d}{suffix}"


def read_picture(run_dir: Path, version: int, suffix: str) -> bytes:
    """Read a picture whole.

    Raises:
        OSError: It is not there, no regular file, or larger than `LARGEST`.
    """
    path = run_dir / picture_name(version, suffix)
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(f"{path} has more than {LARGEST >> 20} MiB")
    return content
