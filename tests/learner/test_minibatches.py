"""How a batch is cut: every episode once per epoch, every decision once per minibatch, ranks in step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.config.algorithm import OptimizerSettings
from asyncrl.learner.minibatches import Minibatch, micro_batches, split_minibatches
from asyncrl.learner.optimizer import learning_rate_share
from asyncrl.learner.ranks import SingleRank


class OtherRankNeeds(SingleRank):
    """A group in which another rank makes `passes` passes."""

    size = 2

    def __init__(self, passes: int) -> None:
        self.passes = passes

    def max(self, values: Tensor) -> Tensor:
        return values.clamp(min=float(self.passes))


@given(episodes=st.integers(1, 40), minibatches=st.integers(1, 8), epoch=st.integers(0, 3))
def test_every_episode_is_dealt_once_and_sizes_differ_by_one(
    episodes: int, minibatches: int, epoch: int
) -> None:
    dealt = split_minibatches(episodes, minibatches, (7, 3, epoch))
    assert sorted(torch.cat(dealt).tolist()) == list(range(episodes))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    again = split_minibatches(episodes, minibatches, (7, 3, epoch))
    assert all(torch.equal(a, b) for a, b in zip(dealt, again, strict=True))


def test_another_epoch_or_version_is_dealt_differently() -> None:
    orders = [
        torch.cat(split_minibatches(32, 4, seed)).tolist() for seed in ((0, 0, 0), (0, 0, 1), (0, 1, 0))
    ]
    assert len({tuple(order) for order in orders}) == 3


@given(rows=st.integers(0, 50), size=st.integers(1, 20), others=st.integers(0, 60))
def test_micro_batches_cover_all_rows_and_keep_up_with_the_other_ranks(
    rows: int, size: int, others: int
) -> None:
    places = list(micro_batches(rows, size, OtherRankNeeds(others)))
    real = [place for place in places if place is not None]
    assert [i for place in real for i in range(rows)[place]] == list(range(rows))
    assert all(place.stop - place.start <= size for place in real)
    assert len(places) == max(others, len(real))


def test_a_pass_for_the_others_counts_nothing() -> None:
    ones = torch.ones(3, 8, 7)
    share = Minibatch(
        rows=torch.tensor([4, 5, 6]), counts=ones, token_counts=ones, value_counts=torch.ones(3, 1)
    )
    part = share.part(None)
    assert not part.real
    assert part.rows.tolist() == [0]
    assert float(part.counts.sum() + part.token_counts.sum() + part.value_counts.sum()) == 0
    assert share.part(slice(1, 3)).rows.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("schedule", "version", "share"),
    [
        ("constant", 3, 1.0),
        ("constant", 0, 0.5),
        ("linear", 6, 0.55),
        ("linear", 99, 0.1),
        ("cosine", 6, 0.55),
    ],
)
def test_the_learning_rate_by_hand(schedule: str, version: int, share: float) -> None:
    # Warm-up over 2 updates, decay over 8 more to a tenth: halfway at 6.
    settings = OptimizerSettings(schedule=schedule, warmup_updates=2, final_lr_share=0.1)  # pyright: ignore
    assert learning_rate_share(settings, version, updates=10) == pytest.approx(share)
    longer = OptimizerSettings(schedule=schedule, warmup_updates=2, final_lr_share=0.1, decay_updates=10)  # pyright: ignore
    assert learning_rate_share(longer, version, updates=1000) == pytest.approx(share)
