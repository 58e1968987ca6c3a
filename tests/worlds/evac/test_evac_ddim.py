"""EVAC's sampler against the formulas of the papers, and against diffusers where that has no NaN."""

import math

import numpy as np
import pytest

from asyncrl.worlds.evac.ddim import sampling_times, signal_scales, signal_shares


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
