"""Draw latents along the straight paths of rectified flow, with OpenSora's sign and times.

Data and noise mix as ``x(t) = (1 - t / 1000) clean + (t / 1000) noise`` (rectified flow, arXiv 2209.03003).
The network predicts ``clean - noise``, the way from noise to data: the opposite sign of Wan's. The published
shift of the times by image size and number of frames is the identity at 256 pixels, so there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

NOISE_TIME: Final = 1000.0
"""Time of pure noise."""
STEPS: Final = 10
"""Network calls per decision, as published."""


@lru_cache(maxsize=32)
def sampling_times(steps: int) -> tuple[float, ...]:
    """Return the times of `steps` network calls, from pure noise downwards, and the final 0.

    Raises:
        ValueError: There is no step.

    Example:
        >>> sampling_times(4)
        (1000.0, 750.0, 500.0, 250.0, 0.0)
    """
    if steps < 1:
        raise ValueError(f"a schedule needs at least one step, got {steps}")
    return tuple(NOISE_TIME * (steps - k) / steps for k in range(steps + 1))


def mix(clean: Tensor, noise: Tensor, times_B: Tensor) -> Tensor:
    """Return what lies between data and noise.

    Args:
        clean: ``[B, ...]`` float.
        noise: The same shape.
        times_B: ``[B]`` float, 0 (data) to 1000 (noise).

    Returns:
        The same shape.
    """
    share = (times_B / NOISE_TIME).reshape(-1, *[1] * (clean.ndim - 1))
    return (1 - share) * clean + share * noise


def sample(velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, *, steps: int) -> Tensor:
    """Follow the velocity from noise to data with Euler steps of equal length.

    Args:
        velocity: Of ``[B, ...]`` float32 at times ``[B]`` float32; the same shape, any float dtype.
        noise: ``[B, ...]`` float32.
        steps: Calls of `velocity`.

    Returns:
        ``[B, ...]`` float32.
    """
    x = noise
    for time, following in pairwise(sampling_times(steps)):
        times_B = torch.full(x.shape[:1], time, device=x.device)
        x = x + velocity(x, times_B).float() * ((time - following) / NOISE_TIME)
    return x
