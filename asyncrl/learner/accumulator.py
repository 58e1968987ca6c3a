"""Adds up the metrics of micro-batches, optimizer steps and ranks.

Sums and what they count are kept apart until the end, so that a mean is exact whatever the micro-batches and
ranks were. Nothing is copied from the device before `reduce`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.learner.ranks import LearnerRanks
from asyncrl.observability.metrics import Metric


class MetricAccumulator:
    """Sums, totals and maxima by metric, on the device of their values; empty at first."""

    def __init__(self) -> None:
        self._sums: dict[Metric | str, tuple[Tensor, Tensor]] = {}
        self._totals: dict[Metric, Tensor] = {}
        self._maxima: dict[Metric, Tensor] = {}

    def mean(self, metric: Metric | str, values: Tensor, mask: Tensor) -> None:
        """Add values to a mean.

        Args:
            values: Any shape and float dtype, added up in float64; what is masked may be anything.
            mask: bool, broadcasts with `values`.
        """
        values, mask = torch.broadcast_tensors(values.detach(), mask)
        self._add(metric, torch.where(mask, values, 0).sum(dtype=torch.float64), mask.sum().double())

    def total(self, metric: Metric, part: Tensor) -> None:
        """Add a part of what all micro-batches and ranks make up together, once per optimizer step.

        Args:
            part: ``[]``, any float dtype; added up in float64.
        """
        held, part = self._totals.get(metric), part.detach().double()
        self._totals[metric] = part if held is None else held + part

    def largest(self, metric: Metric, values: Tensor, mask: Tensor) -> None:
        """Keep the largest valid value, in float64. See `MetricAccumulator.mean` for the arguments."""
        values, mask = torch.broadcast_tensors(values.detach(), mask)
        lowest = values.new_full((), -math.inf, dtype=torch.float64)
        top = torch.where(mask, values, -math.inf).amax().double() if values.numel() else lowest
        self._maxima[metric] = torch.maximum(self._maxima.get(metric, top), top)

    def moments(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add what `effective_sample_size` and `variance` need: the means of the values and their squares.

        See `MetricAccumulator.mean` for the arguments.
        """
        values, mask = torch.broadcast_tensors(values.detach().double(), mask)
        self.mean(name, values, mask)
        self.mean(f"{name}^2", values.square(), mask)

    def fold(self, other: MetricAccumulator) -> None:
        """Add all that another one holds."""
        for metric, (total, number) in other._sums.items():
            self._add(metric, total, number)
        for metric, part in other._totals.items():
            self.total(metric, part)
        for metric, top in other._maxima.items():
            self._maxima[metric] = torch.maximum(self._maxima.get(metric, top), top)

    def reduce(self, ranks: LearnerRanks, steps: int = 1) -> dict[Metric | str, float]:
        """Fold the ranks: means by name (also of squares), totals per optimizer step, maxima."""
        for metric, value in self._totals.items():
            self._sums[metric] = value, torch.full_like(value, steps / ranks.size)
        names = sorted(self._sums, key=str)
        result: dict[Metric | str, float] = {}
        if names:
            flat = torch.stack([value for name in names for value in self._sums[name]])
            totals = ranks.sum(flat).view(-1, 2).tolist()
            result |= {
                name: total / number for name, (total, number) in zip(names, totals, strict=True) if number
            }
        tops = sorted(self._maxima, key=str)
        if tops:
            values = ranks.max(torch.stack([self._maxima[name] for name in tops])).tolist()
            result |= dict(zip(tops, values, strict=True))
        return result

    def _add(self, metric: Metric | str, total: Tensor, number: Tensor) -> None:
        held = self._sums.get(metric)
        self._sums[metric] = (total, number) if held is None else (held[0] + total, held[1] + number)


def effective_sample_size(means: dict[Metric | str, float], name: str) -> float:
    """Compute ``(sum w)^2 / (n sum w^2)`` of what `MetricAccumulator.moments` collected; NaN of nothing."""
    square = means.get(f"{name}^2", 0.0)
    return means[name] ** 2 / square if square > 0 else math.nan


def variance(means: dict[Metric | str, float], name: str) -> float:
    """Compute the variance of what `MetricAccumulator.moments` collected; NaN when there was nothing."""
    if name not in means:
        return math.nan
    return max(0.0, means[f"{name}^2"] - means[name] ** 2)
