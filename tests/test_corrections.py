"""Importance weights: literal numbers, and expectations summed over every token of a small alphabet."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.learner.corrections import (
    importance_stats,
    importance_weights,
    k3,
    log_ratio,
    masked_mean,
    truncated_importance_weights,
)

PROXIMAL = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
BEHAVIOUR = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)


def test_weights_are_probability_ratios_cut_at_the_cap() -> None:
    weights = truncated_importance_weights(PROXIMAL.log(), BEHAVIOUR.log(), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([0.25, 2 / 3, 1.5, 2.0], dtype=torch.float64))


def test_weighted_stale_samples_have_the_expectation_of_fresh_ones() -> None:
    reward = torch.tensor([5.0, -1.0, 2.0, 7.0], dtype=torch.float64)
    weights = truncated_importance_weights(PROXIMAL.log(), BEHAVIOUR.log(), cap=100.0)
    stale, fresh = (BEHAVIOUR * weights * reward).sum(), (PROXIMAL * reward).sum()
    torch.testing.assert_close(stale, fresh)


def test_no_correction_means_weight_one() -> None:
    assert importance_weights("none", PROXIMAL.log(), BEHAVIOUR.log(), 2.0).tolist() == [1.0] * 4


@pytest.mark.parametrize("correction", ["none", "tis"])
def test_no_gradient_flows_through_weights(correction: str) -> None:
    proximal = PROXIMAL.log().requires_grad_()
    assert not importance_weights(correction, proximal, BEHAVIOUR.log(), 2.0).requires_grad  # pyright: ignore


def test_log_ratios_stay_within_twenty() -> None:
    assert log_ratio(torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0])).tolist() == [-20.0, 20.0]


def test_k3_has_the_kl_divergence_as_its_expectation() -> None:
    kl = sum(q * math.log(q / p) for q, p in zip(BEHAVIOUR.tolist(), PROXIMAL.tolist(), strict=True))
    expectation = (BEHAVIOUR * k3(PROXIMAL.log() - BEHAVIOUR.log())).sum()
    assert expectation.item() == pytest.approx(kl)


def test_stats_have_their_definitions_and_see_valid_tokens_only() -> None:
    # Ratios 1, 1, 4 (cut at 2); the fourth token is masked and holds nonsense.
    behaviour = torch.tensor([0.5, 0.5, 0.1, 0.5]).log()
    proximal = torch.tensor([0.5, 0.5, 0.4, math.nan]).log()
    mask = torch.tensor([True, True, True, False])
    weights = truncated_importance_weights(proximal, behaviour, cap=2.0)
    stats = importance_stats(weights, proximal, behaviour, mask, 2.0)
    assert stats.mean.item() == pytest.approx(4 / 3)
    assert stats.largest.item() == pytest.approx(4)
    assert stats.capped.item() == pytest.approx(1 / 3)
    assert stats.effective_sample_size.item() == pytest.approx(16 / (3 * 6))
    assert stats.mismatch_kl.item() == pytest.approx((4 - 1 - math.log(4)) / 3, rel=1e-5)


def test_fresh_samples_have_no_mismatch_and_count_fully() -> None:
    logprob, mask = BEHAVIOUR.log(), torch.ones(4, dtype=torch.bool)
    stats = importance_stats(torch.ones(4), logprob, logprob, mask, 2.0)
    assert [float(value) for value in stats] == [1.0, 1.0, 0.0, 1.0, 0.0]


def test_a_masked_mean_ignores_what_is_masked_and_is_zero_over_nothing() -> None:
    values = torch.tensor([1.0, 3.0, math.nan])
    assert masked_mean(values, torch.tensor([True, True, False])).item() == 2.0
    assert masked_mean(values, torch.zeros(3, dtype=torch.bool)).item() == 0.0
