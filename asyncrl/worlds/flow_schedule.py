"""Flow matching in numbers: which noise levels sampling visits, and how training draws and weighs them.

Sources: rectified flow with shift 5 as used by Wan (arXiv 2503.20314); the bell-shaped training weight is the
one DiffSynth trains Wan with. Data and noise mix as ``x = (1 - sigma) * data + sigma * noise``; the network
is told the time ``1000 * sigma``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

TRAIN_LEVELS: Final = 1000
"""Number of noise levels that training draws from."""
SHIFT: Final = 5.0
"""Pushes the levels towards noise: ``5 s / (1 + 4 s)``."""


def _shift(sigma: Tensor) -> Tensor:
    return SHIFT * sigma / (1 + (SHIFT - 1) * sigma)


@lru_cache(maxsize=32)
def sampling_sigmas(steps: int) -> tuple[float, ...]:
    """Noise levels of an Euler sampler with `steps` network calls, followed by the final 0.

    Example:
        >>> [round(1000 * sigma, 2) for sigma in sampling_sigmas(3)]
        [1000.0, 909.09, 714.29, 0.0]
    """
    if steps < 1:
        raise ValueError(f"a schedule needs at least one step, got {steps}")
    sigmas = _shift(torch.linspace(1, 0, steps + 1, dtype=torch.float64)[:-1])
    return (*sigmas.tolist(), 0.0)


@lru_cache(maxsize=1)
def _training_tables() -> tuple[Tensor, Tensor]:
    sigmas = _shift(torch.linspace(1, 0, TRAIN_LEVELS + 1, dtype=torch.float64)[:-1])
    bell = torch.exp(-2 * ((TRAIN_LEVELS * sigmas - TRAIN_LEVELS / 2) / TRAIN_LEVELS) ** 2)
    bell = bell - bell.min()
    return sigmas.float(), (bell * (TRAIN_LEVELS / bell.sum())).float()


def training_sigmas() -> Tensor:
    """``[1000]`` float32 noise levels by id, from 1 (pure noise) downwards."""
    return _training_tables()[0]


def training_weights() -> Tensor:
    """``[1000]`` float32 loss weight by id: bell-shaped around time 500, lowest weight 0, mean 1."""
    return _training_tables()[1]


CONTEXT_SIGMA: Final = 5 * 0.05 / 1.2
"""Noise level (0.208, id 950) put on the memory latent in training: it makes imagined memories tolerable."""
