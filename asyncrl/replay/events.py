"""Events change the replay's state; each is a line of the ledger, appended and synced before it takes effect.

docs/replay_format.md lists the lines. The checksum of each covers that of the line before: one that was
changed, copied or moved is reported and skipped. A crash can tear only the last, which never took effect.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from asyncrl.errors import ConfigError, ReplayError
from asyncrl.replay.interface import Cause, GroupFailure, ReceiptStatus, RefusalCause
from asyncrl.replay.sealed_file import is_full
from asyncrl.storage.atomic import Checksum, begins_with
from asyncrl.storage.untrusted import open_regular, parse_json, reading, remove, shortened

Entry = dict[str, Any]  # A line of the ledger without its checksum
_CHECKSUM: Final = re.compile(rb',"crc32":"([0-9a-f]{8})"}')
_LENGTH: Final = len(b',"crc32":"01234567"}')
SPARE_BYTES: Final = 1 << 20
"""Decisions are written on a full disk too: `ledger.spare` is given back when a line finds no space."""
START: Final = b"asyncrl-replay ledger"
"""Stands for the checksum of the line before the first, and of a line without a checksum."""
OPTIONAL: Final = ("reason", "cause", "start_state", "why", "left")  # Left out of a line if empty
OLD_STATUSES: Final[dict[str, ReceiptStatus]] = {
    "dropped_world": "dropped_lag",
    "dropped_unrecorded": "dropped_invalid",
}
"""Statuses in ledgers of earlier versions, and their names today."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change of the replay's state. The fields are the keys of its line, in the line's order."""

    def to_line(self) -> Entry:
        """Return the entry of the ledger."""
        return {key: value for key, value in vars(self).items() if value or key not in OPTIONAL}


@dataclass(frozen=True, kw_only=True)
class LearnerStarted(Event):
    """A learner began or resumed."""

    learner: str
    version: int


@dataclass(frozen=True, kw_only=True)
class ActorStarted(Event):
    """An actor started, or started again under a new session."""

    actor: str
    session: str


@dataclass(frozen=True, kw_only=True)
class Granted(Event):
    """A group was granted."""

    grant: int  # Its number
    actor: str
    turn: int  # Number of the actor's request, counted by the actor; -1 if it does not count them
    min_version: int


@dataclass(frozen=True, kw_only=True)
class Used(Event):
    """A batch was given to the learner at `version`."""

    used: Sequence[int]
    request: str
    version: int


@dataclass(frozen=True, kw_only=True)
class Filtered(Event):
    """A complete group will never be used, because its episodes all had the same return."""

    filtered: int
    newest_version: int
    successes: int


@dataclass(frozen=True, kw_only=True)
class Ready(Event):
    """A group that a lost update used waits to be used again."""

    ready: int


@dataclass(frozen=True, kw_only=True)
class Dropped(Event):
    """A group was given up."""

    dropped: int
    status: ReceiptStatus
    episodes: int  # Episodes of the group that had come
    stored: bool
    decisions: int = 0
    task: str = ""
    version: int = 0
    reason: str = ""  # Problem of a group that is set aside
    cause: Cause | Literal[""] = ""
    start_state: str = ""
    why: str = ""
    left: int = 0

    @property
    def failure(self) -> GroupFailure | None:
        """Return the reason why the group could not be imagined, if any; its `member` is not kept."""
        if not self.cause:
            return None
        about = {"start_state": self.start_state, "reason": self.why}
        return GroupFailure(number=self.dropped, member=-1, cause=self.cause, left=self.left, **about)


@dataclass(frozen=True, kw_only=True)
class Refused(Event):
    """An episode was not admitted."""

    refused: ReceiptStatus
    decisions: int = 0
    cause: RefusalCause | Literal[""] = ""  # Of `dropped_invalid`


@dataclass(frozen=True, kw_only=True)
class GroupSized(Event):
    """The run's groups have a different size from here on."""

    group_size: int


KINDS: Final[dict[str, type[Event]]] = {
    fields(kind)[0].name: kind
    for kind in (LearnerStarted, ActorStarted, Granted, Used, Filtered, Ready, Dropped, Refused, GroupSized)
}
"""First key of a line -> its event."""
_CHECKS: Final[dict[Any, Callable[[Any], bool]]] = {
    "int": lambda x: type(x) is int and x >= -1,
    "bool": lambda x: isinstance(x, bool),
    "Sequence[int]": lambda x: isinstance(x, list) and all(type(n) is int and n >= 0 for n in x),
    "ReceiptStatus": lambda x: x in get_args(ReceiptStatus) and x != "held",
}
"""Type of a field -> True if a value read from a ledger has it; all others are texts."""


