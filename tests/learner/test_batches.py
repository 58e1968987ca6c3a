"""From groups of episodes to a batch and its minibatches, and metrics over micro-batches and ranks."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.config.sections import OptimizerSettings
from asyncrl.errors import ReplayError
from asyncrl.learner.batches import batch_metrics as metrics_of_outcomes
from asyncrl.learner.batches import build_batch, group_outcome, valid_steps
from asyncrl.learner.forward import PolicyForward
from asyncrl.learner.optimizer import learning_rate_share
from asyncrl.learner.prepare import build_minibatch, prepare_batch, split_minibatches
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.recipe import build_recipe
from asyncrl.learner.update_metrics import MetricAccumulator, variance
from asyncrl.observability import metrics_system as r
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import Metric
from asyncrl.records import Episode
from asyncrl.replay.admission import problem_with
from support.table_policy import TablePolicy, episode, groups_of


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


class OtherRankNeeds(LearnerRanks):
    """Ranks of which another one makes `passes` passes."""

    size = 2

    def __init__(self, passes: int) -> None:
        self.passes = passes

    def max(self, values: Tensor) -> Tensor:
        return values.clamp(min=float(self.passes))


def forward_in(ranks: LearnerRanks, size: int) -> PolicyForward:
    return PolicyForward(TablePolicy(), ranks, torch.device("cpu"), micro_batch=size)  # type: ignore[arg-type]


@given(episodes=st.integers(1, 40), minibatches=st.integers(1, 8), epoch=st.integers(0, 3))
def test_every_episode_is_used_once_and_sizes_differ_by_one(episodes, minibatches, epoch) -> None:
    dealt = split_minibatches(episodes, minibatches, (7, 3, epoch))
    assert sorted(torch.cat(dealt).tolist()) == list(range(episodes))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    again = split_minibatches(episodes, minibatches, (7, 3, epoch))
    assert all(torch.equal(a, b) for a, b in zip(dealt, again, strict=True))


def test_another_epoch_or_version_is_shared_out_differently() -> None:
    orders = [
        torch.cat(split_minibatches(32, 4, seed)).tolist() for seed in ((0, 0, 0), (0, 0, 1), (0, 1, 0))
    ]
    assert len({tuple(order) for order in orders}) == 3


@given(rows=st.integers(0, 50), size=st.integers(1, 20), others=st.integers(0, 60))
def test_micro_batches_cover_all_rows_and_keep_up_with_the_other_ranks(rows, size, others) -> None:
    found = forward_in(OtherRankNeeds(others), size).split(rows)
    own = [part for part in found if part is not None]
    assert [i for part in own for i in range(rows)[part]] == list(range(rows))
    assert all(part.stop - part.start <= size for part in own)
    assert len(found) == max(others, len(own))
    if size > 2 and rows > 1:
        assert all(part.stop - part.start > 1 for part in own), "a pass of one row is compiled for itself"


def test_a_pass_for_the_others_counts_nothing() -> None:
    batch = build_batch(groups_of([[10, -1], [-1, -1]]), version=0)
    recipe = build_recipe(AlgorithmSettings(group_size=2), CorrectionSettings(), CriticSettings())
    forward = forward_in(LearnerRanks(), 32)
    prepared = prepare_batch(batch, recipe, forward, MetricAccumulator())
    minibatch = build_minibatch(batch, prepared, torch.arange(4), recipe, forward, 6)
    assert minibatch.rows.tolist() == [0, 1, 2, 3, 0]  # The second group carries no signal.
    part = minibatch.part(None)
    assert part.rows.tolist() == [0]
    assert float(part.unit_weights.sum() + part.token_weights.sum() + part.value_weights.sum()) == 0
    assert not part.mask.any()
    assert minibatch.part(slice(1, 3)).rows.tolist() == [1, 2]
    assert float(minibatch.unit_weights.sum()) == pytest.approx(
        float(batch.mask[:4].sum() / batch.mask.sum())
    )


@pytest.mark.parametrize(
    ("schedule", "version", "share"),
    [("constant", 3, 1.0), ("constant", 0, 0.5), ("linear", 6, 0.5), ("linear", 99, 0.0), ("cosine", 6, 0.5)],
)
def test_the_learning_rate_by_hand(schedule: str, version: int, share: float) -> None:
    # Warm-up over 2 updates, decay over 8 more: halfway at 6.
    settings = OptimizerSettings(schedule=schedule, warmup_updates=2)  # pyright: ignore
    assert learning_rate_share(settings, version, updates=10) == pytest.approx(share)
    longer = OptimizerSettings(schedule=schedule, warmup_updates=2, decay_updates=10)  # pyright: ignore
    assert learning_rate_share(longer, version, updates=1000) == pytest.approx(share)


class Twice(LearnerRanks):
    """Two ranks that hold the same."""

    size = 2

    def sum(self, values: Tensor) -> Tensor:
        return 2 * values


@given(cuts=st.lists(st.integers(0, 12), max_size=3))
def test_a_mean_is_the_same_whatever_the_micro_batches_were(cuts: list[int]) -> None:
    g = torch.Generator().manual_seed(0)
    values, mask = torch.randn(12, 8, 7, generator=g), torch.rand(12, 8, 7, generator=g) < 0.5
    values[~mask] = math.nan
    metrics, edges = MetricAccumulator(), [0, *sorted(cuts), 12]
    for start, stop in itertools.pairwise(edges):
        if stop > start:
            metrics.mean(m.ENTROPY_LOSS, values[start:stop], mask[start:stop])
            metrics.largest(m.IMPORTANCE_MAX, values[start:stop], mask[start:stop])
            metrics.moments("x", values[start:stop], mask[start:stop])
    found = metrics.reduce(Twice())
    valid = values[mask].double()
    assert found[m.ENTROPY_LOSS] == pytest.approx(float(valid.mean()))
    assert found[m.IMPORTANCE_MAX] == pytest.approx(float(valid.max()))
    assert variance(found, "x") == pytest.approx(float(valid.var(correction=0)))


def test_totals_are_per_optimizer_step() -> None:
    metrics = MetricAccumulator()
    for part in (1.0, 2.0, 3.0):
        metrics.total(m.LOSS, torch.tensor(part))
    assert metrics.reduce(LearnerRanks(), 2)[m.LOSS] == 3.0
    assert metrics.reduce(Twice(), 2)[m.LOSS] == 6.0  # Each rank holds its part of the loss.


def test_what_has_no_valid_value_is_left_out() -> None:
    metrics = MetricAccumulator()
    metrics.mean(m.RATIO, torch.ones(3), torch.tensor(False))
    assert m.RATIO not in metrics.reduce(LearnerRanks())
    assert math.isnan(variance(metrics.reduce(LearnerRanks()), "x"))
