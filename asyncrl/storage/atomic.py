"""Write files and folders so that each appears under its name when it is complete, or not at all.

    1  what is written goes to NAME.tmp beside it          a crash leaves that, which nobody reads
    2  every file and folder of it is flushed to the disk  (fsync)
    3  it is renamed to NAME, over an old one              a reader sees the old content or the new one
    4  the folder it is in is flushed                      from here on it survives a loss of power

Everything of the package that is written at once is written by this module, except group files of the replay.

Files with one record in every line, each written by one process and read by others while it grows.

Small files that only this user may read: never open to others while they are written, read with care.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.storage.untrusted import check_types, kind_of, load_json, read_rows, remove

_COPY_AGAIN = "Copy the folder again, with all of its files."


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name under which to write a file or folder; it becomes `path` when the block ends.

    What the block began is deleted when it fails. What was there before stays until the new one is complete.
    """
    part = unfinished(path)
    remove(part)
    try:
        yield part
        publish(part, path)
    except BaseException:
        remove(part)
        raise


def unfinished(path: Path) -> Path:
    """Return the name that `path` has while it is written."""
    return path.with_name(path.name + ".tmp")


def publish(part: Path, final: Path) -> None:
    """Flush the file or folder `part` with everything in it to the disk, then give it its final name.

    A folder that has this name is deleted, a file is replaced.
    """
    for path in [*part.rglob("*"), part]:
        flush(path)
    replaced = unfinished(final.with_name(final.name + ".replaced"))
    if kind_of(final) == "a folder" and kind_of(part) == "a folder":
        remove(replaced)
        final.rename(replaced)
    part.replace(final)
    flush(final.parent)
    remove(replaced)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, whole or not at all."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, remedy: str = _COPY_AGAIN) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, no regular file, or holds something else (see `bounded_json`).
    """
    try:
        return load_json(path, dict)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. {remedy}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. {remedy}".rstrip()) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}). {remedy}".rstrip()) from error


Record = TypeVar("Record")
_NUMBER: Final = (int, float)
_TYPES: Final = {"int": int, "float": _NUMBER, "str": str, "bool": bool}


def append_record(path: Path, record: Any) -> None:
    """Add a line, behind one that was torn too.

    Raises:
        OSError: It cannot be written.
        ValueError: A number is not finite.
    """
    line = json.dumps(asdict(record), allow_nan=False) + "\n"
    with path.open("ab+") as file:
        torn = False
        if file.tell():
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        file.write(("\n" if torn else "").encode() + line.encode())


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Return all records that can be read, oldest first; a line that is torn or something else is left out.

    Args:
        kind: A dataclass whose fields are int, float, str or bool.
    """
    if not path.is_file():
        return []
    known = {field.name: _TYPES[str(field.type)] for field in fields(kind)}  # type: ignore[arg-type]
    found = (_checked(row, kind, known) for _, row in read_rows(path) if row is not None)
    return [record for record in found if record is not None]


def keep_records(path: Path, kind: type[Record], wanted: Callable[[Record], bool]) -> None:
    """Remove the records that are not `wanted`, and whatever is none."""
    if not path.exists():
        return
    kept = [record for record in read_records(path, kind) if wanted(record)]
    with replacing(path) as part:
        lines = (json.dumps(asdict(record)) + "\n" for record in kept)  # type: ignore[call-overload]
        part.write_text("".join(lines), encoding="utf-8")


def _checked(row: dict[str, Any], kind: type[Record], known: dict[str, Any]) -> Record | None:
    if row.keys() != known.keys():
        return None
    try:
        check_types(row, known)
    except ValueError:
        return None
    numbers = [value for value in row.values() if isinstance(value, float)]
    return kind(**row) if all(map(math.isfinite, numbers)) else None


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
