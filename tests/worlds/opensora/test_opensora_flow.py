"""Rectified flow with OpenSora's sign: times, mixtures and steps against the equations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncrl.worlds.opensora.files import STEPS
from asyncrl.worlds.opensora.world import mix, sample, sampling_times


def test_the_sampler_visits_the_published_times() -> None:
    assert sampling_times(STEPS) == (1000, 900, 800, 700, 600, 500, 400, 300, 200, 100, 0)
    assert sampling_times(1) == (1000, 0)
    assert sampling_times(3) == pytest.approx((1000, 666.6667, 333.3333, 0), abs=1e-3)


def test_a_schedule_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one step, got 0"):
        sampling_times(0)


def test_mixtures_go_from_data_to_noise() -> None:
    clean, noise = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    times = torch.tensor([0.0, 250.0, 1000.0])
    mixed = mix(clean, noise, times)
    for i, share in enumerate((0.0, 0.25, 1.0)):
        for j in range(2):
            for k in range(4):
                expected = (1 - share) * clean[i, j, k].item() + share * noise[i, j, k].item()
                assert mixed[i, j, k].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_steps_follow_any_velocity_by_the_rule_of_euler(steps: int) -> None:
    def velocity(x: Tensor, times: Tensor) -> Tensor:
        return 0.3 * x * x - times[:, None] / 1000

    noise = torch.randn(2, 5)
    expected = noise.clone()
    for i in range(2):
        for j in range(5):
            x = noise[i, j].item()
            for k in range(steps):
                time = 1000 * (1 - k / steps)
                x = x + (0.3 * x * x - time / 1000) * (1 / steps)
            expected[i, j] = x
    torch.testing.assert_close(sample(velocity, noise, steps=steps), expected, atol=1e-5, rtol=1e-5)


def test_the_true_velocity_leads_from_noise_to_data() -> None:
    """Its sign is OpenSora's: with the other one this ends at twice the noise, less the data."""
    clean, noise = torch.randn(2, 3), torch.randn(2, 3)
    drawn = sample(lambda x, times: clean - noise, noise, steps=10)
    torch.testing.assert_close(drawn, clean, atol=1e-5, rtol=0)


def test_numbers_stay_float32_when_the_network_is_not() -> None:
    drawn = sample(lambda x, times: x.bfloat16(), torch.ones(1, 2), steps=10)
    assert drawn.dtype == torch.float32
