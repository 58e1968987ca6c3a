"""Which tokens count: against literal cases and against the sentence that defines them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.episode_layout import problem_with
from asyncrl.learner.batches import token_mask, valid_steps
from asyncrl.records import Episode
from support.table_policy import episode


def two_decisions(rewards: list[float], *, success: bool) -> Episode:
    reason = "success" if success else "truncated"
    return replace(
        episode(rows=(0, 1)), rewards=np.array(rewards, np.float32).reshape(2, 8), end_reason=reason
    )


def solved_at(step: int) -> Episode:
    return two_decisions([float(n == step) for n in range(16)], success=True)


@given(st.lists(st.sampled_from([-0.1, 0.0, 0.1]), min_size=16, max_size=16), st.integers(8, 15))
def test_rewards_on_the_way_neither_end_an_episode_nor_are_lost(rewards: list[float], last: int) -> None:
    truncated = two_decisions(rewards, success=False)
    assert valid_steps(truncated).all()
    assert truncated.total_reward == pytest.approx(sum(rewards), abs=1e-6)
    solved = two_decisions([*rewards[:last], 1.0, *[0.0] * (15 - last)], success=True)
    assert (valid_steps(solved).sum(), problem_with(solved)) == (last + 1, None)
    assert solved.total_reward == pytest.approx(sum(rewards[:last]) + 1, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([1.0] + [0.0] * 15, "no step of the last decision"),
        ([0.0] * 8 + [1.0] + [-0.1] * 7, "behind the step"),
    ],
)
def test_rewards_that_contradict_the_end_are_refused(rewards: list[float], said: str) -> None:
    assert said in str(problem_with(two_decisions(rewards, success=True)))


def test_all_seven_tokens_of_a_step_share_its_validity() -> None:
    mask = token_mask(valid_steps(solved_at(10)), 7)
    assert mask.shape == (2, 8, 7)
    assert mask.sum() == 11 * 7
    assert mask[1, 2].all()
    assert not mask[1, 3].any()
