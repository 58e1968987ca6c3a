"""Whole runs in every kind of world: two stages, models that wait in host memory, and an actor that joins."""

import os
import signal
from pathlib import Path

import pytest

from asyncrl.observability import metrics_system as s
from asyncrl.observability import process_status
from asyncrl.replay_tools.episodes import read_rows, replay_folder
from support.join_site import Site
from support.tiny_models import WORLDS, write_models
from support.whole_runs import left_over, rows

KINDS = ["wan", *(pytest.param(kind, marks=pytest.mark.long) for kind in WORLDS if kind != "wan")]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_every_kind_of_world_offloads_and_takes_another_actor(kind: str, tmp_path: Path) -> None:
    flags = [*write_models(tmp_path / "models", kind), "--placement", "learner=0,actor=1"]
    flags += ["--actor.pipeline-stages", "2", "--actor.offload", "--replay.max-lag", "1"]
    with Site(tmp_path, [*flags, "--updates", "10"], "actor-1") as site:
        site.progress(1)
        (own,) = (one.pid for one in process_status.read(site.run) if one.role == "actor-1" and one.alive)
        os.kill(own, signal.SIGSTOP)  # So that the run is not over before the other one has joined.
        far = site.actor("far")
        site.train.until("far joined (1 joined actor now)")
        site.progress(3)
        os.kill(own, signal.SIGCONT)
        assert "Traceback" not in site.train.ends()
        assert "far: the run is over" in far.ends()
    found = rows(site.run)
    assert [row["step"] for row in found] == list(range(1, 11))
    assert all(row[s.LAG_MAX.name] <= 1 for row in found)
    used = [row for row in read_rows(replay_folder(site.run)) if row.used_at is not None]
    assert {row.episode.actor for row in used} == {"actor-1", "far"}
    assert max(row.get(s.ACTOR_OFFLOADED.name, 0) for row in found) > 0
    assert left_over(tmp_path) == []
    assert list((tmp_path / "tmp").glob("asyncrl-*")) == []
