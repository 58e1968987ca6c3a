"""Write what a run measures and does in the text format of Prometheus (version 0.0.4).

The format is three rules (a line of help, a line of type, quoted labels), so it is written here and needs no
package; a test reads it with Prometheus's own parser.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from asyncrl import __version__
from asyncrl.observability.metrics import Readings
from asyncrl.observability.process_status import Process, ThreadActivity

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "asyncrl_"
MAIN_THREAD: Final = "MainThread"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    run: str
    """Name of its folder."""
    updates: int
    """At which it ends."""
    step: int
    """Update last written; that of the checkpoint before the first."""
    at: float
    """When it was, or the run began: seconds since 1970."""
    began: float


def exposition(progress: Progress, values: Readings, processes: Sequence[Process], healthy: bool) -> str:
    """Write all of it.

    Args:
        progress: Of the run.
        values: The last row; metrics that are not in it are left out.
        processes: Of the run on this host.
        healthy: What `/healthz` says.
    """
    run = {"run": progress.run}
    lines = [
        *_gauge("run_info", "Constant 1; which run this is.", [(run | {"version": __version__}, 1.0)]),
        *_gauge("run_healthy", "1 where /healthz answers 200.", [(run, float(healthy))]),
        *_gauge("run_updates", "Updates at which the run ends.", [(run, float(progress.updates))]),
        *_gauge("run_update", "Update last written.", [(run, float(progress.step))]),
        *_gauge(
            "run_last_update_timestamp_seconds",
            "When that was; before the first update, when the run began.",
            [(run, progress.at)],
        ),
        *_gauge("run_start_timestamp_seconds", "When this start of the run began.", [(run, progress.began)]),
        *_processes(processes, run),
    ]
    for metric, value in values.items():
        about = f"{metric.meaning} Unit: {metric.unit}. {metric.advice}"
        lines += _gauge(name_of(metric.name), about, [(run, value)])
    return "".join(f"{line}\n" for line in lines)


def name_of(metric: str) -> str:
    """Return what a metric is called in Prometheus, behind `PREFIX`.

    >>> name_of("train/actor/grad_norm")
    'train_actor_grad_norm'
    """
    return re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def _processes(processes: Sequence[Process], run: Mapping[str, str]) -> Iterator[str]:
    """What every process does. Its text is no label: each new one would be a series of its own."""
    up: list[tuple[Mapping[str, str], float]] = []
    busy: list[tuple[Mapping[str, str], float]] = []
    for process in processes:
        labels = {**run, "role": role_of(process.role), "name": process.role}
        up.append((labels, float(process.alive)))
        if process.alive and (found := main_activity(process)) is not None:
            busy.append((labels, found.seconds))
    yield from _gauge("process_up", "1 while a process of the run lives, 0 when it died.", up)
    yield from _gauge(
        "process_activity_seconds", "Time since its main thread began what it does (`asyncrl status`).", busy
    )


def role_of(name: str) -> str:
    """Return what a process is: 'actor' of 'actor-1'; one without a number has its name."""
    return name.partition("-")[0]


def main_activity(process: Process) -> ThreadActivity | None:
    """What the main thread of a process does; None when it has not said."""
    return next((activity for activity in process.activities if activity.thread == MAIN_THREAD), None)


def _gauge(name: str, about: str, values: Iterable[tuple[Mapping[str, str], float]]) -> list[str]:
    """Write one metric with its values; nothing where there are none."""
    full = PREFIX + name
    rows = [f"{full}{_labels(labels)} {_number(value)}" for labels, value in values]
    escaped = about.replace("\\", r"\\").replace("\n", r"\n")
    return [f"# HELP {full} {escaped}", f"# TYPE {full} gauge", *rows] if rows else []


def _labels(labels: Mapping[str, str]) -> str:
    quoted = (
        '{}="{}"'.format(k, v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for k, v in labels.items()
    )
    return "{" + ",".join(quoted) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"
