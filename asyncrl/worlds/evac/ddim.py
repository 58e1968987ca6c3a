"""Noise of EVAC worlds: its levels, the sampler's steps, seeded draws, and the training loss.

Noise levels are those of latent diffusion, betas linear in their square roots from 0.00085 to 0.012 (arXiv
2112.10752), moved so that the last level is pure noise (arXiv 2305.08891, algorithm 1), and visited in equal
steps that end at the first one ("trailing", same paper). The signal of level t is multiplied by a scale that
falls from 1 to 0.7 over the first 400 levels (DynamiCrafter, arXiv 2310.12190), so

    x_t = sqrt(abar_t) scale_t x_0 + sqrt(1 - abar_t) noise
    v_t = sqrt(abar_t) noise - sqrt(1 - abar_t) scale_t x_0

diffusers' `DDIMScheduler` has no such scale, and at eta 1 makes NaN of pure noise.

Dimension letters: B samples or slots, P frames remembered, C new frames, F = P + C, Z latent channels, h/w
latent size, I image tokens, T tokens of an action, K their width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.worlds.evac.conditions import condition_channels

LEVELS: Final = 1000
DROPOUT: Final = 0.1  # Share of the training samples without tokens.
_FIRST_BETA, _LAST_BETA = 0.00085, 0.012
_LOWEST_SCALE, _SCALED_LEVELS = 0.7, 400
_FEWEST, _MOST = 3, 20  # divisors of the history's noise levels
_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


# ---- sampling ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def signal_shares() -> tuple[float, ...]:
    """Return the share of the signal's variance at each level, ``abar``: 1000 numbers from near 1 to 0."""
    roots = torch.linspace(_FIRST_BETA**0.5, _LAST_BETA**0.5, LEVELS, dtype=torch.float64)
    amplitude = torch.cumprod(1 - roots**2, dim=0).sqrt()
    moved = (amplitude - amplitude[-1]) * (amplitude[0] / (amplitude[0] - amplitude[-1]))
    return tuple((moved**2).tolist())


@lru_cache(maxsize=1)
def signal_scales() -> tuple[float, ...]:
    """Return the scale of the signal at each level: 1000 numbers from 1 to 0.7."""
    falling = torch.linspace(1, _LOWEST_SCALE, _SCALED_LEVELS, dtype=torch.float64)
    return (*falling.tolist(), *[_LOWEST_SCALE] * (LEVELS - _SCALED_LEVELS))


class Step(NamedTuple):
    """A step of the sampler (arXiv 2010.02502, equation 12): ``x_factor x + v_factor v + fresh noise``."""

    time: int  # Noise level, 0..999.
    x_factor: float
    v_factor: float
    fresh: float


@lru_cache(maxsize=32)
def sampling_times(steps: int) -> tuple[int, ...]:
    """Return the noise levels of `steps` network calls, the noisiest first: 999, 749, 499, 249 for 4."""
    if not 1 <= steps <= LEVELS:
        raise ValueError(f"a schedule needs 1 to {LEVELS} steps, got {steps}")
    times = torch.arange(LEVELS, 0, -LEVELS / steps, dtype=torch.float64)[:steps].round().long() - 1
    return tuple(times.tolist())


@lru_cache(maxsize=32)
def sampling_steps(steps: int) -> tuple[Step, ...]:
    """Return the factors of every step; all noise is fresh in each (eta 1), as in RLinf."""
    times = sampling_times(steps)
    shares, scales = signal_shares(), signal_scales()
    table = []
    for time, following in zip(times, (*times[1:], 0), strict=True):  # The last step ends at level 0.
        now, then = shares[time], shares[following]
        rescale = scales[following] / scales[time]
        # At the end both levels may be the same one, and nothing is left to add.
        spread = (1 - then) / (1 - now) * (1 - now / then)
        fresh = min(max(spread, 0.0), 1 - then)
        to_signal, to_noise = then**0.5, (1 - then - fresh) ** 0.5
        signal, noise = now**0.5, (1 - now) ** 0.5
        table.append(
            Step(
                time=time,
                x_factor=to_signal * (signal * rescale) + to_noise * noise,
                v_factor=to_signal * (-noise * rescale) + to_noise * signal,
                fresh=fresh**0.5,
            )
        )
    return tuple(table)


