"""Say what changes the replay's state: each event is a line of the ledger, and reads and writes itself.

    {"learner": session, "version": v}                         a learner began or resumed at version v
    {"actor": name, "session": s}                              an actor (re)started
    {"grant": n, "actor": name, "turn": t, "min_version": m}   group n was granted
    {"used": [n, ...], "request": r, "version": v}             a batch was given away
    {"filtered": n, "newest_version": v, "successes": k}       group n is complete but will never be used
    {"ready": n}                                               group n, used by a lost update, waits again;
                                                               "uses": versions of the uses that count
    {"dropped": n, "status": why, "episodes": k, "stored": b,  group n was given up when the learner was at
     "task": t, "version": v}                                  version v; `GroupTable.grants_again` says
                                                               whether its number is granted again;
                                                               dropped_poisoned has "cause", "start_state",
                                                               "why" and start states "left" besides
                                                               one that is given up for a "reason" has that
    {"refused": why, "cause": c}                               one episode was not admitted
    {"group_size": k}                                          groups have k episodes from here on; before the
                                                               first such line as replay.json says
    {"ledger_lost": d}                                         lines with the SHA-256 d are gone: what was
                                                               stored before was given up

Those about dropped or refused episodes also count their "decisions". What follows from an event has an event
of its own. `ReplayState.apply` says what each one changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, ClassVar, Final, Literal, Self

from asyncrl.replay.admission import RefusalCause
from asyncrl.replay.counters import COUNTERS
from asyncrl.replay.interface import CAUSES, GroupFailure, ReceiptStatus

Entry = dict[str, Any]
"""What a line of the ledger holds besides its checksum."""


class Event:
    """What changes the replay's state, and is a line of the ledger."""

    KEYS: ClassVar[tuple[tuple[str, str, type | UnionType], ...]]
    """Key in the line, name of the field and its type, in the line's order."""

    def to_line(self) -> Entry:
        """Return the entry that the ledger keeps."""
        return {key: getattr(self, name) for key, name, _ in self.KEYS}

    @classmethod
    def from_entry(cls, entry: Entry) -> Self | None:
        """Read an entry; None when it is no such event's. A key may lack when its field has a default."""
        fields = {name: entry.get(key, getattr(cls, name, None)) for key, name, _ in cls.KEYS}
        right = all(isinstance(fields[name], kind) for _, name, kind in cls.KEYS)
        right = right and all(_is_counted(name, value) for name, value in fields.items())
        return cls(**fields) if right and fields.get("status", "stored") in COUNTERS else None


def _is_counted(name: str, value: Any) -> bool:
    """Whether what is a number, or a list of them, is none below zero; others are right as they are."""
    if isinstance(value, list):
        return all(type(number) is int and number >= 0 for number in value)
    return type(value) is not int or value >= (-1 if name == "request_number" else 0)


@dataclass(frozen=True, kw_only=True)
class LearnerStarted(Event):
    """A learner began or resumed."""

    KEYS = (("learner", "session", str), ("version", "version", int))
    session: str
    version: int


@dataclass(frozen=True, kw_only=True)
class ActorStarted(Event):
    """An actor started, or started again under a new session."""

    KEYS = (("actor", "actor", str), ("session", "session", str))
    actor: str
    session: str


@dataclass(frozen=True, kw_only=True)
class Granted(Event):
    """A group was granted."""

    KEYS = (
        ("grant", "number", int),
        ("actor", "actor", str),
        ("turn", "request_number", int),
        ("min_version", "min_version", int),
    )
    number: int
    actor: str
    request_number: int
    """The actor's count of acquisitions; -1: it does not count them."""
    min_version: int


@dataclass(frozen=True, kw_only=True)
class Used(Event):
    """A batch was given to the learner."""

    KEYS = (("used", "numbers", list), ("request", "request", str), ("version", "version", int))
    numbers: list[int]
    request: str
    version: int
    """The learner's."""


