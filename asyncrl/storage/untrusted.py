"""Open files that anybody may have put there: regular ones of a bounded size, and nothing else.

A folder that was copied, damaged or handed over can hold a named pipe (opening it waits for ever), a link
that leads out of it, a folder where a file is expected, or a file of terabytes that takes no space. What is
read may be reached over a link; what is written, locked or made may not, for then a link would decide which
file outside of the folder is changed.

Every refusal is an `OSError` whose `strerror` says what is there and what to do, so that whoever handles a
file that cannot be read handles these too.

Read JSON that anybody may have written: bounded in size, depth and numbers, of the types asked for.

Python's own reader takes NaN and Infinity, whole numbers of 4,300 digits, text with half a character, and as
many levels as there is stack. What comes out of here can be written again, put in a C integer, and printed.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn, TypeVar

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


DEEPEST: Final = 64
"""Levels of lists and objects within each other."""
LARGEST: Final = 2**63
"""No whole number is this large or, below zero, larger."""
Kind = TypeVar("Kind")


def parse_json(raw: bytes, kind: type[Kind]) -> Kind:
    """Read one JSON value.

    Raises:
        ValueError: It is no JSON, of another type, too deep, or has a number that is too large or none.
    """
    text = raw.decode("utf-8")
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_fraction, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"it has more than {DEEPEST} levels") from None
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(value)
    if "\\u" in text:  # Half of a character outside of the first plane can be read, but not written.
        json.dumps(value, ensure_ascii=False).encode()
    if not isinstance(value, kind):
        raise ValueError(f"it holds a {type(value).__name__}, expected a {kind.__name__}")
    return value


def load_json(path: Path, kind: type[Kind], limit: int = TEXT_BYTES) -> Kind:
    """Read a file with one JSON value of type `kind`.

    Raises:
        OSError: The file cannot be read, is no regular file, or has more than `limit` bytes.
        ValueError: See `parse_json`.
    """
    return parse_json(read_bytes(path, limit), kind)


def check_types(found: Mapping[str, Any], expected: Mapping[str, type | tuple[type, ...]]) -> None:
    """Check the types of an object's values. A whole number is a float too; true and false are no numbers.

    Raises:
        ValueError: A key is missing or its value is of another type; names it.
    """
    for key, kind in expected.items():
        if key not in found:
            raise ValueError(f"{key} is missing")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        kinds += (int,) if float in kinds else ()
        if type(found[key]) not in kinds:
            wanted = " or ".join(one.__name__ for one in kinds)
            raise ValueError(f"{key} is {shortened(found[key])}, expected {wanted}")


def check_sizes(model: Mapping[str, Any], most: int = 2**24, most_layers: int = 1024) -> None:
    """Check the sizes of a model that a file describes: layers are made before their weights are looked for.

    Raises:
        ValueError: One is larger, or below zero; names it.
    """
    for name, value in model.items():
        for size in value if isinstance(value, list | tuple) else (value,):
            limit = most_layers if name in ("layers", "res_blocks", "llm_layers", "depth") else most
            if type(size) is int and not 0 <= size <= limit:
                raise ValueError(f"{name} is {shortened(size)}, expected a whole number of 0 to {limit}")


def read_rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Read a file with a JSON object in every line, such as metrics.jsonl, one line after the other.

    Yields:
        Each line as it stands, and its object; None for a line that is torn, too long (the line is empty
        then), or anything else than an object in JSON. Whoever leaves those out counts them.

    Raises:
        OSError: The file cannot be read, is no regular file, or has more than `LINES_BYTES`.
    """
    with reading(path, LINES_BYTES) as file:
        for _, line in read_lines(file):
            try:
                row = parse_json(line, dict) if line is not None and line.endswith(b"\n") else None
            except ValueError:
                row = None
            yield line or b"", row


def shortened(value: object) -> str:
    """Write a value for people, on one line of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -LARGEST < (number := int(digits)) < LARGEST:
        raise ValueError(f"it has the number {digits[:20]}{'...' * (len(digits) > 20)}, which is too large")
    return number


def _fraction(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"it has the number {digits[:20]}, which is too large")
    return number


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"it has {name}, which is not in JSON")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it has more than {DEEPEST} levels")
        parts = [part for part in level if isinstance(part, dict | list)]
        level = [below for part in parts for below in (part.values() if isinstance(part, dict) else part)]
