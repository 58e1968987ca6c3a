"""A run reaches its target although its processes die all the time: nothing is lost, doubled or stale."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.chaos_run import Chaos, Plan
from support.tiny_models import write_models
from support.whole_runs import environment

KILLS = int(os.environ.get("ASYNCRL_KILLS", "14"))
"""Of a run; a hundred and more take minutes, by hand."""


@pytest.mark.chaos
@pytest.mark.multiprocess
@pytest.mark.timeout(150 + 20 * KILLS)
def test_a_run_survives_kills(tmp_path: Path) -> None:
    flags = write_models(tmp_path / "models")
    plan = Plan(kills=KILLS, updates=10 + KILLS, deadline=130.0 + 20 * KILLS)
    report = Chaos(plan, tmp_path, flags, environment(tmp_path)).finish()
    assert report.returncode == 0, report.output
    assert len(report.hits) >= plan.kills
    assert {hit.role for hit in report.hits} >= {"actor-1", "actor-2", "replay", "learner-0"}
    assert report.versions == plan.updates
    assert report.acknowledged > 0
    assert (report.lost, report.doubled, report.too_old, report.left_over) == ([], [], [], [])
    assert list((tmp_path / "tmp").glob("asyncrl-*")) == []
