"""Weights in, whether they are all finite out: one pass over them, one number back from the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def weights_are_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether every number is finite.

    Args:
        tensors: Not empty, any shape and float type; when they are sharded, all ranks have to call this.
    """
    largest: Any = torch.nn.utils.get_total_norm(list(tensors.values()), math.inf)
    return math.isfinite(float(whole(largest)))


def whole(value: Tensor) -> Tensor:
    """A number that was computed of sharded tensors is itself spread over the ranks."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value
