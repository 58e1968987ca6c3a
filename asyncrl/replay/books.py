"""Which group is where: what happened to groups in, the books of a run out. Decides nothing, no I/O.

A group is open (granted, members arriving), then ready (complete and stored), then closed (used or dropped).
With `filter_groups` a complete group whose episodes all have the same return is closed without being ready.

The books are bounded, however long a run is: open and ready groups by the credit, closed ones by `horizon`
versions. Of what was closed before, only the numbers are kept, as ranges.
"""

from __future__ import annotations

from asyncrl.replay.closed import ClosedGroups
from asyncrl.replay.groups import FilteredGroup, OpenGroup, ReadyGroup
from asyncrl.replay.ports import ReceiptStatus


class GroupBooks:
    """The groups of a run by what became of them."""

    def __init__(self, *, uses: int, horizon: int) -> None:
        """Start empty.

        Args:
            uses: How often a group is used, at most.
            horizon: Versions after which only the number of a closed group is kept.
        """
        self.uses, self.horizon = uses, horizon
        self.version = 0
        """The learner's newest policy version."""
        self.used = 0
        """Places of groups in the batches given away: the sampling cursor. Filtered groups took none."""
        self.next_number = 0
        self.open: dict[int, OpenGroup] = {}
        self.ready: dict[int, ReadyGroup] = {}
        self.closed = ClosedGroups()
        self.used_at: dict[int, tuple[int, ...]] = {}
        """Ready or recently closed group -> the learner's version at each use."""
        self.filtered: dict[int, FilteredGroup] = {}
        """Recently closed groups whose episodes all had the same return."""
        self.again: set[int] = set()
        """Closed groups whose numbers are granted again, before any new number."""
        self._filtered_before = 0

    @property
    def filtered_groups(self) -> int:
        """Groups whose episodes all had the same return, since the run began."""
        return self._filtered_before + len(self.filtered)

    def make_ready(self, number: int, group: ReadyGroup) -> None:
        """Move a stored group to the ready ones. What it was used for before stays known."""
        used_at = self.used_at.get(number, ())
        self._take_out(number)
        self.ready[number] = group
        if used_at:
            self.used_at[number] = used_at

    def use(self, numbers: list[int]) -> None:
        """Note that groups were given to the learner at `version`. Each is closed after `uses` times."""
        for number in numbers:
            self.open.pop(number, None)  # When the ledger is recalled, before the files are looked at.
            used_at = (*self.used_at.get(number, ()), self.version)
            if len(used_at) >= self.uses:
                self._close(number, "duplicate", self.version)
            self.used_at[number] = used_at
        self.used += len(numbers)

    def retire(self, number: int) -> None:
        """Close a group that was used but not as often as it might have been. That drops nothing."""
        used_at = self.used_at[number]
        self._close(number, "duplicate", used_at[-1])
        self.used_at[number] = used_at

    def take_back(self, number: int, kept: tuple[int, ...]) -> None:
        """Undo the uses of a group but those at the versions `kept`; it is in no other book then."""
        self._take_out(number)
        if kept:
            self.used_at[number] = kept

    def filter(self, number: int, newest_version: int, successes: int) -> None:
        """Close a stored group that teaches nothing: its credit returns, and it does not count as used."""
        self._close(number, "duplicate", newest_version)
        self.filtered[number] = FilteredGroup(newest_version=newest_version, successes=successes)

    def drop(self, number: int, status: ReceiptStatus, *, stored: bool = False) -> OpenGroup | None:
        """Give a group up, for good or (`dropped_resume`) to grant its number again.

        Args:
            number: Of the group.
            status: Why; also what late episodes are told.
            stored: It was complete and stored: all are counted, so late ones are told `duplicate`.

        Returns:
            What was held for it when it was open.
        """
        told: ReceiptStatus = "duplicate" if stored and status != "dropped_resume" else status
        group = self._close(number, told, self.version)
        if status == "dropped_resume":
            self.again.add(number)
        return group

    def _close(self, number: int, status: ReceiptStatus, version: int) -> OpenGroup | None:
        group = self._take_out(number)
        self.closed.add(number, status, version)
        return group

    def _take_out(self, number: int) -> OpenGroup | None:
        for book in (self.ready, self.used_at, self.filtered):
            book.pop(number, None)
        self.closed.discard(number)
        self.again.discard(number)
        self.next_number = max(self.next_number, number + 1)
        return self.open.pop(number, None)

    def advance(self, version: int) -> None:
        """Note a version of the learner that is newer; forget what no resume has to undo any more."""
        self.version = version
        self.forget()

    def forget(self) -> None:
        """Fold the books of groups that were closed more than `horizon` versions ago."""
        before = self.version - self.horizon
        if self.uses > 1:  # Recalled from the ledger, which does not say that a used group became too old.
            stale = [number for number, used_at in self.used_at.items() if used_at[-1] < before]
            for number in stale:
                if number not in self.ready and number not in self.closed:
                    self.retire(number)
        for number in self.closed.forget(before):
            self.used_at.pop(number, None)
            self._filtered_before += self.filtered.pop(number, None) is not None
