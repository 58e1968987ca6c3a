"""Start states that cannot be imagined, and actors of which nothing is admitted. No I/O.

The replay decides, because it alone hears of the failures of all actors and its ledger outlives them. It
sends the names to the actors, and an actor answers the grant of a quarantined start state at once: start
states stay a pure function of seed and number. A failure is part of the event that gives its group up
(`events.Dropped`).

A failure of the policy quarantines no start state: if it fails for all of them in a row, the run cannot go on
with this version. A resume from an earlier version forgets the failures of later ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.replay.interface import ENDLESS, Cause, GroupFailure

COUNTERS: Final[dict[Cause, Metric]] = {
    "policy": m.POISONED_POLICY,
    "world": m.POISONED_WORLD,
    "reward": m.POISONED_REWARD,
    "raised": m.POISONED_RAISED,
    "quarantined": m.POISONED_QUARANTINED,
}
IN_A_ROW: Final = 16
"""Groups that may fail one after the other where every one begins elsewhere (`ENDLESS`)."""
_NAMED: Final = 10
"""Most start states in a message."""


class Quarantine:
    """Failures by start state and by cause."""

    def __init__(self, after: int) -> None:
        """Start without failures; a start state is quarantined `after` failures in as many groups."""
        self.after = after
        self.names: list[str] = []
        """Quarantined start states in order."""
        self.counts: Counter[Cause] = Counter()
        """Groups given up, by cause."""
        self._groups: dict[str, dict[int, int]] = {}
        """Start state -> group that failed -> the learner's version then."""
        self._failed_by_policy: Counter[str] = Counter()
        """Start state -> groups for which the policy failed, since a group was complete."""
        self._first = self._first_of_policy = ""
        self._left, self._policy_fails = True, False
        self._in_a_row, self._last = 0, ""

    def begin(self, version: int) -> None:
        """Forget the failures after `version`: a resume may have other start states and another policy."""
        self._left, self._policy_fails, self._in_a_row = True, False, 0
        self._failed_by_policy.clear()
        for name, groups in self._groups.items():
            self._groups[name] = {number: at for number, at in groups.items() if at <= version}
        self.names = [name for name in self.names if len(self._groups[name]) >= self.after]
        self._first = self._first if any(self._groups.values()) else ""

    def on_complete_group(self) -> None:
        """Restart the counts of failures in a row."""
        self._failed_by_policy.clear()
        self._in_a_row = 0

    def add(self, failure: GroupFailure, version: int) -> None:
        """Count a group that was given up while the learner was at `version`."""
        self.counts[failure.cause] += 1
        name, number = failure.start_state, failure.number
        text = f"start state {name!r} in group {number}: {failure.reason}"
        self._left = failure.left > 0
        if failure.left >= ENDLESS:
            self._in_a_row, self._last = self._in_a_row + 1, text
        if failure.cause == "policy":
            self._failed_by_policy[name] += 1
            failed = sum(count >= self.after for count in self._failed_by_policy.values())
            self._policy_fails = failed >= failure.left
            self._first_of_policy = text
        elif failure.cause != "quarantined":
            self._first = self._first or text
            groups = self._groups.setdefault(name, {})
            groups[number] = version
            if len(groups) >= self.after and name not in self.names:
                self.names.append(name)

    def metrics(self) -> dict[Metric, float]:
        """Return all counts."""
        counts = {metric: float(self.counts[cause]) for cause, metric in COUNTERS.items()}
        return counts | {m.QUARANTINED: float(len(self.names))}

    @property
    def exhausted(self) -> str:
        """Reason why no group can be imagined any more; empty while a start state is left."""
        if self._policy_fails:
            return (
                f"The policy failed for all {len(self._failed_by_policy)} start states, last for "
                f"{self._first_of_policy}. Its weights or its precision are broken: resume from an earlier "
                "checkpoint, with a lower --optimizer.learning-rate."
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
            f"No start state is left: all {len(self.names)} failed in {self.after} groups each "
            f"(--replay.quarantine-after) and are not used any more: {', '.join(self.names[:_NAMED])}{more}. "
            f"First failure: {self._first}. The actors' logs have every one of them. When they fail for one "
            "reason, look at --world and --policy; else choose other --start-states."
        )

    def contents(self) -> str:
        """Return a summary for an error message; empty without failures."""
        if not self.counts:
            return ""
        counts = ", ".join(f"{n} {cause}" for cause, n in sorted(self.counts.items()))
        names = f", {len(self.names)} start states quarantined" if self.names else ""
        first = self._first or self._first_of_policy
        return f"groups poisoned: {counts}{names}; first: {first}; "


class RefusedActors:
    """Notices that nothing which the actors imagine is admitted: such a run would go on for ever.

    An actor cannot end a run with it as long as another one's groups are complete.
    """

    def __init__(self, after: int = 8) -> None:
        """Start without refusals; `after` groups without a complete one, an actor is hopeless."""
        self._after = after
        self._refused: Counter[str] = Counter()
        """Actor -> its refused groups since it completed one."""
        self._last: dict[str, str] = {}

    def add(self, actor: str, number: int, reason: str) -> None:
        """Count a group that was given up because an episode of it was refused."""
        self._refused[actor] += 1
        self._last[actor] = f"group {number} of {actor!r}: {reason}"

    def forget(self, actor: str) -> None:
        """Restart the count of an actor that completed a group, started again or left."""
        self._refused.pop(actor, None)
        self._last.pop(actor, None)

    def exhausted(self, actors: Sequence[str]) -> str:
        """Return why none of the present `actors` will complete a group; empty while there is hope."""
        if not actors or any(self._refused[actor] < self._after for actor in actors):
            return ""
        return (
            f"Nothing that the actors imagine is admitted: of each of {len(actors)} actors {self._after} "
            f"groups in a row were refused (replay/refused_*), last {self._last[actors[-1]][:500]}. Actors "
            "and learner have other settings, models or code: start all with the run's config.json and files."
        )
