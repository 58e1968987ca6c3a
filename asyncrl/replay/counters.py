"""Count what became of episodes and their decisions. The ledger carries the counts over a restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.records import Episode
from asyncrl.replay.admission import RefusalCause
from asyncrl.replay.interface import ReceiptStatus


def has_no_signal(group: Sequence[Episode]) -> bool:
    """Whether all episodes that count have the same return: compared with siblings, none is better."""
    return len({episode.total_reward for episode in group}) <= 1


class FilteredGroups:
    """Groups that were filtered since the learner's last batch."""

    def __init__(self) -> None:
        self.groups = 0
        self._succeeded, self._failed = 0, 0

    def add(self, successes: int, size: int) -> None:
        """Count a group of `size` episodes, `successes` of which succeeded."""
        self.groups += 1
        self._succeeded += successes == size
        self._failed += not successes

    def restart(self) -> None:
        """The learner got a batch, or begins."""
        self.groups = self._succeeded = self._failed = 0

    def reason(self) -> str:
        """Say what all these groups have in common."""
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
        """Nothing was completed yet."""
        self.last: float | None = None
        """Share at the version before the current one, in [0, 1]; None when no group became complete then."""
        self._successes, self._episodes = 0, 0

    def add(self, successes: int, episodes: int) -> None:
        """Count a complete group."""
        self._successes += successes
        self._episodes += episodes

    def close(self) -> None:
        """The learner's version rose: what was counted becomes the last share."""
        self.last = self._successes / self._episodes if self._episodes else None
        self._successes, self._episodes = 0, 0

    def restart(self) -> None:
        """Forget everything, before the groups of the current version are counted again."""
        self.close()
        self.last = None


COUNTERS: Final[dict[ReceiptStatus, Metric]] = {
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
DECISION_COUNTERS: Final[dict[ReceiptStatus, Metric]] = {
    "dropped_lag": m.DROPPED_LAG_DECISIONS,
    "dropped_deadline": m.DROPPED_DEADLINE_DECISIONS,
    "dropped_invalid": m.DROPPED_INVALID_DECISIONS,
    "dropped_resume": m.DROPPED_RESUME_DECISIONS,
    "dropped_poisoned": m.DROPPED_POISONED_DECISIONS,
    "dropped_outdated": m.DROPPED_OUTDATED_DECISIONS,
    "dropped_unusable": m.DROPPED_UNUSABLE_DECISIONS,
    "dropped_unrecorded": m.DROPPED_UNRECORDED_DECISIONS,
}
REFUSED: Final[dict[RefusalCause, Metric]] = {
    "content": m.REFUSED_CONTENT,
    "settings": m.REFUSED_SETTINGS,
    "version": m.REFUSED_VERSION,
    "grant": m.REFUSED_GRANT,
}
"""Of the episodes that are invalid."""


class EpisodeCounters:
    """Counts since the run began."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self.episodes: Counter[ReceiptStatus] = Counter()
        self.decisions: Counter[ReceiptStatus] = Counter()
        """Of dropped episodes."""
        self.refused: Counter[RefusalCause] = Counter()
        """Episodes that were not admitted because they are invalid."""

    def add(self, status: ReceiptStatus, episodes: int = 1, decisions: int = 0) -> None:
        """Count episodes that became the same; a negative number takes back."""
        self.episodes[status] += episodes
        self.decisions[status] += decisions

    def metrics(self) -> dict[Metric, float]:
        """Read everything."""
        episodes = {metric: float(self.episodes[status]) for status, metric in COUNTERS.items()}
        decisions = {metric: float(self.decisions[s]) for s, metric in DECISION_COUNTERS.items()}
        return episodes | decisions | {metric: float(self.refused[c]) for c, metric in REFUSED.items()}

    def reasons(self) -> str:
        """Say how many episodes were dropped why."""
        dropped = {status: n for status, n in self.episodes.items() if status.startswith("dropped") and n}
        return ", ".join(f"{n} {status[8:]}" for status, n in sorted(dropped.items())) or "none"
