"""Compute the loss that OpenSora's transformer is trained with, as published (WMPO, arXiv 2511.09515).

A window of clean latents is four condition frames and the new ones. The new ones are mixed with noise at a
time whose logit is normally distributed; the condition frames with a little noise, at the time that the
network is told of them. The loss is the squared error of the velocity of the new frames only, the same for
all times.

Published with it: Adam (epsilon 1e-15) at a learning rate of 1e-4 after 1000 updates of warm-up, gradients
clipped to norm 1, and as the result a moving average of the weights by 0.99.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from asyncrl.worlds.opensora.rectified_flow import NOISE_TIME, mix
from asyncrl.worlds.opensora.stdit3 import CONDITION, CONDITION_TIME


class Velocity(Protocol):
    """`STDiT3`, or what wraps it."""

    def __call__(self, latents_BZFhw: Tensor, times_B: Tensor, actions_BCA: Tensor) -> Tensor:
        """See `STDiT3.forward`."""
        ...


class WindowLoss(NamedTuple):
    """How wrong the predicted velocity was."""

    loss: Tensor
    """``[]`` float32, mean of `per_sample`, with gradient."""
    per_sample: Tensor
    """``[B]`` float32, mean squared error over the new frames, detached."""


def training_times(count: int, generator: torch.Generator) -> Tensor:
    """Draw ``[B]`` float32 times in 0..1000 whose logit is standard normal.

    Args:
        count: ``B``.
        generator: On the CPU.
    """
    return NOISE_TIME * torch.randn(count, generator=generator).sigmoid()


def window_loss(
    transformer: Velocity,
    latents_BZFhw: Tensor,
    actions_BCA: Tensor,
    generator: torch.Generator,
    *,
    condition_noise: bool = True,
) -> WindowLoss:
    """Compute how well ``clean - noise`` of the new frames is predicted, given the four before.

    Args:
        transformer: In the mode the caller wants.
        latents_BZFhw: ``[B, Z, 4 + C, h, w]`` of any float dtype, clean and scaled.
        actions_BCA: ``[B, C, A]`` float32, normalised; action i produced new frame i.
        generator: On the CPU; draws the times, then the noise of all frames.
        condition_noise: Whether the condition frames are noised.
    """
    clean = latents_BZFhw.float()
    device = clean.device
    times_B = training_times(clean.shape[0], generator).to(device)
    noise = torch.randn(clean.shape, generator=generator).to(device)
    given, new = clean[:, :, :CONDITION], clean[:, :, CONDITION:]
    if condition_noise:
        given = mix(given, noise[:, :, :CONDITION], torch.full_like(times_B, CONDITION_TIME))
    window = torch.cat([given, mix(new, noise[:, :, CONDITION:], times_B)], dim=2)
    velocity = transformer(window, times_B, actions_BCA).float()
    error_B = (velocity - (new - noise[:, :, CONDITION:])).square().flatten(1).mean(1)
    return WindowLoss(loss=error_B.mean(), per_sample=error_B.detach())
