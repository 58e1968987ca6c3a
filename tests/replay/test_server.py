"""The replay over real sockets: nothing is lost, nothing is used twice, and a stop reaches everybody."""

import dataclasses
import shutil
import threading
import time
from pathlib import Path

import pytest
import zmq

from asyncrl.config.sections import ReplaySettings
from asyncrl.errors import ReplayError, SampleTimeout
from asyncrl.messaging.sockets import bind_router
from asyncrl.messaging.wire import decode, encode
from asyncrl.observability import metrics_system as s
from asyncrl.replay.client import WINDOW, ZmqActorPort, ZmqLearnerPort
from asyncrl.replay.interface import GroupGrant, NothingToLearn, RunStopped
from asyncrl.replay.server import ReplayServer
from support.episodes import assert_same, make_episode
from support.replay import Clock, next_batch
from support.replay_server import (
    CONFIG,
    NOBODY,
    ScriptedSocket,
    Served,
    acquire,
    answer,
    kill,
    push_group,
    start_server,
    until,
)
from support.sockets import connect_dealer


def imagine_until_stopped(endpoint: str, name: str, version: list[int], pushed: dict[str, list[str]]) -> None:
    port = ZmqActorPort(endpoint, name)
    try:
        while True:
            for grant in port.acquire_groups(2, 10.0):
                push_group(port, grant, name, max(grant.min_version, version[0] - 1))
                pushed[name].append(grant.group_id)
    except RunStopped:
        assert port.stopped
        port.report({s.ACTORS_WAITING: 0.5})
    finally:
        port.close(10.0)


def test_a_socket_that_the_host_cleaned_away_comes_back(tmp_path: Path, endpoint: str) -> None:
    with Served(tmp_path, endpoint):
        first, learner = ZmqActorPort(endpoint, "a"), ZmqLearnerPort(endpoint)
        learner.status()
        grant = acquire(first)
        shutil.rmtree(Path(endpoint.removeprefix("ipc://")).parent, ignore_errors=True)
        push_group(first, grant, "a", 0)
        until(first, 0)
        second = ZmqActorPort(endpoint, "b")
        assert {acquire(second).number, grant.number} == {0, 1}
        for port in (first, second):
            port.leave(1.0)
        learner.close()


def test_two_actors_and_a_learner_use_every_group_once(tmp_path: Path, endpoint: str) -> None:
    pushed: dict[str, list[str]] = {"a": [], "b": []}
    version, used, updates = [0], list[str](), 8
    with Served(tmp_path, endpoint) as served:
        learner = ZmqLearnerPort(endpoint)
        actors = [
            threading.Thread(target=imagine_until_stopped, args=(endpoint, name, version, pushed))
            for name in pushed
        ]
        for actor in actors:
            actor.start()
        for v in range(updates):
            for group in next_batch(learner, groups=2, version=v, timeout=20.0):
                assert [episode.member for episode in group] == [0, 1]
                assert all(0 <= v - episode.oldest_version <= 1 for episode in group)
                for episode in group:
                    number = int(episode.group_id)
                    ids = make_episode(number, episode.member, versions=(episode.oldest_version,))
                    assert episode.frames.tobytes() == ids.frames.tobytes()
                used.append(group[0].group_id)
            version[0] = v + 1
            learner.report_version(v + 1)
        status = learner.status()
        learner.stop()
        for actor in actors:
            actor.join(15)
            assert not actor.is_alive(), "the stop did not reach an actor"
        served.thread.join(3)
        assert not served.thread.is_alive(), "the replay waits for actors that left"
        learner.close()
    assert len(used) == len(set(used)) == 2 * updates
    assert set(used) <= set(pushed["a"] + pushed["b"])
    assert all(pushed.values()), "both actors took part"
    assert status[s.WIRE_BYTES] > 0
    assert status[s.WIRE_ERRORS] == status[s.DUPLICATES] == status[s.DROPPED_INVALID] == 0
    assert status[s.EPISODES] >= 2 * len(used)


