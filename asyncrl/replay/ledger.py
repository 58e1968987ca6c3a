"""The replay's memory of decisions: one line of JSON each, appended and synced before it takes effect.

    {"learner": session, "version": v}                         a learner began or resumed at version v
    {"actor": name, "session": s}                              an actor (re)started
    {"grant": n, "actor": name, "turn": t, "min_version": m}   group n was granted
    {"used": [n, ...], "request": r, "version": v}             a batch was given away
    {"filtered": n, "newest_version": v, "successes": k}       group n is complete but will never be used
    {"ready": n}                                               group n, used by a lost update, waits again
    {"dropped": n, "status": why, "episodes": k, "stored": b}  group n was given up; with the status
                                                               dropped_resume its number is granted again;
                                                               dropped_poisoned has "cause", "start_state",
                                                               "why" and start states "left" besides
    {"refused": why}                                           one episode was not admitted

Each line also has a checksum, see `lines.py`. A crash can tear only the last line,
which never took effect; opening removes it.

When groups cannot be written for lack of space, decisions still have to be. So 1 MiB lies ready in
`ledger.spare`, given back to the disk when a line finds no space.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ReplayError
from asyncrl.replay.disk import is_full
from asyncrl.replay.lines import read_line, write_line

SPARE_BYTES: Final = 1 << 20


class Ledger:
    """An append-only file of JSON lines."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.close = weakref.finalize(self, os.close, self._file)
        whole = path.read_bytes()
        sound = whole.rfind(b"\n") + 1
        if sound < len(whole):
            os.ftruncate(self._file, sound)
        self.entries = read_entries(path, warn)
        """What was found when it was opened."""
        self._spare = path.with_suffix(".spare")
        self.keep_spare()

    def append(self, **entry: Any) -> None:
        """Add one line; when this returns it is durable.

        Raises:
            ReplayError: The disk does not take it. What is torn is removed when the ledger is opened again.
        """
        line = write_line(entry) + b"\n"
        size = os.fstat(self._file).st_size
        try:
            self._write(line)
        except OSError as error:
            if not (is_full(error) and self._spare.exists()):
                raise self._refused(str(error)) from None
            self._spare.unlink()
            os.ftruncate(self._file, size)
            try:
                self._write(line)
            except OSError as again:
                raise self._refused(str(again)) from None

    def keep_spare(self) -> None:
        """Set space aside for the time when there is none; without space now, nothing happens."""
        if not self._spare.exists() or self._spare.stat().st_size < SPARE_BYTES:
            with contextlib.suppress(OSError), self._spare.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, SPARE_BYTES)

    def _write(self, line: bytes) -> None:
        """Append and sync; a disk that becomes full takes a part at first, and nothing of the rest."""
        while line:
            line = line[os.write(self._file, line) :]
        os.fdatasync(self._file)

    def _refused(self, why: str) -> ReplayError:
        return ReplayError(
            f"{self.path} could not be written: {why}. Free disk space, or lower --replay.max-gigabytes."
        )


def read_entries(path: Path, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """Read the whole lines of a ledger, also while it is written; a damaged one is reported and left out."""
    found: list[dict[str, Any]] = []
    whole = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(whole[: whole.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        try:
            found.append(read_line(line))
        except ValueError as error:
            warn(f"{path}: line {number} is damaged and was skipped: {error}.")
    return found
