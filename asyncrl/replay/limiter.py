"""Who may imagine, what is admitted, what may be used: episodes and versions in, verdicts out. No I/O.

A group is open (granted, members arriving), then ready (complete and stored), then closed (used or dropped).
Everything about lag, use counts, credit and completeness is decided here and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with an empty book; see `config` for the settings."""
        self.group_size, self.groups_per_update, self.max_lag = group_size, groups_per_update, max_lag
        self.group_deadline, self.keep_video_every, self.clock = group_deadline, keep_video_every, clock
        self.version = 0
        """The learner's newest policy version."""
        self.used = 0
        """Groups the updates up to `version` have used."""
        self.next_number = 0
        self.open: dict[int, OpenGroup] = {}
        self.ready: dict[int, ReadyGroup] = {}
        self.closed: dict[int, ReceiptStatus] = {}
        """Group number -> what a late or repeated episode of it is told."""
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
        return self.reopen(self.next_number, actor, turn, min_version)

    def reopen(self, number: int, actor: str, turn: int, min_version: int) -> GroupGrant:
        """Enter a grant into the book (also one made before a restart)."""
        every = self.keep_video_every
        grant = GroupGrant(
            number=number, min_version=min_version, keep_video=every > 0 and number % every == 0
        )
        self.open[number] = OpenGroup(grant=grant, actor=actor, turn=turn, granted_at=self.clock())
        self.next_number = max(self.next_number, number + 1)
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
        self.open.pop(number, None)
        self.ready[number] = ReadyGroup(oldest_version=oldest_version, newest_version=newest_version)
        self.next_number = max(self.next_number, number + 1)

    def use(self, numbers: list[int]) -> None:
        """Note that groups were given to the learner. Each is used once."""
        for number in numbers:
            self.ready.pop(number, None)
            self.open.pop(number, None)
            self.closed[number] = "duplicate"
            self.next_number = max(self.next_number, number + 1)
        self.used += len(numbers)

    def drop(self, number: int, status: ReceiptStatus) -> OpenGroup | None:
        """Give a group up; return what was held for it when it was open."""
        self.ready.pop(number, None)
        group = self.open.pop(number, None)
        self.closed[number] = status
        self.next_number = max(self.next_number, number + 1)
        return group

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

    def begin(self, version: int) -> dict[int, ReceiptStatus]:
        """Start at `version`, as after a resume: return the groups to drop, with the reason.

        What is open belongs to actors that are gone. What is ready stays when the learner may use it; what a
        later version imagined belongs to updates that were lost with the old learner.
        """
        self.version, self.used = version, version * self.groups_per_update
        self.next_number = max(self.next_number, self.used)
        drop: dict[int, ReceiptStatus] = dict.fromkeys(self.open, "dropped_deadline")
        for number, group in self.ready.items():
            if group.newest_version > version or version - group.oldest_version > self.max_lag:
                drop[number] = "dropped_lag"
        return drop


def number_of(group_id: str) -> int:
    """Return the number in a `GroupGrant.group_id`, or -1 when it is none."""
    return int(group_id) if len(group_id) == 8 and group_id.isascii() and group_id.isdecimal() else -1
