"""Write files and folders that appear under their name complete and durable, or not at all.

1  the content goes to NAME.tmp             a crash leaves it there, unread
2  every file and folder of it is synced    (fsync)
3  it is renamed to NAME, over an old one   a reader sees the old content or the new one
4  the parent folder is synced              from here on it survives a loss of power
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.storage.untrusted import kind_of, load_json, open_regular, read_bytes, reading, remove

SMALL_BYTES: Final = 4096


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name for a file or folder, which replaces `path` after a block without error."""
    part = unfinished(path)
    remove(part)
    try:
        yield part
        publish(part, path)
    except BaseException:
        remove(part)
        raise


def unfinished(path: Path) -> Path:
    """Return the temporary name of `path`."""
    return path.with_name(path.name + ".tmp")


def publish(part: Path, final: Path) -> None:
    """Sync a file or folder with its content, and rename it to `final`, replacing an existing one."""
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
    """Sync a file's content, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def copy_others(source: Path, folder: Path, besides: Set[str]) -> None:
    """Copy a folder's content except the names in `besides` and hidden files; links are followed."""

    def skipped(place: str, names: list[str]) -> list[str]:
        return [n for n in names if n.startswith(".") or (Path(place) == source and n in besides)]

    shutil.copytree(source, folder, ignore=skipped, copy_function=shutil.copyfile, dirs_exist_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, atomically."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, remedy: str = "Copy the folder again, with all of its files.") -> dict[str, Any]:
    """Read a JSON object."""
    try:
        return load_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. {remedy}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. {remedy}".rstrip()) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}). {remedy}".rstrip()) from error


# --- private files ---


def write_private(path: Path, text: str) -> None:
    """Write a text with mode 0600, atomically."""
    part = unfinished(path)
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    publish(part, path)


def read_small(path: Path) -> str:
    """Read at most `SMALL_BYTES` bytes of text from a regular file, not through a link."""
    with os.fdopen(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return file.read(SMALL_BYTES).decode()


def check_private(path: Path, remedy: str) -> None:
    """Check that only this user can read a file or enter a folder; else raise ConfigError with `remedy`."""
    about = path.stat()
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(about.st_mode):o} or another owner, so others may know what it "
            f"holds. {remedy}"
        )


# --- checksums ---


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """Length and SHA-256 (1.8 GB/s per thread, faster than a disk) of a file, or of its beginning."""

    bytes: int
    sha256: str  # 64 hexadecimal digits


def digest_of(path: Path) -> str:
    """Compute a regular file's SHA-256, as in `Checksum`."""
    with reading(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum_of_lines(path: Path) -> Checksum | None:
    """Hash the whole lines of a file that another process appends to; None without a file."""
    if not path.exists():
        return None
    content = read_bytes(path)
    lines = content[: content.rfind(b"\n") + 1]
    return Checksum(bytes=len(lines), sha256=hashlib.sha256(lines).hexdigest())


def begins_with(path: Path, expected: Checksum) -> bool:
    """Return True if a file begins with the hashed content; False if it cannot be read."""
    try:
        beginning = read_bytes(path)[: expected.bytes]
    except OSError:  # Opening it for writing reports the reason.
        return False
    return hashlib.sha256(beginning).hexdigest() == expected.sha256
