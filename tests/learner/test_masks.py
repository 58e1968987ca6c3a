"""Which tokens count: against literal cases and against the sentence that defines them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.batches import token_mask, valid_steps


def rewards(decisions: int, *successes: int) -> np.ndarray:
    out = np.zeros((decisions, 8), np.float32)
    out.reshape(-1)[list(successes)] = 1
    return out


@pytest.mark.parametrize(
    ("successes", "valid"), [((), 16), ((0,), 1), ((7,), 8), ((8,), 9), ((10,), 11), ((15,), 16), ((3, 9), 4)]
)
def test_steps_count_up_to_and_including_the_first_success(successes: tuple[int, ...], valid: int) -> None:
    expected = np.arange(16) < valid
    np.testing.assert_array_equal(valid_steps(rewards(2, *successes)).reshape(-1), expected)


@given(st.lists(st.booleans(), min_size=24, max_size=24))
def test_a_step_counts_when_no_step_before_it_succeeded(hits: list[bool]) -> None:
    steps = valid_steps(np.array(hits, np.float32).reshape(3, 8)).reshape(-1)
    assert steps.tolist() == [not any(hits[:step]) for step in range(24)]


def test_all_seven_tokens_of_a_step_share_its_validity() -> None:
    mask = token_mask(valid_steps(rewards(2, 10)), 7)
    assert mask.shape == (2, 8, 7)
    assert mask.sum() == 11 * 7
    assert mask[1, 2].all()
    assert not mask[1, 3].any()
