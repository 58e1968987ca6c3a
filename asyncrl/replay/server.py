"""Serve the replay to actors and the learner over one ROUTER socket.

It ends after the learner's stop once the actors left (or 5 s later), on its stop event, or with its parent.
One thread serves and never waits, one writes files, some read the files of batches.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, fields
from typing import Any, Final

import zmq

from asyncrl.errors import OutOfFiles, WireError
from asyncrl.messaging.framing import Buffer
from asyncrl.messaging.keys import ServerKeys, admitting
from asyncrl.messaging.sockets import LINGER_MS, ConnectionGuard, bind_again, bind_router
from asyncrl.messaging.wire import WITH_EPISODE, Message, decode
from asyncrl.observability import metrics_system as m
from asyncrl.observability.process_status import set_activity
from asyncrl.replay.batch_chooser import BatchChooser
from asyncrl.replay.buffer import Replay
from asyncrl.replay.connection import NO_SETTINGS, JoinSettings
from asyncrl.replay.interface import CAUSES, REPORTED, GroupFailure
from asyncrl.replay.peers import Peers, PeerSender
from asyncrl.replay.state import ReplayState
from asyncrl.storage.run_owner import NO_RUN, RunIdentity

POLL_MS: Final = 100  # Longest sleep of the loop
HANG_TIMEOUT: Final = 300.0  # Seconds that handling messages may take; a slower disk counts as gone
SHUTDOWN_TIMEOUT: Final = 5.0  # Seconds the actors have to leave after the stop
LONG_PASS: Final = 2.0  # Seconds of one pass that do not count as actors' silence
KINDS: Final = {
    *("hello", "ping", "bye", "settings", "acquire", "episode", "failed", "report"),
    *("sample", "fetch", "version", "status", "stop"),
}
_MESSAGES_PER_PASS: Final = 64  # Messages handled before waiting requests are tried again
_EPISODES_PER_PASS: Final = 8  # Before anything is sent, for which learner ranks wait


def serve_replay(
    replay: Replay,
    endpoint: str,
    *,
    security: ServerKeys | None = None,
    settings: JoinSettings = NO_SETTINGS,
    identity: RunIdentity = NO_RUN,
    stop_event: threading.Event | None = None,
    ready: Callable[[], object] = lambda: None,
) -> None:
    """Run the replay until it is over; without `security`, only this user may reach the endpoint."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with (
            admitting(context, security),
            closing(ConnectionGuard(socket := bind_router(context, endpoint, security))) as guard,
        ):
            ready()
            replay.lifecycle.write_in_background()
            replay.batches.read_in_background()
            server = ReplayServer(replay, socket, settings, identity, guard, keyed=security is not None)
            server.run(stop_event or threading.Event(), endpoint)
    finally:
        context.destroy(linger=LINGER_MS)
        replay.close()


