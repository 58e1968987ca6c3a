"""Write the reference page `docs/metrics.md` from the registry of metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from asyncrl.observability import (
    metrics_audit,
    metrics_guard,
    metrics_pace,
    metrics_replay,
    metrics_system,
    metrics_training,
    waits,
)
from asyncrl.observability.metrics import REGISTRY, Metric

SECTIONS: Final = {
    "env/": "What was imagined, by the episodes of the batch.",
    "rollout/": "What the episodes of the batch teach.",
    "train/actor/": "How the policy moves, and how stale its samples are.",
    "train/critic/": "The value head; only with --algorithm.kind ppo.",
    "train/": "The update as a whole.",
    "replay/": "What waits, what is old, what was dropped.",
    "weights/": "How new weights reach the actors.",
    "wait/": "Seconds in each wait, summed over the processes of this host since each of them began.",
    "time/": "Who waits for whom, and how fast.",
    "actor/": "Slots and memory of the actors.",
    "learner/": "Device memory of the learner.",
    "wire/": "Messages between processes.",
    "log/": "What could not be written down.",
    "eval/": "The truth.",
    "audit/": "What `asyncrl audit` found, in RUN/tensorboard/audit only: does imagination tell the truth?",
    "pace/": "What the newest round of --pace.every found: of the policy in truth, and of the world.",
    "world/": "Which world imagines.",
    "guard/": "Whether imagined successes are some when imagined again; only with --guard.kind second.",
}
"""Prefix of names -> what its metrics are about. A metric belongs to the first prefix that fits."""
DEFINED_IN: Final = (
    metrics_training,
    metrics_replay,
    metrics_system,
    metrics_audit,
    metrics_pace,
    metrics_guard,
    waits,
)
"""The modules that define metrics; importing them fills the registry."""
FOLDED: Final = (
    "*Folded by* says how the values of several updates become one console row (--log-every). A *unit* is "
    "what has one probability ratio: a token, an action or a decision (--algorithm.level)."
)

OLDER: Final = {
    "actor/loss": (metrics_training.POLICY_LOSS, ""),
    "actor/value_loss": (metrics_training.VALUE_LOSS, ""),
    "actor/entropy": (metrics_training.ENTROPY_LOSS, ""),
    "actor/grad_norm": (metrics_training.GRAD_NORM, "the largest of an update's steps"),
    "actor/lr": (metrics_training.LEARNING_RATE, ""),
    "rollout/reward_mean": (metrics_training.RETURN, ""),
    "rollout/reward_std": (metrics_training.REWARD_STD, ""),
    "rollout/episode_length": (metrics_training.EPISODE_LEN, ""),
    "rollout/success_rate": (metrics_training.SUCCESS_ONCE, ""),
    "env/success_rate": (metrics_training.SUCCESS_ONCE, "of all environments of the batch together"),
    "env/step_reward": (metrics_training.STEP_REWARD, ""),
    "env/termination_rate": (metrics_training.TERMINATION_RATE, ""),
}
"""Name on RLinf's pages about EVAC and simulators -> ours, and what ours is beyond the name."""


def section_of(metric: Metric) -> str:
    """Return the prefix in `SECTIONS` that a metric belongs to."""
    return next(prefix for prefix in SECTIONS if metric.name.startswith(prefix))


def as_markdown() -> str:
    """Write the reference page of all metrics, one table per section."""
    files = ", ".join(f"`{module.__name__.rpartition('.')[2]}.py`" for module in DEFINED_IN)
    lines = ["# Metrics", "", f"Generated from {files} in `asyncrl/observability`;"]
    lines += ["`asyncrl metrics` prints it.", "", FOLDED]
    for prefix, about in SECTIONS.items():
        lines += ["", f"## {prefix.rstrip('/')}", "", about, ""]
        lines += table(metric for metric in REGISTRY.values() if section_of(metric) == prefix)
    return "\n".join([*lines, *older_names()]) + "\n"


def older_names() -> list[str]:
    """Write the lines that say what the metrics of RLinf's older pages are called here."""
    lines = ["", "## Older names", ""]
    lines += [
        "RLinf's pages about EVAC, LIBERO, ManiSkill and others name twelve metrics that its code does not"
    ]
    lines += ["write any more. Here they are:", ""]
    for old, (metric, note) in OLDER.items():
        lines.append(f"- `{old}`: `{metric.name}`{note and ', '}{note}")
    return lines


def table(metrics: Iterable[Metric]) -> list[str]:
    """Write the lines of one table; a bar inside a cell is escaped."""
    lines = ["| name | unit | folded by | meaning | healthy, and otherwise |", "|---|---|---|---|---|"]
    for metric in metrics:
        cells = (f"`{metric.name}`", metric.unit, metric.reduction.value, metric.meaning, metric.advice)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines
