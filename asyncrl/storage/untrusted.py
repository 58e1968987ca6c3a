"""Read files of unknown origin: regular files, JSON and HDF5. No torch.

Reads follow links; writes, locks and new folders do not, because a link could lead them outside the run's
folder. Every refusal is an `OSError` with a readable `strerror`, or a `ValueError`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import shutil
import stat
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from io import BufferedReader
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    import h5py

_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a regular file without blocking; return its handle, which the caller closes."""
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
    _refuse(path, _kind(found) or "no file")


def kind_of(path: Path) -> str:
    """Name the kind of `path` in two words; empty for a regular file, or if nothing is there."""
    try:
        return _kind(path.lstat().st_mode)
    except OSError:
        return ""


def _kind(mode: int) -> str:
    return next((name for test, name in _KINDS if test(mode)), "")


def _refuse(path: Path, kind: str) -> NoReturn:
    raise OSError(errno.EINVAL, f"it is {kind}, where a file is expected: move it away", str(path))


def reading(path: Path) -> BufferedReader:
    """Open a regular file for reading."""
    return os.fdopen(open_regular(path), "rb")


def read_bytes(path: Path) -> bytes:
    """Read a regular file."""
    with reading(path) as file:
        return file.read()


def files_in(folder: Path, *suffixes: str) -> list[Path]:
    """List a folder's files that end in one of `suffixes`, also in capitals, by name, without hidden ones."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in entries if path.suffix.lower() in suffixes and path.name[0] != ".")


def make_folder(path: Path) -> None:
    """Make a folder of a run, with its parents, unless it exists."""
    kind = kind_of(path)
    if kind == "a link":
        problem = "is a link, so that what is written would lie elsewhere"
    elif kind not in ("", "a folder") or path.is_file():
        problem = f"is {kind or 'a file'}, where a folder is expected"
    else:
        path.mkdir(parents=True, exist_ok=True)
        return
    raise OSError(errno.ENOTDIR, f"{path.name} {problem}: move it away", str(path))


def remove(path: Path) -> None:
    """Delete a file, a link (not its target), or a folder with its content as far as possible."""
    if kind_of(path) == "a folder":
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# --- locks ---


class CannotLock(ConfigError):
    """A lock cannot be taken, although no process holds it."""


def take_lock(path: Path, handle: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file for this process without waiting; False if another process holds the lock."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        without = error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
        why = ": its file system has no locks" if without else ""
        raise CannotLock(
            f"{path} cannot be locked ({error.strerror}){why}. Choose another folder (--run-dir), on a local "
            "disk or on a file system that is mounted with locks."
        ) from None
    return True


# --- JSON ---

LARGEST: Final = 2**63
Types = Mapping[str, type | tuple[type, ...]]
_log = logging.getLogger(__name__)


def parse_json(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object that can be written again, and stored in 64 bits; else raise ValueError."""
    text = raw.decode("utf-8")
    try:
        value = json.loads(
            text,
            parse_int=_number,
            parse_float=_number,
            parse_constant=no_constant,
            object_pairs_hook=without_doubles,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\u" in text:  # A lone surrogate can be read, but not written.
        json.dumps(value, ensure_ascii=False).encode()
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, expected a dict")
    return value


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dict of a JSON object; ValueError if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"it has a key twice, of {shortened(list(found))}")
    return found


def _number(digits: str) -> float:
    whole = digits.lstrip("-").isdigit()
    number = int(digits) if whole and len(digits) <= 20 else float(digits)
    if not abs(number) < (LARGEST if whole else math.inf):
        raise ValueError(f"it has the number {digits[:20]}{'...' * (len(digits) > 20)}, which is too large")
    return number


def no_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and infinities, which Python's JSON would accept."""
    raise ValueError(f"it has {name}, which is not in JSON")


def load_json(path: Path) -> dict[str, Any]:
    """Read a regular file with one JSON object."""
    return parse_json(read_bytes(path))


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line that is a JSON object; None for a torn or other line."""
    try:
        return parse_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None


@cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def read_json_lines(path: Path, expected: Types | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; none if it does not exist.

    Other lines, and values of other types than `expected`, are reported once; a torn end is not.
    """
    with suppress(FileNotFoundError), reading(path) as file:
        for number, line in enumerate(file, 1):
            try:
                if line.endswith(b"\n"):
                    row = parse_json(line)
                    check_types(row, expected or {})
                    yield row
            except ValueError as error:
                _warn_once(f"{path}: line {number} is damaged and left out: {error}")


