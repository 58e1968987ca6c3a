"""Noise levels of sampling, and the loss of training, of Wan worlds.

Sources: rectified flow with shift 5 as used by Wan (arXiv 2503.20314); the bell-shaped training weight is the
one DiffSynth trains Wan with. Data and noise mix as ``x = (1 - sigma) * data + sigma * noise``; the network
gets the time ``1000 * sigma``. Levels are float64: diffusers' FlowMatchEulerDiscreteScheduler has float32
tables, whose last digits give other frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

TRAIN_LEVELS: Final = 1000  # Number of noise levels that training draws from.
SHIFT: Final = 5.0  # Pushes the levels towards noise: 5 s / (1 + 4 s).


def _shift(sigma: Tensor) -> Tensor:
    return SHIFT * sigma / (1 + (SHIFT - 1) * sigma)


@lru_cache(maxsize=32)
def sampling_sigmas(steps: int) -> tuple[float, ...]:
    """Compute the noise levels of an Euler sampler with `steps` network calls, and the final 0.

    Example:
        >>> [round(1000 * sigma, 2) for sigma in sampling_sigmas(3)]
        [1000.0, 909.09, 714.29, 0.0]
    """
    if steps < 1:
        raise ValueError(f"a schedule needs at least one step, got {steps}")
    sigmas = _shift(torch.linspace(1, 0, steps + 1, dtype=torch.float64)[:-1])
    return (*sigmas.tolist(), 0.0)


@lru_cache(maxsize=1)
def training_tables() -> tuple[Tensor, Tensor]:
    """Return noise levels, 1 (pure noise) first, and loss weights (a bell, mean 1): ``[1000]`` float32."""
    sigmas = _shift(torch.linspace(1, 0, TRAIN_LEVELS + 1, dtype=torch.float64)[:-1])
    bell = torch.exp(-2 * ((TRAIN_LEVELS * sigmas - TRAIN_LEVELS / 2) / TRAIN_LEVELS) ** 2)
    bell = bell - bell.min()
    return sigmas.float(), (bell * (TRAIN_LEVELS / bell.sum())).float()


CONTEXT_SIGMA: Final = 5 * 0.05 / 1.2
"""Noise level (0.208, id 950) put on the memory latent in training: it makes imagined memories tolerable."""


class WindowNoise(NamedTuple):
    """Random numbers of a batch of windows, on the CPU."""

    ids: Tensor  # [B] int64, rows of `training_tables`.
    new: Tensor  # [B, Z, 2, h, w] float32.
    memory: Tensor  # [B, Z, 1, h, w] float32.

    @classmethod
    def drawn(cls, batch: int, latent: Sequence[int], generator: torch.Generator) -> WindowNoise:
        """Draw for `batch` windows of latents ``[Z, h, w]``; the generator is on the CPU."""
        channels, *grid = latent
        return cls(
            ids=torch.randint(0, TRAIN_LEVELS, (batch,), generator=generator),
            new=torch.randn((batch, channels, 2, *grid), generator=generator),
            memory=torch.randn((batch, channels, 1, *grid), generator=generator),
        )


def window_loss(
    transformer: Callable[[Tensor, Tensor, Tensor], Tensor],
    latents_BZ4hw: Tensor,
    actions_BTA: Tensor,
    noise: WindowNoise | torch.Generator,
    *,
    context_noise: bool = True,
    context_sigma: float = CONTEXT_SIGMA,
) -> Tensor:
    """Compute the weighted mean squared error ``[]`` of ``noise - clean`` of the two new latents.

    The anchor is clean. The memory is noised a little, at time 0, so that the imperfect memories of a long
    imagined episode do not make it drift (WoVR, arXiv 2602.13977).
    Latents are clean and normalised: anchor, memory, two new. The first action is the dummy.
    """
    clean = latents_BZ4hw.float()
    device = clean.device
    if isinstance(noise, torch.Generator):
        batch, channels, _, *grid = clean.shape
        noise = WindowNoise.drawn(batch, (channels, *grid), noise)
    sigmas, weights = training_tables()
    new_noise = noise.new.to(device)
    sigma_B = sigmas[noise.ids].to(device)
    blend = sigma_B[:, None, None, None, None]
    new = (1 - blend) * clean[:, :, 2:] + blend * new_noise
    memory = clean[:, :, 1:2]
    if context_noise:
        memory = (1 - context_sigma) * memory + context_sigma * noise.memory.to(device)
    window = torch.cat([clean[:, :, :1], memory, new], dim=2)
    times_B4 = 1000 * sigma_B[:, None] * torch.tensor([0.0, 0.0, 1.0, 1.0], device=device)
    velocity = transformer(window, times_B4, actions_BTA)[:, :, 2:].float()
    error_B = (velocity - (new_noise - clean[:, :, 2:])).square().flatten(1).mean(1)
    weighted_B = error_B * weights[noise.ids].to(device)
    return weighted_B.mean()
