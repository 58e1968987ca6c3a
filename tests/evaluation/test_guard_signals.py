"""Signals of a false success by hand, and AUROC against counting every pair."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncrl.evaluation.guard_signals import auroc, signals_of


def end(scores: np.ndarray) -> int | None:
    hits = np.flatnonzero((scores >= 0.7).any(1))
    return int(hits[0]) if hits.size else None


def test_signals_are_those_of_the_decision_that_succeeds() -> None:
    scores = np.array([[0.1, 0.2], [0.9, 0.6]], np.float32)
    others = np.array([[0.8, 0.1], [0.3, 0.5]], np.float32)
    frames = np.zeros((4, 1, 1, 3), np.uint8)
    drawn = frames.copy()
    drawn[:2], drawn[2], drawn[3] = 200, 10, 30
    found = signals_of((scores, frames), (others, drawn), threshold=0.7, end=end)
    assert found == pytest.approx(
        {
            "decision": 2,
            "last frame": 0.4,
            "best frame": 0.1,
            "frames that score": 0.5,
            "second draw: verdict": 0,
            "second draw: best frame": 0.1,
            "second draw: last frame of both": 0.5,
            "second draw: pictures": 20,
        },
        abs=1e-6,
    )
    none = signals_of((scores, frames), (others / 2, drawn), threshold=0.7, end=end)
    assert none["second draw: verdict"] == 1


@pytest.mark.parametrize("seed", range(5))
def test_auroc_is_the_share_of_pairs_in_the_right_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, false, strata = rng.integers(0, 6, 40), rng.random(40) < 0.4, rng.integers(0, 3, 40)

    def slow(same: bool) -> float:
        won = [
            0.5 * (float(values[i] > values[j]) + float(values[i] >= values[j]))
            for i in range(40)
            for j in range(40)
            if false[i] and not false[j] and (not same or strata[i] == strata[j])
        ]
        return float(np.mean(won))

    assert auroc(values.tolist(), false.tolist()) == pytest.approx(slow(False))
    assert auroc(values.tolist(), false.tolist(), strata.tolist()) == pytest.approx(slow(True))


def test_without_a_pair_there_is_no_number() -> None:
    assert math.isnan(auroc([0.1, 0.2], [True, True]))
    assert math.isnan(auroc([], []))
    assert math.isnan(auroc([0.1, 0.2], [True, False], [1, 2]))
