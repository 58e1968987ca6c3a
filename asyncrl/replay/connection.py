"""One socket to the replay that reintroduces itself as needed, and the episodes without a receipt.

It sends `hello` and pings once a second. A restarted replay answers that it does not know the peer; then the
connection introduces itself again, and its owner repeats everything unanswered to the new process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import zmq

from asyncrl import __version__
from asyncrl.errors import AttemptEnded, ReplayError
from asyncrl.messaging.framing import Buffer
from asyncrl.messaging.keys import ClientKeys
from asyncrl.messaging.sockets import IDENTITY, LEAVE_SECONDS, LINGER_MS, Handshakes, open_dealer
from asyncrl.messaging.wire import Message, decode, encode
from asyncrl.records import Episode
from asyncrl.replay.groups import number_of
from asyncrl.replay.interface import GroupFailure
from asyncrl.storage.atomic import read_small
from asyncrl.storage.run_owner import NO_RUN, RunIdentity

PING_EVERY: Final = 1.0  # Seconds; also between repeated questions
RESEND_AFTER: Final = 10.0  # Seconds until an episode or request that was not answered at all is sent again
HELD_RESEND_AFTER: Final = 60.0
"""Seconds until an episode of an incomplete group is sent again: its final receipt may be lost."""
RANK: Final = "rank"  # Role of a learner rank other than 0: it fetches its part of batches
VISITOR: Final = "visitor"


class Sent(NamedTuple):
    """Send state of a message that is repeated until answered."""

    server_id: str  # Replay process that it was sent to
    at: float


NOT_SENT: Final = Sent("", -float("inf"))


class Connection:
    """One DEALER socket that introduces itself again after a restart of the replay."""

    def __init__(
        self,
        endpoint: str,
        role: str,
        name: str,
        version: int,
        security: ClientKeys | None = None,
        identity: RunIdentity = NO_RUN,
    ) -> None:
        """Connect; the replay need not be there yet."""
        self.endpoint, self.role, self.name, self.version = endpoint, role, name, version
        self._identity = identity
        self.session = os.urandom(8).hex()
        self.server_id = ""  # Id of the replay process that knows this port; empty if none
        self.stopped = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = open_dealer(self._context, endpoint, f"{role}-{self.session}".encode(), security)
            # A private ipc folder admits no other user, and has no handshake.
            self._handshakes = Handshakes(self._socket, endpoint) if endpoint.startswith("tcp") else None
            self._socket.connect(endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._spoke = -float("inf")
        # Around every use of the socket, which no two threads may use at once.
        self._lock, self._closing = threading.RLock(), threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="replay pings", daemon=True)
        if role == "actor":
            self._pulse.start()

    def exchange(self, wait: float) -> list[Message]:
        """Keep connected; return messages, whose images are views, and wait up to `wait` seconds for one."""
        found = list[Message]()
        with self._lock:
            if self._quiet():
                self.send_now("ping") if self.server_id else self._introduce()
            if wait > 0:
                self._socket.poll(max(1, int(1000 * min(wait, PING_EVERY))))
            if self._handshakes is not None:
                self._handshakes.check()
            while self._socket.poll(0):
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                message = decode([frame.buffer for frame in frames], views=True)
                if message.kind == "welcome":
                    self._welcome(message)
                elif message.kind == "stopped":
                    self.stopped = True
                elif message.kind == "refused":
                    raise ReplayError(f"the replay refused a message: {message['reason']}")
                elif message.kind == "ended":
                    raise AttemptEnded(f"the replay at {self.endpoint}", message["attempt"])
                else:
                    found.append(message)
        return found

    def send_now(self, kind: str, **fields: Any) -> bool:
        """Send a message without waiting; False if the queue is full."""
        return self.send_frames(encode(kind, **fields))

    def send_frames(self, frames: list[Buffer]) -> bool:
        """Send an encoded message without waiting; False if the queue is full."""
        try:
            with self._lock:
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def due(self, sent: Sent, every: float) -> bool:
        """True if a resend is due: the replay is another process, or `every` seconds passed."""
        again = sent.server_id != self.server_id or time.monotonic() - sent.at >= every
        return bool(self.server_id) and again

    def sent(self) -> Sent:
        """Return the record of a message that was just sent."""
        return Sent(self.server_id, time.monotonic())

    def _quiet(self) -> bool:
        now = time.monotonic()
        quiet = now - self._spoke >= PING_EVERY
        self._spoke = now if quiet else self._spoke
        return quiet

    def _beat(self) -> None:
        while not self._closing.wait(PING_EVERY / 4):
            if self._lock.acquire(timeout=PING_EVERY):
                try:
                    # Not a ping: the answer of a restarted replay would not be read now.
                    if not self._closing.is_set() and self._quiet():
                        self._introduce()
                finally:
                    self._lock.release()

    def await_farewell(self) -> None:
        """Wait until the replay has read `bye`: closing the connection drops unread messages."""
        self._closing.set()  # No ping follows.
        until = time.monotonic() + LEAVE_SECONDS
        while self.server_id and not self.stopped and (left := until - time.monotonic()) > 0:
            came = self._socket.poll(int(1000 * left))
            if came and decode(self._socket.recv_multipart()).kind in ("bye", "stopped"):
                return

    def close(self) -> None:
        """Disconnect; sent messages are still delivered for LINGER_MS."""
        self._closing.set()
        if self._pulse.is_alive():
            self._pulse.join(2 * PING_EVERY)
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._context.destroy(linger=LINGER_MS)

    def _introduce(self) -> None:
        who = {"role": self.role, "name": self.name, "session": self.session, "version": self.version}
        self.send_now("hello", **who, secret=self._identity.secret, attempt=self._identity.attempt)

    def _welcome(self, message: Message) -> None:
        if message["package"] != __version__:
            raise ReplayError(
                f"the replay at {self.endpoint} runs asyncrl {message['package'][:40]}, this process "
                f"{__version__}. Run the same asyncrl version on both sides."
            )
        if message["known"]:
            self.server_id = message["boot"]
        else:
            self.server_id = ""
            self._introduce()


@dataclass(kw_only=True)
class _Unacknowledged:
    """An episode, or a failed group's report, without a final receipt."""

    number: int  # Of its group
    frames: list[Buffer]
    sent: Sent = NOT_SENT
    held: bool = False  # The replay has it; the final receipt follows, but only once


