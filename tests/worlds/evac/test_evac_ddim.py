"""EVAC's sampler and noise against formulas, and the rule of its memory."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.worlds.evac.ddim import (
    normal_noise,
    philox,
    sampling_times,
    seed_words,
    signal_scales,
    signal_shares,
)
from asyncrl.worlds.evac.world import EvacState


def slow_shares() -> list[float]:
    """Algorithm 1 of arXiv 2305.08891, with Python's own numbers."""
    first, last = math.sqrt(0.00085), math.sqrt(0.012)
    betas = [(first + (last - first) * i / 999) ** 2 for i in range(1000)]
    product, roots = 1.0, []
    for beta in betas:
        product *= 1 - beta
        roots.append(math.sqrt(product))
    return [((r - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2 for r in roots]


def slow_scale(t: int) -> float:
    return 1 - 0.3 * t / 399 if t < 400 else 0.7


def test_levels_and_scales_follow_the_formulas() -> None:
    np.testing.assert_allclose(signal_shares(), slow_shares(), atol=1e-12)
    np.testing.assert_allclose(signal_scales(), [slow_scale(t) for t in range(1000)], atol=1e-12)
    assert signal_shares()[-1] == 0
    assert signal_shares()[0] == pytest.approx(1 - 0.00085)


@pytest.mark.parametrize("steps", [1, 2, 27, 50, 1000])
def test_the_steps_are_equal_and_begin_at_pure_noise(steps: int) -> None:
    expected = [round(1000 - i * 1000 / steps) - 1 for i in range(steps)]
    assert list(sampling_times(steps)) == expected
    assert sampling_times(steps)[0] == 999


@pytest.mark.parametrize("steps", [0, 1001])
def test_an_impossible_number_of_steps_is_refused(steps: int) -> None:
    with pytest.raises(ValueError, match="1 to 1000 steps"):
        sampling_times(steps)


ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_words_are_the_published_ones(counter: tuple, key: tuple, expected: tuple) -> None:
    """The known answers that come with the paper's own implementation."""
    as_tensors = [torch.tensor([word]) for word in counter]
    got = philox(as_tensors, [torch.tensor([word]) for word in key])
    assert tuple(int(word) for word in got) == expected
    assert tuple(int(word) for word in philox((as_tensors[0], *counter[1:]), key)) == expected


def by_hand(seed: int, draw: int, count: int) -> list[float]:
    """Box and Muller's formula, in Python's own numbers, over Philox in Python's own numbers."""
    numbers: list[float] = []
    for place in range((count + 3) // 4):
        c, k = [place, draw, 0, 0], [seed & ONES, seed >> 32 & ONES]
        for _ in range(10):
            p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [p1 >> 32 ^ c[1] ^ k[0], p1 & ONES, p0 >> 32 ^ c[3] ^ k[1], p0 & ONES]
            k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
        u = [(word + 0.5) / 2**32 for word in c]
        for a, b in ((u[0], u[1]), (u[2], u[3])):
            numbers += [math.sqrt(-2 * math.log(a)) * f(2 * math.pi * b) for f in (math.cos, math.sin)]
    return numbers[:count]


def test_numbers_follow_the_formula() -> None:
    seeds = [0, 7, 2**63 + 12345, 2**32]
    got = normal_noise(torch.from_numpy(seed_words(seeds)), 9, (3, 7))
    expected = torch.tensor([by_hand(seed, 9, 21) for seed in seeds]).view(4, 3, 7)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(got, normal_noise(torch.from_numpy(seed_words(seeds)), torch.tensor(9), (3, 7)))


def some_state(batch: int, room: int = 17, seed: int = 0) -> EvacState:
    g = torch.Generator().manual_seed(seed)
    return EvacState(
        history=torch.randn(batch, room, 4, 2, 2, generator=g),
        poses=torch.randn(batch, room, 8, generator=g),
        count=torch.randint(1, room - 8, (batch,), generator=g),
        first=torch.randint(0, 256, (batch, 4, 4, 3), generator=g, dtype=torch.uint8),
        finite=torch.rand(batch, generator=g) > 0.5,
        left=1 + (seed + torch.arange(batch)) % 3,
    )


def tensors(state: EvacState) -> dict[str, Tensor]:
    return {name: value for name, value in vars(state).items() if isinstance(value, Tensor)}


def test_states_for_other_numbers_of_decisions_do_not_mix() -> None:
    with pytest.raises(ConfigError, match=r"room for 25 frames .* room for 17"):
        some_state(2).write_rows([0], some_state(1, room=25))


def test_moving_gives_a_state_with_the_same_numbers() -> None:
    state = some_state(2)
    moved = state.to("cpu")
    assert all(torch.equal(t, tensors(state)[name]) for name, t in tensors(moved).items())
    moved.left[0] = 77
    assert state.left[0] != 77
