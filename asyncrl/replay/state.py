"""Change the replay's state by events alone: in the ledger first, then in memory.

A running replay commits an event, which does both; recovery applies the events of the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.records import Episode
from asyncrl.replay.events import (
    ActorStarted,
    Dropped,
    Event,
    Filtered,
    Granted,
    GroupSized,
    LearnerStarted,
    Ledger,
    LedgerLost,
    Ready,
    Refused,
    Used,
)
from asyncrl.replay.groups import ReadyGroup
from asyncrl.replay.interface import ReceiptStatus, RefusalCause
from asyncrl.replay.limiter import Limiter
from asyncrl.replay.quarantine import Quarantine

EPISODES: Final[dict[ReceiptStatus, Metric]] = {
    "stored": m.EPISODES,
    "duplicate": m.DUPLICATES,
    "dropped_lag": m.DROPPED_LAG,
    "dropped_deadline": m.DROPPED_DEADLINE,
    "dropped_invalid": m.DROPPED_INVALID,
    "dropped_resume": m.DROPPED_RESUME,
    "dropped_poisoned": m.DROPPED_POISONED,
    "dropped_outdated": m.DROPPED_OUTDATED,
    "dropped_unusable": m.DROPPED_UNUSABLE,
    "dropped_unrecorded": m.DROPPED_UNRECORDED,
}
DECISIONS: Final[dict[ReceiptStatus, Metric]] = {
    status: m.DROPPED_DECISIONS[metric]
    for status, metric in EPISODES.items()
    if metric in m.DROPPED_DECISIONS
}
REFUSED: Final[dict[RefusalCause, Metric]] = {
    "content": m.REFUSED_CONTENT,
    "settings": m.REFUSED_SETTINGS,
    "version": m.REFUSED_VERSION,
    "grant": m.REFUSED_GRANT,
}


def has_no_signal(group: Sequence[Episode]) -> bool:
    """True if all episodes have the same return: compared with siblings, none is better."""
    return len({episode.total_reward for episode in group}) <= 1


class EpisodeCounters:
    """Counts of episodes since the run began; the ledger carries them over a restart."""

    def __init__(self) -> None:
        """Start at 0."""
        self.episodes: Counter[ReceiptStatus] = Counter()
        self.decisions: Counter[ReceiptStatus] = Counter()
        """Decisions of dropped episodes."""
        self.refused: Counter[RefusalCause] = Counter()
        """Invalid episodes that were not admitted."""

    def add(self, status: ReceiptStatus, episodes: int = 1, decisions: int = 0) -> None:
        """Count episodes with one status; a negative number takes back."""
        self.episodes[status] += episodes
        self.decisions[status] += decisions

    def metrics(self) -> dict[Metric, float]:
        """Return all counts."""
        episodes = {metric: float(self.episodes[status]) for status, metric in EPISODES.items()}
        decisions = {metric: float(self.decisions[status]) for status, metric in DECISIONS.items()}
        return episodes | decisions | {metric: float(self.refused[c]) for c, metric in REFUSED.items()}

    def reasons(self) -> str:
        """Return the numbers of dropped episodes by reason, as text."""
        dropped = {status: n for status, n in self.episodes.items() if status.startswith("dropped") and n}
        return ", ".join(f"{n} {status[8:]}" for status, n in sorted(dropped.items())) or "none"


class FilteredGroups:
    """Groups that were filtered since the learner's last batch."""

    def __init__(self) -> None:
        """Start at 0."""
        self.groups = self._succeeded = self._failed = 0

    def add(self, successes: int, size: int) -> None:
        """Count a group of `size` episodes, of which `successes` succeeded."""
        self.groups += 1
        self._succeeded += successes == size
        self._failed += not successes

    def reason(self) -> str:
        """Return the property that all these groups share, as text."""
        which = f"of the last {self.groups} groups"
        if self.groups == self._succeeded:
            return f"every episode {which} succeeded"
        if self.groups == self._failed:
            return f"every episode {which} failed"
        return (
            f"within each {which} all episodes scored the same ({self._succeeded} groups succeeded, "
            f"{self._failed} failed)"
        )


