"""Whole runs in every kind of world: actors offload, are lost, come back and join."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.messaging.keys import create_keys
from asyncrl.observability import metrics_system as s
from asyncrl.observability import process_status
from asyncrl.replay_tools.episodes import read_rows, replay_folder
from support.tiny_models import WORLDS, write_models
from support.whole_runs import ACTOR, PATIENCE, TRAIN, Program, free_port, left_over, reach, rows

KINDS = ["wan", *(pytest.param(kind, marks=pytest.mark.long) for kind in WORLDS if kind != "wan")]
UPDATES = 10
MAX_LAG = 1
OWN = "actor-1"
FAR = "far"


class KindRun:
    """A run of 10 updates, which an actor can join."""

    def __init__(self, tmp_path: Path, flags: list[str]) -> None:
        self.tmp_path, self.run = tmp_path, tmp_path / "run"
        self.endpoint, self.keys = f"tcp://127.0.0.1:{free_port()}", tmp_path / "keys"
        create_keys(self.keys, ["learner", OWN, FAR])
        train = ["--placement", "learner=0,actor=1", "--actor.pipeline-stages", "2", "--actor.offload"]
        train += ["--replay.listen", self.endpoint, "--replay.keys", str(self.keys)]
        train += ["--replay.max-lag", str(MAX_LAG), "--updates", str(UPDATES), "--run-dir", str(self.run)]
        self.programs: list[Program] = []
        self.train = self._start("train", [*TRAIN, *flags, *train])

    def join(self) -> Program:
        """Start the other actor, and wait until it has joined."""
        command = [*ACTOR, "--join", self.endpoint, "--keys", str(self.keys), "--name", FAR]
        far = self._start(FAR, [*command, "--device", "cpu", "--threads", "1"])
        far.until("joined")  # or it ended, and has said why
        self.train.until(f"{FAR} joined (1 joined actor now)")
        return far

    def _start(self, name: str, command: Sequence[str]) -> Program:
        self.programs.append(Program(self.tmp_path, name, [*command]))
        return self.programs[-1]

    def own_actor(self, *, not_pid: int = 0) -> int:
        """Wait for the run's own actor; returns its process id, which is not `not_pid`."""
        deadline = time.monotonic() + PATIENCE
        while True:
            found = [one.pid for one in process_status.read(self.run) if one.role == OWN and one.alive]
            if found and found != [not_pid]:
                return found[0]
            assert self.train.process.poll() is None, self.train.said()
            assert time.monotonic() < deadline, self.train.said()
            time.sleep(0.02)

    def goes_on(self) -> None:
        """Wait for one more update."""
        reach(self.run, len(rows(self.run)) + 1, self.train.process, PATIENCE)


def lose_one_and_take_another(run: KindRun) -> Program:
    """Kill the run's own actor and let another one join; returns that.

    Whatever else the machine is busy with, either has to work while the other one does not.
    """
    reach(run.run, 1, run.train.process, PATIENCE)
    first = run.own_actor()
    os.kill(first, signal.SIGSTOP)  # so that the run is not over before the other one has joined
    far = run.join()
    os.kill(first, signal.SIGKILL)
    run.goes_on()
    far.process.send_signal(signal.SIGSTOP)
    run.train.until(f"{OWN} died and came back (respawn 1)")
    assert run.own_actor(not_pid=first) != first
    run.goes_on()
    far.process.send_signal(signal.SIGCONT)
    return far


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_survives_the_loss_of_an_actor_and_takes_another_one(kind: str, tmp_path: Path) -> None:
    run = KindRun(tmp_path, write_models(tmp_path / "models", kind))
    try:
        far = lose_one_and_take_another(run)
        assert "Traceback" not in run.train.ends()
        assert f"{FAR}: the run is over" in far.ends()
    finally:
        for program in run.programs:
            program.process.kill()
    found = rows(run.run)
    assert [row["step"] for row in found] == list(range(1, UPDATES + 1))
    assert all(row[s.LAG_MAX.name] <= MAX_LAG for row in found)
    assert max(row.get(s.ACTOR_OFFLOADED.name, 0) for row in found) > 0
    used = [row for row in read_rows(replay_folder(run.run)) if row.used_at is not None]
    assert {row.episode.actor for row in used} == {OWN, FAR}
    assert left_over(tmp_path) == []
    assert list((tmp_path / "tmp").glob("asyncrl-*")) == []
