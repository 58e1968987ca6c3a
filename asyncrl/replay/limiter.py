"""Who may imagine, what is admitted, what may be used: episodes and versions in, verdicts out. No I/O.

A group is open (granted, members arriving), then ready (complete and stored), then closed (used or dropped).
With `filter_groups` a complete group whose episodes all have the same return is closed without being ready.
Everything about lag, use counts, credit and completeness is decided here and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from asyncrl.records import Episode, problem_with
from asyncrl.replay.ports import GroupGrant, Receipt, ReceiptStatus


@dataclass(kw_only=True)
class OpenGroup:
    """A granted group that is not complete."""

    grant: GroupGrant
    actor: str
    turn: int
    """The actor's count of acquisitions; a repeated question gets the same grant."""
    granted_at: float
    first_at: float | None = None
    """When its first episode came, in seconds of the limiter's clock."""
    members: dict[int, Episode] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReadyGroup:
    """A complete group that waits to be used."""

    oldest_version: int
    newest_version: int


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """What a learner that begins at an earlier version changes in the books."""

    ready: tuple[int, ...]
    """Groups used by updates that are lost; they wait to be used again."""
    drop: dict[int, ReceiptStatus]
    """Groups to give up. The numbers with `dropped_resume` are granted again."""


class Limiter:
    """The books of all groups of a run."""

    def __init__(
        self,
        *,
        group_size: int,
        groups_per_update: int,
        max_lag: int,
        group_deadline: float = 300.0,
        keep_video_every: int = 0,
        filter_groups: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with an empty book; see `config` for the settings."""
        self.group_size, self.groups_per_update, self.max_lag = group_size, groups_per_update, max_lag
        self.group_deadline, self.keep_video_every, self.clock = group_deadline, keep_video_every, clock
        self.filter_groups = filter_groups
        self.version = 0
        """The learner's newest policy version."""
        self.used = 0
        """Groups the updates up to `version` have used. Filtered groups are none of them."""
        self.next_number = 0
        self.open: dict[int, OpenGroup] = {}
        self.ready: dict[int, ReadyGroup] = {}
        self.closed: dict[int, ReceiptStatus] = {}
        """Group number -> what a late or repeated episode of it is told."""
        self.used_at: dict[int, int] = {}
        """Closed group -> the learner's version when it was used."""
        self.filtered: dict[int, int] = {}
        """Closed group whose episodes all had the same return -> version of its newest decision."""
        self.again: set[int] = set()
        """Closed groups whose numbers are granted again, before any new number."""
        self._heard: dict[str, float] = {}

    @property
    def ahead(self) -> int:
        """Groups used, or granted and still of use."""
        return self.used + len(self.open) + len(self.ready)

    @property
    def credit(self) -> int:
        """Groups that may be granted now: what the learner can use before the lag bound drops it."""
        return max(0, (self.max_lag + self.version + 1) * self.groups_per_update - self.ahead)

    def hear(self, actor: str) -> None:
        """Note a sign of life."""
        self._heard[actor] = self.clock()

    def silent(self, actor: str) -> bool:
        """Whether an actor gave no sign of life for `group_deadline` seconds."""
        return self._heard.get(actor, -float("inf")) < self.clock() - self.group_deadline

    def grant(self, actor: str, turn: int = -1) -> GroupGrant | None:
        """Grant the next group, or None without credit.

        Args:
            actor: Who imagines it.
            turn: Same turn, same grant; -1 never repeats.
        """
        for group in self.open.values():
            if turn >= 0 and group.actor == actor and group.turn == turn:
                return group.grant
        if not self.credit:
            return None
        min_version = max(0, self.ahead // self.groups_per_update - self.max_lag)
        return self.reopen(min(self.again, default=self.next_number), actor, turn, min_version)

    def reopen(self, number: int, actor: str, turn: int, min_version: int) -> GroupGrant:
        """Enter a grant into the book (also one made before a restart)."""
        every = self.keep_video_every
        grant = GroupGrant(
            number=number, min_version=min_version, keep_video=every > 0 and number % every == 0
        )
        self._take_out(number)
        self.open[number] = OpenGroup(grant=grant, actor=actor, turn=turn, granted_at=self.clock())
        return grant

    def judge(self, episode: Episode) -> Receipt:
        """Decide about an episode: `held` means that it was entered into its group."""
        number = number_of(episode.group_id)

        def receipt(status: ReceiptStatus, reason: str = "") -> Receipt:
            return Receipt(episode_id=episode.episode_id, status=status, reason=reason)

        if number in self.ready:
            return receipt("duplicate")
        if number in self.closed:
            status = self.closed[number]
            return receipt(status, "" if status == "duplicate" else "its group was given up")
        if number not in self.open:
            return receipt("dropped_invalid", f"group {episode.group_id[:40]!r} was never granted")
        group = self.open[number]
        present = group.members.get(episode.member)
        if present is not None and present.episode_id == episode.episode_id:
            return receipt("duplicate")
        problem = problem_with(episode) or self._misfit(group, episode)
        if problem:
            return receipt("dropped_invalid", problem)
        if self.version - episode.oldest_version > self.max_lag:
            return receipt(
                "dropped_lag",
                f"version {episode.oldest_version} at {self.version}, --replay.max-lag is {self.max_lag}",
            )
        self.hear(group.actor)
        group.first_at = self.clock() if group.first_at is None else group.first_at
        group.members[episode.member] = episode
        return receipt("held")

    def _misfit(self, group: OpenGroup, episode: Episode) -> str | None:
        if episode.group_size != self.group_size:
            return f"group size {episode.group_size}, this run has {self.group_size}"
        if episode.member in group.members:
            return f"member {episode.member} came twice, with different ids"
        for sibling in group.members.values():
            if sibling.final_frame.shape != episode.final_frame.shape:
                return f"images of {episode.final_frame.shape}, its siblings have {sibling.final_frame.shape}"
            if (sibling.task, sibling.start_state) != (episode.task, episode.start_state):
                return "its siblings have another task or start state"
        return None

    def complete(self, number: int) -> bool:
        """Whether all members of an open group are there."""
        return number in self.open and len(self.open[number].members) == self.group_size

    def make_ready(self, number: int, oldest_version: int, newest_version: int) -> None:
        """Move a stored group to the ready ones."""
        self._take_out(number)
        self.ready[number] = ReadyGroup(oldest_version=oldest_version, newest_version=newest_version)

    def use(self, numbers: list[int]) -> None:
        """Note that groups were given to the learner at `version`. Each is used once."""
        for number in numbers:
            self._close(number, "duplicate")
            self.used_at[number] = self.version
        self.used += len(numbers)

    def filter(self, number: int, newest_version: int) -> None:
        """Close a stored group that teaches nothing: its credit returns, and it does not count as used."""
        self._close(number, "duplicate")
        self.filtered[number] = newest_version

    def drop(self, number: int, status: ReceiptStatus) -> OpenGroup | None:
        """Give a group up, for good or (`dropped_resume`) to grant its number again.

        Returns:
            What was held for it when it was open.
        """
        group = self._close(number, status)
        if status == "dropped_resume":
            self.again.add(number)
        return group

    def forget(self, number: int) -> None:
        """Take a group out of all books; its number is not granted by this."""
        self._take_out(number)

    def _close(self, number: int, status: ReceiptStatus) -> OpenGroup | None:
        group = self._take_out(number)
        self.closed[number] = status
        return group

    def _take_out(self, number: int) -> OpenGroup | None:
        for book in (self.ready, self.closed, self.used_at, self.filtered):
            book.pop(number, None)
        self.again.discard(number)
        self.next_number = max(self.next_number, number + 1)
        return self.open.pop(number, None)

    def overdue(self) -> list[int]:
        """Open groups to give up: first episode too long ago, or none yet and an actor that fell silent."""
        latest = self.clock() - self.group_deadline
        found = []
        for number, group in self.open.items():
            since = group.first_at
            if since is None:
                since = max(group.granted_at, self._heard.get(group.actor, group.granted_at))
            if since < latest:
                found.append(number)
        return found

    def stale(self) -> list[int]:
        """Open and ready groups that hold a decision beyond the lag bound."""
        oldest = {number: group.oldest_version for number, group in self.ready.items()}
        for number, group in self.open.items():
            if group.members:
                oldest[number] = min(episode.oldest_version for episode in group.members.values())
        return [number for number, version in oldest.items() if self.version - version > self.max_lag]

    def pick(self, groups: int) -> list[int] | None:
        """Choose the oldest ready groups within the lag bound at `version`; None when there are too few.

        A group with a decision of a later version than the learner's waits until the learner is there.
        """
        usable = [
            number
            for number, group in sorted(self.ready.items())
            if group.newest_version <= self.version and self.version - group.oldest_version <= self.max_lag
        ]
        return usable[:groups] if len(usable) >= groups else None

    def plan_resume(self, version: int, stored: Mapping[int, ReadyGroup]) -> Resumption:
        """Say what has to change before a learner begins at `version`, as after a resume.

        The aim is that it sees what it would have seen without the interruption. What is open belongs to
        actors that are gone, what a later version imagined to updates that are lost: both are imagined again
        under the same numbers, which decide start states and seeds. What a lost update used, and this version
        may use, waits again.

        Args:
            version: Where the learner goes on.
            stored: Groups whose files exist.
        """
        drop: dict[int, ReceiptStatus] = dict.fromkeys(self.open, "dropped_resume")
        ready = []
        for number, newest_version in self.filtered.items():
            if newest_version > version:
                drop[number] = "dropped_resume"
        for number, used_at in self.used_at.items():
            if used_at >= version:
                verdict = self._verdict(stored.get(number), version)
                if verdict is None:
                    ready.append(number)
                else:
                    drop[number] = verdict
        for number, group in self.ready.items():
            if (verdict := self._verdict(group, version)) is not None:
                drop[number] = verdict
        return Resumption(ready=tuple(sorted(ready)), drop=dict(sorted(drop.items())))

    def _verdict(self, group: ReadyGroup | None, version: int) -> ReceiptStatus | None:
        """Why a learner that begins at `version` may not use a group, or None when it may."""
        if group is None or group.newest_version > version:
            return "dropped_resume"
        return "dropped_lag" if version - group.oldest_version > self.max_lag else None

    def begin(self, version: int) -> None:
        """Start at `version`, after the changes of `plan_resume`.

        `used` is a place in the line of groups: every update uses `groups_per_update`, whatever was filtered
        or dropped. So it follows from the version, also when `groups_per_update` was changed for the resume.
        """
        self.version, self.used = version, version * self.groups_per_update
        self.next_number = max(self.next_number, self.used)


def number_of(group_id: str) -> int:
    """Return the number in a `GroupGrant.group_id`, or -1 when it is none."""
    return int(group_id) if len(group_id) == 8 and group_id.isascii() and group_id.isdecimal() else -1
