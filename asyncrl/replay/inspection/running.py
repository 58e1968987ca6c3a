"""Arrays in, one after another; minimum, maximum, mean and standard deviation out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Running:
    """Statistics of one column, without keeping it. Pictures count per channel, scaled to [0, 1]."""

    def __init__(self, *, image: bool = False) -> None:
        self._image = image
        self._count = self._pixels = 0
        self._low = self._high = self._sum = self._squares = np.empty(0)

    def add(self, values: NDArray[Any]) -> None:
        """Count ``[T, D]`` numbers, or ``[T, H, W, 3]`` uint8 pictures."""
        flat = values.reshape(-1, values.shape[-1]).astype(np.float64) / (255 if self._image else 1)
        low, high = flat.min(axis=0), flat.max(axis=0)
        total, squares = flat.sum(axis=0), (flat**2).sum(axis=0)
        if self._count:
            low, high = np.minimum(low, self._low), np.maximum(high, self._high)
            total, squares = total + self._sum, squares + self._squares
        self._low, self._high, self._sum, self._squares = low, high, total, squares
        self._count += len(values)
        self._pixels += len(flat)

    def as_dict(self) -> dict[str, Any]:
        """The statistics as lists; those of pictures have the shape ``[3, 1, 1]``."""
        mean = self._sum / self._pixels
        spread = np.sqrt(np.maximum(0.0, self._squares / self._pixels - mean**2))
        told = {"min": self._low, "max": self._high, "mean": mean, "std": spread}
        shape = (-1, 1, 1) if self._image else (-1,)
        return {name: value.reshape(shape).tolist() for name, value in told.items()} | {
            "count": [self._count]
        }
