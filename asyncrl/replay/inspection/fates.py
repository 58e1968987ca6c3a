"""A replay's ledger in, what became of each group out. Reads only; the ledger may grow meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.replay.ledger import read_entries

Fate = Literal["used", "filtered", "dropped", "unused"]


@dataclass(kw_only=True)
class Fates:
    """The last word of the ledger on every group."""

    granted: set[int] = field(default_factory=set)
    """Groups that an actor was allowed to imagine."""
    used: dict[int, int] = field(default_factory=dict)
    """Group -> the learner's version when it was used."""
    filtered: dict[int, dict[str, int]] = field(default_factory=dict)
    """Group whose episodes all had the same return -> its `newest_version` and `successes`."""
    dropped: dict[int, str] = field(default_factory=dict)
    """Group that was given up -> why."""
    again: set[int] = field(default_factory=set)
    """Groups that wait to be used again, because a resume lost the update that had used them."""

    def of(self, number: int) -> Fate:
        """What became of a group; `unused`: it waits, or the ledger does not know it."""
        if number in self.used:
            return "used"
        if number in self.filtered:
            return "filtered"
        return "dropped" if number in self.dropped else "unused"

    def note(self, entry: dict[str, Any]) -> None:
        """Follow one line of the ledger."""
        match entry:
            case {"grant": int(number)}:
                self._forget(number)
                self.granted.add(number)
            case {"used": list(numbers), "version": int(version)}:
                for number in numbers:
                    self._forget(number)
                    self.used[number] = version
            case {"filtered": int(number), "newest_version": int(newest), "successes": int(successes)}:
                self._forget(number)
                self.filtered[number] = {"newest_version": newest, "successes": successes}
            case {"ready": int(number), "uses": [*_, int(version)]}:  # A resume undid only the later uses.
                self._forget(number)
                self.used[number] = version
                self.again.add(number)
            case {"ready": int(number)}:
                self._forget(number)
                self.again.add(number)
            case {"dropped": int(number), "status": str(status)}:
                self._forget(number)
                self.dropped[number] = status

    def _forget(self, number: int) -> None:
        for book in (self.used, self.filtered, self.dropped):
            book.pop(number, None)
        self.again.discard(number)


def read_fates(folder: Path, warn: Callable[[str], None]) -> Fates:
    """Read a replay folder's ledger.

    Args:
        folder: The replay folder; without a ledger nothing is known.
        warn: Receives one line per damaged line.
    """
    fates = Fates()
    for entry in read_entries(folder / "ledger.log", warn):
        fates.note(entry)
    return fates
