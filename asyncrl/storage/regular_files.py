"""Open files that anybody may have put there: regular ones of a bounded size, and nothing else.

A folder that was copied, damaged or handed over can hold a named pipe (opening it waits for ever), a link
that leads out of it, a folder where a file is expected, or a file of terabytes that takes no space. What is
read may be reached over a link; what is written, locked or made may not, for then a link would decide which
file outside of the folder is changed.

Every refusal is an `OSError` whose `strerror` says what is there and what to do, so that whoever handles a
file that cannot be read handles these too.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

TEXT_BYTES: Final = 64 * 2**20
"""Largest file of settings, names, or what a model says about itself. Published tokenizers have 20 MiB."""
LINES_BYTES: Final = 4 * 2**30
"""Largest file of lines, such as a run's metrics or ledger: millions of updates."""
LINE_BYTES: Final = 2**20
"""Longest line of such a file."""
_MOVE: Final = "move it away"
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a regular file, never waiting for anybody; return its handle, which the caller closes.

    Raises:
        OSError: It cannot be opened, or is something else than a regular file; says what.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0), mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR) and (kind := kind_of(path)):
            _refuse(path, kind)
        raise
    if stat.S_ISREG(found := os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    _refuse(path, _named(found))


def kind_of(path: Path) -> str:
    """Say in two words what is at `path` instead of a regular file; empty for one, and where nothing is."""
    try:
        return _named(path.lstat().st_mode)
    except OSError:
        return ""


def _named(mode: int) -> str:
    return next((name for test, name in _KINDS if test(mode)), "")


def _refuse(path: Path, kind: str) -> NoReturn:
    raise OSError(errno.EINVAL, f"it is {kind or 'no file'}, where a file is expected: {_MOVE}", str(path))


@contextmanager
def reading(path: Path, limit: int) -> Iterator[BinaryIO]:
    """Open a file of at most `limit` bytes to read.

    Raises:
        OSError: See `open_regular`; or it is larger.
    """
    handle = open_regular(path)
    with io.FileIO(handle, "rb") as raw:
        size = os.fstat(handle).st_size
        if size > limit:
            raise OSError(
                errno.EFBIG, f"it has {size} bytes, more than the limit of {limit}: {_MOVE}", str(path)
            )
        with io.BufferedReader(raw) as file:
            yield file


def read_bytes(path: Path, limit: int = TEXT_BYTES) -> bytes:
    """Read a file of at most `limit` bytes, as long as it is now.

    Raises:
        OSError: See `reading`.
    """
    with reading(path, limit) as file:
        return file.read(os.fstat(file.fileno()).st_size)  # Python reserves what is asked for.


def read_text(path: Path, limit: int = TEXT_BYTES) -> str:
    """Read a file of at most `limit` bytes as UTF-8.

    Raises:
        OSError: See `reading`.
        ValueError: It is not UTF-8.
    """
    return read_bytes(path, limit).decode("utf-8")


def read_lines(file: BinaryIO, longest: int = LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    r"""Read one line after the other, whatever their length, in memory for one.

    Yields:
        Number from 1, and the line with its line feed, which the last one may lack; None for a longer line.
    """
    number = 0
    while line := file.readline(longest + 1):
        number += 1
        if len(line) <= longest or line.endswith(b"\n"):
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(longest)
        yield number, None


def make_folder(path: Path) -> None:
    """Make a folder of a run, with those above it, unless it is there.

    Raises:
        OSError: Something else is there, also a link: what the run writes must stay in the run's folder.
    """
    kind = kind_of(path)
    if kind == "a link":
        what = f"{path.name} is a link, so that what is written would lie elsewhere"
        raise OSError(errno.ENOTDIR, f"{what}: {_MOVE}", str(path))
    if kind not in ("", "a folder") or path.is_file():
        what = f"{path.name} is {kind or 'a file'}, where a folder is expected"
        raise OSError(errno.ENOTDIR, f"{what}: {_MOVE}", str(path))
    path.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Delete what is there: a file, a link (never what it leads to), or a folder with all that is in it.

    What cannot be deleted stays; nothing there is no error.
    """
    if kind_of(path) == "a folder":
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
