"""Compute the statistics of LeRobot's columns: exact, over all samples, numbers and pictures alike.

Letters: T samples, D numbers of a sample, H W picture size.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

QUANTILES: Final = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
"""As LeRobot calls them; between two samples they are interpolated."""
_LEVELS: Final = 256


class NumberStatistics:
    """Statistics of a column of numbers, which is kept."""

    def __init__(self) -> None:
        self._parts: list[NDArray[Any]] = []

    def add(self, values: NDArray[Any]) -> None:
        """Count ``[T, D]`` numbers."""
        self._parts.append(values)

    def as_dict(self) -> dict[str, Any]:
        """Return ``[D]`` lists by name, and how many samples there were."""
        values = np.concatenate(self._parts).astype(np.float64)
        found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
        found |= {name: np.quantile(values, share, axis=0) for name, share in QUANTILES.items()}
        return {name: value.tolist() for name, value in found.items()} | {"count": [len(values)]}


class PictureStatistics:
    """Statistics of a camera's pictures per channel, in [0, 1], from how often each level occurs."""

    def __init__(self) -> None:
        self._counts = np.zeros((3, _LEVELS), np.int64)
        self._pictures = 0

    def add(self, pictures: NDArray[np.uint8]) -> None:
        """Count ``[T, H, W, 3]`` pictures."""
        for channel in range(3):
            self._counts[channel] += np.bincount(pictures[..., channel].ravel(), minlength=_LEVELS)
        self._pictures += len(pictures)

    def as_dict(self) -> dict[str, Any]:
        """Return ``[3, 1, 1]`` lists by name, and how many pictures there were."""
        channels = [_of_levels(counts) for counts in self._counts]
        found = {name: [[[channel[name]]] for channel in channels] for name in channels[0]}
        return found | {"count": [self._pictures]}


def _of_levels(counts: NDArray[np.int64]) -> dict[str, float]:
    """Compute one channel's statistics from ``[256]`` counts."""
    seen, levels, total = np.flatnonzero(counts), np.arange(_LEVELS) / 255, int(counts.sum())
    mean = float((counts * levels).sum() / total)
    spread = math.sqrt(float((counts * (levels - mean) ** 2).sum() / total))
    found = {"min": float(levels[seen[0]]), "max": float(levels[seen[-1]]), "mean": mean, "std": spread}
    return found | {name: _quantile(counts, total, share) for name, share in QUANTILES.items()}


def _quantile(counts: NDArray[np.int64], total: int, share: float) -> float:
    """Return what `np.quantile` gives of all the levels that were counted, in [0, 1]."""
    ends, place = np.cumsum(counts), (total - 1) * share
    low, high = (int(np.searchsorted(ends, at, side="right")) for at in (math.floor(place), math.ceil(place)))
    return (low + (high - low) * (place - math.floor(place))) / 255
