"""Who may imagine, what is admitted, what may be used: episodes and versions in, verdicts out. No I/O.

What became of the groups is in `books.py`. Everything about lag, use counts, credit and completeness is
decided here and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncrl.records import Episode, problem_with
from asyncrl.replay.groups import GroupTable, OpenGroup, mismatch, number_of
from asyncrl.replay.interface import GroupGrant, Receipt, ReceiptStatus
from asyncrl.replay.samplers import Order, pick_in_order


class Limiter(GroupTable):
    """The books of all groups of a run, and what follows from them."""

    def __init__(
        self,
        *,
        group_size: int,
        groups_per_update: int,
        max_lag: int,
        group_timeout: float = 300.0,
        silence: float = 30.0,
        keep_video_every: int = 0,
        filter_groups: bool = False,
        uses: int = 1,
        order: Order = "oldest",
        seed: int = 0,
        horizon: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with an empty book; see `config` for the settings.

        `horizon`: versions that a resume may go back and find everything, see `resumption.py`. It is at least
        `max_lag`.
        """
        super().__init__(uses=uses, horizon=max(horizon, max_lag))
        self.group_size, self.groups_per_update, self.max_lag = group_size, groups_per_update, max_lag
        self.group_timeout, self.keep_video_every, self.clock = group_timeout, keep_video_every, clock
        self.filter_groups, self.seed, self.silence = filter_groups, seed, silence
        self.order: Order = order
        self._heard: dict[str, float] = {}
        self._listening_since = self.clock()

    @property
    def ahead(self) -> int:
        """Uses made, and uses that granted groups still promise."""
        left = sum(self.uses - len(self.used_at.get(number, ())) for number in self.ready)
        return self.used + self.uses * len(self.open) + left

    @property
    def credit(self) -> int:
        """Groups that may be granted now: what the learner can use before the lag bound drops it.

        With several uses a batch still needs as many different groups, so there is credit for these.
        """
        line = (self.max_lag + self.version + 1) * self.groups_per_update - self.ahead
        batch = min(self.groups_per_update, (self.version + 1) * self.groups_per_update - self.used)
        return max(0, -(-line // self.uses), batch - len(self.open) - len(self.ready))

    def note_heartbeat(self, actor: str) -> None:
        """Note a sign of life."""
        self._heard[actor] = self.clock()

    def since_heartbeat(self, actor: str) -> float:
        """Seconds since an actor's last sign of life."""
        return self.clock() - max(self._heard.get(actor, 0.0), self._listening_since)

    def timed_out(self, actor: str) -> bool:
        """Whether an actor gave no sign of life for more than `silence` seconds."""
        return self.since_heartbeat(actor) > self.silence

    def forgive_silence(self) -> None:
        """Note that nobody could be heard until now: the replay itself was held up."""
        self._listening_since = self.clock()

    def grant(self, actor: str, request_number: int = -1, *, withhold: bool = False) -> GroupGrant | None:
        """Grant the next group, or None without credit.

        Args:
            actor: Who imagines it.
            request_number: Same turn, same grant; -1 never repeats.
            withhold: Grant nothing new, whatever the credit.
        """
        for group in self.open.values():
            if request_number >= 0 and group.actor == actor and group.request_number == request_number:
                return group.grant
        if withhold or not self.credit:
            return None
        first_use = self.ahead // self.groups_per_update
        min_version = max(0, min(first_use - self.max_lag, self.version))
        return self.restore_grant(
            min(self.to_grant_again, default=self.next_number), actor, request_number, min_version
        )

    def restore_grant(self, number: int, actor: str, request_number: int, min_version: int) -> GroupGrant:
        """Enter a grant into the book (also one made before a restart)."""
        every = self.keep_video_every
        grant = GroupGrant(
            number=number, min_version=min_version, keep_video=every > 0 and number % every == 0
        )
        self._take_out(number)
        self.open[number] = OpenGroup(
            grant=grant, actor=actor, request_number=request_number, granted_at=self.clock()
        )
        return grant

    def admit(self, episode: Episode) -> Receipt:
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
        problem = problem_with(episode) or mismatch(group, episode, self.group_size)
        if problem:
            return receipt("dropped_invalid", problem)
        if self.version - episode.oldest_version > self.max_lag:
            return receipt(
                "dropped_lag",
                f"version {episode.oldest_version} at {self.version}, --replay.max-lag is {self.max_lag}",
            )
        self.note_heartbeat(group.actor)
        group.first_at = self.clock() if group.first_at is None else group.first_at
        group.members[episode.member] = episode
        return receipt("held")

    def complete(self, number: int) -> bool:
        """Whether all members of an open group are there."""
        return number in self.open and len(self.open[number].members) == self.group_size

    def overdue(self) -> list[int]:
        """Open groups to give up: first episode too long ago, or an actor that fell silent.

        A complete one waits for the disk; that is not its actor's fault.
        """
        now, found = self.clock(), []
        for number, group in self.open.items():
            late = group.first_at is not None and group.first_at < now - self.group_timeout
            lost = group.granted_at < now - self.silence and self.timed_out(group.actor)
            if (late or lost) and not self.complete(number):
                found.append(number)
        return found

    def unfinished(self, actor: str) -> list[int]:
        """Open groups of an actor whose members are not all there."""
        return [n for n, group in self.open.items() if group.actor == actor and not self.complete(n)]

    def stale(self) -> list[int]:
        """Open and ready groups that hold a decision beyond the lag bound."""
        oldest = {number: group.oldest_version for number, group in self.ready.items()}
        for number, group in self.open.items():
            if group.members:
                oldest[number] = min(episode.oldest_version for episode in group.members.values())
        return [number for number, version in oldest.items() if self.version - version > self.max_lag]

    def pick(self, groups: int) -> list[int] | None:
        """Choose ready groups within the lag bound at `version`, in `order`; None when there are too few.

        A group with a decision of a later version than the learner's waits until the learner is there.
        """
        usable = {
            number: group
            for number, group in sorted(self.ready.items())
            if group.newest_version <= self.version and self.version - group.oldest_version <= self.max_lag
        }
        if len(usable) < groups:
            return None
        return pick_in_order(usable, groups, self.order, seed=self.seed, cursor=self.used)

    def begin(self, version: int) -> None:
        """Start at `version`, after the changes of `resumption.plan_resume`.

        `used` is a place in the line of groups: every update uses `groups_per_update`, whatever was filtered
        or dropped. So it follows from the version, also when `groups_per_update` was changed for the resume.
        """
        self.version, self.used = version, version * self.groups_per_update
        self.next_number = max(self.next_number, self.used)
