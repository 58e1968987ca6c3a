"""Draw the noise that a world's decision begins with, each row from its own seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def draw_noise(seeds: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """Draw ``[B, *shape]`` float32 standard normal noise on the CPU, row i from ``seeds[i]`` alone."""
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return torch.stack(rows)