class ReplayServer:
    """Serves actors and learner ranks over one ROUTER socket."""

    def __init__(
        self,
        replay: Replay,
        socket: zmq.Socket[bytes],
        settings: JoinSettings = NO_SETTINGS,
        identity: RunIdentity = NO_RUN,
        guard: ConnectionGuard | None = None,
        *,
        keyed: bool = False,
    ) -> None:
        self._guard = guard
        self.replay, self.socket, self.sender = replay, socket, PeerSender(socket)
        self.peers = Peers(replay, self.sender, settings, identity, keyed=keyed)
        self._served_at = time.monotonic()
        self._acquires: dict[bytes, deque[int]] = {}  # Actor -> its requests for a group without an answer.
        # Actors that asked since the last pass: their group may have been granted, and the answer lost.
        self._asked = set[bytes]()
        self._sample_request: Message | None = None
        self._hand_over = HandOver(replay.batches, replay.state, self.sender)
        self._bytes = self._episodes = 0

    def run(self, stop_event: threading.Event, endpoint: str) -> None:
        """Serve until stopped, orphaned, or abandoned by all after the learner's stop."""
        parent, serve_until = os.getppid(), float("inf")
        while not stop_event.is_set() and os.getppid() == parent and time.monotonic() < serve_until:
            bind_again(self.socket, endpoint)
            # Short sleeps while threads work, whose end no message reports.
            busy = self.replay.lifecycle.unwritten or self._hand_over.busy
            self.serve_once(1 if busy else 5 if self.replay.batches.busy else POLL_MS)
            if self.replay.stopped:
                serve_until = min(serve_until, time.monotonic() + SHUTDOWN_TIMEOUT)
                if not self.peers.actors:
                    return

    def serve_once(self, wait_ms: int) -> None:
        """Handle the messages that came within `wait_ms` milliseconds, then send all that is due."""
        set_activity("serving", HANG_TIMEOUT)
        self.socket.poll(wait_ms)
        self._receive()
        if time.monotonic() - self._served_at > LONG_PASS:  # The replay itself stalled.
            self.replay.state.limiter.listening_since = self.replay.state.limiter.clock()
        self.replay.maintain()
        self._answer()
        self._served_at = time.monotonic()

    def _receive(self) -> None:
        enough = self._episodes + _EPISODES_PER_PASS
        for _ in range(_MESSAGES_PER_PASS):
            if self._episodes >= enough:
                return
            try:
                peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if self._guard is not None:
                self._guard.note(peer)
            self._handle(peer.bytes, [frame.buffer for frame in frames])

    def _handle(self, peer: bytes, frames: list[Buffer]) -> None:
        try:
            message = decode(frames, views=True)
            if message.kind not in KINDS:
                raise WireError(f"the replay does not take {message.kind!r}.")
            if message.kind == "hello":
                self.peers.check(message)
            elif message.kind == "failed" and message["cause"] not in CAUSES:
                raise WireError(f"cause {message['cause'][:40]!r} is none of {', '.join(CAUSES)}.")
        except WireError as error:
            self.sender.refuse(peer, error)
            return
        if peer in self.peers.actors:
            self.replay.state.limiter.record_heartbeat(self.peers.actors[peer])
        if message.kind in WITH_EPISODE:
            self._bytes += sum(map(len, frames))
            self._episodes += 1
        known = message.kind in ("hello", "settings") or self.peers.knows(peer)
        if known and self.replay.stopped and message.kind not in ("bye", "status", "stop"):
            self.sender.send(peer, "stopped")
        elif known:
            self._dispatch(peer, message)
        elif message.kind == "bye":
            self.sender.send(peer, "bye")
        else:
            self.peers.welcome(peer, known=False)

    def _answer(self) -> None:
        routes = {name: peer for peer, name in self.peers.actors.items()}
        for actor, receipt in self.replay.pop_receipts():
            if actor in routes:
                self._receipt(routes[actor], receipt.episode_id, receipt.status, receipt.reason)
        if self.replay.stopped:
            return
        if self.peers.learner:  # It brings the version at which the run begins.
            self._grant()
        self._try_sample()
        notices = self.replay.lifecycle.notices
        learner = self.peers.learner
        while notices and learner and self.sender.send(learner, "notice", text=notices[0]):
            notices.pop(0)
        self._hand_over.send_due()
        self.replay.batches.read_ahead()
        self.sender.unreachable.clear()

    def _grant(self) -> None:
        answered = True
        while answered:
            peers = self._acquires.keys()
            peers = list(peers if self.replay.state.limiter.credit else self._asked & peers)
            answered = sum(self._grant_one(peer) for peer in peers) > 0
        self._asked.clear()

    def _grant_one(self, peer: bytes) -> bool:
        requests = self._acquires[peer]
        # An actor that hangs would keep the credit; awake, it asks again.
        if peer not in self.peers.actors or self.replay.state.limiter.timed_out(self.peers.actors[peer]):
            del self._acquires[peer]
            return False
        if not self.peers.send_quarantined(peer):
            return False  # Its queue is full: it hears the names before its next grant.
        name = self.peers.actors[peer]
        if self.replay.was_given_up(name, requests[0]):
            self.sender.send(peer, "given_up", turn=requests.popleft())
        elif (grant := self.replay.grant(name, requests[0])) is not None:
            self.sender.send(peer, "grant", turn=requests.popleft(), **asdict(grant))
        else:
            return False
        if not requests:
            del self._acquires[peer]
        return True

    def _try_sample(self) -> None:
        wanted = self._sample_request
        if wanted is None:
            return
        numbers = self.replay.choose(wanted["groups"], wanted["version"], wanted["request"])
        answer: dict[str, Any] = {"request": wanted["request"]}
        if numbers is not None:
            kind, answer["numbers"] = "chosen", numbers
        elif self.replay.batches.reading:
            return
        elif why := self.replay.exhausted_reason:
            kind, answer = "refused", {"reason": why[:4000]}
        elif why := self.replay.filter_end_reason:
            kind, answer["reason"] = "nothing_to_learn", why
        else:
            return
        if self.sender.send(self.peers.learner, kind, **answer):
            self._sample_request = None  # Else the next pass gives it the same answer.

    def _dispatch(self, peer: bytes, message: Message) -> None:
        actor, from_learner = self.peers.actors.get(peer), peer == self.peers.learner
        match message.kind:
            case "hello":
                if message["role"] == "learner" and not from_learner:
                    self._sample_request = None
                self._hand_over.forget(peer)  # It asks again.
                self.peers.hello(peer, message)
            case "ping":
                self.peers.welcome(peer)
            case "bye":
                self.peers.remove(peer)
                self.sender.send(peer, "bye")
            case "settings":
                self.peers.send_settings(peer, message)
            case "acquire" if actor is not None:
                first = message["turn"]
                self._acquires[peer] = deque(range(first, first + message["groups"]))
                self._asked.add(peer)
            case "episode":
                assert message.episode is not None
                receipt = self.replay.admit(message.episode, actor or "")
                self._receipt(peer, receipt.episode_id, receipt.status, receipt.reason)
            case "failed":
                about = {x.name: message[x.name] for x in fields(GroupFailure)}
                self.replay.fail(GroupFailure(**about), actor or "")
                self._receipt(peer, message["report"], "dropped_poisoned", "")
            case "report" if actor is not None:
                readings = message["readings"].items()
                self.replay.report(actor, {REPORTED[name]: x for name, x in readings if name in REPORTED})
            case "sample" if from_learner and message["groups"] >= 1:
                self._sample_request = message
            case "fetch" if self.peers.learns(peer):
                self._hand_over.ask(peer, message)
            case "version" if from_learner:
                self.replay.set_version(message["version"])
            case "status":
                wire = {m.WIRE_BYTES: float(self._bytes), m.WIRE_ERRORS: float(self.sender.errors)}
                named = {metric.name: value for metric, value in (self.replay.status() | wire).items()}
                about = {"contents": self.replay.contents()[:4000], **asdict(self.replay.filling)}
                self.sender.send(peer, "status_reply", readings=named, **about)
            case "stop" if from_learner:
                self.replay.stopped = True
                for other in [peer, *self.peers.actors]:
                    if not self.sender.send(other, "stopped"):
                        self.peers.remove(other)

    def _receipt(self, peer: bytes, episode_id: str, status: str, reason: str) -> None:
        self.sender.send(peer, "receipt", episode_id=episode_id, status=status, reason=reason[:1000])


