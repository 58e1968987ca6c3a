"""Write files and folders so that each appears under its name when it is complete, or not at all.

    1  what is written goes to NAME.tmp beside it          a crash leaves that, which nobody reads
    2  every file and folder of it is flushed to the disk  (fsync)
    3  it is renamed to NAME, over an old one              a reader sees the old content or the new one
    4  the folder it is in is flushed                      from here on it survives a loss of power

Everything of the package that is written at once is written by this module, except group files of the replay.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.errors import CheckpointError
from asyncrl.storage.bounded_json import load_json
from asyncrl.storage.regular_files import kind_of, remove

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
