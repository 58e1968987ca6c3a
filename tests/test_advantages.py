"""Group-relative advantages: literal numbers, the slow formula, and groups that stay apart."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.advantages import group_relative_advantages


def by_definition(returns: list[float], group_size: int, normalize_by_std: bool) -> list[float]:
    out = []
    for start in range(0, len(returns), group_size):
        group = returns[start : start + group_size]
        mean, spread = statistics.fmean(group), statistics.stdev(group)
        out += [(r - mean) / (spread + 1e-6 if normalize_by_std else 1.0) for r in group]
    return out


def test_one_success_of_four_is_one_and_a_half_deviations_above() -> None:
    # mean 1/4; unbiased variance (9/16 + 3/16) / 3 = 1/4, deviation 1/2.
    advantages = group_relative_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4)
    torch.testing.assert_close(advantages, torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0)


def test_without_the_deviation_only_the_mean_is_subtracted() -> None:
    advantages = group_relative_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4)
    assert advantages.tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_it_matches_the_definition(group_size: int, normalize: bool) -> None:
    returns = torch.rand(16, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor(by_definition(returns.tolist(), group_size, normalize))
    actual = group_relative_advantages(returns, group_size, normalize_by_std=normalize)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("normalize", [True, False])
@given(score=st.floats(-10, 10, width=32), group_size=st.integers(2, 9))
def test_a_group_that_scored_all_the_same_gets_exactly_zero(
    normalize: bool, score: float, group_size: int
) -> None:
    returns = torch.full((group_size,), score)
    advantages = group_relative_advantages(returns, group_size, normalize_by_std=normalize)
    assert advantages.tolist() == [0.0] * group_size


@given(order=st.permutations(range(4)))
def test_groups_in_another_order_keep_their_own_advantages(order: list[int]) -> None:
    returns_NG = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    straight = group_relative_advantages(returns_NG.flatten(), 3).unflatten(0, (4, 3))
    shuffled = group_relative_advantages(returns_NG[order].flatten(), 3).unflatten(0, (4, 3))
    assert torch.equal(shuffled, straight[order])


@pytest.mark.parametrize(("count", "group_size"), [(7, 2), (4, 1)])
def test_what_is_no_whole_number_of_groups_is_refused_with_its_shape(count: int, group_size: int) -> None:
    with pytest.raises(ValueError, match=rf"group_size={group_size}.*\({count},\)"):
        group_relative_advantages(torch.zeros(count), group_size)
