"""Table of the groups: granted and open, then complete and ready, then closed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from asyncrl.records import Episode, Sampling
from asyncrl.replay.admission import unlike
from asyncrl.replay.group_file import GroupFile
from asyncrl.replay.interface import GroupGrant, ReceiptStatus

NO_VERSION: Final = 2**63 - 1
"""Oldest version of a group without members."""
GRANTS_AGAIN: Final = 2
"""Repeated grants of a number whose group its actors did not complete."""


class GroupTable:
    """The groups of a run, each open, ready or closed.

    Events, the learner's version and the files change it. Numbers are granted in ascending order: a number
    below `next_number` that is neither open nor ready is closed, also if nothing else of it is remembered.
    """

    def __init__(self, *, uses: int, horizon: int) -> None:
        """Start empty."""
        self.uses, self.horizon = uses, horizon
        self.version = 0
        """The learner's newest policy version."""
        self.used = 0
        """Groups in all batches: the sampling cursor. A filtered group is in none."""
        self.next_number = 0
        self.open: dict[int, OpenGroup] = {}
        self.ready: dict[int, ReadyGroup] = {}
        self.closed: dict[int, ClosedGroup] = {}
        """Closed groups that are not forgotten, about in the order of closing."""
        self.used_at: dict[int, tuple[int, ...]] = {}
        """Ready or recently closed group -> the learner's version at each use."""
        self.filtered: dict[int, FilteredGroup] = {}
        """Recently closed groups whose episodes all had the same return."""
        self.to_grant_again: set[int] = set()
        """Closed groups whose numbers are granted again, before any new number."""
        self._given_up: dict[int, int] = {}
        """Number that may be granted again -> times that its actor did not complete it."""
        self._filtered_before = 0
        self._forgotten: set[int] | None = set()
        """Until `end_recovery`, the forgotten closed groups."""

    @property
    def filtered_groups(self) -> int:
        """Count the groups whose episodes all had the same return, since the run began."""
        return self._filtered_before + len(self.filtered)

    def is_closed(self, number: int) -> bool:
        """True if a group was used up, filtered or given up.

        While the ledger is read, only groups that it closed count: a damaged line may hide a grant whose file
        exists. After that, every file of a group that is not closed has made it ready.
        """
        if self._forgotten is not None:
            return number in self.closed or number in self._forgotten
        return 0 <= number < self.next_number and number not in self.open and number not in self.ready

    def is_counted(self, number: int) -> bool:
        """True if the episodes of a stored group are counted: it is ready, used or closed."""
        return number in self.ready or number in self.used_at or self.is_closed(number)

    def end_recovery(self) -> None:
        """Finish recovery from the ledger and the files."""
        self.forget()
        self._forgotten = None

    def open_group(self, number: int, group: OpenGroup) -> None:
        """Add a granted group."""
        group.granted_before = number in self.to_grant_again
        self._take_out(number)
        self.open[number] = group

    def make_ready(self, number: int, group: ReadyGroup) -> None:
        """Make a stored group ready; its earlier uses stay known."""
        used_at = self.used_at.get(number, ())
        self._take_out(number)
        self._given_up.pop(number, None)
        self.ready[number] = group
        if used_at:
            self.used_at[number] = used_at

    def use(self, numbers: Sequence[int]) -> None:
        """Record that groups were given to the learner at `version`; each is closed after `uses` times."""
        for number in numbers:
            self.open.pop(number, None)  # When the ledger is read, before the files are looked at.
            used_at = (*self.used_at.get(number, ()), self.version)
            if len(used_at) >= self.uses:
                self._close(number, "duplicate", self.version)
            self.used_at[number] = used_at
        self.used += len(numbers)

    def close_used(self, number: int) -> None:
        """Close a group that was used, but less than `uses` times. That drops nothing."""
        used_at = self.used_at[number]
        self._close(number, "duplicate", used_at[-1])
        self.used_at[number] = used_at

    def undo_uses(self, number: int, kept: tuple[int, ...]) -> None:
        """Forget a group and its uses, except those at the versions `kept`."""
        self._take_out(number)
        if kept:
            self.used_at[number] = kept

    def filter(self, number: int, newest_version: int, successes: int, size: int) -> None:
        """Close a stored group without a learning signal: its credit returns, it does not count as used."""
        self._close(number, "duplicate", newest_version)
        self.filtered[number] = FilteredGroup(newest_version=newest_version, successes=successes, size=size)

    def forget_uses(self) -> None:
        """Make all closings final: no resume undoes them."""
        self._filtered_before += len(self.filtered)
        self.used_at.clear()
        self.filtered.clear()

    def drop(self, number: int, status: ReceiptStatus, *, stored: bool = False) -> None:
        """Give a group up, for good or to grant its number again (`grants_again`)."""
        again = self.grants_again(number, status)
        given_up = self._given_up.get(number, 0) + (status == "dropped_deadline")
        told: ReceiptStatus = "duplicate" if stored and status != "dropped_resume" else status
        self._close(number, told, self.version)
        if again:
            self.to_grant_again.add(number)
            self._given_up[number] = given_up

    def grants_again(self, number: int, status: ReceiptStatus) -> bool:
        """True if a number is granted again after its group is dropped for this reason.

        Otherwise start states with slow groups would be used less. A group that cannot be imagined or is not
        admitted would fail again; and its actors may die of a group, so the number of repetitions is bounded.
        """
        if status == "dropped_deadline":
            return self._given_up.get(number, 0) < GRANTS_AGAIN
        return status in ("dropped_resume", "dropped_lag")

    def _close(self, number: int, status: ReceiptStatus, version: int) -> None:
        self._take_out(number)
        self._given_up.pop(number, None)
        self.closed[number] = ClosedGroup(status=status, version=version)

    def _take_out(self, number: int) -> None:
        for groups in (self.open, self.ready, self.closed, self.used_at, self.filtered):
            groups.pop(number, None)
        self.to_grant_again.discard(number)
        if self._forgotten is not None:
            self._forgotten.discard(number)
        self.next_number = max(self.next_number, number + 1)

    def advance(self, version: int) -> None:
        """Set a newer version of the learner; forget everything that no resume has to undo."""
        self.version = version
        self.forget()

    def forget(self) -> None:
        """Forget the groups that were closed more than `horizon` versions ago; around a resume some later."""
        before = self.version - self.horizon
        if self.uses > 1:  # No event records that a used group became too old.
            stale = [number for number, used_at in self.used_at.items() if used_at[-1] < before]
            for number in stale:
                if number not in self.ready and number not in self.closed:
                    self.close_used(number)
        old = list(itertools.takewhile(lambda number: self.closed[number].version < before, self.closed))
        for number in old:
            del self.closed[number]
            self.used_at.pop(number, None)
            self._filtered_before += self.filtered.pop(number, None) is not None
            if self._forgotten is not None:
                self._forgotten.add(number)


