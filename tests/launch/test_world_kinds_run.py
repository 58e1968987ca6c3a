"""Whole runs in every kind of world: actors offload, are lost, come back and join."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from asyncrl.observability import metrics_system as s
from asyncrl.observability import process_status
from asyncrl.replay_tools.episodes import read_rows, replay_folder
from support.join_site import Site
from support.tiny_models import WORLDS, write_models
from support.whole_runs import PATIENCE, Program, left_over, rows

KINDS = ["wan", *(pytest.param(kind, marks=pytest.mark.long) for kind in WORLDS if kind != "wan")]
UPDATES = 10
MAX_LAG = 1
OWN = "actor-1"
FAR = "far"


def own_actor(site: Site, *, not_pid: int = 0) -> int:
    """Wait for the run's own actor; returns its process id, which is not `not_pid`."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = [one.pid for one in process_status.read(site.run) if one.role == OWN and one.alive]
        if found and found != [not_pid]:
            return found[0]
        assert site.train.process.poll() is None, site.train.said()
        assert time.monotonic() < deadline, site.train.said()
        time.sleep(0.02)


def lose_one_and_take_another(site: Site) -> Program:
    """Kill the run's own actor and let another one join; returns that.

    Whatever else the machine is busy with, either has to work while the other one does not.
    """
    site.progress(1)
    first = own_actor(site)
    os.kill(first, signal.SIGSTOP)  # so that the run is not over before the other one has joined
    far = site.actor(FAR)
    far.until("joined")  # or it ended, and has said why
    site.train.until(f"{FAR} joined (1 joined actor now)")
    os.kill(first, signal.SIGKILL)
    site.progress(1)
    far.process.send_signal(signal.SIGSTOP)
    site.train.until(f"{OWN} died and came back (respawn 1)")
    assert own_actor(site, not_pid=first) != first
    site.progress(1)
    far.process.send_signal(signal.SIGCONT)
    return far


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_survives_the_loss_of_an_actor_and_takes_another_one(kind: str, tmp_path: Path) -> None:
    flags = [*write_models(tmp_path / "models", kind), "--placement", "learner=0,actor=1"]
    flags += ["--actor.pipeline-stages", "2", "--actor.offload"]
    flags += ["--replay.max-lag", str(MAX_LAG), "--updates", str(UPDATES)]
    with Site(tmp_path, flags, OWN) as site:
        far = lose_one_and_take_another(site)
        assert "Traceback" not in site.train.ends()
        assert f"{FAR}: the run is over" in far.ends()
    found = rows(site.run)
    assert [row["step"] for row in found] == list(range(1, UPDATES + 1))
    assert all(row[s.LAG_MAX.name] <= MAX_LAG for row in found)
    assert max(row.get(s.ACTOR_OFFLOADED.name, 0) for row in found) > 0
    used = [row for row in read_rows(replay_folder(site.run)) if row.used_at is not None]
    assert {row.episode.actor for row in used} == {OWN, FAR}
    assert left_over(tmp_path) == []
    assert list((tmp_path / "tmp").glob("asyncrl-*")) == []
