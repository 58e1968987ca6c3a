"""Declare the table through which learner and actors agree on the weight group, wherever it lies.

    folder_table   files of a private folder: for processes of one host
    store_table    torch's store over TCP: for one process of each of several hosts

An entry that is something else than it should be is skipped, counted (`weights/wrong_entries`) and named in
the log, once for each content: readers poll.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from asyncrl.errors import WeightSyncError, first_line
from asyncrl.observability import waits

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from asyncrl.weights.wake_up import WakeUp

MAX_VALUE: Final = 1 << 20
"""Longest value that is read, in bytes, where the reader says nothing else."""
_log = logging.getLogger(__name__)


class TableError(WeightSyncError):
    """The table cannot be read or written now. It can be tried again."""


class TableGone(Exception):
    """The table is not there any more: the run that it belonged to is over, or out of reach."""

    def __init__(self, why: str, since: float | None = None) -> None:
        super().__init__(why)
        self.since = time.monotonic() if since is None else since
        """When it was there last, in seconds of `time.monotonic`."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Appended lines that one look found."""

    lines: tuple[bytes, ...]
    """Complete ones, without their ends; empty lines are left out."""
    end: int
    """Bytes of the value up to where they end: where the next look begins."""


class Table(ABC):
    """Texts by key. Any number of processes and threads may use it at the same time.

    Every method raises `TableGone` when the table is gone and `TableError` when it cannot be used now.
    """

    one_host: ClassVar[bool]
    """All who use it are processes of one host, which can be asked whether they live."""
    endpoint: str
    """Where it is, for those who join and for errors."""

    def __init__(self) -> None:
        self._wrong: dict[str, int] = {}
        """Key -> sum of the wrong content that was named last."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Give `key` a value, whole or not at all."""

    @abstractmethod
    def get(self, key: str, limit: int = MAX_VALUE) -> bytes | None:
        """Return the value of `key`; None when it has none, or one that is longer than `limit` bytes."""

    @abstractmethod
    def check(self, key: str) -> bool:
        """Tell whether `key` has a value."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Take the value of `key` away, when it has one."""

    @abstractmethod
    def list_keys(self) -> list[str]:
        """List the keys that have a value."""

    @abstractmethod
    def append(self, key: str, line: bytes) -> int:
        """Add a line, without its end, to the value of `key`; returns its bytes, up to this line at least."""

    @abstractmethod
    def read_lines(self, key: str, start: int) -> Lines:
        """Return complete lines of `key` from byte `start` on."""

    @abstractmethod
    def open_wake_up(self) -> WakeUp:
        """Make what this process waits on while it expects an entry."""

    @abstractmethod
    def epoch_store(self, epoch: int, seconds: float) -> Store:
        """Open the store through which the members of an epoch set up their link; `seconds` for a key."""

    @abstractmethod
    def forget_link(self, epoch: int) -> None:
        """Delete the store of an epoch's link, which is formed or given up."""

    @abstractmethod
    def close(self) -> None:
        """Free what this process holds of the table. May be called twice."""

    def get_object(self, key: str, limit: int = MAX_VALUE) -> dict[str, Any] | None:
        """Return the JSON object that `key` has; None when it has none, or something else."""
        raw = self.get(key, limit)
        return None if raw is None else self.parse_object(key, raw)

    def parse_object(self, key: str, raw: bytes) -> dict[str, Any] | None:
        """Read a JSON object; None, counted, when it is something else."""
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError) as error:
            self.note_wrong(key, raw, f"is not JSON ({first_line(error, 80)})")
            return None
        if not isinstance(found, dict):
            self.note_wrong(key, raw, "is not a JSON object")
            return None
        return found

    def note_wrong(self, key: str, content: bytes, why: str) -> None:
        """Count a wrong value, or a wrong line of it, and name it; the same content in a row only once."""
        content_sum = zlib.crc32(content)
        if self._wrong.get(key) == content_sum:
            return
        self._wrong[key] = content_sum
        waits.count(waits.WRONG_ENTRIES)
        _log.warning("The entry %r of the weights' table %s %s; it is skipped.", key, self.endpoint, why)
