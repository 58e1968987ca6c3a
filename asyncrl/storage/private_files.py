"""Small files that only this user may read: never open to others while they are written, read with care."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError
from asyncrl.storage.atomic import publish, unfinished

MAX_BYTES: Final = 4096


def write_private(path: Path, text: str) -> None:
    """Write a text with mode 0600, whole or not at all, over what was there."""
    part = unfinished(path)
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    publish(part, path)


def read_small(path: Path) -> str:
    """Read a text of at most `MAX_BYTES` bytes from a regular file; longer ones are cut.

    Raises:
        OSError: There is none, or it is a link, a pipe or a folder.
        ValueError: It is not UTF-8.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a file")
        return file.read(MAX_BYTES).decode()


def check_private(path: Path, remedy: str) -> None:
    """Check that only this user can read a file, or enter a folder.

    Raises:
        ConfigError: Others can; `remedy` says what to do.
        OSError: It is not there.
    """
    about = path.stat()
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(about.st_mode):o} or another owner, so others may know what it "
            f"holds. {remedy}"
        )
