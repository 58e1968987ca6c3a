"""Noise from a counter: known answers, and what makes it noise."""

import math

import pytest
import torch

from asyncrl.worlds.evac.ddim import normal_noise, philox, seed_words

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
