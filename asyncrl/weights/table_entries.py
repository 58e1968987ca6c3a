"""What the entries of the weights' table are, and how each is read: checked, or None.

A value that is not what it should be raises ValueError here, and `read` turns that into a wrong entry of the
table, which is counted and skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from asyncrl.observability import process_status
from asyncrl.weights.table import Table
from asyncrl.weights.wake_up import is_name

MAX_MEMBERS: Final = 1024
"""Actors that can be members at a time; the registration of a further one is skipped."""
LONGEST_TEXT: Final = 2000
"""Letters of a name or of a reason."""
_TICKET: Final = re.compile(r"[0-9a-f]{16}")
_EPOCH: Final = re.compile(r"e([0-9]{1,18})\..*")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LearnerProcess:
    """Who made the table."""

    pid: int
    started: int
    """See `process_status.started`; 0 where the system does not tell."""
    wake_up: str
    """Name of its `WakeUpSocket`."""

    @property
    def gone(self) -> bool:
        """Whether the process ended."""
        return process_status.is_gone(self.pid, self.started)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One registration of an actor."""

    name: str
    ticket: str
    refused: str = ""
    """Why the actor will not take part; empty for a proper member."""
    leaving: bool = False
    """Takes the registration of this ticket back."""
    pid: int = 0
    started: int = 0
    """See `process_status.started`; 0 where the system does not tell."""
    wake_up: str = ""
    """Name of its `WakeUpSocket`."""


@dataclass(frozen=True, kw_only=True)
class EpochOffer:
    """One epoch as the learner announced it. The learner has rank 0, members[i] has rank i + 1."""

    epoch: int
    members: tuple[Member, ...]
    seen: int
    """Bytes of `joins` that the learner had read."""


@dataclass(frozen=True, kw_only=True)
class VersionHeader:
    """What precedes a broadcast."""

    version: int
    buffer_index: int
    """Which of the learner's two buffer sets holds the version."""
    checksum: int
    """See `packing.checksum`; 0 where the members look it up themselves (`SharesBuffers`)."""


def read(table: Table, key: str, raw: bytes, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """Read one JSON object of the table.

    Args:
        table: Where a wrong one is noted.
        key: Whose value, or a line of whose value, `raw` is.
        raw: The text.
        parse: Makes the entry of the object, or raises KeyError or ValueError.
    """
    found = table.parse_object(key, raw)
    if found is None:
        return None
    try:
        return parse(found)
    except (KeyError, ValueError) as error:
        table.note_wrong(key, raw, f"is wrong ({error!r:.200})")
        return None


def parse_learner(found: dict[str, Any]) -> LearnerProcess:
    """Check what the learner said of itself."""
    return LearnerProcess(
        pid=_number(found["pid"]), started=_number(found["started"]), wake_up=_wake_up(found["wake_up"])
    )


def parse_member(found: dict[str, Any]) -> Member:
    """Check a registration."""
    if unknown := found.keys() - Member.__dataclass_fields__.keys():
        raise ValueError(f"unknown: {sorted(unknown)}")
    return Member(
        name=_text(found["name"]),
        ticket=_ticket(found["ticket"]),
        refused=_text(found.get("refused", "")),
        leaving=found.get("leaving", False) is True,
        pid=_number(found["pid"]),
        started=_number(found["started"]),
        wake_up=_wake_up(found["wake_up"]),
    )


def parse_offer(found: dict[str, Any]) -> EpochOffer:
    """Check an offer."""
    members = found["members"]
    if not isinstance(members, list) or len(members) > MAX_MEMBERS:
        raise ValueError(f"members is no list of at most {MAX_MEMBERS}")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in members):
        raise ValueError("members are no pairs")
    return EpochOffer(
        epoch=_number(found["epoch"]),
        members=tuple(Member(name=_text(name), ticket=_ticket(ticket)) for name, ticket in members),
        seen=_number(found["seen"]),
    )


def parse_header(found: dict[str, Any]) -> VersionHeader:
    """Check what precedes a broadcast."""
    index = found["buffer_index"]
    if index not in (0, 1) or isinstance(index, bool):
        raise ValueError(f"buffer_index is {index!r:.100}")
    return VersionHeader(
        version=_number(found["version"]),
        buffer_index=int(index),
        checksum=_number(found["checksum"], low=-(2**63)),
    )


def epoch_of(key: str) -> int | None:
    """Return the epoch to which a key belongs; None when it belongs to the run."""
    match = _EPOCH.fullmatch(key)
    return int(match[1]) if match else None


def _number(value: object, low: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**64:
        raise ValueError(f"{value!r:.100} is no whole number from {low} on")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise ValueError(f"{value!r:.100} is no text of at most {LONGEST_TEXT} letters")
    return value


def _ticket(value: object) -> str:
    if not isinstance(value, str) or not _TICKET.fullmatch(value):
        raise ValueError(f"{value!r:.100} is no ticket")
    return value


def _wake_up(value: object) -> str:
    if value != "" and not is_name(value):
        raise ValueError(f"{value!r:.100} is no socket of the folder")
    return str(value)
