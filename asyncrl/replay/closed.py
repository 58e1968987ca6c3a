"""The books of closed groups: closed at a version, answered while a resume may undo it, then only known.

Groups that were closed long ago are ranges of numbers, so a run may be of any length.
"""

from __future__ import annotations

from asyncrl.replay.ports import ReceiptStatus
from asyncrl.replay.ranges import Ranges


class ClosedGroups:
    """Group number -> what a late or repeated episode of it is told."""

    def __init__(self) -> None:
        """No group was closed."""
        self.recent: dict[int, ReceiptStatus] = {}
        """Those not yet forgotten, about in the order of closing."""
        self._versions: dict[int, int] = {}
        self._forgotten = Ranges()

    def __contains__(self, number: int) -> bool:
        return number in self.recent or number in self._forgotten

    def __getitem__(self, number: int) -> ReceiptStatus:
        """Return the status, or `duplicate` for a group that was forgotten, whatever became of it."""
        return self.recent.get(number, "duplicate")

    def add(self, number: int, status: ReceiptStatus, version: int) -> None:
        """Close a group that is not closed.

        Args:
            number: Of the group.
            status: What its late or repeated episodes are told.
            version: From this version on, the learner learned or could have learned from it, or saw it go.
        """
        self.recent[number], self._versions[number] = status, version

    def discard(self, number: int) -> None:
        """Make a group not closed."""
        if self.recent.pop(number, None) is None:
            self._forgotten.discard(number)
        else:
            del self._versions[number]

    def forget(self, before: int) -> list[int]:
        """Forget all of groups closed before a version but that they are closed.

        Args:
            before: The version. A group that was closed behind a later one, as around a resume, stays longer.

        Returns:
            The groups that were forgotten.
        """
        found = list[int]()
        for number, version in self._versions.items():
            if version >= before:
                break
            found.append(number)
        for number in found:
            del self.recent[number], self._versions[number]
            self._forgotten.add(number)
        return found
