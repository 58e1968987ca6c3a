"""A run reaches its target although its processes die all the time: nothing is lost, doubled or stale."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.chaos_refits import look_at_worlds, refit_flags, sample, unlike_again
from support.chaos_run import REFIT_MOMENTS, REFIT_WEIGHTS, Chaos, Plan
from support.tiny_models import write_models
from support.whole_runs import environment

KILLS = int(os.environ.get("ASYNCRL_KILLS", "14"))
"""Of a run; a hundred and more take minutes, by hand."""
REFIT_KILLS = int(os.environ.get("ASYNCRL_REFIT_KILLS", "6"))
"""Of a run whose world is refitted; a hundred and more take minutes, by hand."""


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


@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.render
@pytest.mark.timeout(270 + 30 * REFIT_KILLS)
def test_no_kill_makes_an_episode_name_a_world_that_did_not_draw_it(tmp_path: Path) -> None:
    plan = Plan(
        kills=REFIT_KILLS,
        updates=12 + REFIT_KILLS // 2,
        worlds=3 + REFIT_KILLS // 10,
        at_once=2,
        roles=tuple(REFIT_WEIGHTS),
        moments=REFIT_MOMENTS,
        deadline=240.0 + 30 * REFIT_KILLS,
    )
    flags = refit_flags(tmp_path / "models")
    report = Chaos(plan, tmp_path, flags, environment(tmp_path) | {"CHAOS_ACCEPT": "1"}).finish()
    assert report.returncode == 0, report.output
    assert len(report.hits) >= plan.kills
    assert report.acknowledged > 0
    assert (report.lost, report.doubled, report.too_old, report.left_over) == ([], [], [], [])
    found = look_at_worlds(tmp_path / "run", tmp_path / "notes.jsonl")
    assert (found.wrong, found.too_old) == ([], [])
    assert len(set().union(*found.drawn.values())) > 2, "several worlds drew what is stored"
    again = sample(found.drawn, 6)
    assert unlike_again(tmp_path / "run", again) == []
    print(
        f"{len(report.hits)} hits in {report.seconds:.0f} s, {report.acknowledged} episodes acknowledged, "
        f"{found.worlds} worlds accepted, {len(found.drawn)} groups stored, {found.mixed} of them drawn by "
        f"several worlds; imagined again and equal: {len(again)}"
    )