class HandOver:
    """Sends each learner rank the groups of the chosen batch that it requests, a few at a time."""

    def __init__(self, batches: BatchChooser, state: ReplayState, sender: PeerSender) -> None:
        self._batches, self._state, self._sender = batches, state, sender
        # Routing id of a rank -> groups that it requested and does not have, in the order of its requests.
        self._due: dict[bytes, dict[int, None]] = {}

    @property
    def busy(self) -> bool:
        """True if a rank waits for a group."""
        return bool(self._due)

    def ask(self, rank: bytes, message: Message) -> None:
        """Add a rank's request for a group; a repeated one changes nothing."""
        request, number = message["request"], message["number"]
        if request != self._state.request or number not in self._state.batch:
            self._send_lost(rank, request, number, "it is not of the batch that was chosen last")
        else:
            self._due.setdefault(rank, {})[number] = None

    def forget(self, rank: bytes) -> None:
        """Drop the requests of a rank that left or restarts."""
        self._due.pop(rank, None)

    def send_due(self) -> None:
        """Send every rank as much as it accepts of the groups that are read; start to read the others."""
        for rank, due in list(self._due.items()):
            for number in list(due):
                if number not in self._state.batch or self._send(rank, number):
                    del due[number]
            if not due or rank in self._sender.unreachable:
                self.forget(rank)  # It will ask again.

    def _send(self, rank: bytes, number: int) -> bool:
        """Return False if the group has to be sent again; True if it was sent, or reported as lost."""
        try:
            group = self._batches.load(number)
        except OutOfFiles:  # Tried again in the next pass.
            return False
        if group is None:
            return False
        if why := group.damaged or group.problem:
            self._send_lost(rank, self._state.request, number, why)
            return True
        if not all(self._sender.send_frames(rank, frames) for frames in group.messages):
            return False
        self._batches.sent(number)
        return True

    def _send_lost(self, rank: bytes, request: str, number: int, why: str) -> None:
        self._sender.send(rank, "lost", request=request, number=number, reason=why[:1000])