def check_types(found: Mapping[str, Any], expected: Types) -> None:
    """Check the types of an object's values. An int is also a float; a bool is no number."""
    for key, kind in expected.items():
        if key not in found:
            raise ValueError(f"{key} is missing")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        kinds += (int,) if float in kinds else ()
        if type(found[key]) not in kinds:
            wanted = " or ".join(one.__name__ for one in kinds)
            raise ValueError(f"{key} is {shortened(found[key])}, expected {wanted}")


class Typed:
    """A dataclass read from a file: ValueError for values that its annotations do not allow.

    No text, bool or 7.0 is an int; floats are finite in 32 bits, sizes at most 2**24 and layers at most 1024.
    """

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            most = 1024 if name in ("layers", "res_blocks", "llm_layers", "depth") else 2**24
            if not _allows(hint, found := getattr(self, name), most):
                wanted = hint.__name__ if isinstance(hint, type) else str(hint).removeprefix("typing.")
                wanted += f" of 0 to {most}" if hint is int else ""
                raise ValueError(f"{name} is {shortened(found)}, expected {wanted}")


def _allows(hint: Any, found: Any, most: int) -> bool:
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        return found in inner
    if kind is tuple and isinstance(found, tuple):
        hints = inner[:1] * len(found) if Ellipsis in inner else inner
        return len(found) == len(hints) and all(map(_allows, hints, found, repeat(most)))
    if hint in (int, float):
        number = type(found) is int or (hint is float and type(found) is float)
        return number and (0 <= found <= most if hint is int else abs(found) < 2**127)
    return isinstance(found, hint) if hint in (str, bool) else kind is not tuple


def shortened(value: object) -> str:
    """Format a value on one line of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- HDF5 ---


def open_hdf5(path: Path) -> h5py.File:
    """Open an HDF5 file for reading, also without locks. h5py alone would block on a named pipe."""
    import h5py

    handle = open_regular(path)
    try:
        with suppress(CannotLock):
            if not take_lock(path, handle, fcntl.LOCK_SH):
                raise BlockingIOError(errno.EAGAIN, "another process writes it: wait for its end", str(path))
    finally:
        os.close(handle)
    return h5py.File(path, "r", locking=False)


def dataset_in(file: h5py.Group, name: str) -> h5py.Dataset:
    """Find a dataset of fixed-length values stored in this file; else raise Key-, Type- or ValueError."""
    import h5py

    dataset = _object_in(file, name)
    if not isinstance(dataset, h5py.Dataset):
        raise TypeError(f"{name} is not a dataset of this file")
    created = dataset.id.get_create_plist()
    if created.get_layout() == h5py.h5d.VIRTUAL or created.get_external_count():
        raise TypeError(f"{name} lies in other files")  # Reading its shape may open them.
    if dataset.dtype.hasobject:
        raise TypeError(f"{name} holds values of no fixed length")
    declared = math.prod(dataset.shape) * dataset.dtype.itemsize
    # The missing ones would be made up in memory.
    if dataset.chunks is None and declared > (stored := dataset.id.get_storage_size()):
        raise ValueError(f"{name} declares {declared} bytes, but the file has {stored} of it")
    return dataset


def group_in(file: h5py.Group, name: str) -> h5py.Group:
    """Find a group of this file."""
    import h5py

    group = _object_in(file, name)
    if not isinstance(group, h5py.Group):
        raise KeyError(f"there is no group {name}")
    return group


def _object_in(file: h5py.Group, name: str) -> Any:
    # Through hard links only, because others may lead to another file; None for another link.
    import h5py

    found: Any = file
    for part in name.split("/"):
        link = found.get(part, getlink=True) if isinstance(found, h5py.Group) else None
        if link is None:
            raise KeyError(f"there is no {name}")
        if not isinstance(link, h5py.HardLink):
            return None
        found = found[part]
    return found
