"""Count what all processes of a run drop or do again, and report it with the learner's metrics.

A count is a total of `process_status`: shared memory that costs microseconds to add to, can be added to by
any process of the host, and outlives the one that counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncrl.observability import metrics_system, process_status
from asyncrl.observability.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class Count:
    """One kind of event."""

    total: int
    """Number of its total in `process_status`; waits have those from 0 on."""
    metric: Metric


RESPAWNS: Final = Count(total=31, metric=metrics_system.RESPAWNS)
WRONG_ENTRIES: Final = Count(total=30, metric=metrics_system.WRONG_ENTRIES)
LOST_ROWS: Final = Count(total=29, metric=metrics_system.LOST_ROWS)
LOST_CURVES: Final = Count(total=28, metric=metrics_system.LOST_CURVES)
DISCONNECTED: Final = Count(total=27, metric=metrics_system.DISCONNECTED)
DROPPED_LINES: Final = Count(total=33, metric=metrics_system.DROPPED_LINES)
LOST_TRACKED: Final = Count(total=32, metric=metrics_system.LOST_TRACKED)
COUNTS: Final = (
    RESPAWNS,
    WRONG_ENTRIES,
    LOST_ROWS,
    LOST_CURVES,
    DISCONNECTED,
    DROPPED_LINES,
    LOST_TRACKED,
)


def note(count: Count, amount: float = 1.0) -> None:
    """Count an event of this process."""
    process_status.count(count.total, amount)


def read(totals: tuple[float, ...]) -> dict[Metric, float]:
    """Take the counts out of `process_status.totals`; nothing where there are none."""
    return {count.metric: totals[count.total] for count in COUNTS} if totals else {}
