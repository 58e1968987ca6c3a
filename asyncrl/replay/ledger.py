"""Keep the replay's decisions: one line of JSON each, appended and synced before it takes effect.

What the lines say is in `events.py`. Each line has a checksum that covers that of the line before: a line
that was changed, copied, moved, or came from elsewhere is reported and skipped, and so is the line behind one
that is missing. A crash can tear only the last line, which never took effect; opening removes it.

When groups cannot be written for lack of space, decisions still have to be. So 1 MiB lies ready in
`ledger.spare`, given back to the disk when a line finds no space.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from asyncrl.errors import ReplayError
from asyncrl.replay.sealed_file import is_full
from asyncrl.storage.bounded_json import parse_json
from asyncrl.storage.regular_files import LINES_BYTES, open_regular, read_lines, reading, remove

MAX_LINE: Final = 2**20
"""Bytes; longer lines are damaged."""
_CHECKSUM: Final = re.compile(rb',"crc32":"([0-9a-f]{8})"}')
_LENGTH: Final = len(b',"crc32":"01234567"}')


def write_line(entry: dict[str, Any], previous: bytes = b"") -> bytes:
    """Write one entry (not empty) without the line feed; `previous`: digits of the line before."""
    body = json.dumps(entry, separators=(",", ":")).encode()
    return body[:-1] + b',"crc32":"%08x"}' % zlib.crc32(previous + body)


def read_line(line: bytes, previous: bytes = b"") -> dict[str, Any]:
    """Read one entry, without its checksum.

    Raises:
        ValueError: It was changed, was not written behind the digits `previous`, or is no such line.
    """
    checksum = checksum_of(line)
    if checksum is None or len(line) > MAX_LINE:
        raise ValueError("it does not end with a checksum")
    body = line[:-_LENGTH] + b"}"
    # Not `crc32(body, previous)`: a bit of `previous` would make up for one of the body's first four bytes.
    if zlib.crc32(previous + body) != int(checksum, 16):
        raise ValueError("its checksum does not match")
    return parse_json(body, dict)


def checksum_of(line: bytes) -> bytes | None:
    """Return the 8 digits that a line claims, right or wrong; None when it claims none."""
    found = _CHECKSUM.fullmatch(line, max(0, len(line) - _LENGTH))
    return None if found is None else found[1]


SPARE_BYTES: Final = 1 << 20
START: Final = b"asyncrl-replay ledger"
"""What the checksum of the first line covers instead, and that of a line behind one without a checksum."""


class Ledger:
    """An append-only file of JSON lines."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Open or create it, and remove a torn last line; `warn` receives one line per damaged line read."""
        self.path, self._warn = path, warn
        self._file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.close = weakref.finalize(self, os.close, self._file)
        sound, self._last = _end(path)
        if sound < os.fstat(self._file).st_size:
            os.ftruncate(self._file, sound)
        self._spare = path.with_suffix(".spare")
        self.keep_spare()

    def read(self) -> Iterator[dict[str, Any]]:
        """Read what is in it, one entry after another."""
        return read_entries(self.path, self._warn)

    def append(self, **entry: Any) -> None:
        """Add one line; when this returns it is durable.

        Raises:
            ReplayError: The disk does not take it. What is torn is removed when the ledger is opened again.
        """
        line = write_line(entry, self._last)
        size = os.fstat(self._file).st_size
        try:
            self._write(line + b"\n")
        except OSError as error:
            if not (is_full(error) and self._spare.is_file()):
                raise self._refused(str(error)) from None
            self._spare.unlink()
            os.ftruncate(self._file, size)
            try:
                self._write(line + b"\n")
            except OSError as again:
                raise self._refused(str(again)) from None
        self._last = _link(line)

    def keep_spare(self) -> None:
        """Set space aside for the time when there is none; without space now, nothing happens."""
        with contextlib.suppress(OSError):
            if self._spare.is_symlink() or not self._spare.is_file():
                remove(self._spare)
            handle = open_regular(self._spare, os.O_WRONLY | os.O_CREAT)
            try:
                if os.fstat(handle).st_size < SPARE_BYTES:
                    os.posix_fallocate(handle, 0, SPARE_BYTES)
            finally:
                os.close(handle)

    def _write(self, line: bytes) -> None:
        """Append and sync; a disk that becomes full takes a part at first, and nothing of the rest."""
        while line:
            line = line[os.write(self._file, line) :]
        os.fdatasync(self._file)

    def _refused(self, why: str) -> ReplayError:
        return ReplayError(
            f"{self.path} could not be written: {why}. Free disk space, or lower --replay.max-gigabytes."
        )


def read_entries(path: Path, warn: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Read the whole lines of a ledger, also while it is written; one that is not believed is reported.

    A line is believed when its checksum covers that of the last line that was believed, or the one that the
    line before it claims: so reading goes on behind a damaged line. That costs also the line behind it when
    the damage is in its checksum.
    """
    if not path.exists():
        return
    believed = claimed = START
    with reading(path, LINES_BYTES) as file:
        for number, whole in read_lines(file, MAX_LINE + 1):
            if whole is not None and not whole.endswith(b"\n"):
                return
            line = b"" if whole is None else whole[:-1]
            before, claimed = claimed, _link(line)
            try:
                entry = _read_behind(line, believed, before)
            except ValueError as error:
                warn(f"{path}: line {number} is damaged or out of place and was skipped: {error}.")
                continue
            believed = claimed
            yield entry


def _read_behind(line: bytes, believed: bytes, claimed: bytes) -> dict[str, Any]:
    try:
        return read_line(line, believed)
    except ValueError:
        if claimed == believed:
            raise
        return read_line(line, claimed)


def _end(path: Path) -> tuple[int, bytes]:
    """Find where the last whole line ends, in bytes, and what the next line's checksum covers of it."""
    with reading(path, LINES_BYTES) as file:
        end = _line_feed_before(file, file.seek(0, os.SEEK_END))
        begin = max(_line_feed_before(file, max(0, end)) + 1, end - MAX_LINE)  # A longer line is damaged.
        file.seek(begin)
        return end + 1, _link(file.read(max(0, end - begin)))


def _line_feed_before(file: BinaryIO, end: int) -> int:
    """Find the last line feed before byte `end`, in pieces; -1 when there is none."""
    while end > 0:
        begin = max(0, end - MAX_LINE)
        file.seek(begin)
        if (found := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + found
        end = begin
    return -1


def _link(line: bytes) -> bytes:
    return checksum_of(line) or START
