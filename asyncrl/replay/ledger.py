"""The replay's memory of decisions: one line of JSON each, appended and synced before it takes effect.

    {"learner": session, "version": v}                         a learner began or resumed at version v
    {"actor": name, "session": s}                              an actor (re)started
    {"grant": n, "actor": name, "turn": t, "min_version": m}   group n was granted
    {"used": [n, ...], "request": r, "version": v}             a batch was given away
    {"filtered": n, "newest_version": v, "successes": k}       group n is complete but will never be used
    {"ready": n}                                               group n, used by a lost update, waits again
    {"dropped": n, "status": why, "episodes": k, "stored": b}  group n was given up; with the status
                                                               dropped_resume its number is granted again
    {"refused": why}                                           one episode was not admitted

Each line also has a checksum, see `lines.py`. A crash can tear only the last line,
which never took effect; opening removes it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.errors import ReplayError
from asyncrl.replay.lines import read_line, write_line


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

    def append(self, **entry: Any) -> None:
        """Add one line; when this returns it is durable.

        Raises:
            ReplayError: The disk does not take it. What is torn is removed when the ledger is opened again.
        """
        line = write_line(entry) + b"\n"
        try:
            whole = os.write(self._file, line) == len(line)  # A disk that becomes full takes a part at first.
            os.fdatasync(self._file)
        except OSError as error:
            raise self._refused(str(error)) from None
        if not whole:
            raise self._refused("it took only a part of a line")

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
