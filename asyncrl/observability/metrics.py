"""Keep every number that a run reports, and fold several values of one into one.

A metric is defined once, with how its values are folded, its unit, its meaning and advice: in
`metrics_training`, `metrics_replay`, `metrics_system`, and for waits in `waits`. Callers log
``{m.GRAD_NORM: 3.2}``, never a bare string. `docs/metrics.md` is generated from the registry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final


class Reduction(Enum):
    """How several values of one metric become one."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True)
class Metric:
    """One number that a run reports."""

    name: str
    reduction: Reduction
    unit: str
    meaning: str
    advice: str
    """What a healthy value looks like, and what to do about another: one or two sentences.

    Flags are written with their dashes, and numbers appear only where they follow from a definition. For a
    name that RLinf uses too it says how its number differs.
    """


@dataclass(frozen=True)
class LagRange:
    """Lags whose decisions are counted together."""

    name: str
    """In names of metrics."""
    text: str
    low: int
    high: int

    def holds(self, lag: Any) -> Any:
        """Say of an array or tensor of lags, of any shape, which are within: bool, of the same shape."""
        return (lag >= self.low) & (lag <= self.high)


LAG_RANGES: Final = (
    LagRange("0", "0", 0, 0),
    LagRange("1", "1", 1, 1),
    LagRange("2", "2", 2, 2),
    LagRange("3_4", "3 or 4", 3, 4),
    LagRange("5_8", "5 to 8", 5, 8),
    LagRange("9_up", "9 or more", 9, 1 << 40),
)

Readings = Mapping[Metric, float]

REGISTRY: dict[str, Metric] = {}
"""Name -> metric, of all modules that were imported."""

_FOLD = {
    Reduction.MEAN: lambda values: math.fsum(values) / len(values),
    Reduction.SUM: math.fsum,
    Reduction.MAX: max,
    Reduction.MIN: min,
    Reduction.LAST: lambda values: values[-1],
}


def define(name: str, reduction: Reduction, unit: str, meaning: str, advice: str) -> Metric:
    """Add a metric to the registry; its name must be new."""
    assert name not in REGISTRY, name
    REGISTRY[name] = Metric(name, reduction, unit, meaning, advice)
    return REGISTRY[name]


def reduce(rows: Iterable[Readings]) -> dict[Metric, float]:
    """Fold several rows of values into one, each metric by its own rule. Absent values are left out."""
    collected: dict[Metric, list[float]] = {}
    for row in rows:
        for metric, value in row.items():
            collected.setdefault(metric, []).append(float(value))
    return {metric: float(_FOLD[metric.reduction](values)) for metric, values in collected.items()}
