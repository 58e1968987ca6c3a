"""The replay's state, which events change: in the ledger first, then in memory.

A running replay commits an event, which does both; recovery applies the events of the ledger. A group that
cannot be imagined is part of the event that gives it up, and counts against its start state (`Quarantine`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final, get_args

from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import REGISTRY, Metric
from asyncrl.replay import events
from asyncrl.replay.events import Event, Ledger
from asyncrl.replay.group_file import GroupFile
from asyncrl.replay.groups import EpisodeCounters, FilterStreak
from asyncrl.replay.interface import ENDLESS, Cause, GroupFailure
from asyncrl.replay.limiter import Limiter

COUNTERS: Final[dict[Cause, Metric]] = {
    cause: REGISTRY[f"replay/poisoned_{cause}"] for cause in get_args(Cause)
}
IN_A_ROW: Final = 16  # Groups that may fail one after the other where every one begins elsewhere (ENDLESS)
QUARANTINE_AFTER: Final = 2  # Groups of a start state that fail before it is no longer used
_NAMED: Final = 10


class ReplayState:
    """The groups and actors, the learner's last batch, counts of episodes, and the start states that fail."""

    def __init__(self, ledger: Ledger, limiter: Limiter, group_size: int) -> None:
        self._ledger, self.limiter = ledger, limiter
        self.group_size = group_size  # Episodes of a group, as of the last event
        self.learner = ""  # The learner's session
        self.request = ""  # The learner's last answered request
        self.batch: list[int] = []  # Groups that it got
        self.counters, self.quarantine = EpisodeCounters(), Quarantine()
        self.filtered = FilterStreak()

    def commit(self, event: Event) -> None:
        """Make an event durable, then apply it."""
        self._ledger.append(**event.to_line())
        self.apply(event)

    def apply(self, event: Event) -> None:
        """Change the state by an event of the ledger.

        A stored group's episodes are counted when it gets ready (no event); in recovery, at its first event.
        """
        limiter, counters, size = self.limiter, self.counters, self.group_size
        match event:
            case events.LearnerStarted():
                limiter.begin(event.version)
                self.quarantine.begin(event.version)
                self.filtered = FilterStreak()
                self.learner, self.request, self.batch = event.learner, "", []
            case events.ActorStarted():
                actor = limiter.actors[event.actor]
                actor.session, actor.answered = event.session, -1
            case events.Granted():
                limiter.actors[event.actor].answered = event.turn
                limiter.apply_grant(event)
            case events.Used():
                if event.version > limiter.version:
                    limiter.advance(event.version)
                counters.add("stored", size * sum(not limiter.is_counted(n) for n in event.used))
                limiter.use(event.used)
                self.filtered = FilterStreak()
                self.request, self.batch = event.request, list(event.used)
            case events.Filtered():
                if event.filtered not in limiter.ready:
                    counters.add("stored", size)
                limiter.filter(event.filtered, event.newest_version, event.successes, size)
                self.filtered.add(event.successes, size)
            case events.Ready():
                limiter.remove(event.ready)
                counters.add("stored", -size)
            case events.Dropped():
                if event.stored and not limiter.is_counted(event.dropped):
                    counters.add("stored", event.episodes)
                limiter.drop(event.dropped, event.status, stored=event.stored)
                counters.add(event.status, event.episodes, event.decisions)
                if event.failure is not None:
                    self.quarantine.add(event.failure, event.version)
            case events.Refused():
                counters.add(event.refused, 1, event.decisions)
                if event.cause:
                    counters.refused[event.cause] += 1
            case events.GroupSized():
                self.group_size = event.group_size

    def make_ready(self, number: int, group: GroupFile) -> None:
        """Make a group with a file ready; its episodes are counted once."""
        self.limiter.make_ready(number, group)
        self.quarantine.on_complete_group()
        self.counters.add("stored", group.group_size)


class Quarantine:
    """Failures by start state and by cause.

    The replay decides, because only it receives the failures of all actors. A failure of the policy
    quarantines no start state: if it fails for all of them in a row, the run cannot go on with this version.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.counts: Counter[Cause] = Counter()
        # Start state -> group that failed -> the learner's version then.
        self._groups: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._failed_by_policy: Counter[str] = Counter()  # Since a group was complete.
        self._in_a_row = 0  # Groups that failed, each from another start, since a group was complete.
        self._left = ENDLESS  # Start states, by the last failure.
        self._first = self._last = ""

    def begin(self, version: int) -> None:
        """Forget the failures after `version`: a resume may have other start states and another policy."""
        self._left = ENDLESS
        self.on_complete_group()
        for name, groups in self._groups.items():
            self._groups[name] = {number: at for number, at in groups.items() if at <= version}
        self.names = [name for name in self.names if len(self._groups[name]) >= QUARANTINE_AFTER]
        self._first = self._first if any(self._groups.values()) else ""

    def on_complete_group(self) -> None:
        """Restart the counts of failures in a row."""
        self._failed_by_policy.clear()
        self._in_a_row = 0

    def add(self, failure: GroupFailure, version: int) -> None:
        """Count a group that was given up while the learner was at `version`."""
        self.counts[failure.cause] += 1
        name, number = failure.start_state, failure.number
        self._last = f"start state {name!r} in group {number}: {failure.reason}"
        self._left = failure.left
        self._in_a_row += failure.left >= ENDLESS
        if failure.cause == "policy":
            self._failed_by_policy[name] += 1
        elif failure.cause != "quarantined":
            self._first = self._first or self._last
            self._groups[name][number] = version
            if len(self._groups[name]) >= QUARANTINE_AFTER and name not in self.names:
                self.names.append(name)

    def metrics(self) -> dict[Metric, float]:
        """Return all counts."""
        counts = {metric: float(self.counts[cause]) for cause, metric in COUNTERS.items()}
        return counts | {m.QUARANTINED: float(len(self.names))}

    @property
    def exhausted_reason(self) -> str:
        """Reason why no group can be imagined any more; empty while a start state is left."""
        failed = sum(count >= QUARANTINE_AFTER for count in self._failed_by_policy.values())
        if self._failed_by_policy and failed >= self._left:
            return (
                f"The policy failed for all {len(self._failed_by_policy)} start states, last for "
                f"{self._last}. Its weights or its precision are broken: resume from an earlier checkpoint, "
                "with a lower --optimizer.learning-rate."
            )
        if self._in_a_row >= IN_A_ROW:
            return (
                f"{self._in_a_row} groups in a row failed, each from another start, last {self._last}. The "
                "actors' logs have every one of them. Look at --world and --policy."
            )
        if self._left:
            return ""
        more = f" and {len(self.names) - _NAMED} more" if len(self.names) > _NAMED else ""
        return (
            f"No start state is left: all {len(self.names)} failed in {QUARANTINE_AFTER} groups each and are "
            f"not used any more: {', '.join(self.names[:_NAMED])}{more}. "
            f"First failure: {self._first}. The actors' logs have every one of them. When they fail for one "
            "reason, look at --world and --policy; else choose other --start-states."
        )

    def contents(self) -> str:
        """Return a summary for an error message; empty without failures."""
        if not self.counts:
            return ""
        counts = ", ".join(f"{n} {cause}" for cause, n in sorted(self.counts.items()))
        names = f", {len(self.names)} start states quarantined" if self.names else ""
        first = self._first or self._last
        return f"groups poisoned: {counts}{names}; first: {first}; "
