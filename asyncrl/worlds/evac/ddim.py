"""Sample by DDIM with velocities, zero terminal signal-to-noise ratio and a rescaled signal.

Noise levels are those of latent diffusion, betas linear in their square roots from 0.00085 to 0.012 (arXiv
2112.10752), moved so that the last level is pure noise (arXiv 2305.08891, algorithm 1), and visited in equal
steps that end at the first one ("trailing", same paper). The signal of level t is multiplied by a scale that
falls from 1 to 0.7 over the first 400 levels (DynamiCrafter, arXiv 2310.12190), so

    x_t = sqrt(abar_t) scale_t x_0 + sqrt(1 - abar_t) noise
    v_t = sqrt(abar_t) noise - sqrt(1 - abar_t) scale_t x_0

A step (arXiv 2010.02502, equation 12) takes away the noise that the velocity tells, and with eta > 0 adds
fresh noise. At pure noise the added variance equals, but for the last digits, all that there is: it is
bounded by that, since the root of a negative number would make everything NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

LEVELS: Final = 1000
_FIRST_BETA, _LAST_BETA = 0.00085, 0.012
_LOWEST_SCALE, _SCALED_LEVELS = 0.7, 400


@lru_cache(maxsize=1)
def signal_shares() -> tuple[float, ...]:
    """Compute the share of the signal's variance at each level, ``abar``: 1000 numbers from near 1 to 0."""
    roots = torch.linspace(_FIRST_BETA**0.5, _LAST_BETA**0.5, LEVELS, dtype=torch.float64)
    amplitude = torch.cumprod(1 - roots**2, dim=0).sqrt()
    moved = (amplitude - amplitude[-1]) * (amplitude[0] / (amplitude[0] - amplitude[-1]))
    return tuple((moved**2).tolist())


@lru_cache(maxsize=1)
def signal_scales() -> tuple[float, ...]:
    """Compute what the signal of each level is multiplied by: 1000 numbers from 1 to 0.7."""
    falling = torch.linspace(1, _LOWEST_SCALE, _SCALED_LEVELS, dtype=torch.float64)
    return (*falling.tolist(), *[_LOWEST_SCALE] * (LEVELS - _SCALED_LEVELS))


@dataclass(frozen=True, kw_only=True)
class Step:
    """The numbers of one step.

    ``x_0 = signal_x x + signal_v v`` and ``noise = noise_x x + noise_v v``, then
    ``x = to_signal x_0 + to_noise noise + fresh * new noise``.
    """

    time: int
    """Noise level that the network is told, 0..999."""
    signal_x: float
    signal_v: float
    noise_x: float
    noise_v: float
    to_signal: float
    to_noise: float
    fresh: float

    @property
    def x_factor(self) -> float:
        """What the noisy latent is multiplied by in this step."""
        return self.to_signal * self.signal_x + self.to_noise * self.noise_x

    @property
    def v_factor(self) -> float:
        """What the velocity is multiplied by in this step."""
        return self.to_signal * self.signal_v + self.to_noise * self.noise_v


@lru_cache(maxsize=32)
def sampling_times(steps: int) -> tuple[int, ...]:
    """Compute the noise levels that `steps` network calls visit, the noisiest first.

    Example:
        >>> sampling_times(4)
        (999, 749, 499, 249)
    """
    if not 1 <= steps <= LEVELS:
        raise ValueError(f"a schedule needs 1 to {LEVELS} steps, got {steps}")
    times = torch.arange(LEVELS, 0, -LEVELS / steps, dtype=torch.float64)[:steps].round().long() - 1
    return tuple(times.tolist())


@lru_cache(maxsize=32)
def sampling_steps(steps: int, eta: float = 1.0) -> tuple[Step, ...]:
    """Compute the numbers of every step.

    Args:
        steps: Network calls, 1 to 1000.
        eta: Share of the fresh noise: 0 none (deterministic), 1 as much as in ancestral sampling.
    """
    times = sampling_times(steps)
    shares, scales = signal_shares(), signal_scales()
    table = []
    for time, following in zip(times, (*times[1:], 0), strict=True):  # The last step ends at level 0.
        now, then = shares[time], shares[following]
        rescale = scales[following] / scales[time]
        # At the end both levels may be the same one, and nothing is left to add.
        spread = eta**2 * (1 - then) / (1 - now) * (1 - now / then)
        fresh = min(max(spread, 0.0), 1 - then)
        table.append(
            Step(
                time=time,
                signal_x=now**0.5 * rescale,
                signal_v=-((1 - now) ** 0.5) * rescale,
                noise_x=(1 - now) ** 0.5,
                noise_v=now**0.5,
                to_signal=then**0.5,
                to_noise=(1 - then - fresh) ** 0.5,
                fresh=fresh**0.5,
            )
        )
    return tuple(table)


def guided(told: Tensor, untold: Tensor, scale: float, rescale: float) -> Tensor:
    """Push a velocity away from what is predicted without conditions (arXiv 2207.12598).

    Args:
        told: ``[B, ...]`` velocity under the conditions.
        untold: ``[B, ...]`` velocity without them.
        scale: 1 gives `told`; larger follows the conditions more.
        rescale: In [0, 1], how far the spread of each row is brought back to that of `told` (arXiv
            2305.08891, section 3.4).

    Returns:
        ``[B, ...]``.
    """
    pushed = untold + scale * (told - untold)
    axes = tuple(range(1, told.ndim))
    kept = pushed * (told.std(axes, keepdim=True) / pushed.std(axes, keepdim=True).clamp(min=1e-12))
    return rescale * kept + (1 - rescale) * pushed
