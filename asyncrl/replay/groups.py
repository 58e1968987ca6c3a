"""Keep what the replay knows of each group: granted and open, then complete and ready, then closed."""

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
"""Above all versions: of a group without members."""
GRANTS_AGAIN: Final = 2
"""How often a number is granted again whose group its actors did not complete."""


class GroupTable:
    """The groups of a run, each open, ready or closed.

    Events change it (`ReplayState.apply`), and what follows from the learner's version and from the files.
    Numbers are granted in ascending order. So what is below `next_number` and neither open nor ready is
    closed, also when nothing else of it is remembered; see `is_closed`.
    """

    def __init__(self, *, uses: int, horizon: int) -> None:
        """Start empty.

        Args:
            uses: How often a group is used, at most.
            horizon: Versions after which of a closed group nothing is remembered.
        """
        self.uses, self.horizon = uses, horizon
        self.version = 0
        """The learner's newest policy version."""
        self.used = 0
        """Groups in the batches given away: the sampling cursor. A filtered group is in none."""
        self.next_number = 0
        self.open: dict[int, OpenGroup] = {}
        self.ready: dict[int, ReadyGroup] = {}
        self.closed: dict[int, ClosedGroup] = {}
        """Those not yet forgotten, about in the order of closing."""
        self.used_at: dict[int, tuple[int, ...]] = {}
        """Ready or recently closed group -> the learner's version at each use."""
        self.filtered: dict[int, FilteredGroup] = {}
        """Recently closed groups whose episodes all had the same return."""
        self.to_grant_again: set[int] = set()
        """Closed groups whose numbers are granted again, before any new number."""
        self._given_up: dict[int, int] = {}
        """Number that is not closed for good -> how often its actor did not complete it."""
        self._filtered_before = 0
        self._forgotten: set[int] | None = set()
        """Until `end_recovery`, the closed groups that are not in `closed` any more."""

    @property
    def filtered_groups(self) -> int:
        """Groups whose episodes all had the same return, since the run began."""
        return self._filtered_before + len(self.filtered)

    def is_closed(self, number: int) -> bool:
        """Whether a group was used up, filtered or given up.

        While the ledger is read, only a group that it closed counts: a damaged line may hide a grant whose
        file is there. After that, every file of a group that is not closed has made it ready.
        """
        if self._forgotten is not None:
            return number in self.closed or number in self._forgotten
        return 0 <= number < self.next_number and number not in self.open and number not in self.ready

    def is_counted(self, number: int) -> bool:
        """Whether a group is known to have been stored: ready, used or closed."""
        return number in self.ready or number in self.used_at or self.is_closed(number)

    def end_recovery(self) -> None:
        """Note that the ledger was read and the files were looked at."""
        self.forget()
        self._forgotten = None

    def open_group(self, number: int, group: OpenGroup) -> None:
        """Note that a group was granted."""
        group.granted_before = number in self.to_grant_again
        self._take_out(number)
        self.open[number] = group

    def make_ready(self, number: int, group: ReadyGroup) -> None:
        """Move a stored group to the ready ones. What it was used for before stays known."""
        used_at = self.used_at.get(number, ())
        self._take_out(number)
        self._given_up.pop(number, None)
        self.ready[number] = group
        if used_at:
            self.used_at[number] = used_at

    def use(self, numbers: Sequence[int]) -> None:
        """Note that groups were given to the learner at `version`. Each is closed after `uses` times."""
        for number in numbers:
            self.open.pop(number, None)  # When the ledger is read, before the files are looked at.
            used_at = (*self.used_at.get(number, ()), self.version)
            if len(used_at) >= self.uses:
                self._close(number, "duplicate", self.version)
            self.used_at[number] = used_at
        self.used += len(numbers)

    def close_used(self, number: int) -> None:
        """Close a group that was used but not as often as it might have been. That drops nothing."""
        used_at = self.used_at[number]
        self._close(number, "duplicate", used_at[-1])
        self.used_at[number] = used_at

    def undo_uses(self, number: int, kept: tuple[int, ...]) -> None:
        """Undo the uses of a group but those at the versions `kept`; nothing else is known of it then."""
        self._take_out(number)
        if kept:
            self.used_at[number] = kept

    def filter(self, number: int, newest_version: int, successes: int, size: int) -> None:
        """Close a stored group that teaches nothing: its credit returns, and it does not count as used."""
        self._close(number, "duplicate", newest_version)
        self.filtered[number] = FilteredGroup(newest_version=newest_version, successes=successes, size=size)

    def forget_uses(self) -> None:
        """Let no resume undo what closed a group until now: closed it stays."""
        self._filtered_before += len(self.filtered)
        self.used_at.clear()
        self.filtered.clear()

    def drop(self, number: int, status: ReceiptStatus, *, stored: bool = False) -> None:
        """Give a group up, for good or to grant its number again (`grants_again`).

        Args:
            number: Of the group.
            status: Why; also what late episodes are told.
            stored: It was complete and stored: all are counted, so late ones are told `duplicate`.
        """
        again = self.grants_again(number, status)
        given_up = self._given_up.get(number, 0) + (status == "dropped_deadline")
        told: ReceiptStatus = "duplicate" if stored and status != "dropped_resume" else status
        self._close(number, told, self.version)
        if again:
            self.to_grant_again.add(number)
            self._given_up[number] = given_up

    def grants_again(self, number: int, status: ReceiptStatus) -> bool:
        """Whether a number is granted again when its group is dropped for this reason.

        Otherwise those start states would be used less whose groups take longer. What cannot be imagined or
        is not admitted would fail again; and a group may be what its actors die of, so not for ever.
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
        """Note a version of the learner that is newer; forget what no resume has to undo any more."""
        self.version = version
        self.forget()

    def forget(self) -> None:
        """Forget the groups that were closed more than `horizon` versions ago.

        A group that was closed after one of a later version, as around a resume, is remembered longer.
        """
        before = self.version - self.horizon
        if self.uses > 1:  # Read from the ledger, which does not say that a used group became too old.
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
    """It was given up then; episodes of that grant may still come."""
    members: dict[int, Episode] = field(default_factory=dict)

    oldest_version: int = NO_VERSION
    """Version of the oldest decision of the members that are there, of which there is at least one."""

    def add(self, episode: Episode) -> None:
        """Add a member. What follows from it is remembered: with many actors it is asked for all the time."""
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
    """What its late or repeated episodes are told."""
    version: int
    """From this version on, the learner learned or could have learned from it, or saw it go."""


@dataclass(frozen=True, kw_only=True)
class FilteredGroup:
    """A complete group whose episodes all had the same return."""

    newest_version: int
    successes: int
    """Episodes that succeeded."""
    size: int
    """Its episodes."""


def ready_group(group_file: GroupFile) -> ReadyGroup:
    """Return what the limiter has to know of a sealed group."""
    share = min(1.0, max(0.0, group_file.success))  # It may come from a file that anybody wrote.
    return ReadyGroup(
        oldest_version=group_file.oldest_version,
        newest_version=group_file.newest_version,
        spread=math.sqrt(share * (1 - share)),
        sampling=group_file.sampling,
        world_version=group_file.world_version,
        size=group_file.attributes["group_size"],
    )


def mismatch(group: OpenGroup, episode: Episode) -> str | None:
    """Say why an episode cannot be added to a group, or None when it can."""
    if episode.member in group.members:
        return f"member {episode.member} came twice, with different ids"
    for sibling in group.members.values():
        if (problem := unlike(sibling, episode)) is not None:
            return problem
    return None


def number_of(group_id: str) -> int:
    """Return the number in a `GroupGrant.group_id`, or -1 when it is none."""
    return int(group_id) if len(group_id) == 8 and group_id.isascii() and group_id.isdecimal() else -1
