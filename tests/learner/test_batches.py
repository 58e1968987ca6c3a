"""From groups of episodes to a batch: every number by hand, and what is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ReplayError
from asyncrl.learner.batches import batch_metrics as metrics_of_outcomes
from asyncrl.learner.batches import build_batch, group_outcome, valid_steps
from asyncrl.observability import metrics_system as r
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import Metric
from asyncrl.records import Episode
from asyncrl.replay.admission import problem_with
from support.table_policy import episode, groups_of


def batch_metrics(groups: list[list[Episode]], **about: Any) -> dict[Metric, float]:
    return metrics_of_outcomes([group_outcome(group) for group in groups], **about)


def small_groups() -> list[list[Episode]]:
    """Group 0: success at step 10 of 16, and 8 steps without. Group 1: two failures."""
    return [
        [
            episode(group=0, member=0, rows=(3, 4), success_at=10, versions=(5, 6)),
            episode(group=0, member=1, rows=(1,), versions=(4,)),
        ],
        [episode(group=1, member=i, rows=(2,), versions=(7,)) for i in range(2)],
    ]


def test_a_batch_holds_every_decision_with_its_own_numbers() -> None:
    batch = build_batch(small_groups(), version=7)
    assert batch.frames[:, 0, 0, 0].tolist() == [3, 4, 1, 2, 2]
    assert batch.tasks == ("lift the red block",) * 5
    assert batch.mask.sum(dim=(1, 2)).tolist() == [56, 3 * 7, 56, 56, 56]
    assert batch.rewards.sum(dim=1).tolist() == [0, 1, 0, 0, 0]
    assert batch.rewards[1, 2] == 1
    assert batch.decision_index.tolist() == [0, 1, 0, 0, 0]
    assert batch.final_frames[:, 0, 0, 0].tolist() == [5, 2, 3, 3]
    assert batch.terminated.tolist() == [True, False, False, False]
    assert batch.lag.tolist() == [2, 1, 3, 0, 0]
    assert batch.episode.tolist() == [0, 0, 1, 2, 3]
    assert batch.lengths.tolist() == [11, 8, 8, 8]
    assert batch.returns.tolist() == [1.0, 0.0, 0.0, 0.0]
    first = episode(group=0, member=0, rows=(3, 4), success_at=10, versions=(5, 6))
    np.testing.assert_array_equal(batch.sample["tokens"][:2].numpy(), first.sample["tokens"])
    np.testing.assert_array_equal(batch.behaviour_logprob[:2].numpy(), first.logprobs)
    assert (batch.sample["tokens"].dtype, batch.behaviour_logprob.dtype) == (torch.int64, torch.float32)


def test_metrics_of_a_batch_by_hand() -> None:
    values = batch_metrics(small_groups(), version=7)
    assert values[m.SUCCESS_ONCE] == 0.25
    assert values[m.RETURN] == values[m.REWARDS] == 0.25
    assert values[m.REWARD] == pytest.approx((1 / 11) / 4)
    assert values[m.REWARD_STD] == pytest.approx(0.4330127)  # Of 1, 0, 0, 0: the root of 1/4 - 1/16.
    assert values[m.STEP_REWARD] == pytest.approx(1 / (11 + 8 + 8 + 8))
    assert values[m.TERMINATION_RATE] == 0.25
    assert values[m.EPISODE_LEN] == (11 + 8 + 8 + 8) / 4
    assert values[r.SIGNAL_GROUPS] == 0.5
    assert values[r.LAG_MEAN] == pytest.approx(6 / 5)
    assert values[r.LAG_MAX] == 3
    shares = {metric.name.removeprefix("replay/lag_"): values[metric] for metric in r.LAG_HISTOGRAM}
    assert shares == {"0": 0.4, "1": 0.2, "2": 0.2, "3_4": 0.2, "5_8": 0.0, "9_up": 0.0}


def test_an_episode_that_fails_for_good_counts_as_terminated_and_not_as_solved() -> None:
    solved, failed = episode(rows=(0, 1), success_at=11), episode(member=1, rows=(2,))
    solved.rewards[0, 2] = 0.5
    fallen = dataclasses.replace(failed, end_reason="terminated")
    values = batch_metrics([[solved, fallen]], version=0)
    assert (values[m.SUCCESS_ONCE], values[m.TERMINATION_RATE]) == (0.5, 1.0)
    assert values[m.STEP_REWARD] == pytest.approx(1.5 / 20)  # 12 steps until the success, and 8.
    assert values[m.REWARD] == pytest.approx((1.5 / 12 + 0) / 2)
    assert values[m.REWARD_STD] == 0.75  # Of 1.5 and 0.


@pytest.mark.parametrize("members", [[0], [0, 0], [0, 1, 1], []])
def test_a_group_that_is_not_complete_is_refused(members: list[int]) -> None:
    with pytest.raises(ReplayError, match="each sibling exactly once"):
        build_batch([[episode(member=i) for i in members]], version=0)


def test_siblings_of_two_groups_are_refused() -> None:
    with pytest.raises(ReplayError, match=r"00000000.*00000001"):
        build_batch([[episode(group=0, member=0), episode(group=1, member=1)]], version=0)


def test_a_decision_of_a_later_version_is_refused() -> None:
    with pytest.raises(ReplayError, match="version 9, but the learner is only at 8"):
        build_batch(groups_of([[1, -1]], versions=(8, 9)), version=8)


def two_decisions(rewards: list[float], *, success: bool) -> Episode:
    reason = "success" if success else "truncated"
    return dataclasses.replace(
        episode(rows=(0, 1)), rewards=np.array(rewards, np.float32).reshape(2, 8), end_reason=reason
    )


@given(st.lists(st.sampled_from([-0.1, 0.0, 0.1]), min_size=16, max_size=16), st.integers(8, 15))
def test_rewards_on_the_way_neither_end_an_episode_nor_are_lost(rewards: list[float], last: int) -> None:
    truncated = two_decisions(rewards, success=False)
    assert valid_steps(truncated).all()
    assert truncated.total_reward == pytest.approx(sum(rewards), abs=1e-6)
    solved = two_decisions([*rewards[:last], 1.0, *[0.0] * (15 - last)], success=True)
    assert (valid_steps(solved).sum(), problem_with(solved)) == (last + 1, None)
    assert solved.total_reward == pytest.approx(sum(rewards[:last]) + 1, abs=1e-6)