def test_a_killed_replay_loses_nothing_and_uses_nothing_twice(tmp_path: Path, endpoint: str) -> None:
    server = start_server(tmp_path, endpoint)
    learner, actor = ZmqLearnerPort(endpoint), ZmqActorPort(endpoint, "actor-0")
    try:
        with pytest.raises(SampleTimeout):  # Introduces the learner.
            next_batch(learner, groups=1, version=0, timeout=0.5)
        stored, half = acquire(actor), acquire(actor)
        push_group(actor, stored, "actor-0", 0)
        until(actor, 0)
        first = make_episode(half.number, 0, versions=(0,))
        actor.push(first)
        until(actor, 1)
        kill(server)
        second = make_episode(half.number, 1, versions=(0,))
        actor.push(second)  # While nobody listens.
        server = start_server(tmp_path, endpoint)
        until(actor, 0)
        learner.status()  # The restarted replay grants nothing before it heard from the learner.
        third = acquire(actor)
        assert third.number == 2, "the restarted replay knows what was granted"
        batch = next_batch(learner, groups=1, version=0, timeout=15.0)
        kill(server)
        server = start_server(tmp_path, endpoint)
        batch += next_batch(learner, groups=1, version=0, timeout=15.0)
        assert [group[0].group_id for group in batch] == ["00000000", "00000001"]
        assert_same(batch[1][0], first)
        assert_same(batch[1][1], second)
        with pytest.raises(SampleTimeout, match=r"0 groups ready, 1 in flight"):
            next_batch(learner, groups=1, version=0, timeout=0.2)
    finally:
        learner.stop()
        learner.close()
        actor.close(1.0)
        server.wait(10)
        kill(server)


def test_the_deadline_of_a_sample_says_what_the_replay_holds(tmp_path: Path, endpoint: str) -> None:
    with Served(tmp_path, endpoint):
        learner, actor = ZmqLearnerPort(endpoint), ZmqActorPort(endpoint, "actor-0")
        learner.status()
        push_group(actor, acquire(actor), "actor-0", 0)
        actor.push(make_episode(acquire(actor).number, 0, versions=(0,)))
        until(actor, 1)
        expected = (
            "holds 1 groups ready, 1 in flight with 1 episodes; episodes dropped: none; "
            "actors seen: actor-0; version 0, credit for 2 more groups"
        )
        with pytest.raises(SampleTimeout, match=expected):
            next_batch(learner, groups=2, version=0, timeout=0.3)
        with pytest.raises(ReplayError, match="1 episodes of actor 'actor-0' were not acknowledged"):
            actor.close(0.3)
        learner.close()


def test_an_actor_with_a_full_window_waits(tmp_path: Path, endpoint: str) -> None:
    with Served(tmp_path, endpoint):
        learner, actor = ZmqLearnerPort(endpoint), ZmqActorPort(endpoint, "actor-0", window=1)
        learner.status()
        grant = acquire(actor)
        actor.push(make_episode(grant.number, 0, versions=(0,)))
        assert actor.acquire_groups(1, 0.2) == []
        actor.push(make_episode(grant.number, 1, versions=(0,)))
        assert acquire(actor).number == 1
        actor.close(1.0)
        learner.close()


def test_no_group_is_granted_before_the_learner_said_its_version(tmp_path: Path, endpoint: str) -> None:
    with Served(tmp_path, endpoint):
        actor = ZmqActorPort(endpoint, "actor-0")
        assert actor.acquire_groups(1, 0.3) == []
        learner = ZmqLearnerPort(endpoint, version=5)
        learner.status()
        grant = acquire(actor)
        assert (grant.number, grant.min_version) == (10, 4)
        actor.close(1.0)
        learner.close()