@dataclass(kw_only=True)
class OpenGroup:
    """A granted group that is not complete."""

    grant: GroupGrant
    actor: str
    request_number: int
    """The actor's count of acquisitions; a repeated question gets the same grant."""
    granted_at: float
    """In seconds of the limiter's clock."""
    granted_before: bool = False
    """True if it was given up before; episodes of that grant may still come."""
    members: dict[int, Episode] = field(default_factory=dict)

    oldest_version: int = NO_VERSION
    """Version of the oldest decision of the present members."""

    def add(self, episode: Episode) -> None:
        """Add a member."""
        self.members[episode.member] = episode
        self.oldest_version = min(self.oldest_version, episode.oldest_version)


@dataclass(frozen=True, kw_only=True)
class ReadyGroup:
    """A complete group that can be used."""

    oldest_version: int
    newest_version: int
    spread: float = 0.0
    """Standard deviation of the episodes' returns (1: success, 0: none)."""
    sampling: Sampling | None = None
    """None: as the run's."""
    world_version: int = 0
    """Of the world that imagined it."""
    size: int = 0
    """Its episodes; 0: as many as the run's groups have."""


@dataclass(frozen=True, kw_only=True)
class ClosedGroup:
    """A group that will not be used (any more)."""

    status: ReceiptStatus
    """Answer to its late or repeated episodes."""
    version: int
    """The learner's version at its last use or at its closing."""


@dataclass(frozen=True, kw_only=True)
class FilteredGroup:
    """A complete group whose episodes all had the same return."""

    newest_version: int
    successes: int
    """Episodes that succeeded."""
    size: int
    """Its episodes."""


def ready_group(group_file: GroupFile) -> ReadyGroup:
    """Return the limiter's view of a sealed group."""
    share = min(1.0, max(0.0, group_file.success))  # The file may have any origin.
    return ReadyGroup(
        oldest_version=group_file.oldest_version,
        newest_version=group_file.newest_version,
        spread=math.sqrt(share * (1 - share)),
        sampling=group_file.sampling,
        world_version=group_file.world_version,
        size=group_file.attributes["group_size"],
    )


def mismatch(group: OpenGroup, episode: Episode) -> str | None:
    """Return why an episode cannot be added to a group, or None if it can."""
    if episode.member in group.members:
        return f"member {episode.member} came twice, with different ids"
    return next((problem for x in group.members.values() if (problem := unlike(x, episode))), None)


def number_of(group_id: str) -> int:
    """Return the number in a `GroupGrant.group_id`, or -1 if it has none."""
    return int(group_id) if len(group_id) == 8 and group_id.isascii() and group_id.isdecimal() else -1
