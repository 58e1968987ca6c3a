"""Episodes through shared memory from real actors to a real replay: exact, never lost, never needed."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from asyncrl.messaging.shared_memory import RingMissing, Rings, RingWriter
from asyncrl.messaging.sockets import bind_router
from asyncrl.messaging.wire import decode, encode
from asyncrl.observability import metrics_replay as m
from asyncrl.observability import metrics_system as s
from asyncrl.records import Episode
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from asyncrl.replay.replay import open_replay
from asyncrl.replay.server import ReplayServer, serve_replay
from support import child_environment
from support.episodes import assert_same, make_episode
from support.replay import make_core, make_limiter
from support.replay_server import CONFIG, ScriptedSocket, acquire, answer, kill, until

IMAGE = 160
"""Pixels: an episode of one decision has two pictures of 76,800 bytes."""
PICTURES = 2 * 76_800
RING = 2**20
SERVER = """
import logging, sys
from pathlib import Path
from asyncrl.replay.replay import open_replay
from asyncrl.replay.server import serve_replay
from support.replay_server import CONFIG
logging.basicConfig(level=logging.INFO)
folder, endpoint, shared = sys.argv[1:]
ready = lambda: print("ready", flush=True)
serve_replay(open_replay(Path(folder), CONFIG), endpoint, shared_bytes=int(shared), ready=ready)
"""
ACTOR = """
import sys, time
from test_server_shared_memory import ZmqActorPort, acquire, large
endpoint, name, shared, groups, members = sys.argv[1:]
port = ZmqActorPort(endpoint, name, shared_bytes=int(shared))
for _ in range(int(groups)):
    grant = port.acquire_group(20.0)
    for member in range(int(members)):
        port.push(large(grant.number, member, grant.min_version))
if int(members) == 2:
    port.close(20.0)
else:
    while True:
        port.serve()
        print(port.unacknowledged, flush=True)
        time.sleep(0.05)
