"""Reports every few seconds where an actor's time and memory went."""

from __future__ import annotations

import time
from typing import Final

from asyncrl.actors.acting import Acting
from asyncrl.devices.offload import IdleOffload
from asyncrl.devices.tensors import peak_memory
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric

FIRST_REPORT = 0.2
"""Seconds until the first report, which short runs would not have otherwise."""
REPORT_EVERY: Final = 2.0
"""Seconds between two reports."""


class ActorTelemetry:
    """Adds up seconds, slots and steps between two reports."""

    def __init__(self, acting: Acting, offload: IdleOffload) -> None:
        self._acting, self._offload = acting, offload
        self._seconds: dict[Metric, float] = {}
        self._live = self._slots = self._useful = self._imagined = 0
        self._since = time.monotonic()
        self._every = FIRST_REPORT

    def add(self, metric: Metric, seconds: float) -> None:
        """Count seconds for a metric that is a share of the time."""
        self._seconds[metric] = self._seconds.get(metric, 0.0) + seconds

    def add_busy(self, seconds: float) -> None:
        """Count a round of the actor's thread, waits for devices included."""
        self.add(m.ACTOR_HOST, seconds)

    def add_live_slots(self, live: int, slots: int) -> None:
        """Count the slots with an episode, when a decision is launched."""
        self._live, self._slots = self._live + live, self._slots + slots

    def add_steps(self, useful: int, imagined: int) -> None:
        """Count steps that were decided, and those of them that lie before their episode's end."""
        self._useful, self._imagined = self._useful + useful, self._imagined + imagined

    def add_device_wait(self, seconds: float) -> None:
        """Count what a round waited for devices."""
        self.add(m.ACTOR_HOST, -seconds)

    def report_if_due(self) -> dict[Metric, float] | None:
        """Return the report, when it is time for one."""
        now = time.monotonic()
        elapsed = now - self._since
        if elapsed < self._every or (self._every == FIRST_REPORT and not self._seconds):
            return None
        self._every = REPORT_EVERY
        devices = self._acting.pop_device_seconds()
        for metric, seconds in devices.items():
            self.add(metric, seconds)
        if all(device.type == "cpu" for device in self._acting.devices):
            self.add(m.ACTOR_HOST, -sum(devices.values()))  # The models ran on the actor's own thread.
        shares = {metric: min(1.0, max(0.0, s / elapsed)) for metric, s in self._seconds.items()}
        self._seconds, self._since = {}, now
        report = {
            m.ACTORS_WAITING: 0.0,
            m.ACTOR_MEMORY: peak_memory(set(self._acting.devices)),
            **{metric: float(count) for metric, count in self._acting.counts.items()},
        } | shares
        if self._slots:
            report[m.LIVE_SLOTS] = self._live / self._slots
        if self._imagined:
            report[m.USEFUL_STEPS] = self._useful / self._imagined
        self._live = self._slots = self._useful = self._imagined = 0
        if self._offload.enabled:
            moving, offloaded = self._offload.pop_metrics()
            report |= {m.ACTOR_OFFLOAD: min(1.0, moving / elapsed), m.ACTOR_OFFLOADED: float(offloaded)}
        return report
