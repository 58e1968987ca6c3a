"""The simulation of many GPUs, with small numbers whose results follow from a formula."""

from importlib import import_module
from typing import Any

import pytest

from support import ROOT


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> Any:
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(ROOT / "benchmarks")
    yield
    patch.undo()


def simulated(seed: int = 0, updates: int = 30, **changes: Any) -> Any:
    """Two actors of 8 slots that imagine 4 groups of 4 episodes of 4 decisions; a batch takes them 4 s."""
    module = import_module("simulated_run")
    plain = {
        "actors": 2, "slots": 8, "round_seconds": 1.0, "update_seconds": 2.0, "group_size": 4,
        "groups_per_update": 4, "decisions": 4, "max_lag": 2,
    }  # fmt: skip
    scale = module.Scale(**(plain | changes))
    return module.Simulation(scale, seed).run(updates, skip=10)


@pytest.mark.parametrize("update_seconds", [1.0, 4.0, 20.0])
def test_the_slower_side_sets_the_pace(update_seconds: float) -> None:
    found = simulated(update_seconds=update_seconds)
    assert found.seconds == pytest.approx(max(update_seconds, 4.0), rel=0.02)
    assert found.decisions_per_second == pytest.approx(64 / found.seconds)
    assert found.learner_waits == pytest.approx(max(0, 1 - update_seconds / 4), abs=0.03)
    assert found.actors_wait == pytest.approx(max(0, 1 - 4 / update_seconds), abs=0.03)


def test_the_measured_runs_are_made_again() -> None:
    scale = import_module("simulated_run")
    for gpus, actors, asynchronous, synchronous, learner, imagining, _, credit in scale.MEASURED:
        for lag, measured in ((2, asynchronous), (0, synchronous)):
            times = scale.measured_scale(actors, learner, imagining, max_lag=lag)
            found = scale.Simulation(times, 0).run(40, skip=10)
            assert found.decisions_per_second * 8 * 3600 == pytest.approx(measured, rel=0.1)
            assert found.lag_max <= lag
            if lag:
                assert found.actors_wait == pytest.approx(credit, abs=0.1)
        assert gpus == 2 * actors
