"""Readings of micro-batches in, readings of the whole update over all ranks out.

Sums and numbers of readings are kept apart until the end, so that a mean is exact whatever the micro-batches
and ranks were. Nothing is copied from the device before `readings`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.learner.ranks import LearnerRanks
from asyncrl.observability.metrics import Metric


class MetricAccumulator:
    """Collects the readings of one update on one rank."""

    def __init__(self, device: torch.device) -> None:
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._sums: dict[Metric | str, list[Tensor]] = {}
        self._totals: dict[Metric, Tensor] = {}
        self._tops: dict[Metric, Tensor] = {}
        self.steps = 0
        """Optimizer steps so far."""

    def mean(self, metric: Metric | str, values: Tensor, mask: Tensor) -> None:
        """Add values to a mean; what is masked may be anything. `mask` broadcasts with `values`."""
        values, mask = torch.broadcast_tensors(values.detach(), mask)
        self.add(metric, torch.where(mask, values, 0).sum(dtype=torch.float64), mask.sum())

    def add(self, metric: Metric | str, total: Tensor | float, number: Tensor | float) -> None:
        """Add a sum and how many it is of."""
        held = self._sums.setdefault(metric, [self._zero, self._zero])
        held[0], held[1] = held[0] + total, held[1] + number

    def total(self, metric: Metric, part: Tensor) -> None:
        """Add a part of a reading that micro-batches and ranks make up together, once per optimizer step."""
        self._totals[metric] = self._totals.get(metric, self._zero) + part.detach()

    def largest(self, metric: Metric, values: Tensor, mask: Tensor) -> None:
        """Keep the largest valid value."""
        values, mask = torch.broadcast_tensors(values.detach(), mask)
        top = (
            torch.where(mask, values, -math.inf).amax().double() if values.numel() else self._zero - math.inf
        )
        self._tops[metric] = torch.maximum(self._tops.get(metric, top), top)

    def moments(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Collect what `ess` and `variance` need."""
        values, mask = torch.broadcast_tensors(values.detach().double(), mask)
        self.mean(name, values, mask)
        self.mean(f"{name}^2", values.square(), mask)

    def readings(self, group: LearnerRanks) -> dict[Metric | str, float]:
        """Fold the ranks: means by name (also of squares), totals per step, maxima.

        All ranks hold the same names.
        """
        for metric, value in self._totals.items():
            self._sums[metric] = [value, self._zero + self.steps / group.size]
        names = sorted(self._sums, key=str)
        result: dict[Metric | str, float] = {}
        if names:
            flat = torch.stack([value for name in names for value in self._sums[name]])
            totals = group.sum(flat).view(-1, 2).tolist()
            result |= {
                name: total / number for name, (total, number) in zip(names, totals, strict=True) if number
            }
        tops = sorted(self._tops, key=str)
        if tops:
            values = group.max(torch.stack([self._tops[name] for name in tops])).tolist()
            result |= dict(zip(tops, values, strict=True))
        return result


def effective_sample_size(readings: dict[Metric | str, float], name: str) -> float:
    """``(sum w)^2 / (n sum w^2)`` of what `Tally.moments` collected under `name`; NaN when there was none."""
    square = readings.get(f"{name}^2", 0.0)
    return readings[name] ** 2 / square if square > 0 else math.nan


def variance(readings: dict[Metric | str, float], name: str) -> float:
    """Variance of what `MetricAccumulator.moments` collected under `name`; NaN when there was nothing."""
    if name not in readings:
        return math.nan
    return max(0.0, readings[f"{name}^2"] - readings[name] ** 2)
