"""Measure how much memory a process needed at most. torch is imported only for a GPU."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def host_peak() -> float:
    """Return the largest resident memory this process ever had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def peak_memory(devices: Iterable[torch.device]) -> float:
    """Return the most bytes this process's tensors ever took on one GPU; without a GPU, on the host."""
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus:
        return host_peak()
    import torch

    return float(max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus))
