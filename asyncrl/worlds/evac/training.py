"""Compute the loss that EVAC's network is trained with: the velocity of a chunk, given frames before it.

The noise levels are the sampler's (`ddim`). The remembered frames are noised a little while the network is
told that they are clean, so that the imperfect frames of an imagined episode do not make it drift ("teacher
forcing" augmentation; EnerVerse-AC, arXiv 2505.09723): a frame gets level ``(1 - cos(a)) * 1000 / d`` with a
uniform in 0..pi/2 for each frame and d a whole number of 3 to 20 for each sample, older frames the noisier
ones. The condition image is taken from the noised frames, for else the clean ones would still be seen. Some
samples are shown no tokens at all, which is what guidance needs.

Dimension letters: B samples, P frames remembered, C new frames, F = P + C, Z latent channels, h/w latent
size, I image tokens, T tokens of an action, K their width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from asyncrl.worlds.evac.conditions import condition_channels
from asyncrl.worlds.evac.ddim import LEVELS, signal_scales, signal_shares

FEWEST, MOST = 3, 20
"""Bounds of the divisor of the history's noise levels."""
DROPOUT: Final = 0.1
"""Share of the samples that are shown no tokens."""


class ChunkLoss(NamedTuple):
    """How wrong the predicted velocity was."""

    loss: Tensor
    """``[]`` float32, mean of `per_sample`, with gradient."""
    per_sample: Tensor
    """``[B]`` float32, mean squared error over the new frames, detached."""


class Draws(NamedTuple):
    """What chance decides for a batch, all of it on the CPU."""

    levels: Tensor
    """``[B]`` int64 noise level of the new frames, 0..999."""
    noise: Tensor
    """``[B, C, Z, h, w]`` float32 of the new frames."""
    history_levels: Tensor
    """``[B, P]`` int64 noise level of each remembered frame, the oldest first."""
    history_noise: Tensor
    """``[B, P, Z, h, w]`` float32."""
    told: Tensor
    """``[B]`` float32: 1, or 0 for a sample that is shown no tokens."""


def draw(generator: torch.Generator, new: torch.Size, remembered: int, *, dropout: float = DROPOUT) -> Draws:
    """Draw what chance decides for a batch, in the order of `Draws`.

    Args:
        generator: On the CPU.
        new: ``[B, C, Z, h, w]``.
        remembered: ``P``.
        dropout: Share of the samples that are shown no tokens, in [0, 1].
    """
    batch, _, *frame = new
    levels = torch.randint(0, LEVELS, (batch,), generator=generator)
    noise = torch.randn(new, generator=generator)
    divisors = torch.randint(FEWEST, MOST + 1, (batch, 1), generator=generator)
    angles = torch.rand(batch, remembered, generator=generator) * (math.pi / 2)
    history_levels = ((1 - angles.cos()) * LEVELS / divisors).long().clamp(max=LEVELS - 1)
    return Draws(
        levels=levels,
        noise=noise,
        history_levels=history_levels.sort(dim=1, descending=True).values,
        history_noise=torch.randn(batch, remembered, *frame, generator=generator),
        told=(torch.rand(batch, generator=generator) >= dropout).float(),
    )


@lru_cache(maxsize=1)
def _tables() -> tuple[Tensor, Tensor, Tensor]:
    """Return by noise level ``sqrt(abar)``, ``sqrt(1 - abar)`` and the signal's scale: ``[1000]`` float32."""
    with torch.inference_mode(False):
        shares = torch.tensor(signal_shares(), dtype=torch.float64)
        return shares.sqrt().float(), (1 - shares).sqrt().float(), torch.tensor(signal_scales())


def noised(clean: Tensor, levels: Tensor, noise: Tensor) -> Tensor:
    """Mix latents with noise.

    Args:
        clean: ``[B, N, Z, h, w]`` float32.
        levels: ``[B, N]`` int64 on the CPU.
        noise: Like `clean`.
    """
    root, rest, scale = (_at(table, levels, clean) for table in _tables())
    return root * scale * clean + rest * noise


def velocity(clean: Tensor, levels: Tensor, noise: Tensor) -> Tensor:
    """Return what is predicted of latents ``[B, N, Z, h, w]`` float32 at levels ``[B, N]`` int64 (CPU)."""
    root, rest, scale = (_at(table, levels, clean) for table in _tables())
    return root * noise - rest * scale * clean


def _at(table: Tensor, levels: Tensor, like: Tensor) -> Tensor:
    return table[levels][..., None, None, None].to(like.device)


def chunk_loss(
    unet: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
    history_BPZhw: Tensor,
    new_BCZhw: Tensor,
    maps_BCZhw: Tensor,
    rays_6hw: Tensor,
    image_BIK: Tensor,
    actions_BFTK: Tensor,
    *,
    fps: Tensor,
    domain: Tensor,
    draws: Draws,
    history_noise: bool = True,
) -> ChunkLoss:
    """Compute how well the velocity of the new frames is predicted.

    Args:
        unet: An `EvacUNet`, in the mode the caller wants.
        history_BPZhw: ``[B, P, Z, h, w]`` float32 clean latents of remembered frames, the last one last.
        new_BCZhw: ``[B, C, Z, h, w]`` float32 clean latents of the new frames.
        maps_BCZhw: ``[B, C, Z, h, w]`` float32 latents of their trajectory maps.
        rays_6hw: ``[6, h, w]`` float32.
        image_BIK: ``[B, I, K]`` tokens of the window's first frame.
        actions_BFTK: ``[B, F, T, K]`` tokens of the action that made each frame.
        fps: ``[B]`` of any dtype.
        domain: ``[B]`` int64.
        draws: Of `draw`.
        history_noise: Whether the remembered frames are noised.

    Returns:
        The loss; gradients reach the network and what made the tokens.
    """
    device, remembered = new_BCZhw.device, history_BPZhw.shape[1]
    levels_BC = draws.levels[:, None].expand(-1, new_BCZhw.shape[1])
    noise = draws.noise.to(device)
    if history_noise:
        history_BPZhw = noised(history_BPZhw, draws.history_levels, draws.history_noise.to(device))
    latents = torch.cat([history_BPZhw, noised(new_BCZhw, levels_BC, noise)], dim=1).transpose(1, 2)
    window = torch.cat([latents, condition_channels(history_BPZhw, maps_BCZhw, rays_6hw)], dim=1)
    times_BF = torch.cat([torch.zeros_like(draws.history_levels), levels_BC], dim=1).to(device)
    told = draws.told.to(device)
    image, actions = image_BIK * told[:, None, None], actions_BFTK * told[:, None, None, None]
    predicted = unet(window, times_BF, image, actions, fps, domain)[:, :, remembered:].transpose(1, 2)
    error_B = (predicted.float() - velocity(new_BCZhw, levels_BC, noise)).square().flatten(1).mean(1)
    return ChunkLoss(loss=error_B.mean(), per_sample=error_B.detach())
