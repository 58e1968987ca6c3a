"""The children of a rank: who is waited for and who is not."""

import time
from functools import partial

import pytest

from asyncrl.errors import RunError
from asyncrl.launch.children import ChildProcesses
from asyncrl.launch.job import Job, RunInfo, failure_file, pop_failure, report_failure
from asyncrl.observability.signals import StopFlag


class Child:
    """A supervisor whose child finishes with the given poll; 0: never."""

    def __init__(self, name: str, finishes_with: int = 0) -> None:
        self.name, self.finishes_with, self.respawns = name, finishes_with, 0
        self.polls, self.finished = 0, False
        self.ended_after: float | None = None

    def poll(self) -> None:
        self.polls += 1
        self.finished = self.finished or self.polls == self.finishes_with

    def wait(self, deadline: float) -> bool:
        self.ended_after = deadline
        return False

    def stop(self, deadline: float) -> int:
        self.finished = True
        return 0


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("asyncrl.launch.children.POLL_INTERVAL", 0.001)


@pytest.fixture
def children_of():
    made: list[ChildProcesses] = []

    def make(*children: Child) -> ChildProcesses:
        made.append(ChildProcesses(StopFlag(), tell=lambda line: None))
        for child in children:
            made[-1].spawn(lambda child=child: child)
        return made[-1]

    yield make
    for children in made:
        children.end(0.0)


def test_an_actor_that_the_end_of_the_run_did_not_reach_is_ended(children_of):
    actor = Child("actor-1")
    looks = iter([False, False, True])
    children = children_of(actor)
    children.run_until_done(over=lambda: next(looks))
    children.end(8.0)
    assert actor.ended_after == pytest.approx(8.0, abs=1.0)
    assert actor.finished


def test_a_rank_that_only_lends_its_device_stays_until_the_run_is_over(children_of):
    looks = []
    children_of().run_until_done(over=lambda: len(looks) == 5 or looks.append(None) is not None)
    assert len(looks) == 5


class Dying(Child):
    """Dies too often once its polls are over."""

    def poll(self) -> None:
        super().poll()
        if self.finished or not self.finishes_with:
            raise RunError(f"{self.name} died too often")


def test_an_actor_that_dies_after_the_end_of_the_run_fails_nobody(children_of):
    children_of(Dying("actor-1")).run_until_done(over=lambda: True)


def test_a_busy_rank_delays_no_respawn_and_hears_of_the_last_death_when_it_looks(children_of):
    child = Dying("actor-0", finishes_with=4)
    children = children_of(child)
    until = time.monotonic() + 10
    while child.polls < 4:  # Nobody looks, as during a long update.
        assert time.monotonic() < until
        time.sleep(0.001)
    with pytest.raises(RunError, match="died too often"):
        children.run_until_done(over=lambda: False)


@pytest.mark.parametrize(("local_rank", "local_size"), [(1, 2), (0, 1)], ids=["near", "far"])
def test_a_rank_that_reports_its_failure_stays_until_the_run_is_over(tmp_path, local_rank, local_size):
    sockets, hosts = tmp_path / "sockets", tmp_path / "run" / "hosts"
    sockets.mkdir()
    hosts.mkdir(parents=True)
    info = RunInfo(run_dir=str(hosts.parent), replay_endpoint="", weights_endpoint="", sockets=str(sockets))
    job = Job(rank=1, size=2, local_rank=local_rank, local_size=local_size)
    children = ChildProcesses(StopFlag(), report_failure=partial(report_failure, info, job))
    children.spawn(lambda: Dying("actor-1"))
    said: list[str] = []

    def over() -> bool:
        said.append(pop_failure(sockets, hosts))
        return bool(said[-1])

    children.run_until_done(over)
    children.end(0.0)
    assert said[-1] == "Rank 1: actor-1 died too often"
    assert pop_failure(sockets, hosts) == ""
    assert not failure_file(info, job).exists()
    assert str(children.failure) == "actor-1 died too often"


def test_children_are_watched_until_all_finished_or_a_stop_is_asked_for(children_of):
    finishing = Child("actor-1", finishes_with=6)
    children_of(finishing).run_until_done(over=lambda: False)
    assert finishing.polls >= 6
    children = children_of(Child("actor-1"))
    children._stop.requested = True
    children.run_until_done(over=lambda: False)
