"""Change the replay's state by events alone: in the ledger first, then in memory.

What runs commits an event, which does both; what recovers applies the events that the ledger holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.replay.counters import EpisodeCounters, FilteredGroups
from asyncrl.replay.events import (
    ActorStarted,
    Dropped,
    Event,
    Filtered,
    Granted,
    GroupSized,
    LearnerStarted,
    LedgerLost,
    Ready,
    Refused,
    Used,
)
from asyncrl.replay.groups import ReadyGroup
from asyncrl.replay.ledger import Ledger
from asyncrl.replay.limiter import Limiter
from asyncrl.replay.quarantine import Quarantine


@dataclass(kw_only=True)
class Session:
    """Who takes part, and what the learner was given last."""

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
    """The groups, what became of their episodes, who takes part, and the quarantined start states."""

    def __init__(self, ledger: Ledger, limiter: Limiter, group_size: int) -> None:
        """Start empty; see `recovery.recover`.

        Args:
            ledger: Keeps the events.
            limiter: Knows no group yet.
            group_size: Episodes of a group when the ledger began; a resume may have changed it.
        """
        self._ledger, self.limiter = ledger, limiter
        self.group_size = group_size
        """Episodes of a group, as of the last event."""
        self.lost_ledgers: set[str] = set()
        """See `events.LedgerLost`."""
        self.counters, self.session = EpisodeCounters(), Session()
        self.quarantine = Quarantine(limiter.settings.quarantine_after)
        self.filtered = FilteredGroups()

    def commit(self, event: Event) -> None:
        """Make an event durable, then change the state as it says.

        Raises:
            ReplayError: The disk does not take it.
        """
        self._ledger.append(**event.to_line())
        self.apply(event)

    def apply(self, event: Event) -> None:
        """Change the state as an event of the ledger says.

        The episodes of a stored group are counted when it becomes ready. That is no event: from the ledger
        they are counted by the first event that is about the stored group.
        """
        limiter, counters, session = self.limiter, self.counters, self.session
        size = self.group_size
        match event:
            case LearnerStarted():
                limiter.begin(event.version)
                self.quarantine.begin(event.version)
                self.filtered.restart()
                session.learner, session.request, session.batch = event.session, "", []
            case ActorStarted():
                session.actors[event.actor] = event.session
                session.answered.pop(event.actor, None)
            case Granted():
                session.actors.setdefault(event.actor, "")
                session.answered[event.actor] = event.request_number
                limiter.note_grant(event)
            case Used():
                if event.version > limiter.version:
                    limiter.advance(event.version)
                counters.add("stored", size * sum(not limiter.is_counted(n) for n in event.numbers))
                limiter.use(event.numbers)
                self.filtered.restart()
                session.request, session.batch = event.request, event.numbers
            case Filtered():
                if event.number not in limiter.ready:
                    counters.add("stored", size)
                limiter.filter(event.number, event.newest_version, event.successes, size)
                self.filtered.add(event.successes, size)
            case Ready():
                limiter.undo_uses(event.number, tuple(event.uses))
                if not event.uses:
                    counters.add("stored", -size)
            case Dropped():
                if event.stored and not limiter.is_counted(event.number):
                    counters.add("stored", event.episodes)
                limiter.drop(event.number, event.status, stored=event.stored)
                counters.add(event.status, event.episodes, event.decisions)
                if event.failure is not None:
                    self.quarantine.note(event.failure, event.version)
            case Refused():
                counters.add(event.status, 1, event.decisions)
                if event.cause:
                    counters.refused[event.cause] += 1
            case GroupSized():
                self.group_size = event.size
            case LedgerLost():
                self.lost_ledgers.add(event.digest)
                limiter.forget_uses()

    def make_ready(self, number: int, group: ReadyGroup) -> None:
        """Note that a group's file is there, which makes it ready; its episodes are counted once."""
        self.limiter.make_ready(number, group)
        self.quarantine.note_complete()
        if number not in self.limiter.used_at:
            self.counters.add("stored", group.size or self.group_size)
