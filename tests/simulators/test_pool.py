"""The pool of simulators: answers come as they are ready, and what is lost is played again."""

import itertools
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import ConfigError, RunError
from asyncrl.simulators import pool as pools
from asyncrl.simulators.interface import Demonstrator, Seen, SimStart, SimulatorSource, random_start
from asyncrl.simulators.pool import SimulatorPool, SlotAnswer
from asyncrl.simulators.pool_worker import Worker
from asyncrl.simulators.rollout import Observations, Play, rollout
from support.simulated import COUNTING, CountingPlace


def source(places: int = 1, *settings: str, name: str = COUNTING, horizon: int = 0) -> SimulatorSource:
    return SimulatorSource(name=name, places=places, settings=settings, horizon=horizon)


def take(pool: SimulatorPool, count: int) -> dict[int, SlotAnswer]:
    """Wait for the answers of so many slots."""
    found: dict[int, SlotAnswer] = {}
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline
        found |= {answer.slot: answer for answer in pool.ready(10)}
    return found


def actions(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (steps, 7)).astype(np.float32)


def still(shown: Observations) -> np.ndarray:
    return np.zeros((len(shown.tasks), 8, 7), np.float32)


def plays(*seeds: int) -> list[Play]:
    return [Play(start=SimStart(name=f"seed-{seed}", task="", seed=seed)) for seed in seeds]


def test_an_answer_holds_what_was_asked_for() -> None:
    with SimulatorPool(source(2), workers=0) as pool:
        pool.reset(1, random_start(pool.spec, 6))
        first = take(pool, 1)[1]
        assert (first.task, first.steps, first.frames.shape) == ("put a on b", 0, (1, 2, 2, 2, 3))
        assert first.poses.shape == (1, 0), "it shows none"
        pool.step(1, actions(8))
        last = take(pool, 1)[1]
        assert (last.steps, last.success.tolist()) == (6, [False] * 5 + [True]), "it ends with success"
        assert last.frames[:, 0, 0, 0, 0].tolist() == [6]
        np.testing.assert_array_equal(last.actions, actions(8)[:6])
        pool.reset(1, random_start(pool.spec, 6))
        take(pool, 1)
        pool.step(1, actions(8), frames="all", past_success=True)
        every = take(pool, 1)[1]
        assert every.frames[:, 0, 0, 0, 0].tolist() == every.states[:, 1].tolist() == list(range(1, 9))
        assert every.rewards.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.multiprocess
def test_nobody_waits_for_the_slowest(tmp_path: Path) -> None:
    with SimulatorPool(source(1, f"accident=hang@{tmp_path / 'hung'}"), workers=2) as pool:
        for slot in range(2):
            pool.reset(slot, random_start(pool.spec, 100))
        take(pool, 2)
        pool.step(0, actions(8))
        while not (tmp_path / "hung").exists():
            time.sleep(0.01)
        began = time.monotonic()
        for _ in range(3):
            pool.step(1, actions(8))
            assert list(take(pool, 1)) == [1]
        assert time.monotonic() - began < 30


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["kill", "raise", pytest.param("hang", marks=pytest.mark.slow)])
def test_what_a_lost_worker_played_is_played_again_with_the_same_result(kind: str, tmp_path, caplog) -> None:
    def results(*settings: str) -> list[tuple[int, int, list[float]]]:
        with SimulatorPool(source(2, *settings), workers=2, timeout=8) as pool:
            played = rollout(pool, still, plays(*range(101, 113)), keep_frames=True)
            return sorted((e.seed, e.steps, e.states[:, 1].tolist()) for e in played)

    undisturbed = results()
    assert results(f"accident={kind}@{tmp_path / 'happened'}") == undisturbed
    assert (tmp_path / "happened").exists()
    said = {"kill": "exit code -9", "raise": "the robot fell over", "hang": "did not answer within 8 s"}[kind]
    assert "The simulator worker" in caplog.text
    assert said in caplog.text


@pytest.mark.multiprocess
def test_a_worker_that_is_built_slowly_has_its_time_to_answer_all_the_same() -> None:
    with SimulatorPool(source(1, "seconds=1.5"), workers=2, timeout=1.0) as pool:
        for slot in range(pool.slots):
            pool.reset(slot, random_start(pool.spec, 7))
        answers = [answer for _ in range(pool.slots) for answer in pool.ready(20.0)]
    assert {answer.slot for answer in answers} == {0, 1}
    assert [answer.lost for answer in answers] == ["", ""]


@pytest.mark.multiprocess
def test_a_worker_that_dies_within_a_message_is_lost() -> None:
    with SimulatorPool(source(1), workers=1) as pool:
        pool.reset(0, random_start(pool.spec, 7))
        take(pool, 1)
        member = pool._members[0]
        assert isinstance(member, pools._WorkerProcess)
        member.pipe.close()
        member.pipe, theirs = multiprocessing.Pipe()
        os.write(
            theirs.fileno(), (1000).to_bytes(4, "big") + b"[{"
        )  # The length of a message, and its begin.
        theirs.close()
        member.process.kill()
        (answer,) = pool.ready(10)
        assert "died with exit code" in answer.lost


