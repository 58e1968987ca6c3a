"""A resume with another --algorithm.group-size, and actors that come and bring nothing."""

import os
from pathlib import Path

import pytest

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings
from asyncrl.launch.roles import open_run_replay
from asyncrl.observability import metrics_system as m
from asyncrl.replay.buffer import Replay
from asyncrl.replay.peers import MOST_NEWCOMERS
from asyncrl.replay.server import ReplayServer
from asyncrl.replay_tools.files import Verify
from support.episodes import make_episode
from support.replay import Clock, fill, make_limiter, make_replay, read_batch
from support.replay_server import NOBODY, ScriptedSocket


def opened(folder: Path, size: int, said: list[str] | None = None) -> Replay:
    config = TrainConfig(
        algorithm=AlgorithmSettings(group_size=size, groups_per_update=1, filter_groups=False),
        replay=ReplaySettings(max_lag=2, group_timeout=60.0),
    )
    return open_run_replay(folder, config, print if said is None else said.append)


def fill_group(replay: Replay, number: int, versions: tuple[int, ...]) -> list[str]:
    """Push all members of a group, imagined anew; return what became of them."""
    size = replay.state.limiter.group_size
    made = [
        make_episode(number, k, group_size=size, versions=versions, episode_id=os.urandom(16).hex())
        for k in range(size)
    ]
    return [replay.admit(episode).status for episode in made]


def begun(folder: Path) -> None:
    """A run with groups of two: 0 was used, 1 and 2 are ready, 3 is open."""
    replay = opened(folder, 2)
    replay.begin("before", 0)
    for number in range(3):
        assert replay.grant("actor-0") is not None
        assert fill_group(replay, number, (0,)) == ["held", "held"]
    assert read_batch(replay, 1, 0) is not None
    replay.set_version(1)
    assert replay.grant("actor-0") is not None
    replay.close()


def test_groups_of_another_size_are_given_up_and_imagined_again(tmp_path: Path) -> None:
    size = 3
    begun(tmp_path)
    said: list[str] = []
    replay = opened(tmp_path, size, said)
    replay.begin("resumed", 1)
    assert not replay.state.limiter.ready
    assert not replay.state.limiter.open
    assert replay.status()[m.DROPPED_RESUME] == 4, "two groups of two episodes"
    assert replay.status()[m.EPISODES] == 6
    (line,) = [line for line in said if "--algorithm.group-size" in line]
    assert "2 stored groups" in line
    for number in (1, 2, 3):
        assert (grant := replay.grant("actor-0")) is not None
        assert grant.number == number
        assert fill_group(replay, number, (1,))[-1] == "held"
    batch = read_batch(replay, 1, 1)
    assert batch is not None
    assert [len(group) for group in batch] == [size]
    assert replay.status()[m.EPISODES] == 6 + 3 * size
    replay.close()
    assert Verify(path=tmp_path).run() == 0, "files of both sizes are sound"
    replay = opened(tmp_path, size, said)
    assert replay.status()[m.EPISODES] == 6 + 3 * size, "counted alike after a restart"
    replay.begin("resumed", 1)
    assert sorted(replay.state.limiter.ready) == [2, 3]


def test_a_used_group_whose_update_is_lost_is_imagined_again_in_the_new_size(tmp_path: Path) -> None:
    begun(tmp_path)
    replay = opened(tmp_path, 3)
    replay.begin("resumed", 0)
    assert not replay.state.limiter.ready
    assert [grant.number for _ in range(3) if (grant := replay.grant("actor-0"))] == [0, 1, 2]
    assert fill_group(replay, 0, (0,)) == ["held"] * 3
    assert read_batch(replay, 1, 0) is not None


def test_back_to_the_first_size_and_a_kill_before_the_learner_came(tmp_path: Path) -> None:
    begun(tmp_path)
    for size in (3, 3, 2, 4):
        opened(tmp_path, size).close()  # No learner came.
    replay = opened(tmp_path, 2)
    replay.begin("resumed", 1)
    assert sorted(replay.state.limiter.ready) == [1, 2], "they have the run's size again"
    assert replay.status()[m.EPISODES] == 6


ROUNDS = 120  # One second and one group of the steady actor each


class Site:
    """A replay on a clock of its own, with a learner and an actor that completes a group per round."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.socket = Clock(), ScriptedSocket()
        self.replay = make_replay(folder, make_limiter(clock=self.clock))
        self.service = ReplayServer(self.replay, self.socket)  # type: ignore[arg-type]
        self.socket.say(b"L", "hello", role="learner", name="learner", session="s", version=0, **NOBODY)
        self.come("steady")
        self.updates = 0

    def come(self, name: str, session: str = "") -> None:
        who = {"name": name, "session": session or name}
        self.socket.say(who["session"].encode(), "hello", role="actor", version=0, **who, **NOBODY)
        self.service.serve_once(0)

    def round(self) -> None:
        self.clock.now += 1.0
        self.service.serve_once(0)
        grant = self.replay.grant("steady")
        if grant is not None:
            fill(self.replay, grant.number, (self.updates,), actor="steady")
        if self.replay.choose(2, self.updates):
            self.updates += 1
            self.replay.set_version(self.updates)

    def admitted(self) -> int:
        return sum(message.kind == "welcome" and message["known"] for _, message in self.socket.sent)


@pytest.mark.parametrize("says_bye", [True, False], ids=["leave", "vanish"])
@pytest.mark.parametrize("one_name", [True, False], ids=["one name", "many names"])
@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_actors_that_bring_nothing_cost_little(tmp_path: Path, says_bye: bool, one_name: bool) -> None:
    site = Site(tmp_path)
    site.round()
    for second in range(ROUNDS):
        for n in range(6):
            session = f"far-{second}-{n}"
            site.come("far" if one_name else session, session)
            site.socket.say(session.encode(), "acquire", turn=0, groups=8)
            site.service.serve_once(0)
            if says_bye:
                site.socket.say(session.encode(), "bye")
                site.service.serve_once(0)
        site.round()
    assert site.updates >= 0.9 * ROUNDS / 2, f"{site.updates} updates, alone {ROUNDS / 2}"
    most = MOST_NEWCOMERS * (ROUNDS / site.replay.state.limiter.heartbeat_timeout + 1)
    assert site.admitted() < most < 6 * ROUNDS
    assert sum("session" in line for line in site.replay.store.ledger.read()) < most
    site.replay.close()


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_nobody_is_a_newcomer_before_one_brought_something(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for n in range(2 * MOST_NEWCOMERS):
        site.come(f"first-{n}")
    assert site.admitted() == 2 * MOST_NEWCOMERS + 2, "all, with the learner"
    for number in range(4):
        assert site.replay.grant("first-0").number == number  # type: ignore[union-attr]
    fill(site.replay, 1, (0,), actor="first-0")
    limiter = site.replay.state.limiter
    assert [limiter.is_newcomer(name) for name in ("first-0", "first-1")] == [False, True]
    site.replay.leave("first-0")
    assert not limiter.is_newcomer("first-1")
    site.replay.close()
