"""EVAC's sampler against the formulas of the papers, and against diffusers where that has no NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncrl.worlds.evac.ddim import guided, sampling_steps, sampling_times, signal_scales, signal_shares


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


def slow_step(x: float, v: float, t: int, s: int, eta: float, noise: float) -> float:
    """Equation 12 of arXiv 2010.02502, velocities and the rescaled signal."""
    a, b = slow_shares()[t], slow_shares()[s]
    signal = math.sqrt(a) * x - math.sqrt(1 - a) * v
    told = math.sqrt(a) * v + math.sqrt(1 - a) * x
    signal *= slow_scale(s) / slow_scale(t)
    variance = min(eta**2 * (1 - b) / (1 - a) * (1 - a / b), 1 - b)
    return math.sqrt(b) * signal + math.sqrt(1 - b - variance) * told + math.sqrt(variance) * noise


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


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("steps", [5, 50])
def test_every_step_follows_the_equation_and_is_finite(steps: int, eta: float) -> None:
    rng = np.random.default_rng(0)
    times = [*sampling_times(steps), 0]
    for step, t, s in zip(sampling_steps(steps, eta), times[:-1], times[1:], strict=True):
        x, v, noise = rng.normal(size=3)
        got = step.x_factor * x + step.v_factor * v + step.fresh * noise
        assert math.isfinite(got)
        assert step.time == t
        assert got == pytest.approx(slow_step(x, v, t, s, eta, noise), abs=1e-9)


def test_guidance_follows_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    told, untold = torch.randn(2, 3, 4, 5, generator=generator), torch.randn(2, 3, 4, 5, generator=generator)
    expected = []
    for c, u in zip(told.tolist(), untold.tolist(), strict=True):
        flat_c, flat_u = np.array(c).ravel(), np.array(u).ravel()
        pushed = flat_u + 7.5 * (flat_c - flat_u)
        expected.append(0.7 * pushed * flat_c.std(ddof=1) / pushed.std(ddof=1) + 0.3 * pushed)
    got = guided(told, untold, 7.5, 0.7)
    np.testing.assert_allclose(got.flatten(1).numpy(), np.array(expected), atol=1e-5)
    torch.testing.assert_close(guided(told, untold, 1.0, 0.0), told, atol=1e-6, rtol=1e-5)