def test_a_pool_that_loses_worker_after_worker_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MOST_LOST", 2)
    pool = SimulatorPool(source(1, "accident=raise@/dev/null/never"), workers=1)
    with pool, pytest.raises(RunError, match="It is number 2 that was lost, so the pool gives up"):
        list(rollout(pool, still, plays(100)))


def test_what_nobody_looks_at_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    look = CountingPlace.look
    monkeypatch.setattr(CountingPlace, "look", lambda place: (drawn.append(place.steps), look(place))[1])
    with SimulatorPool(source(1), workers=0) as pool:
        for frames, seed, wanted in (
            ("none", 100, [0]),
            ("last", 100, [0, 8]),
            ("all", 100, list(range(9))),
            ("last", 103, [0, 3]),  # It ends before the step whose picture was asked for.
            ("none", 103, [0]),
        ):
            drawn.clear()
            pool.reset(0, random_start(pool.spec, seed))
            take(pool, 1)
            pool.step(0, actions(8), frames=frames)
            take(pool, 1)
            assert drawn == wanted, (frames, seed)


def test_steps_may_be_cut_anywhere() -> None:
    made = actions(11)
    results = []
    for cuts in ([1] * 11, [8, 3], [5, 6]):
        with SimulatorPool(source(1), workers=0) as pool:
            pool.reset(0, random_start(pool.spec, 100))
            take(pool, 1)
            parts = []
            for a, b in itertools.pairwise(np.cumsum([0, *cuts])):
                pool.step(0, made[a:b], frames="all")
                parts.append(take(pool, 1)[0].states)
            results.append(np.concatenate(parts))
    for states in results[1:]:
        np.testing.assert_array_equal(states, results[0])


def test_requests_that_do_not_fit_are_refused() -> None:
    with SimulatorPool(source(1), workers=0) as pool:
        pool.reset(0, random_start(pool.spec, 1))
        with pytest.raises(ValueError, match="still asked"):
            pool.reset(0, random_start(pool.spec, 1))
        with pytest.raises(ValueError, match="slot 1 is not one of 1"):
            pool.reset(1, random_start(pool.spec, 1))
        take(pool, 1)
        for wrong in (actions(8)[:, :6], np.full((8, 7), np.nan, np.float32), actions(8)[0], actions(0)):
            with pytest.raises(ConfigError, match=r"The policy chose actions .*\[steps, 7\] finite numbers"):
                pool.step(0, wrong)


@pytest.mark.multiprocess
def test_a_pool_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="tabletop"):
        SimulatorPool(source(name="table"), workers=0)
    for workers in (0, 2):
        with pytest.raises(ConfigError, match="unexpected keyword"):
            SimulatorPool(source(1, "colour=red"), workers)
    with pytest.raises(ConfigError, match="made a SimStart, which is no simulator"):
        SimulatorPool(source(name="support.simulated:no_simulator"), workers=0)


@pytest.mark.multiprocess
def test_an_expert_chooses_in_the_worker() -> None:
    results = []
    for workers in (0, 1):
        with SimulatorPool(source(1, "render=false", name="tabletop"), workers=workers) as pool:
            pool.reset(0, random_start(pool.spec, 3), Demonstrator(noise=(0.1, 0.2)))
            take(pool, 1)
            pool.step(0, 8, frames="all")
            results.append(take(pool, 1)[0].actions)
    assert results[0].shape == (8, 7)
    assert np.abs(results[0]).max() > 0.05
    np.testing.assert_array_equal(*results)


@pytest.mark.multiprocess
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_workers_die_when_their_parent_is_killed() -> None:
    script = (
        "from asyncrl.simulators.interface import SimulatorSource\n"
        "from asyncrl.simulators.pool import SimulatorPool\n"
        "if __name__ == '__main__':\n"
        "    pool = SimulatorPool(SimulatorSource(name='tabletop', settings=('render=false',)), workers=1)\n"
        "    print(pool._members[0].process.pid, flush=True)\n"
        "    input()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        assert select.select([worker], [], [], 0)[0] == []
        parent.send_signal(signal.SIGKILL)
        assert select.select([worker], [], [], 20)[0] == [worker]
        os.close(worker)


def test_a_simulator_whose_spec_promises_poses_must_show_them(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = source().build()
    monkeypatch.setattr(type(simulator), "look", lambda self, places: Seen(*_blank(len(places))))
    simulator.spec = replace(simulator.spec, poses=True)
    worker = Worker(simulator)
    with pytest.raises(ConfigError, match="counting shows no poses, but its spec has poses=True"):
        worker.take(
            [{"do": "reset", "place": 0, "start": asdict(random_start(simulator.spec, 1)), "expert": None}]
        )


def _blank(places: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((places, 2, 2, 2, 3), np.uint8), np.zeros((places, 2), np.float32)
