"""Metrics over micro-batches and ranks: exact means whatever the cuts, maxima, moments."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.update_metrics import MetricAccumulator, variance
from asyncrl.observability import metrics_training as m


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