# ---- seeded draws --------------------------------------------------------------------------------
# Philox 4x32-10 (Salmon et al., SC 2011) turns a counter and a key into four random words of 32 bits. The key
# is the row's seed, the counter the place within the draw and the number of the draw, so that a row's noise
# depends on nothing else, and nothing waits for the device. Words are kept in int64, whose products wrap at
# 64 bits like unsigned ones.


def philox(counter: Sequence[Tensor | int], key: Sequence[Tensor | int]) -> tuple[Tensor, ...]:
    """Compute four random words, int64 in 0..2**32 - 1, from four words of a counter and two of a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        t0, t1 = (k0 + number * _WEYL[0]) & _MASK, (k1 + number * _WEYL[1]) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ t0, low1, high0 ^ c3 ^ t1, low0
    return c0, c1, c2, c3  # type: ignore[return-value]  # at least one word of the counter is a tensor


def _product(multiplier: int, word: Tensor | int) -> tuple[Tensor | int, Tensor | int]:
    # The upper and the lower 32 bits.
    if isinstance(word, int):
        return (multiplier * word) >> 32, (multiplier * word) & _MASK
    # The factor as a signed number: int64 has no word above 2**63, and products are the same modulo 2**64.
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK


def seed_words(seeds: Sequence[int]) -> NDArray[np.int64]:
    """Split seeds of 64 bits into words: ``[B, 2]`` int64 in 0..2**32 - 1, the lower one first."""
    return np.array([(int(seed) & _MASK, (int(seed) >> 32) & _MASK) for seed in seeds], dtype=np.int64)


def normal_words(place_N: Tensor, seeds_B2: Tensor, draw: int | Tensor) -> Tensor:
    """Draw four standard normal numbers for each place ``[N]`` int64: ``[B, N, 4]`` float64.

    This part may be compiled, so the places are an argument: a compiled `arange` would be an index of 32
    bits, too few for Philox's products.
    """
    words = philox((place_N, draw, 0, 0), (seeds_B2[:, :1], seeds_B2[:, 1:]))
    # Centres of 2**32 equal parts of (0, 1), so that the logarithm is finite. In float64: float32 has no
    # room for them next to 1, where the radius goes to zero.
    uniform = [(word.double() + 0.5) * 2.0**-32 for word in words]
    numbers = []
    for first, second in ((uniform[0], uniform[1]), (uniform[2], uniform[3])):  # Box and Muller (1958)
        radius, angle = (-2 * first.log()).sqrt(), 2 * math.pi * second
        numbers += [radius * angle.cos(), radius * angle.sin()]
    return torch.stack(numbers, dim=2)


def normal_noise(
    seeds_B2: Tensor,
    draw: int | Tensor,
    shape: tuple[int, ...],
    *,
    words: Callable[[Tensor, Tensor, int | Tensor], Tensor] = normal_words,
) -> Tensor:
    """Draw ``[B, *shape]`` float32 standard normal numbers; row i depends on its seed and `draw` alone."""
    count = math.prod(shape)
    place_N = torch.arange((count + 3) // 4, device=seeds_B2.device)
    return words(place_N, seeds_B2, draw).flatten(1)[:, :count].float().unflatten(1, shape)


# ---- training ------------------------------------------------------------------------------------ The
# history is noised a little while its time is 0, so that the imperfect frames of an imagined episode do not
# make the network drift (EnerVerse-AC, arXiv 2505.09723): a frame gets level (1 - cos(a)) * 1000 / d with a
# uniform in 0..pi/2 for each frame and d a whole number of 3 to 20 for each sample, older frames the noisier
# ones. The condition image is taken from the noised frames. Samples without
# tokens keep a network fit for guidance in other samplers, as published.


class Draws(NamedTuple):
    """Random numbers of a batch, on the CPU."""

    levels: Tensor  # [B] int64 noise level of the new frames, 0..999.
    noise: Tensor  # [B, C, Z, h, w] float32 of the new frames.
    history_levels: Tensor  # [B, P] int64 noise level of each remembered frame, the oldest first.
    history_noise: Tensor  # [B, P, Z, h, w] float32.
    conditioned: Tensor  # [B] float32: 0 for a sample without tokens, else 1.


def draw(generator: torch.Generator, new: torch.Size, remembered: int) -> Draws:
    """Draw the random numbers of a batch of ``[B, C, Z, h, w]`` new and ``P`` remembered frames."""
    batch, _, *frame = new
    levels = torch.randint(0, LEVELS, (batch,), generator=generator)
    noise = torch.randn(new, generator=generator)
    divisors = torch.randint(_FEWEST, _MOST + 1, (batch, 1), generator=generator)
    angles = torch.rand(batch, remembered, generator=generator) * (math.pi / 2)
    history_levels = ((1 - angles.cos()) * LEVELS / divisors).long().clamp(max=LEVELS - 1)
    return Draws(
        levels=levels,
        noise=noise,
        history_levels=history_levels.sort(dim=1, descending=True).values,
        history_noise=torch.randn(batch, remembered, *frame, generator=generator),
        conditioned=(torch.rand(batch, generator=generator) >= DROPOUT).float(),
    )


@lru_cache(maxsize=1)
def _tables() -> tuple[Tensor, Tensor, Tensor]:
    with torch.inference_mode(False):
        shares = torch.tensor(signal_shares(), dtype=torch.float64)
        return shares.sqrt().float(), (1 - shares).sqrt().float(), torch.tensor(signal_scales())


def noised(clean: Tensor, levels: Tensor, noise: Tensor) -> Tensor:
    """Mix latents ``[B, N, Z, h, w]`` float32 with noise, at levels ``[B, N]`` int64 on the CPU."""
    root, rest, scale = (_at(table, levels, clean) for table in _tables())
    return root * scale * clean + rest * noise


def velocity(clean: Tensor, levels: Tensor, noise: Tensor) -> Tensor:
    """Return the velocity of latents ``[B, N, Z, h, w]`` float32, at levels ``[B, N]`` int64 on the CPU."""
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
) -> Tensor:
    """Compute the mean squared error ``[]`` of the new frames' velocity.

    Latents are float32 and clean, the last remembered frame last; maps are latents too. The image tokens are
    those of the window's first frame, `fps` and `domain` ``[B]``.
    """
    device, remembered = new_BCZhw.device, history_BPZhw.shape[1]
    levels_BC = draws.levels[:, None].expand(-1, new_BCZhw.shape[1])
    noise = draws.noise.to(device)
    history_BPZhw = noised(history_BPZhw, draws.history_levels, draws.history_noise.to(device))
    latents = torch.cat([history_BPZhw, noised(new_BCZhw, levels_BC, noise)], dim=1).transpose(1, 2)
    window = torch.cat([latents, condition_channels(history_BPZhw, maps_BCZhw, rays_6hw)], dim=1)
    times_BF = torch.cat([torch.zeros_like(draws.history_levels), levels_BC], dim=1).to(device)
    conditioned = draws.conditioned.to(device)
    image, actions = image_BIK * conditioned[:, None, None], actions_BFTK * conditioned[:, None, None, None]
    predicted = unet(window, times_BF, image, actions, fps, domain)[:, :, remembered:].transpose(1, 2)
    error_B = (predicted.float() - velocity(new_BCZhw, levels_BC, noise)).square().flatten(1).mean(1)
    return error_B.mean()
