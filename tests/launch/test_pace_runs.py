"""Whole runs with --pace.every: the world is refitted beside the training, which never waits for it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.pace import PaceSettings
from asyncrl.config.run import TrainConfig
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launch import refits
from asyncrl.launch.environment import check_environment
from asyncrl.launch.policies import build_policy
from asyncrl.observability import metrics_pace as m
from support.accepted_worlds import accept
from support.join_site import Site
from support.pace_runs import Running, flags, worlds_of, write_models_and_base
from support.recorded import recorded_spec, write_recorded
from support.whole_runs import left_over, rows

pytestmark = pytest.mark.render


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("models")
    return folder, write_models_and_base(folder)


def newest_drawn(run: Running, groups: int = 1) -> set[int]:
    """The worlds that drew the newest stored groups."""
    return {world for _, found in sorted(worlds_of(run.folder).items())[-groups:] for world in found}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_accepted_worlds_reach_actors_also_those_that_come_back(models, tmp_path) -> None:
    with Running(tmp_path, flags(models, **{"pace.every": 10_000})) as run:
        run.until(lambda: newest_drawn(run) == {0}, "the world of the beginning imagines")
        accept(run.folder, models[0] / "world", 1)
        run.until(lambda: newest_drawn(run) == {1}, "world 1 imagines")
        run.until(lambda: rows(run.folder)[-1][m.WORLD_VERSION.name] == 1, "a row says so")
        run.replaced("actor-0")
        at = max(worlds_of(run.folder))
        run.until(lambda: max(worlds_of(run.folder)) > at + 6, "the new actor imagines")
        assert newest_drawn(run, groups=4) == {1}, "it took the run's world before it began"
        for version in (2, 3):
            accept(run.folder, models[0] / "world", version)
        run.until(lambda: newest_drawn(run) == {3}, "world 3 imagines")
        for found in worlds_of(run.folder).values():
            assert max(found) - min(found) <= 1, "no group reaches over more than the bound"
        run.end()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_an_actor_that_dies_while_a_world_is_sent_comes_back_with_the_newest_one(models, tmp_path) -> None:
    with Running(tmp_path, flags(models, **{"pace.every": 10_000})) as run:
        accept(run.folder, models[0] / "world", 1)
        run.until(lambda: newest_drawn(run) == {1}, "world 1 imagines")
        (actor,) = run.pids("actor-0")
        os.kill(actor, signal.SIGSTOP)
        accept(run.folder, models[0] / "world", 2)
        run.until(lambda: run.doing("learner-0", " version 2"), "world 2 is on its way")
        accept(run.folder, models[0] / "world", 3)
        before = set(worlds_of(run.folder))
        os.kill(actor, signal.SIGKILL)
        run.until(lambda: run.pids("actor-0") not in ([], [actor]), "the actor came back")
        run.until(lambda: len(worlds_of(run.folder).keys() - before) > 4, "it imagines")
        later = {number: worlds for number, worlds in worlds_of(run.folder).items() if number not in before}
        assert all(set(worlds) <= {2, 3} for worlds in later.values()), later
        run.until(lambda: newest_drawn(run) == {3}, "world 3 imagines")
        run.end()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_accepted_worlds_reach_an_actor_that_joined(models, tmp_path) -> None:
    site = Site(tmp_path, flags(models, **{"pace.every": 10_000}))

    def until(true: Any, what: str) -> None:
        deadline = time.monotonic() + 90
        while not true():
            assert site.train.process.poll() is None, site.train.said()
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def drawn() -> set[int]:
        return {world for found in worlds_of(site.run).values() for world in found}

    try:
        site.train.until("waits up to 600 s")
        first = site.actor("first")
        site.progress(2)
        accept(site.run, models[0] / "world", 1)
        until(lambda: 1 in drawn(), "the actor took the new world")
        first.process.send_signal(signal.SIGTERM)
        first.ends()
        at = max(worlds_of(site.run))
        site.actor("second")
        until(lambda: max(worlds_of(site.run)) > at + 4, "another one imagines")
        late = [found for number, found in sorted(worlds_of(site.run).items()) if number > at + 2]
        assert {world for found in late for world in found} == {1}, "it fetched the run's world"
        site.train.process.send_signal(signal.SIGINT)
        assert "Traceback" not in site.train.ends()
    finally:
        for program in site.programs:
            program.process.kill()
    assert left_over(tmp_path) == []


# ---- what is refused -----------------------------------------------------------------------------


def checked(models: tuple[Path, list[str]], **changes: Any) -> None:
    folder = models[0]
    config = TrainConfig(
        policy=str(folder / "policy"),
        world=str(folder / "world"),
        start_states=str(folder / "starts.h5"),
        device="cpu",
    )
    if "world" in changes:  # It is the first to be asked.
        config = replace(config, start_states="tabletop")
    pace = {name: changes.pop(name) for name in list(changes) if name in PaceSettings.__dataclass_fields__}
    config = replace(config, pace=PaceSettings(**({"every": 2} | pace)), **changes)
    policy = build_policy(config, torch.device("cpu"))
    refits.check(config, check_environment(config), policy)


def test_what_can_be_done_is_not_refused(models, tmp_path: Path) -> None:
    checked(models)
    checked(models, recordings=str(tmp_path))
    write_recorded(tmp_path / "base", recorded_spec(64, simulator="tabletop"), (9,))
    checked(models, base=(str(tmp_path / "base"),))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"world": "tabletop_true"}, "tabletop_true is a simulator: it is the truth"),
        ({"recordings": "/no/such/folder"}, "--pace.recordings /no/such/folder is no folder"),
        ({"base": ("/no/such/folder",)}, "--pace.base: /no/such/folder holds no part"),
        ({"simulator": "libero_spatial"}, "libero"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(models, changes: Any, problem: str) -> None:
    with pytest.raises(AsyncRLError, match=problem):
        checked(models, **changes)


def test_recordings_of_another_size_are_no_base(models, tmp_path: Path) -> None:
    write_recorded(tmp_path, recorded_spec(16), (9,))
    with pytest.raises(ConfigError, match="16 x 16 and actions of 7 numbers, but --world draws 64"):
        checked(models, base=(str(tmp_path),))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"simulator": "tabletop", "recordings": "x"}, "come from one of them"),
        ({"every": 2, "world_steps": 0, "reward_steps": 0}, "would refit nothing"),
        ({"budget": 100}, "a round has 256 episodes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        PaceSettings(**changes)