@dataclass(frozen=True, kw_only=True)
class Filtered(Event):
    """A complete group will never be used, because its episodes all had the same return."""

    KEYS = (
        ("filtered", "number", int),
        ("newest_version", "newest_version", int),
        ("successes", "successes", int),
    )
    number: int
    newest_version: int
    successes: int
    """Episodes that succeeded."""


@dataclass(frozen=True, kw_only=True)
class Ready(Event):
    """A group that a lost update used waits to be used again."""

    KEYS = (("ready", "number", int), ("uses", "uses", list | tuple))
    number: int
    uses: Sequence[int] = ()
    """The learner's versions at the uses that count."""

    def to_line(self) -> Entry:
        """Return the entry that the ledger keeps, with the uses that there are."""
        return super().to_line() if self.uses else {"ready": self.number}


@dataclass(frozen=True, kw_only=True)
class Dropped(Event):
    """A group was given up."""

    KEYS = (
        ("dropped", "number", int),
        ("status", "status", str),
        ("episodes", "episodes", int),
        ("stored", "stored", bool),
        ("decisions", "decisions", int),
        ("task", "task", str),
        ("version", "version", int),
    )
    number: int
    status: ReceiptStatus
    episodes: int
    """Of the group, as far as they had come."""
    stored: bool
    """Whether the group has or had a file."""
    decisions: int = 0
    """Of these episodes."""
    task: str = ""
    """Of the group; empty when no episode of it had come."""
    version: int = 0
    """The learner's."""
    failure: GroupFailure | None = None
    """Why it could not be imagined, when it was given up for that. The ledger does not keep its `member`."""
    reason: str = ""
    """What is wrong with it, of a group that is set aside."""

    def to_line(self) -> Entry:
        """Return the entry that the ledger keeps, with the failure and the reason that there are."""
        line, why = super().to_line(), self.failure
        if self.reason:
            line |= {"reason": self.reason}
        if why is not None:
            line |= {"cause": why.cause, "start_state": why.start_state, "why": why.reason, "left": why.left}
        return line

    @classmethod
    def from_entry(cls, entry: Entry) -> Self | None:
        """Read an entry; None when it is no such event's."""
        event, reason = super().from_entry(entry), entry.get("reason")
        if event is None:
            return None
        reason = reason if isinstance(reason, str) else ""
        return replace(event, failure=_failure(event.number, entry), reason=reason)


@dataclass(frozen=True, kw_only=True)
class Refused(Event):
    """An episode was not admitted."""

    KEYS = (("refused", "status", str), ("decisions", "decisions", int), ("cause", "cause", str))
    status: ReceiptStatus
    decisions: int = 0
    """Of the episode."""
    cause: RefusalCause | Literal[""] = ""
    """Of one that is invalid; empty for others, and in ledgers of earlier versions."""


@dataclass(frozen=True, kw_only=True)
class GroupSized(Event):
    """The run's groups have another size from here on."""

    KEYS = (("group_size", "size", int),)
    size: int
    """Episodes per group."""


@dataclass(frozen=True, kw_only=True)
class LedgerLost(Event):
    """What was stored before the ledger was lost has been given up."""

    KEYS = (("ledger_lost", "digest", str),)
    digest: str
    """SHA-256 of the lines that are gone."""


KINDS: Final[tuple[type[Event], ...]] = (
    LearnerStarted, ActorStarted, Granted, Used, Filtered, Ready, Dropped, Refused, GroupSized, LedgerLost,
)  # fmt: skip


def read_events(entries: Iterable[Entry]) -> Iterator[Event]:
    """Read the entries of a ledger; those that are no event's are passed over."""
    for entry in entries:
        found = (kind.from_entry(entry) for kind in KINDS)
        if (event := next(filter(None, found), None)) is not None:
            yield event


def _failure(number: int, entry: Entry) -> GroupFailure | None:
    match entry:
        case {"cause": cause, "start_state": str(name), "why": str(why), "left": int(left)} if (
            cause in CAUSES
        ):
            return GroupFailure(
                number=number, member=-1, cause=cause, start_state=name, reason=why, left=left
            )
    return None
