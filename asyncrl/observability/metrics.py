"""Registry of every number that a run reports, rules to fold several values into one, and the reference page.

A metric is defined once: in `metrics_training`, `metrics_system`, or for waits in `waits`. Callers log
``{m.GRAD_NORM: 3.2}``, never a bare string.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Metric:
    """One number that a run reports."""

    name: str
    reduction: str  # One of `FOLD`: the rule by which several values become one
    unit: str
    meaning: str
    advice: str  # Healthy value, and the remedy for another; for a name that RLinf uses too, the difference


@dataclass(frozen=True)
class LagRange:
    """Lags whose decisions are counted together."""

    name: str  # Suffix in names of metrics
    text: str
    low: int
    high: int


LAG_RANGES: Final = (
    LagRange("0", "0", 0, 0),
    LagRange("1", "1", 1, 1),
    LagRange("2", "2", 2, 2),
    LagRange("3_4", "3 or 4", 3, 4),
    LagRange("5_8", "5 to 8", 5, 8),
    LagRange("9_up", "9 or more", 9, 1 << 40),
)

Readings = Mapping[Metric, float]

REGISTRY: dict[str, Metric] = {}  # Name -> metric, of all imported modules

FOLD: Final[Mapping[str, Callable[[list[float]], float]]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "sum": math.fsum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


def define(text: str) -> Metric:
    """Register a new metric by ``name, reduction, unit: Meaning. Advice.``; the meaning is one sentence."""
    head, _, about = " ".join(text.split()).partition(": ")
    name, reduction, unit = head.split(", ")
    meaning, _, advice = about.partition(". ")
    assert name not in REGISTRY, name
    assert reduction in FOLD, name
    REGISTRY[name] = Metric(name, reduction, unit, f"{meaning}.", advice)
    return REGISTRY[name]


def reduce(rows: Iterable[Readings]) -> dict[Metric, float]:
    """Fold several rows of values into one, each metric by its own rule. Absent values are left out."""
    collected: dict[Metric, list[float]] = {}
    for row in rows:
        for metric, value in row.items():
            collected.setdefault(metric, []).append(float(value))
    return {metric: float(FOLD[metric.reduction](values)) for metric, values in collected.items()}


SECTIONS: Final = {
    "env/": "Imagined episodes of the batch.",
    "rollout/": "Returns and advantages of the batch.",
    "train/actor/": "How the policy moves, and how stale its samples are.",
    "train/critic/": "The value head; only with --algorithm.kind ppo.",
    "train/": "The update as a whole.",
    "replay/": "Waiting, stale and dropped episodes.",
    "weights/": "How new weights reach the actors.",
    "wait/": "Seconds in each wait, summed over the processes of this host: [waits](waits.md) lists them.",
    "time/": "Who waits for whom, and how fast.",
    "actor/": "Slots and memory of the actors.",
    "learner/": "Device memory of the learner.",
    "wire/": "Messages between processes.",
    "log/": "Rows and lines that could not be written.",
    "eval/": "Success in the true simulator.",
}
"""Prefix of names -> subject of its metrics. A metric belongs to the first prefix that fits."""
_REPEATED: Final = (*(f"lag_{lags.name}" for lags in LAG_RANGES[1:]), "_decisions")
"""Ends of names that the page describes once, in its head."""
_DEFINED_IN: Final = ("metrics_training", "metrics_system", "waits")
_NOTES: Final = (
    "Values of several actors, ranks or minibatches become their mean, unless a rule follows the unit. "
    "A *unit* in a description has one probability ratio: a token, an action or a decision "
    "(--algorithm.level). Names with `lag_0` also exist with `lag_1`, `lag_2`, `lag_3_4`, `lag_5_8` and "
    "`lag_9_up`, and each `replay/dropped_*` (episodes) as `replay/dropped_*_decisions` (decisions)."
)


def section_of(name: str) -> str:
    """Return the prefix in `SECTIONS` that a metric belongs to."""
    return next(prefix for prefix in SECTIONS if name.startswith(prefix))


def as_markdown() -> str:
    """Write the reference page of all metrics, one table per section."""
    for module in _DEFINED_IN:
        importlib.import_module(f"asyncrl.observability.{module}")
    files = ", ".join(f"`{module}.py`" for module in _DEFINED_IN)
    lines = ["# Metrics", "", f"Generated from {files} in `asyncrl/observability`;"]
    lines += ["`asyncrl metrics` prints it.", "", _NOTES]
    for prefix, about in SECTIONS.items():
        lines += ["", f"## {prefix.rstrip('/')}", "", about]
        if prefix == "wait/":
            continue
        lines += ["", "| name | unit | meaning | healthy, and otherwise |", "|---|---|---|---|"]
        for x in REGISTRY.values():
            if section_of(x.name) == prefix and not x.name.endswith(_REPEATED):
                unit = x.unit if x.reduction == "mean" else f"{x.unit}, {x.reduction}"
                cells = (f"`{x.name}`", unit, x.meaning, x.advice)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