def read_events(entries: Iterable[Entry], warn: Callable[[str], None]) -> Iterator[Event]:
    """Read the entries of a ledger; ones of unknown kinds are skipped, keys with a default may be missing."""
    for entry in entries:
        if (kind := KINDS.get(next(iter(entry), ""))) is None:
            continue
        known = {field.name: entry.get(field.name, field.default) for field in fields(kind)}
        if (status := str(known.get("status"))) in OLD_STATUSES:
            known["status"] = OLD_STATUSES[status]
        if all(_CHECKS.get(x.type, lambda text: isinstance(text, str))(known[x.name]) for x in fields(kind)):
            yield kind(**known)
        else:
            warn(f"A line of the ledger has a value of another type and was skipped: {shortened(entry)}.")


def write_line(entry: Entry, previous: bytes = b"") -> bytes:
    """Write one entry (not empty) without the line feed; `previous` has the digits of the line before."""
    body = json.dumps(entry, separators=(",", ":")).encode()
    return body[:-1] + b',"crc32":"%08x"}' % zlib.crc32(previous + body)


def read_line(line: bytes, previous: bytes = b"") -> Entry:
    """Read one entry, without its checksum."""
    if (checksum := _checksum_of(line)) == START:
        raise ValueError("it does not end with a checksum")
    body = line[:-_LENGTH] + b"}"
    # Not `crc32(body, previous)`: a bit of `previous` would make up for one of the body's first four bytes.
    if zlib.crc32(previous + body) != int(checksum, 16):
        raise ValueError("its checksum does not match")
    return parse_json(body)


def _checksum_of(line: bytes) -> bytes:
    """Return the 8 digits of a line's own checksum, correct or not."""
    found = _CHECKSUM.fullmatch(line, max(0, len(line) - _LENGTH))
    return START if found is None else found[1]


def require_ledger(path: Path, at_checkpoint: Checksum | None) -> None:
    """Check that a ledger still begins as it did when the run's checkpoint was written."""
    if at_checkpoint is not None and not begins_with(path, at_checkpoint):
        raise ConfigError(
            f"{path} is not what it was when the checkpoint was written: lines are missing or changed, so "
            "the stored groups that were used are unknown. Put the file back, or start a new run from the "
            "checkpoint: asyncrl train --policy RUN/checkpoints/update_N."
        )


class Ledger:
    """An append-only file of JSON lines."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Open or create it, and remove a torn last line; `warn` receives one line per damaged line."""
        self.path, self._warn = path, warn
        self._file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.close = weakref.finalize(self, os.close, self._file)
        end = self._find_end()
        if end < os.fstat(self._file).st_size:
            os.ftruncate(self._file, end)
        self._spare = path.with_suffix(".spare")
        self.keep_spare()

    def _find_end(self) -> int:
        """Return the end of the last whole line; keep its digits for the next line's checksum."""
        end, self._last = 0, START
        with reading(self.path) as file:
            for line in file:
                if line.endswith(b"\n"):
                    end, self._last = end + len(line), _checksum_of(line[:-1])
        return end

    def read(self) -> Iterator[Entry]:
        """Read one entry after another."""
        return read_entries(self.path, self._warn)

    def append(self, **entry: Any) -> None:
        """Append one line durably; on a full disk, the spare space is given back first."""
        line, size = write_line(entry, self._last), os.fstat(self._file).st_size
        try:
            try:
                self._write(line + b"\n")
            except OSError as error:
                if not (is_full(error) and self._spare.is_file()):
                    raise
                self._spare.unlink()
                os.ftruncate(self._file, size)
                self._write(line + b"\n")
        except OSError as error:
            raise ReplayError(
                f"{self.path} could not be written: {error}. Free disk space, or lower "
                "--replay.max-gigabytes."
            ) from None
        self._last = _checksum_of(line)

    def keep_spare(self) -> None:
        """Reserve the spare space; does nothing without space."""
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
        while line:  # A disk that becomes full accepts a part first.
            line = line[os.write(self._file, line) :]
        os.fdatasync(self._file)


def read_entries(path: Path, warn: Callable[[str], None]) -> Iterator[Entry]:
    """Read the whole lines of a ledger, also while it is written; others are reported and skipped.

    A line is believed if its checksum covers that of the last believed line, or the one that the line before
    it claims: so reading continues after a damaged line. Damage in a checksum loses the next line too.
    """
    if not path.exists():
        return
    believed = claimed = START
    with reading(path) as file:
        for number, whole in enumerate(file, 1):
            if not whole.endswith(b"\n"):
                return
            line = whole[:-1]
            before, claimed = claimed, _checksum_of(line)
            for previous in (believed, before):
                try:
                    entry = read_line(line, previous)
                except ValueError as error:
                    problem = error
                else:
                    believed = claimed
                    yield entry
                    break
            else:
                warn(f"{path}: line {number} is damaged or out of place and was skipped: {problem}.")