class SuccessWindow:
    """Share of successful episodes among the groups completed at one version of the learner."""

    def __init__(self) -> None:
        """Start without groups."""
        self.last: float | None = None
        """Share at the version before the current one, in [0, 1]; None if no group became complete then."""
        self._successes = self._episodes = 0

    def add(self, successes: int, episodes: int) -> None:
        """Count a complete group."""
        self._successes += successes
        self._episodes += episodes

    def close(self) -> None:
        """Start the next version: the current share becomes the last one."""
        self.last = self._successes / self._episodes if self._episodes else None
        self._successes = self._episodes = 0


@dataclass(kw_only=True)
class Session:
    """The participants, and the learner's last batch."""

    learner: str = ""
    """The learner's session."""
    request: str = ""
    """The learner's last answered request."""
    batch: list[int] = field(default_factory=list)
    """Groups of the answer."""
    actors: dict[str, str] = field(default_factory=dict)
    """Every actor seen -> its session."""
    answered: dict[str, int] = field(default_factory=dict)
    """Actor -> its newest request of this session that was answered with a group."""


class ReplayState:
    """The groups, the fate of their episodes, the participants, and the quarantined start states."""

    def __init__(self, ledger: Ledger, limiter: Limiter, group_size: int) -> None:
        """Start empty; see `recovery.recover`."""
        self._ledger, self.limiter = ledger, limiter
        self.group_size = group_size
        """Episodes of a group, as of the last event."""
        self.lost_ledgers: set[str] = set()
        """See `events.LedgerLost`."""
        self.counters, self.session = EpisodeCounters(), Session()
        self.quarantine = Quarantine(limiter.settings.quarantine_after)
        self.filtered = FilteredGroups()

    def commit(self, event: Event) -> None:
        """Make an event durable, then apply it."""
        self._ledger.append(**event.to_line())
        self.apply(event)

    def apply(self, event: Event) -> None:
        """Change the state by an event of the ledger.

        The episodes of a stored group are counted when it becomes ready, which is no event: recovery counts
        them at the first event of the stored group.
        """
        limiter, counters, session = self.limiter, self.counters, self.session
        size = self.group_size
        match event:
            case LearnerStarted():
                limiter.begin(event.version)
                self.quarantine.begin(event.version)
                self.filtered = FilteredGroups()
                session.learner, session.request, session.batch = event.learner, "", []
            case ActorStarted():
                session.actors[event.actor] = event.session
                session.answered.pop(event.actor, None)
            case Granted():
                session.actors.setdefault(event.actor, "")
                session.answered[event.actor] = event.turn
                limiter.grant(event)
            case Used():
                if event.version > limiter.version:
                    limiter.advance(event.version)
                counters.add("stored", size * sum(not limiter.is_counted(n) for n in event.used))
                limiter.use(event.used)
                self.filtered = FilteredGroups()
                session.request, session.batch = event.request, list(event.used)
            case Filtered():
                if event.filtered not in limiter.ready:
                    counters.add("stored", size)
                limiter.filter(event.filtered, event.newest_version, event.successes, size)
                self.filtered.add(event.successes, size)
            case Ready():
                limiter.undo_uses(event.ready, tuple(event.uses))
                if not event.uses:
                    counters.add("stored", -size)
            case Dropped():
                if event.stored and not limiter.is_counted(event.dropped):
                    counters.add("stored", event.episodes)
                limiter.drop(event.dropped, event.status, stored=event.stored)
                counters.add(event.status, event.episodes, event.decisions)
                if event.failure is not None:
                    self.quarantine.add(event.failure, event.version)
            case Refused():
                counters.add(event.refused, 1, event.decisions)
                if event.cause:
                    counters.refused[event.cause] += 1
            case GroupSized():
                self.group_size = event.group_size
            case LedgerLost():
                self.lost_ledgers.add(event.ledger_lost)
                limiter.forget_uses()

    def make_ready(self, number: int, group: ReadyGroup) -> None:
        """Make a group with a file ready; its episodes are counted once."""
        self.limiter.make_ready(number, group)
        self.quarantine.on_complete_group()
        if number not in self.limiter.used_at:
            self.counters.add("stored", group.size or self.group_size)
