"""The registry of metrics: folding rules, names, and the generated page."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import metrics as m
from asyncrl.metrics import Metric, Over, as_markdown, reduce

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"


@pytest.mark.parametrize(
    ("over", "expected"),
    [(Over.MEAN, 3.0), (Over.SUM, 9.0), (Over.MAX, 6.0), (Over.MIN, 1.0), (Over.LAST, 2.0)],
)
def test_each_rule_folds_its_own_way(over: Over, expected: float) -> None:
    metric = Metric("x", over, "1", "")
    assert reduce([{metric: 6.0}, {metric: 1.0}, {metric: 2.0}]) == {metric: expected}


def test_a_reading_that_is_absent_from_a_row_does_not_count() -> None:
    assert reduce([{m.LOSS: 4.0}, {}, {m.LOSS: 2.0, m.LAG_MAX: 7.0}]) == {m.LOSS: 3.0, m.LAG_MAX: 7.0}


def test_no_rows_fold_to_nothing() -> None:
    assert reduce([]) == {}


def test_the_names_others_rely_on_are_there() -> None:
    names = (
        "train/actor/approx_kl train/actor/clip_fraction train/actor/clipped_ratio train/actor/grad_norm "
        "train/actor/lr train/actor/policy_loss train/critic/value_loss train/critic/value_clip_ratio "
        "train/critic/explained_variance train/entropy_loss train/loss rollout/advantages_max "
        "rollout/advantages_mean rollout/advantages_min rollout/rewards env/episode_len env/return "
        "env/reward env/success_once"
    )
    assert set(names.split()) <= m.REGISTRY.keys()


def test_the_page_in_docs_is_current() -> None:
    assert PAGE.read_text() == as_markdown(), "run: python -m asyncrl metrics > docs/metrics.md"
