"""Actors come and go at the replay: told the settings, given up when they leave or fall silent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest
import zmq

from asyncrl.config.sections import ReplaySettings
from asyncrl.errors import ConfigError, ReplayError
from asyncrl.launch.roles import open_run_replay
from asyncrl.messaging import weight_messages
from asyncrl.messaging.sockets import LINGER_MS, bind_router, check_endpoint, why_taken
from asyncrl.messaging.wire import encode
from asyncrl.observability import metrics_system as m
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from asyncrl.replay.connection import JoinSettings, ask_settings
from asyncrl.replay.server import serve_replay
from asyncrl.weights.interface import PULL
from asyncrl.weights.publisher import BroadcastPublisher
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.weight_server import ServerSettings
from support import child_environment
from support.episodes import make_episode
from support.replay import Clock, make_limiter, make_replay
from support.replay_server import CONFIG, acquire, answer, push_group, until
from support.weights import channel_folder, policy, source

SETTINGS = JoinSettings(config='{"long": "' + 10_000 * "x" + '"}', weights="tcp://10.0.0.5:5556")


class Run:
    """A replay in a thread of this process, and a learner."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.stop, ready, self.endpoint = Event(), Event(), endpoint
        more = {"stop_event": self.stop, "ready": ready.set, "settings": SETTINGS}
        replay = open_run_replay(folder, replace(CONFIG, replay=ReplaySettings(max_lag=1)))
        replay.state.limiter.heartbeat_timeout = 3.0
        self.thread = Thread(target=serve_replay, args=(replay, endpoint), kwargs=more)
        self.thread.start()
        assert ready.wait(10)
        self.learner = ZmqLearnerPort(endpoint)
        self.learner.status()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.learner.close()
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()

    def in_flight(self) -> float:
        return self.learner.status()[m.GROUPS_IN_FLIGHT]


def test_a_visitor_is_told_the_settings_however_long(tmp_path: Path, endpoint: str) -> None:
    with Run(tmp_path, endpoint) as run:
        assert ask_settings(endpoint, "far", None, 10.0) == SETTINGS
        assert "far" not in str(run.learner._ask_status(10.0)), "a visitor is nobody yet"
        actor = ZmqActorPort(endpoint, "far")
        acquire(actor)
        with pytest.raises(ReplayError, match="has an actor called 'far'"):
            ask_settings(endpoint, "far", None, 10.0)
        actor.leave(1.0)
        assert ask_settings(endpoint, "far", None, 10.0) == SETTINGS
        stays = ZmqActorPort(endpoint, "stays")
        acquire(stays)
        run.learner.stop()
        with pytest.raises(ReplayError, match="is over"):
            ask_settings(endpoint, "further", None, 10.0)
        stays.leave(1.0)


def test_without_a_replay_a_visitor_says_so(endpoint: str) -> None:
    with pytest.raises(ReplayError, match=r"no replay answered at .* within 0\.3 s"):
        ask_settings(endpoint, "far", None, 0.3)


def test_an_actor_that_leaves_hands_over_what_is_finished_and_gives_the_rest_back_at_once(
    tmp_path: Path, endpoint: str
) -> None:
    with Run(tmp_path, endpoint) as run:
        actor, other = ZmqActorPort(endpoint, "far"), ZmqActorPort(endpoint, "other")
        groups = [acquire(actor) for _ in range(4)]
        assert other.acquire_groups(1, 0.3) == [], "all credit is taken"
        actor.push(make_episode(groups[0].number, 0, versions=(0,), actor="far"))
        push_group(actor, groups[1], "far", 0)
        began = time.monotonic()
        actor.leave(5.0)
        assert {acquire(other).number for _ in range(3)} == {0, 2, 3}
        assert time.monotonic() - began < 3.0
        while not (status := run.learner.status())[m.EPISODES] and time.monotonic() - began < 10.0:
            time.sleep(0.02)  # What the replay holds is written a little later.
        assert status[m.EPISODES] == 2, "the complete group was delivered"
        assert status[m.DROPPED_DEADLINE] == 1, "the episode of a group that nobody will complete"
        other.leave(1.0)


def test_replay_and_weights_take_ipv6_where_it_is_given(tmp_path: Path) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
        endpoint = f"tcp://[::1]:{probe.getsockname()[1]}"
        assert "Address already in use" in why_taken(endpoint)
    with Run(tmp_path, endpoint), channel_folder() as folder:
        assert ask_settings(endpoint, "far", None, 10.0) == SETTINGS
        publisher = BroadcastPublisher(
            "shared_memory", folder, settings=ServerSettings(listen="tcp://[::1]:0")
        )
        publisher.publish(source(0, elements=10), 0)
        receiver = WeightReceiver(PULL, publisher.pull_endpoint, "far", policy(0, elements=10))
        assert receiver.wait_for_first(20.0) == 0
        receiver.close()
        publisher.close()
    with pytest.raises(ConfigError, match="can be reached from other hosts"):
        check_endpoint("tcp://[fd00::5]:5")


