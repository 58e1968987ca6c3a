"""Encoded windows of recorded video in, the loss that fits the Wan transformer out.

Dimension letters: B windows, Z latent channels, h/w latent size, T = 13 actions of a window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.worlds.flow_schedule import CONTEXT_SIGMA, training_sigmas, training_weights


class WindowLoss(NamedTuple):
    """How wrong the predicted velocity was."""

    loss: Tensor
    """[] mean of `per_sample`, with gradient."""
    per_sample: Tensor
    """[B] weighted mean squared error over the two new latents, detached."""


def window_loss(
    transformer: Callable[[Tensor, Tensor, Tensor], Tensor],
    latents_BZ4hw: Tensor,
    actions_BTA: Tensor,
    generator: torch.Generator,
    *,
    context_noise: bool = True,
    context_sigma: float = CONTEXT_SIGMA,
) -> WindowLoss:
    """Flow matching on one window: predict ``noise - clean`` of the two new latents, given the first two.

    The anchor is clean. The memory is noised a little while the network is told that it is clean, so that the
    imperfect memories of a long imagined episode do not make it drift (WoVR, arXiv 2602.13977).

    Args:
        transformer: An `ActionWanTransformer`, in the mode the caller wants.
        latents_BZ4hw: ``[B, Z, 4, h, w]`` clean normalised latents: anchor, memory, two new.
        actions_BTA: ``[B, 13, 7]`` raw actions, the first of them the dummy.
        generator: On the CPU; draws the noise levels, the noise and the memory's noise, in this order.
        context_noise: Whether the memory is noised.
        context_sigma: Noise level of the memory, in [0, 1].
    """
    clean = latents_BZ4hw.float()
    device = clean.device
    ids = torch.randint(0, len(training_sigmas()), (clean.shape[0],), generator=generator)
    noise = torch.randn(clean[:, :, 2:].shape, generator=generator).to(device)
    memory_noise = torch.randn(clean[:, :, 1:2].shape, generator=generator).to(device)
    sigma_B = training_sigmas()[ids].to(device)
    blend = sigma_B[:, None, None, None, None]
    new = (1 - blend) * clean[:, :, 2:] + blend * noise
    memory = clean[:, :, 1:2]
    if context_noise:
        memory = (1 - context_sigma) * memory + context_sigma * memory_noise
    window = torch.cat([clean[:, :, :1], memory, new], dim=2)
    times_B4 = 1000 * sigma_B[:, None] * torch.tensor([0.0, 0.0, 1.0, 1.0], device=device)
    velocity = transformer(window, times_B4, actions_BTA)[:, :, 2:].float()
    error_B = (velocity - (noise - clean[:, :, 2:])).square().flatten(1).mean(1)
    weighted_B = error_B * training_weights()[ids].to(device)
    return WindowLoss(loss=weighted_B.mean(), per_sample=weighted_B.detach())
