"""Decide who may imagine, which episodes are admitted, and which groups may be used. No I/O."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.sections import ReplaySettings
from asyncrl.observability.metrics import Metric
from asyncrl.records import Episode, SamplingParams
from asyncrl.replay import interface
from asyncrl.replay.admission import Expected, Refusal, refusal
from asyncrl.replay.events import Granted
from asyncrl.replay.group_file import GroupFile
from asyncrl.replay.groups import GroupTable, OpenGroup, number_of
from asyncrl.replay.interface import GroupGrant, Receipt, ReceiptStatus, RefusalCause

HEARTBEAT_TIMEOUT: Final = 30.0  # Seconds of silence of an actor until its groups are given up
NEWCOMERS_SHARE: Final = 4  # Newcomers have at most one of so many groups that may be in flight


@dataclass(kw_only=True)
class ActorRecord:
    """The state of one actor in the replay. The ledger keeps the first two."""

    session: str = ""
    answered: int = -1  # Its newest request of this session that was answered with a group
    heard_at: float = -math.inf  # Last sign of life
    progress_at: float = -math.inf  # Last decision or episode
    readings: dict[Metric, float] = field(default_factory=dict)  # Its last report
    names_sent: int = 0  # Quarantined start states that it knows
    refused: int = 0  # Groups given up for an episode that was refused, since it completed one
    last_refusal: str = ""


class Limiter(GroupTable):
    """All groups and actors of a run, and the rules of lag, credit and completeness."""

    def __init__(
        self,
        settings: ReplaySettings,
        algorithm: AlgorithmSettings,
        *,
        episode_format: interface.EpisodeFormat = interface.ANY_FORMAT,
        resume_window: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without groups; a resume can reopen those closed in the last `resume_window` versions."""
        super().__init__(resume_window=max(resume_window, settings.max_lag))
        self.settings, self.max_lag, self.clock = settings, settings.max_lag, clock
        self.group_size, self.groups_per_update = algorithm.group_size, algorithm.groups_per_update
        self.filter_groups = algorithm.filter_groups
        self.sampling = SamplingParams(temperature=algorithm.temperature, top_k=algorithm.top_k)
        self.episode_format = episode_format
        self.heartbeat_timeout = HEARTBEAT_TIMEOUT
        self.actors: defaultdict[str, ActorRecord] = defaultdict(ActorRecord)
        self.proven = set[str]()  # Actors that brought an episode since they came
        self.listening_since = self.clock()  # Silence is counted from here; later after a stall.

    def too_old(self, aged: Episode | OpenGroup | GroupFile, version: int) -> bool:
        """True if the lag bound forbids a learner at `version` to use an episode or group."""
        return version - aged.oldest_version > self.max_lag

    @property
    def uses_reserved(self) -> int:
        """Uses made, plus those reserved by granted and ready groups."""
        return self.used + len(self.open) + len(self.ready)

    @property
    def credit(self) -> int:
        """Groups that may be granted now: those that the learner can use before the lag bound drops them."""
        return max(0, (self.max_lag + self.version + 1) * self.groups_per_update - self.uses_reserved)

    def matches_run(self, group: GroupFile) -> bool:
        """True if a group has the run's size, world and sampling."""
        same = group.sampling == self.sampling and group.group_size == self.group_size
        return same and self.episode_format.world_version in (None, group.world_version)

    def is_newcomer(self, actor: str) -> bool:
        """True if an actor delivered no episode since it connected, while another connected one did."""
        return actor not in self.proven and not all(map(self.timed_out, self.proven))

    def record_heartbeat(self, actor: str) -> None:
        """Record a sign of life."""
        self.actors[actor].heard_at = self.clock()

    def since_heartbeat(self, actor: str) -> float:
        """Return the seconds since an actor's last sign of life."""
        return self.clock() - max(self.actors[actor].heard_at, self.listening_since)

    def timed_out(self, actor: str) -> bool:
        """True if an actor gave no sign of life for more than `heartbeat_timeout` seconds."""
        return self.since_heartbeat(actor) > self.heartbeat_timeout

    def find_grant(self, actor: str, request_number: int) -> GroupGrant | None:
        """Return the open group that was granted for the same request >= 0 of an actor, if any."""
        for group in self.open.values():
            if request_number >= 0 and group.actor == actor and group.request_number == request_number:
                return group.grant
        return None

    def new_grant(self, actor: str, request_number: int = -1) -> Granted | None:
        """Return the event that would grant the next group to an actor; None without credit."""
        if not self.credit:
            return None
        if self.is_newcomer(actor):
            share = max(1, (self.max_lag + 1) * self.groups_per_update // NEWCOMERS_SHARE)
            if sum(self.is_newcomer(group.actor) for group in self.open.values()) >= share:
                return None
        first_use = self.uses_reserved // self.groups_per_update
        return Granted(
            grant=min(self.to_grant_again, default=self.next_number),
            actor=actor,
            turn=request_number,
            min_version=max(0, min(first_use - self.max_lag, self.version)),
        )

    def apply_grant(self, event: Granted) -> None:
        """Open a granted group, also in recovery."""
        every, number = self.settings.keep_video_every, event.grant
        keep_video = every > 0 and number % every == 0
        group = OpenGroup(
            grant=GroupGrant(number=number, min_version=event.min_version, keep_video=keep_video),
            actor=event.actor,
            request_number=event.turn,
            granted_at=self.clock(),
        )
        group.granted_before = number in self.to_grant_again
        self.remove(number)
        self.open[number] = group

    def expected(self, newest_version: int, actor: str | None = None) -> Expected:
        """Return the properties that an episode of this actor must have; None: of any actor."""
        return Expected(
            format=self.episode_format,
            group_size=self.group_size,
            sampling=self.sampling,
            newest_version=newest_version,
            actor=actor,
        )

    def owns(self, number: int, actor: str | None) -> bool:
        """True if a group is open and was granted to `actor` (None: to any)."""
        return number in self.open and actor in (None, self.open[number].actor)

    def admit(self, episode: Episode, actor: str | None = None) -> Receipt:
        """Decide about a sender's episode (None: unknown sender); `held`: added to its group."""
        number = number_of(episode.group_id)

        def receipt(status: ReceiptStatus, reason: str = "", cause: RefusalCause | None = None) -> Receipt:
            return Receipt(episode_id=episode.episode_id, status=status, reason=reason, cause=cause)

        if number in self.ready:
            return receipt("duplicate")
        if number in self.closed and self.closed[number].answer != "duplicate":
            return receipt(self.closed[number].answer, "its group was given up")
        if self.is_closed(number):  # Its fate may be forgotten.
            return receipt("duplicate")
        if number not in self.open:
            return receipt("dropped_invalid", f"group {episode.group_id[:40]!r} was never granted", "grant")
        group = self.open[number]
        present = group.members.get(episode.member)
        if present is not None and present.episode_id == episode.episode_id:
            return receipt("duplicate")
        sender = episode.actor if actor is None else actor
        other_grant = group.actor != sender or episode.oldest_version < group.grant.min_version
        if group.granted_before and (other_grant or present is not None):
            return receipt("dropped_outdated", "its group was given up, and granted again since")
        if not self.owns(number, actor):
            return receipt("dropped_invalid", f"group {number} was granted to another actor", "grant")
        # The learner publishes a version before it reports it here; the next update needs a batch first.
        refused = refusal(episode, self.expected(self.version + 1, actor))
        if refused is None and (problem := group.problem_with(episode)) is not None:
            refused = Refusal("content", problem)
        if refused is not None:
            return receipt("dropped_invalid", refused.reason, refused.cause)
        if self.too_old(episode, self.version):
            lag = f"policy version {episode.oldest_version} at {self.version}"
            return receipt("dropped_lag", f"{lag}, --replay.max-lag is {self.max_lag}")
        owner = self.actors[group.actor]
        owner.heard_at = owner.progress_at = self.clock()
        group.add(episode)
        self.proven.add(group.actor)
        return receipt("held")

    def complete(self, number: int) -> bool:
        """True if an open group has all members."""
        return number in self.open and len(self.open[number].members) == self.group_size

    def overdue(self) -> list[int]:
        """List the incomplete open groups of actors that make no progress or fell silent."""
        now, found = self.clock(), []
        for number, group in self.open.items():
            progress = max(group.granted_at, self.actors[group.actor].progress_at, self.listening_since)
            late = progress < now - self.settings.group_timeout
            lost = group.granted_at < now - self.heartbeat_timeout and self.timed_out(group.actor)
            if (late or lost) and not self.complete(number):
                found.append(number)
        return found

    def stale(self) -> list[int]:
        """List the ready and open groups with a decision beyond the lag bound."""
        return [n for n, group in {**self.ready, **self.open}.items() if self.too_old(group, self.version)]

    @property
    def usable(self) -> dict[int, GroupFile]:
        """Ready groups that a learner at `version` may use, by number."""
        return {
            number: group
            for number, group in sorted(self.ready.items())
            if group.newest_version <= self.version
            and not self.too_old(group, self.version)
            and self.matches_run(group)
        }

    def pick(self, groups: int, *, not_awaited: Collection[int] = ()) -> list[int] | None:
        """Choose the lowest-numbered ready groups within the lag bound at `version`; None if too few.

        Slow groups are awaited: they are mostly failures, and skipping them would bias the batch. Those of
        newcomers are not: an actor that comes and vanishes would hold up the learner.
        """
        numbers = list(self.usable)[:groups]
        if len(numbers) < groups:
            return None
        lower = [number for number in self.open if number < numbers[-1] and number not in not_awaited]
        return None if any(not self.is_newcomer(self.open[n].actor) for n in lower) else numbers

    def plan_resume(
        self, version: int, stored: Mapping[int, GroupFile], *, in_turns: bool = False
    ) -> tuple[list[int], dict[int, ReceiptStatus]]:
        """Plan the changes before a learner begins at `version`, to give it an uninterrupted run's groups.

        Open groups (their actors are gone), groups of later versions, and those of another world, sampling or
        group size are imagined again under the same numbers, which decide start states and seeds. Groups that
        a lost update used, and this version may use, wait again.

        That is exact down to `resume_window` versions before the current one: groups closed before stay
        closed, so batches, start states and shares differ, but nothing is used twice or above the lag bound.
        Nor is it exact for a group that a lost update dropped as too old: newer versions imagine it again.

        Example:
            Updates use 2 groups; a resume at version 5 after a crash at 7. Groups 0..9, used at versions
            0..4, stay closed. 10..13, used at 5 and 6, wait again; those that version 6 sampled, and the open
            14 and 15, are imagined again under their numbers.

        Returns groups to use again, and those to give up: with `dropped_resume` they are granted again.
        """
        drop: dict[int, ReceiptStatus] = dict.fromkeys(self.open, "dropped_resume")
        used = [n for n, closed in self.closed.items() if closed.used and closed.version >= version]
        for number in [*used, *self.ready]:
            group = self.ready.get(number, stored.get(number))
            if group is None or group.newest_version > version or not self.matches_run(group):
                drop[number] = "dropped_resume"
            elif self.too_old(group, version):
                drop[number] = "dropped_lag"
        filtered = {n: closed.version for n, closed in self.closed.items() if closed.filtered is not None}
        drop |= {n: "dropped_resume" for n, newest in filtered.items() if newest > version}
        kept = {n: stored[n].newest_version for n in {*used, *self.ready} - drop.keys()}
        if in_turns and len(kept) < (self.max_lag + 1) * self.groups_per_update:
            drop |= {n: "dropped_resume" for n, newest in (kept | filtered).items() if newest == version}
        return sorted(set(used) - drop.keys()), dict(sorted(drop.items()))

    def begin(self, version: int) -> None:
        """Start at `version`, after the changes of `plan_resume`."""
        # Every update uses as many groups, however many were filtered or dropped, so `used` follows from the
        # version, also if `groups_per_update` was changed for the resume.
        self.version, self.used = version, version * self.groups_per_update
        self.next_number = max(self.next_number, self.used)
