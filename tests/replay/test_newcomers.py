"""Actors that come, are admitted and bring nothing: what they cost the others is bounded."""

from pathlib import Path

import pytest

from asyncrl.replay.peers import MOST_NEWCOMERS
from asyncrl.replay.server import ReplayServer
from support.replay import Clock, fill, make_limiter, make_replay
from support.replay_server import NOBODY, ScriptedSocket

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
