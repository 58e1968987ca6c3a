"""Draw standard normal numbers on any device from a seed per row and a count of draws, without a state.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a counter and a
key into four random words of 32 bits. Here the key is the row's seed, and the counter the place within the
draw and the number of the draw, so that a row's noise depends on nothing else: not on its slot, its
neighbours or what was drawn before. All of it is tensor arithmetic: nothing waits for the device, and nothing
comes from the host but the seeds. Words are kept in int64, whose products wrap at 64 bits like unsigned ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


def philox(counter: Sequence[Tensor | int], key: Sequence[Tensor | int]) -> tuple[Tensor, ...]:
    """Compute four random words from four words of a counter and two of a key.

    Args:
        counter: Four tensors int64 (or numbers) in 0..2**32 - 1 whose shapes broadcast; one is a tensor.
        key: Two of the same kind.

    Returns:
        Four int64 tensors in 0..2**32 - 1 of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        t0, t1 = (k0 + number * _WEYL[0]) & _MASK, (k1 + number * _WEYL[1]) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ t0, low1, high0 ^ c3 ^ t1, low0
    return c0, c1, c2, c3  # type: ignore[return-value]  # at least one word of the counter is a tensor


def _product(multiplier: int, word: Tensor | int) -> tuple[Tensor | int, Tensor | int]:
    """Return the upper and the lower 32 bits of a product of two words."""
    if isinstance(word, int):
        return (multiplier * word) >> 32, (multiplier * word) & _MASK
    # The factor as a signed number: int64 has no word above 2**63, and products are the same modulo 2**64.
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK


def seed_words(seeds: Sequence[int]) -> NDArray[np.int64]:
    """Split seeds of 64 bits into words: ``[B, 2]`` int64 in 0..2**32 - 1, the lower one first."""
    return np.array([(int(seed) & _MASK, (int(seed) >> 32) & _MASK) for seed in seeds], dtype=np.int64)


def normal_words(place_N: Tensor, seeds_B2: Tensor, draw: int | Tensor) -> Tensor:
    """Draw four standard normal numbers for each place.

    This is what may be compiled. Places come from outside: a compiled `arange` would be an index of 32 bits,
    which Philox's products leave.

    Args:
        place_N: ``[N]`` int64 in 0..2**32 - 1.
        seeds_B2: ``[B, 2]`` int64, of `seed_words`.
        draw: Number of the draw, 0..2**32 - 1; a tensor: ``[]`` int64.

    Returns:
        ``[B, N, 4]`` float64.
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
    """Draw standard normal numbers.

    Args:
        seeds_B2: ``[B, 2]`` int64 on the device, of `seed_words`.
        draw: Number of the draw, 0..2**32 - 1; a tensor: ``[]`` int64.
        shape: Of a row.
        words: `normal_words`, or that compiled.

    Returns:
        ``[B, *shape]`` float32; row i depends on ``seeds_B2[i]`` and `draw` alone.
    """
    count = math.prod(shape)
    place_N = torch.arange((count + 3) // 4, device=seeds_B2.device)
    return words(place_N, seeds_B2, draw).flatten(1)[:, :count].float().unflatten(1, shape)
