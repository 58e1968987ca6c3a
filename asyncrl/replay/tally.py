"""What became of episodes and their decisions, counted by reason. The ledger carries it over a restart."""

from __future__ import annotations

from collections import Counter
from typing import Final

from asyncrl.observability import metrics as m
from asyncrl.observability.metrics import Metric
from asyncrl.replay.ports import ReceiptStatus

COUNTERS: Final[dict[ReceiptStatus, Metric]] = {
    "stored": m.EPISODES,
    "duplicate": m.DUPLICATES,
    "dropped_lag": m.DROPPED_LAG,
    "dropped_deadline": m.DROPPED_DEADLINE,
    "dropped_invalid": m.DROPPED_INVALID,
    "dropped_resume": m.DROPPED_RESUME,
    "dropped_poisoned": m.DROPPED_POISONED,
}
DECISION_COUNTERS: Final[dict[ReceiptStatus, Metric]] = {
    "dropped_lag": m.DROPPED_LAG_DECISIONS,
    "dropped_deadline": m.DROPPED_DEADLINE_DECISIONS,
    "dropped_invalid": m.DROPPED_INVALID_DECISIONS,
    "dropped_resume": m.DROPPED_RESUME_DECISIONS,
    "dropped_poisoned": m.DROPPED_POISONED_DECISIONS,
}


class Tally:
    """Counts since the run began."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self.episodes: Counter[ReceiptStatus] = Counter()
        self.decisions: Counter[ReceiptStatus] = Counter()
        """Of dropped episodes."""

    def add(self, status: ReceiptStatus, episodes: int = 1, decisions: int = 0) -> None:
        """Count episodes that met the same fate; a negative number takes back."""
        self.episodes[status] += episodes
        self.decisions[status] += decisions

    def readings(self) -> dict[Metric, float]:
        """Read everything."""
        episodes = {metric: float(self.episodes[status]) for status, metric in COUNTERS.items()}
        return episodes | {metric: float(self.decisions[s]) for s, metric in DECISION_COUNTERS.items()}

    def reasons(self) -> str:
        """Say how many episodes were dropped why."""
        dropped = {status: n for status, n in self.episodes.items() if status.startswith("dropped") and n}
        return ", ".join(f"{n} {status[8:]}" for status, n in sorted(dropped.items())) or "none"