class Outbox:
    """The unacknowledged episodes of one actor."""

    def __init__(self, link: Connection, warn: Callable[[str], None]) -> None:
        """Start empty; `warn` receives a line for each episode that the replay dropped as invalid."""
        self._link, self.warn = link, warn
        self._items: dict[str, _Unacknowledged] = {}
        self.dropped: set[int] = set()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def groups(self) -> int:
        """Count of the groups with unacknowledged episodes."""
        return len({item.number for item in self._items.values()})

    @property
    def undelivered(self) -> bool:
        """True if a message may not have reached the replay yet."""
        return not all(item.held for item in self._items.values())

    def add(self, episode: Episode) -> None:
        """Add an episode; its arrays must not change any more."""
        number, frames = number_of(episode.group_id), encode("episode", episode)
        self._items[episode.episode_id] = _Unacknowledged(number=number, frames=frames)

    def fail(self, failure: GroupFailure) -> None:
        """Add the report of a group that failed; it is acknowledged like an episode."""
        report = os.urandom(16).hex()
        frames = encode("failed", report=report, **asdict(failure))
        self._items[report] = _Unacknowledged(number=failure.number, frames=frames)

    def handle(self, message: Message) -> None:
        """Record a receipt; other messages are ignored."""
        if message.kind != "receipt" or (item := self._items.get(message["episode_id"])) is None:
            return
        status = message["status"]
        if status == "held":
            item.held = True
            return
        del self._items[message["episode_id"]]
        if status.startswith("dropped") and status != "dropped_outdated":
            self.dropped.add(item.number)
        if status == "dropped_invalid":
            self.warn(f"replay: episode {message['episode_id']} was dropped: {message['reason']}")

    def send_due(self) -> None:
        """Send everything that the replay does not have, without waiting."""
        if self._link.stopped:
            return
        for item in self._items.values():
            if self._link.due(item.sent, HELD_RESEND_AFTER if item.held else RESEND_AFTER):
                if not self._link.send_frames(item.frames):
                    return
                item.sent, item.held = self._link.sent(), False


@dataclass(frozen=True, kw_only=True)
class JoinSettings:
    """Facts that an actor needs to join a run."""

    config: str  # JSON of the run's TrainConfig
    weights: str
    identity: RunIdentity = NO_RUN


NO_SETTINGS: Final = JoinSettings(config="", weights="")


def ask_settings(endpoint: str, name: str, security: ClientKeys | None, timeout: float) -> JoinSettings:
    """Ask a replay for the settings of its run; it may refuse: wrong keys, another version, a taken name."""
    link = Connection(endpoint, VISITOR, name, 0, security, RunIdentity(secret=_secret_next_to(endpoint)))
    until, asked = time.monotonic() + timeout, NOT_SENT
    try:
        while time.monotonic() < until:
            if link.due(asked, PING_EVERY) and link.send_now("settings", name=name):
                asked = link.sent()
            for message in link.exchange(0.1):  # Nothing else is sent to a visitor.
                identity = RunIdentity(secret=message["secret"], attempt=message["attempt"])
                return JoinSettings(config=message["config"], weights=message["weights"], identity=identity)
            if link.stopped:
                raise ReplayError(f"the run at {endpoint} is over.")
    finally:
        link.close()
    raise ReplayError(
        f"no replay answered at {endpoint} within {timeout:g} s. Is the run under way, is this its "
        "--replay.listen, and do firewalls let it through?"
    )


def _secret_next_to(endpoint: str) -> str:
    try:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        return read_small(folder / IDENTITY) if endpoint.startswith("ipc://") else ""
    except (OSError, ValueError):  # Then no replay answers, or it refuses this process.
        return ""