@pytest.mark.parametrize("kind", ["bye", "leave"])
def test_a_peer_that_leaves_waits_until_a_busy_one_has_read_it(endpoint: str, kind: str) -> None:
    """A connection that ends takes unread messages with it."""
    with zmq.Context() as context, bind_router(context, endpoint) as router:
        if kind == "bye":
            port = ZmqActorPort(endpoint, "a")
            answer(router, port, "hello", reply="welcome", boot="b", known=True)
            assert port.acquire_groups(1, 0.3) == []  # It reads the welcome.
            leave, farewell = lambda: port.leave(0.0), encode("bye")
        else:
            receiver = WeightReceiver(PULL, endpoint, "a", None)
            peer, _ = router.recv_multipart()
            router.send_multipart([peer, *weight_messages.encode("unchanged")])
            time.sleep(0.2)
            leave, farewell = receiver.close, weight_messages.encode("closed")
        thread = Thread(target=leave)
        thread.start()
        time.sleep(LINGER_MS / 1000 + 0.3)
        heard = b""
        while f'"kind":"{kind}"'.encode() not in heard:
            assert router.poll(4000), "it was lost"
            peer, heard = router.recv_multipart()
        thread.join(0.3)
        assert thread.is_alive(), "it went before it was answered"
        router.send_multipart([peer, *farewell])
        thread.join(2.0)
        assert not thread.is_alive()


STOPPED = """
import sys, time
from asyncrl.replay.client import ZmqActorPort
from support.episodes import make_episode
from support.replay_server import acquire, push_group, until
port = ZmqActorPort(sys.argv[1], "far")
late, never = acquire(port), acquire(port)
port.push(make_episode(late.number, 0, versions=(0,), actor="far"))
until(port, 1)
print("stop me", flush=True)
time.sleep(1.0)
port.push(make_episode(late.number, 1, versions=(0,), actor="far"))
until(port, 0)
push_group(port, acquire(port), "far", 0)
until(port, 0)
print("stored", flush=True)
port.leave(1.0)
"""


def test_a_stopped_actor_loses_its_groups_soon_and_goes_on_when_it_wakes(tmp_path, endpoint: str) -> None:
    """Another one that only is slow keeps its group: pings do not wait for a round to end."""
    with Run(tmp_path, endpoint) as run:
        command = [sys.executable, "-c", STOPPED, endpoint]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment())
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "stop me\n"
            os.kill(child.pid, signal.SIGSTOP)
            slow = ZmqActorPort(endpoint, "slow")
            grant = acquire(slow)
            assert run.in_flight() == 3
            began = time.monotonic()
            while run.in_flight() > 1:
                assert time.monotonic() - began < 20, "its groups are not given up"
                time.sleep(0.1)
            time.sleep(max(0.0, 4.5 - (time.monotonic() - began)))  # Longer than the silence.
            assert run.in_flight() == 1
            push_group(slow, grant, "slow", 0)
            until(slow, 0)
            os.kill(child.pid, signal.SIGCONT)
            assert child.stdout.readline() == "stored\n"
            assert child.wait(20) == 0
        finally:
            child.kill()
            child.wait(10)
            child.stdout.close()
        status = run.learner.status()
        assert status[m.EPISODES] == 4
        assert status[m.DROPPED_DEADLINE] == 2, "the one it had sent, and the one that came late"
        slow.leave(1.0)


def test_of_two_actors_with_one_name_the_older_ends(tmp_path: Path, endpoint: str) -> None:
    with Run(tmp_path, endpoint):
        older = ZmqActorPort(endpoint, "far")
        acquire(older)
        newer = ZmqActorPort(endpoint, "far")
        acquire(newer)

        def go_on() -> None:
            for _ in range(100):
                older.acquire_groups(1, 0.1)

        with pytest.raises(ReplayError, match="another actor called 'far' took this one's place"):
            go_on()
        for _ in range(15):  # It is not thrown out in turn.
            newer.acquire_groups(1, 0.1)
        older._link.close()
        newer.leave(1.0)


def test_a_held_up_replay_does_not_take_its_own_pause_for_silence(scripted, monkeypatch) -> None:
    service, socket, clock = scripted
    socket.say(b"a", "acquire", turn=0, groups=1)
    service.serve_once(0)
    clock.now += 100.0
    service._served_at -= 100.0
    service.serve_once(0)
    assert list(service.replay.state.limiter.open) == [0]
    clock.now += 31.0
    service.serve_once(0)
    assert not service.replay.state.limiter.open


def test_a_complete_group_that_waits_for_the_disk_is_not_given_back(tmp_path: Path) -> None:
    clock = Clock()
    replay = make_replay(tmp_path, make_limiter(clock=clock))
    replay.begin("s", 0)
    replay.hello("a", "sa")
    for turn in range(2):
        assert replay.grant("a", turn) is not None
    for member in range(2):
        replay.state.limiter.admit(make_episode(0, member, versions=(0,)))
    replay.leave("a")
    assert list(replay.state.limiter.open) == [0]
    clock.now += 100.0
    replay.maintain()
    assert list(replay.state.limiter.open) == [0]