"""


def large(number: int, member: int, version: int = 0) -> Episode:
    return make_episode(number, member, versions=(version,), image=IMAGE)


class Run:
    """A replay process with its learner, and actor processes."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder, self.endpoint, self.log = folder, endpoint, folder.parent / "replay.log"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.learner = ZmqLearnerPort(endpoint)

    def replay(self, shared: int = 4 * RING) -> subprocess.Popen[bytes]:
        process = self._start(SERVER, str(self.folder), self.endpoint, str(shared))
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        self.learner.status()
        return process

    def actor(
        self, name: str, *, shared: int = RING, groups: int, members: int = 2
    ) -> subprocess.Popen[bytes]:
        return self._start(ACTOR, self.endpoint, name, str(shared), str(groups), str(members))

    def _start(self, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", script, *arguments]
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=child_environment())
        self.processes.append(process)
        return process

    def use(self, groups: int) -> list[list[Episode]]:
        """Sample so many groups, two per update, and compare each episode with what its actor made."""
        found: list[list[Episode]] = []
        for version in range(groups // 2):
            batch = self.learner.sample(groups=2, version=version, timeout=20.0)
            self.learner.report_version(version + 1)
            found += batch
        for group in found:
            for member, episode in enumerate(group):
                assert_same(episode, large(int(episode.group_id), member, episode.oldest_version))
        return found

    def close(self) -> None:
        self.learner.close()
        for process in self.processes:
            kill(process)


@pytest.fixture
def run(tmp_path: Path, endpoint: str) -> Iterator[Run]:
    (tmp_path / "replay").mkdir()
    made = Run(tmp_path / "replay", endpoint)
    yield made
    made.close()


@pytest.fixture
def inside(run: Run) -> Iterator[ZmqActorPort]:
    """An actor in this process, with a ring."""
    port = ZmqActorPort(run.endpoint, "actor-0", shared_bytes=RING)
    yield port
    if not port._link._context.closed:
        port._link.close()


def test_a_ring_that_holds_three_groups_carries_thirty_exactly(run: Run) -> None:
    run.replay()
    actor = run.actor("actor-0", groups=30)
    used = run.use(30)
    assert sorted(int(group[0].group_id) for group in used) == list(range(30))
    assert actor.wait(20) == 0
    status = run.learner.status()
    assert status[s.SHARED_BYTES] + status[s.UNSHARED] * PICTURES == 60 * PICTURES
    assert status[s.SHARED_BYTES] > 40 * PICTURES
    assert status[s.WIRE_BYTES] > status[s.SHARED_BYTES]
    assert status[s.WIRE_ERRORS] == status[m.DUPLICATES] == status[m.DROPPED_INVALID] == 0


def test_what_finds_no_room_uses_the_socket(run: Run) -> None:
    run.replay()
    actor = run.actor("actor-0", groups=8, shared=PICTURES + 1000)
    run.use(8)
    assert actor.wait(20) == 0
    status = run.learner.status()
    assert status[s.SHARED_BYTES] >= PICTURES, "one episode fits"
    assert status[s.UNSHARED] >= 4
    assert status[s.WIRE_ERRORS] == 0


@pytest.mark.parametrize(("of_replay", "of_actor"), [(0, RING), (RING - 1, RING), (RING, 0)])
def test_without_shared_memory_on_one_side_the_socket_is_used(
    run: Run, of_replay: int, of_actor: int
) -> None:
    run.replay(shared=of_replay)
    actor = run.actor("actor-0", groups=4, shared=of_actor)
    run.use(4)
    assert actor.wait(20) == 0
    status = run.learner.status()
    assert status[s.SHARED_BYTES] == status[s.UNSHARED] == status[s.WIRE_ERRORS] == 0
    assert run.log.read_text().count("episodes of actor-0 come through the socket") == (of_actor > 0)


def test_an_actor_killed_with_a_held_episode_in_its_ring_harms_nobody(run: Run) -> None:
    replay = run.replay()
    actor = run.actor("actor-0", groups=1, members=1)
    assert actor.stdout is not None
    deadline = time.monotonic() + 20
    while run.learner.status()[s.SHARED_BYTES] < PICTURES:
        assert time.monotonic() < deadline
    kill(actor)  # The replay holds views of its ring, and of the first half of a group.
    assert run.learner.status()[m.GROUPS_IN_FLIGHT] == 1
    successor = run.actor("actor-0", groups=4)
    used = run.use(4)
    assert successor.wait(20) == 0
    assert sorted(int(group[0].group_id) for group in used) == [1, 2, 3, 4], "group 0 was given up"
    status = run.learner.status()
    assert status[m.DROPPED_DEADLINE] == 1
    assert status[s.SHARED_BYTES] >= 8 * PICTURES, "the successor's ring was mapped"
    assert replay.poll() is None


def mappings(process: subprocess.Popen[bytes]) -> int:
    return Path(f"/proc/{process.pid}/maps").read_text().count("memfd:asyncrl-")


def test_the_mapping_goes_when_its_actor_has_a_successor(run: Run) -> None:
    replay = run.replay()
    for number in range(2):
        actor = run.actor("actor-0", groups=1, members=1)
        assert actor.stdout is not None
        assert actor.stdout.readline() == b"1\n"
        deadline = time.monotonic() + 20
        while run.learner.status()[s.SHARED_BYTES] < (number + 1) * PICTURES:
            assert time.monotonic() < deadline
        assert mappings(replay) == 1
        kill(actor)
    assert run.actor("actor-0", groups=1).wait(20) == 0
    run.learner.status()
    assert mappings(replay) == 0, "it said goodbye"


def test_a_restarted_replay_gets_the_unacknowledged_from_the_ring_again(
    run: Run, inside: ZmqActorPort
) -> None:
    replay = run.replay()
    grant = acquire(inside)
    inside.push(large(grant.number, 0))
    until(inside, 1)
    while run.learner.status()[s.SHARED_BYTES] < PICTURES:
        inside.serve()
    kill(replay)
    inside.push(large(grant.number, 1))
    run.replay()
    until(inside, 0)
    status = run.learner.status()
    assert status[s.SHARED_BYTES] == 2 * PICTURES, "of this process"
    assert status[s.WIRE_ERRORS] == 0
    other = acquire(inside)
    for member in range(2):
        inside.push(large(other.number, member))
    until(inside, 0)
    run.use(2)
    inside.close(5.0)


def test_a_restarted_replay_without_shared_memory_gets_them_by_the_socket(
    run: Run, inside: ZmqActorPort
) -> None:
    replay = run.replay()
    grants = [acquire(inside), acquire(inside)]
    inside.push(large(grants[0].number, 0))
    until(inside, 1)
    while run.learner.status()[s.SHARED_BYTES] < PICTURES:
        inside.serve()
    kill(replay)
    run.replay(shared=0)
    inside.push(large(grants[0].number, 1))
    for member in range(2):
        inside.push(large(grants[1].number, member))
    until(inside, 0)
    status = run.learner.status()
    assert status[s.SHARED_BYTES] == status[s.WIRE_ERRORS] == 0
    run.use(2)
    inside.close(5.0)


def test_one_process_of_the_replay_gets_a_place_in_the_ring_once(
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A repetition may be read after the place has another owner, so it carries its bytes."""
    monkeypatch.setattr("asyncrl.replay.outbox.RESEND_AFTER", 0.2)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    replay = bind_router(context, endpoint)
    actor = ZmqActorPort(endpoint, "actor-0", shared_bytes=RING)
    answer(replay, actor, "hello", reply="welcome", boot="b", known=True)
    about = answer(replay, actor, "ring", reply="ring_answer", mapped=True, reason="")
    rings = Rings(RING)
    assert rings.announced(b"a", about.fields) == ""
    deadline = time.monotonic() + 15
    while not actor._outbox._mapped and time.monotonic() < deadline:
        actor.serve()
    sent = large(0, 0)
    actor.push(sent)
    received = []
    while len(received) < 2 and time.monotonic() < deadline:
        actor.serve()
        if replay.poll(20):
            _, *frames = replay.recv_multipart()
            message = decode(frames, rings.get(b"a"))
            received += [message] if message.kind == "episode" else []
    actor._link.close()
    context.destroy(linger=0)
    assert [message.shared_bytes for message in received] == [PICTURES, 0]
    for message in received:
        assert message.episode is not None
        assert_same(message.episode, sent)


def test_a_message_for_an_earlier_process_is_no_error(tmp_path: Path) -> None:
    """It waited in a queue while the replay was restarted: the actor introduces itself and its ring again."""
    core, socket, ring = make_core(tmp_path, make_limiter()), ScriptedSocket(), RingWriter(RING)
    service = ReplayServer(core, socket, Rings(RING))  # type: ignore[arg-type]
    frames = encode("episode", large(0, 0), ring.put_episode(large(0, 0)))
    with pytest.raises(RingMissing):
        decode(frames)
    stale = [zmq.Frame(frame) for frame in (b"a", *frames)]
    socket.inbox.append(stale)
    service.serve_once(0)
    assert [(message.kind, message.fields["known"]) for _, message in socket.sent] == [("welcome", False)]
    socket.say(b"a", "hello", role="actor", name="a", session="s", version=0)
    socket.inbox.append(stale)  # Now that is nothing an honest actor does.
    service.serve_once(0)
    assert [message.kind for _, message in socket.sent[1:]] == ["welcome", "refused"]
    core.close()
    ring.close()


def test_a_dishonest_announcement_is_refused_and_counted(tmp_path: Path, endpoint: str) -> None:
    stop, ready = threading.Event(), threading.Event()
    server = threading.Thread(
        target=serve_replay,
        args=(open_replay(tmp_path, CONFIG), endpoint),
        kwargs={"stop_event": stop, "ready": ready.set, "shared_bytes": RING},
    )
    server.start()
    assert ready.wait(10)
    ring, context = RingWriter(RING), zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.connect(endpoint)

    def ask(kind: str, **fields: object) -> str:
        socket.send_multipart(encode(kind, **fields))
        assert socket.poll(5000)
        return decode(socket.recv_multipart()).kind

    about = ring.announcement()
    assert ask("ring", **about) == "welcome", "it has to introduce itself first"
    assert ask("hello", role="actor", name="a", session="s", version=0) == "welcome"
    for lie in ({"name": "y"}, {"bytes": RING - 64}, {"fd": -1}, {"bytes": -(2**63)}, {"pid": 0}):
        assert ask("ring", **(about | lie)) == "refused", lie
    assert ask("ring", **(about | {"host": "elsewhere"})) == "ring_answer"
    assert ask("ring", **about) == "ring_answer"
    learner = ZmqLearnerPort(endpoint)
    assert learner.status()[s.WIRE_ERRORS] == 5
    learner.close()
    context.destroy(linger=0)
    ring.close()
    stop.set()
    server.join(10)
