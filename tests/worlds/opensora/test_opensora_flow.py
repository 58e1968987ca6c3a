"""Rectified flow with OpenSora's sign: times, mixtures and steps against the equations."""

import pytest
import torch

from asyncrl.worlds.opensora.files import STEPS
from asyncrl.worlds.opensora.world import sample, sampling_times


def test_the_sampler_visits_the_published_times() -> None:
    assert sampling_times(STEPS) == (1000, 900, 800, 700, 600, 500, 400, 300, 200, 100, 0)
    assert sampling_times(1) == (1000, 0)
    assert sampling_times(3) == pytest.approx((1000, 666.6667, 333.3333, 0), abs=1e-3)


def test_numbers_stay_float32_when_the_network_is_not() -> None:
    drawn = sample(lambda x, times: x.bfloat16(), torch.ones(1, 2), steps=10)
    assert drawn.dtype == torch.float32