def test_invalid_messages_are_answered_counted_and_survived(tmp_path: Path, endpoint: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Served(tmp_path, endpoint):
        stranger = connect_dealer(context, endpoint, b"stranger")
        hello = encode("hello", role="king", name="x", session="y", version=0, **NOBODY)
        for frames in ([b"garbage!!"], [b""] * 40, [bytes(hello[0])[:-1] + b"x"], hello):
            stranger.send_multipart(frames)
            assert stranger.poll(5000)
            assert decode(stranger.recv_multipart()).kind == "refused"
        stranger.send_multipart(encode("stop"))  # Not introduced: not obeyed.
        assert stranger.poll(5000)
        assert decode(stranger.recv_multipart()).fields["known"] is False
        learner = ZmqLearnerPort(endpoint)
        assert learner.status()[s.WIRE_ERRORS] == 4
        learner.close()
        context.destroy(linger=0)


def test_an_episode_whose_last_receipt_was_lost_is_settled_later(endpoint: str, monkeypatch) -> None:
    monkeypatch.setattr("asyncrl.replay.connection.HELD_RESEND_AFTER", 0.2)
    monkeypatch.setattr("asyncrl.replay.connection.LEAVE_SECONDS", 0.1)  # Nobody answers its goodbye.
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    replay, actor = bind_router(context, endpoint), ZmqActorPort(endpoint, "actor-0")
    answer(replay, actor, "hello", reply="welcome", boot="b", known=True)
    episode = make_episode(0, 0)
    actor.push(episode)
    receipt = {"reply": "receipt", "episode_id": episode.episode_id, "reason": ""}
    answer(replay, actor, "episode", status="held", **receipt)
    until(actor, 1)  # Its group becomes complete, but the receipt gets lost.
    answer(replay, actor, "episode", status="duplicate", **receipt)
    until(actor, 0)
    actor.close(1.0)
    context.destroy(linger=0)


def test_a_lost_grant_is_repeated_although_others_wait_for_credit(scripted) -> None:
    service, socket, _ = scripted
    socket.deaf = {b"b"}
    socket.say(b"b", "acquire", turn=0, groups=1)
    service.serve_once(0)  # Granted, but b did not hear of it.
    socket.deaf = set()
    socket.say(b"a", "acquire", turn=0, groups=1)
    service.serve_once(0)
    socket.say(b"b", "acquire", turn=0, groups=1)
    service.serve_once(0)
    assert (socket.grants(b"a"), socket.grants(b"b")) == ([], [0])


def test_a_request_is_answered_with_one_group_although_that_was_given_up(scripted) -> None:
    """As by a host that was cut off: the answer to its question is still on its way to it."""
    service, socket, clock = scripted
    socket.say(b"a", "acquire", turn=0, groups=1)
    service.serve_once(0)
    for _ in range(5):
        clock.now += 7.0  # In all 35 s; the deadline is 30 s.
        service.serve_once(0)
    socket.say(b"a", "ping")
    socket.say(b"a", "acquire", turn=0, groups=1)
    service.serve_once(0)
    assert socket.grants(b"a") == [0], "it may go on with this answer, and would leave a second one alone"
    assert [message["turn"] for to, message in socket.sent if message.kind == "given_up"] == [0]
    socket.say(b"a", "acquire", turn=1, groups=1)
    service.serve_once(0)
    assert socket.grants(b"a") == [0, 0]
    assert service.replay.state.limiter.open[0].request_number == 1


def test_an_actor_passes_over_requests_whose_groups_were_given_up(endpoint: str, monkeypatch) -> None:
    monkeypatch.setattr("asyncrl.replay.connection.LEAVE_SECONDS", 0.1)  # Nobody answers its goodbye.
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    replay, actor = bind_router(context, endpoint), ZmqActorPort(endpoint, "actor-0")
    answer(replay, actor, "hello", reply="welcome", boot="b", known=True)
    assert actor.acquire_groups(1, 0.2) == []
    grant = {"min_version": 0, "keep_video": False}
    answer(replay, actor, "acquire", reply="grant", turn=0, number=7, **grant)
    assert acquire(actor).number == 7
    assert actor.acquire_groups(1, 0.0) == []
    asked = answer(replay, actor, "acquire", reply="given_up", turn=1)
    assert asked["turn"] == 1
    assert actor.acquire_groups(1, 0.2) == []
    asked = answer(replay, actor, "acquire", reply="grant", turn=2, number=7, **grant)
    assert asked["turn"] == 2, "it asks for the next one at once"
    assert acquire(actor).number == 7
    actor.close(1.0)
    context.destroy(linger=0)


def test_requests_without_credit_are_not_tried_in_every_pass(scripted, monkeypatch) -> None:
    """With 64 actors that wait, to try them all took half of the serving thread's time."""
    service, socket, _ = scripted
    tried, grant = list[str](), service.replay.grant

    def counted(actor: str, request: int) -> GroupGrant | None:
        tried.append(actor)
        return grant(actor, request)

    monkeypatch.setattr(service.replay, "grant", counted)
    for peer in (b"a", b"b"):
        socket.say(peer, "acquire", turn=0, groups=1)
    for _ in range(5):
        service.serve_once(0)
    assert tried == ["a", "b", "b"], "all in the pass in which they asked"
    socket.say(b"L", "version", version=1)
    service.serve_once(0)
    assert (tried[3:], socket.grants(b"b")) == (["b"], [1]), "there is credit again"


def test_a_waiting_request_is_no_sign_of_life(scripted: tuple[ReplayServer, ScriptedSocket, Clock]) -> None:
    """An actor that hangs loses its group after the deadline, and another one gets the credit."""
    service, socket, clock = scripted
    for turn in (0, 1):
        socket.say(b"a", "acquire", turn=turn, groups=1)
        service.serve_once(0)
    assert socket.grants(b"a") == [0]
    for _ in range(5):
        clock.now += 7.0  # In all 35 s; the deadline is 30 s.
        socket.say(b"b", "acquire", turn=0, groups=1)
        service.serve_once(0)
    assert (socket.grants(b"a"), socket.grants(b"b")) == ([0], [0])
    socket.say(b"a", "acquire", turn=1, groups=1)
    service.serve_once(0)
    assert service.replay.state.limiter.credit == 0
    assert socket.grants(b"a") == [0], "it asks again, but somebody else has the credit now"


def test_what_actors_report_is_folded_by_each_metrics_rule_and_ends_with_them(scripted) -> None:
    service, socket, clock = scripted
    socket.say(b"a", "report", readings={s.ACTOR_WORLD.name: 0.5, s.ACTOR_MEMORY.name: 5e9})
    socket.say(b"b", "report", readings={s.ACTOR_WORLD.name: 7.0, s.ACTOR_MEMORY.name: 2e9})
    service.serve_once(0)
    status = service.replay.status()
    assert (status[s.ACTOR_WORLD], status[s.ACTOR_MEMORY]) == (0.75, 5e9), "mean of shares, largest peak"
    socket.say(b"a", "bye")
    service.serve_once(0)
    assert service.replay.status()[s.ACTOR_MEMORY] == 2e9
    clock.now += 1000.0
    assert s.ACTOR_MEMORY not in service.replay.status(), "nor do the silent count"


def test_an_actor_reports_of_itself_only(scripted: tuple[ReplayServer, ScriptedSocket, Clock]) -> None:
    service, socket, _ = scripted
    socket.say(b"a", "report", readings={s.EPISODES.name: 1e9})
    service.serve_once(0)
    assert service.replay.status()[s.EPISODES] == 0


def test_the_learner_hears_how_far_its_batch_is_and_that_there_is_nothing_to_learn(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.replay.buffer.MAX_FILTERED_BATCHES", 2)
    chosen = dataclasses.replace(CONFIG.algorithm, filter_groups=True)
    filtering = dataclasses.replace(CONFIG, algorithm=chosen)
    with Served(tmp_path, endpoint, filtering):
        learner, actor = ZmqLearnerPort(endpoint), ZmqActorPort(endpoint, "actor-0")
        with pytest.raises(SampleTimeout) as caught:  # Introduces the learner.
            next_batch(learner, groups=2, version=0, timeout=0.3)
        assert caught.value.episodes == 0
        first = acquire(actor)
        actor.push(make_episode(first.number, 0, versions=(0,), success=True))
        actor.report({s.ACTOR_DECISIONS: 7.0})
        until(actor, 1)
        with pytest.raises(SampleTimeout) as caught:
            next_batch(learner, groups=2, version=0, timeout=0.5)
        assert (caught.value.groups, caught.value.episodes, caught.value.decisions) == (0, 1, 7)
        actor.push(make_episode(first.number, 1, versions=(0,), success=True))
        for _ in range(3):
            grant = acquire(actor)
            for member in range(2):
                actor.push(make_episode(grant.number, member, versions=(0,), success=True))
        with pytest.raises(NothingToLearn, match="last 4 groups all episodes scored the same"):
            next_batch(learner, groups=2, version=0, timeout=15.0)
        learner.stop()
        learner.close()
        actor.close(5.0)


def test_one_message_asks_for_many_groups_and_none_waits_for_another_round(scripted) -> None:
    service, socket, _ = scripted
    socket.say(b"a", "acquire", turn=0, groups=3)
    socket.say(b"b", "acquire", turn=0, groups=3)
    credit = service.replay.state.limiter.credit
    service.serve_once(0)
    granted = socket.grants(b"a") + socket.grants(b"b")
    assert sorted(granted) == list(range(credit)), "all there was credit for, in turns"
    service.replay.set_version(5)
    service.serve_once(0)
    assert len(socket.grants(b"a")) == len(socket.grants(b"b")) == 3, "the rest when there is credit again"


def test_more_groups_are_in_flight_than_the_window_of_an_outbox_holds(tmp_path: Path, endpoint: str) -> None:
    config = dataclasses.replace(
        CONFIG,
        algorithm=dataclasses.replace(CONFIG.algorithm, groups_per_update=50),
        replay=ReplaySettings(max_lag=0),
    )
    with Served(tmp_path / "replay", endpoint, config):
        learner = ZmqLearnerPort(endpoint)
        learner.status()  # It has introduced itself.
        actor = ZmqActorPort(endpoint, "actor-0", window=WINDOW + 64)
        grants = actor.acquire_groups(50, 5.0)
        deadline = time.monotonic() + 10
        while learner.status()[s.GROUPS_IN_FLIGHT] < 50:
            assert time.monotonic() < deadline, "one message asks for all of them"
        while len(grants) < 50:  # The replay has sent them; they come one by one.
            more = actor.acquire_groups(50 - len(grants), 5.0)
            assert more
            grants += more
        assert [grant.number for grant in grants] == list(range(50))
        for grant in grants:  # One member each: all groups stay open, none is acknowledged.
            actor.push(make_episode(grant.number, 0, versions=(0,)))
        assert actor.unacknowledged == 50
        for grant in grants:
            actor.push(make_episode(grant.number, 1, versions=(0,)))
        actor.close(30.0)
        assert len(next_batch(learner, groups=50, version=0, timeout=30.0)) == 50
        learner.stop()
        learner.close()


def test_a_learner_looks_after_its_children_while_a_replay_comes_back(tmp_path: Path, endpoint: str) -> None:
    polls: list[int] = []
    replay: list[Served] = []

    def poll() -> None:
        polls.append(len(polls))
        if len(polls) == 3:
            replay.append(Served(tmp_path, endpoint).__enter__())
        elif len(polls) > 1000:
            raise ReplayError("it died too often")

    learner = ZmqLearnerPort(endpoint, poll=poll)
    try:
        assert learner.status()[s.GROUPS_READY] == 0
    finally:
        replay[0].__exit__(None, None, None)
    assert len(polls) >= 3
    polls.extend([0] * 1000)
    with pytest.raises(ReplayError, match="died too often"):
        learner.status()
    learner.close()
