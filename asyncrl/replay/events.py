"""The ledger in, the books as they were out. Consequences of an entry have entries of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.replay.counters import COUNTERS, EpisodeCounters
from asyncrl.replay.limiter import Limiter


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


def apply(entry: dict[str, Any], limiter: Limiter, counters: EpisodeCounters, session: Session) -> None:
    """Repeat one decision of the ledger."""
    size = limiter.group_size
    match entry:
        case {"learner": str(learner), "version": int(version)}:
            limiter.begin(version)
            session.learner, session.request, session.batch = learner, "", []
        case {"actor": str(actor), "session": str(of_actor)}:
            session.actors[actor] = of_actor
        case {
            "grant": int(number),
            "actor": str(actor),
            "turn": int(request_number),
            "min_version": int(lowest),
        }:
            session.actors.setdefault(actor, "")
            limiter.restore_grant(number, actor, request_number, lowest)
        case {"used": list(numbers), "request": str(request), "version": int(version)}:
            if version > limiter.version:
                limiter.advance(version)
            fresh = [n for n in numbers if n not in limiter.used_at and n not in limiter.closed]
            counters.add("stored", size * len(fresh))
            limiter.use(numbers)
            session.request, session.batch = request, numbers
        case {"filtered": int(number), "newest_version": int(version), "successes": int(successes)}:
            limiter.filter(number, version, successes)
            counters.add("stored", size)
        case {"ready": int(number)}:
            kept = tuple(entry.get("uses", ()))
            limiter.undo_uses(number, kept)
            if not kept:
                counters.add("stored", -size)  # Counted again when it is found or used.
        case {"refused": status} if status in COUNTERS:
            counters.add(status, 1, entry.get("decisions", 0))
        case {
            "dropped": int(number),
            "status": status,
            "episodes": int(count),
            "stored": bool(stored),
        } if status in COUNTERS:
            if stored and number not in limiter.closed and number not in limiter.used_at:
                counters.add("stored", count)
            limiter.drop(number, status, stored=stored)
            counters.add(status, count, entry.get("decisions", 0))
