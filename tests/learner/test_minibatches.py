"""How a batch is cut: every episode once per epoch, every decision once per minibatch, ranks in step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.config.sections import OptimizerSettings
from asyncrl.learner.batches import build_batch
from asyncrl.learner.forward import PolicyForward
from asyncrl.learner.optimizer import learning_rate_share
from asyncrl.learner.prepare import build_minibatch, prepare_batch, split_minibatches
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.recipe import build_recipe
from asyncrl.learner.update_metrics import MetricAccumulator
from support.table_policy import TablePolicy, groups_of


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
