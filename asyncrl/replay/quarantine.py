"""Decide from the groups that actors could not imagine which start states are not used any more. No I/O.

The replay decides, because only it hears of the failures of all actors and its ledger outlives them all. It
does not know which start state a number stands for: the actors do, so it tells them the names before the next
grant, and an actor answers the grant of such a start state at once, without imagining. That costs a message
per such grant, and start states stay a pure function of seed and number, whatever failed.

A failure is part of the event that gives its group up (`events.Dropped`): both are durable, or neither.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from asyncrl.observability import metrics_replay as m
from asyncrl.observability.metrics import Metric
from asyncrl.replay.interface import Cause, GroupFailure

COUNTERS: Final[dict[Cause, Metric]] = {
    "policy": m.POISONED_POLICY,
    "world": m.POISONED_WORLD,
    "reward": m.POISONED_REWARD,
    "raised": m.POISONED_RAISED,
    "quarantined": m.POISONED_QUARANTINED,
}
_NAMED: Final = 10
"""Start states that a message names at most."""


class Quarantine:
    """What failed, by start state and by cause."""

    def __init__(self, after: int) -> None:
        """Nothing failed yet; a start state is quarantined `after` failures in as many groups."""
        self.after = after
        self.names: list[str] = []
        """Quarantined start states in the order in which they came here."""
        self.counts: Counter[Cause] = Counter()
        """Groups given up, by cause."""
        self._groups: dict[str, set[int]] = {}
        self._first = ""
        self._left = True

    def begin(self) -> None:
        """A learner began or resumed: perhaps with other start states, so some may be left again."""
        self._left = True

    def note(self, failure: GroupFailure) -> None:
        """Count a group that was given up."""
        self._left = failure.left > 0
        self.counts[failure.cause] += 1
        name, number = failure.start_state, failure.number
        if failure.cause == "quarantined":
            return
        self._first = self._first or f"start state {name!r} in group {number}: {failure.reason}"
        groups = self._groups.setdefault(name, set())
        groups.add(number)
        if len(groups) >= self.after and name not in self.names:
            self.names.append(name)

    def metrics(self) -> dict[Metric, float]:
        """Read the counts."""
        counts = {metric: float(self.counts[cause]) for cause, metric in COUNTERS.items()}
        return counts | {m.QUARANTINED: float(len(self.names))}

    @property
    def exhausted(self) -> str:
        """Why no group can be imagined any more; empty while a start state is left."""
        if self._left:
            return ""
        more = f" and {len(self.names) - _NAMED} more" if len(self.names) > _NAMED else ""
        return (
            f"No start state is left: all {len(self.names)} failed in {self.after} groups each "
            f"(--replay.quarantine-after) and are not used any more: {', '.join(self.names[:_NAMED])}{more}. "
            f"First failure: {self._first}. The actors' logs have every one of them. When they fail for one "
            "reason, look at --world and --policy; else choose other --start-states."
        )

    def contents(self) -> str:
        """Say in a few words what failed, for an error message; empty when nothing did."""
        if not self.counts:
            return ""
        counts = ", ".join(f"{n} {cause}" for cause, n in sorted(self.counts.items()))
        names = f", {len(self.names)} start states quarantined" if self.names else ""
        return f"groups poisoned: {counts}{names}; first: {self._first}; "
