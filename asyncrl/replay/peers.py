"""Peers of the replay: their admission, their list, and messages to them."""

from __future__ import annotations

import logging
import os
from typing import Any, Final

import zmq

from asyncrl import __version__
from asyncrl.errors import WireError
from asyncrl.messaging.framing import Buffer
from asyncrl.messaging.wire import Message, encode
from asyncrl.replay.buffer import Replay
from asyncrl.replay.connection import RANK, VISITOR, JoinSettings
from asyncrl.replay.limiter import ActorRecord
from asyncrl.storage.run_owner import RunIdentity

NAME_RESERVED: Final = 5.0  # Seconds after an actor's last sign of life until another may have its name
MOST_NEWCOMERS: Final = 64
"""Most actors without an episode that are admitted within the heartbeat's timeout; further ones wait."""
_LOG = logging.getLogger(__name__)
_LOGGED: Final = 100  # Refused messages that are written to the log; all are counted


class PeerSender:
    """Messages to the peers of one ROUTER socket, without waiting."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.errors = 0
        self.unreachable: set[bytes] = set()  # Peers that were gone when something was sent to them

    def send(self, peer: bytes, kind: str, **fields: Any) -> bool:
        """Send a message; False if the peer takes none now: it will ask again."""
        return self.send_frames(peer, encode(kind, **fields))

    def send_frames(self, peer: bytes, frames: list[Buffer]) -> bool:
        """Send an encoded message; see `send`."""
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.unreachable.add(peer)
            return False
        return True

    def refuse(self, peer: bytes, error: WireError) -> None:
        """Refuse a message with its error, and count it."""
        self.errors += 1
        if self.errors <= _LOGGED:
            _LOG.warning("refused a message: %s", error)
        self.send(peer, "refused", reason=str(error)[:1000])


class Peers:
    """The learner and the connected actors."""

    def __init__(
        self,
        replay: Replay,
        sender: PeerSender,
        settings: JoinSettings,
        identity: RunIdentity,
        *,
        keyed: bool,
    ) -> None:
        self.replay, self.sender, self.settings = replay, sender, settings
        self.identity, self._keyed = identity, keyed
        self.server_id = os.urandom(8).hex()
        self.actors: dict[bytes, str] = {}
        self.learner = b""  # The learner's routing id; empty until it is there
        self.ranks: dict[str, bytes] = {}  # Name of each other learner rank that is there -> its routing id
        self._visitors = set[bytes]()  # Peers that may ask for the settings.
        self._came = list[tuple[float, str]]()  # Time and name of actors that brought no episode yet
        self._replaced: set[str] = set()  # Sessions of actors whose name a newer one took.

    def knows(self, peer: bytes) -> bool:
        """True if a peer has introduced itself to this run."""
        return peer in self.actors or self.learns(peer)

    def learns(self, peer: bytes) -> bool:
        """True if a peer is a learner rank of this run: it gets groups."""
        return peer == self.learner or peer in self.ranks.values()

    def check(self, message: Message) -> None:
        """Check that a peer belongs to this run."""
        role, who = message["role"], f"{message['role'][:40]} {message['name'][:40]!r}"
        if message["package"] != __version__:
            raise WireError(
                f"{who} runs asyncrl {message['package'][:40]!r}, the replay runs {__version__!r}. Run the "
                "same asyncrl version on both sides."
            )
        if role not in ("actor", "learner", RANK, VISITOR):
            raise WireError(f"role {role[:40]!r} is not 'actor', 'learner', {RANK!r} or {VISITOR!r}.")
        if role == VISITOR and self._keyed:
            return  # Its key admits it; it comes for the run's secret.
        if not self.identity.knows(message["secret"]):
            raise WireError(
                f"{who} belongs to another run than this replay, or to none. Perhaps two runs have the same "
                "--replay.listen: give each its own."
            )
        if role != VISITOR and message["attempt"] > self.identity.attempt:
            raise WireError(f"{who} belongs to a newer start of the run than this replay.")

    def hello(self, peer: bytes, message: Message) -> None:
        """Record a peer that `check` accepted, and welcome it."""
        if message["role"] == VISITOR:
            self._visitors.add(peer)
        elif message["attempt"] < self.identity.attempt:
            self.sender.send(peer, "ended", attempt=self.identity.attempt)
            return
        if message["role"] == "learner":
            self.learner = peer
            for actor in self.replay.state.limiter.actors.values():
                actor.names_sent = 0  # A resume may have forgotten some of them.
            self.replay.begin(message["session"], message["version"])
        elif message["role"] == RANK:
            self.ranks[message["name"]] = peer
        elif message["role"] == "actor" and not self._admit(peer, message):
            return
        self.welcome(peer)

    def welcome(self, peer: bytes, *, known: bool = True) -> None:
        """Answer whether this process knows the peer; if not, the peer introduces itself and asks again."""
        self.sender.send(peer, "welcome", boot=self.server_id, known=known)

    def remove(self, peer: bytes) -> None:
        """Remove an actor. After the stop, its open groups stay, for a resume."""
        name = self.actors.pop(peer, None)
        if name is not None and not self.replay.stopped:
            self.replay.leave(name)

    def send_settings(self, peer: bytes, message: Message) -> None:
        """Send the run's settings to a process that wants to join."""
        if peer not in self._visitors:
            self.welcome(peer, known=False)
            return
        name = message["name"]
        if name in self.actors.values() and self.replay.state.limiter.since_heartbeat(name) < NAME_RESERVED:
            why = f"the run has an actor called {name!r}. Use another --name, or try again when it ended."
            self.sender.send(peer, "refused", reason=why)
        else:
            whose = {"secret": self.identity.secret, "attempt": self.identity.attempt}
            about = {"config": self.settings.config, "weights": self.settings.weights}
            self.sender.send(peer, "settings_reply", **about, **whose)

    def send_quarantined(self, peer: bytes) -> bool:
        """Send an actor the quarantined start states that it does not know; False if its queue is full."""
        actor = self.replay.state.limiter.actors[self.actors[peer]]
        for name in self.replay.state.quarantine.names[actor.names_sent :]:
            if not self.sender.send(peer, "quarantined", start_state=name):
                return False
            actor.names_sent += 1
        return True

    def _admit(self, peer: bytes, message: Message) -> bool:
        """Admit a peer; of two actors with one name, the newer stays: a respawned actor keeps its name."""
        name, session, limiter = message["name"], message["session"], self.replay.state.limiter
        actor = limiter.actors.get(name, ActorRecord())
        if session in self._replaced:
            why = f"another actor called {name!r} took this one's place. Give each a --name of its own."
            self.sender.send(peer, "refused", reason=why)
            return False
        now = limiter.clock()
        if actor.session != session:
            recent = now - limiter.heartbeat_timeout
            self._came = [(at, who) for at, who in self._came if at > recent and limiter.is_newcomer(who)]
            if len(self._came) >= MOST_NEWCOMERS:
                return False  # It introduces itself again.
            self._came.append((now, name))
            if actor.session:
                self._replaced.add(actor.session)
        if peer not in self.actors:
            actor.names_sent = 0
        for other, known in list(self.actors.items()):
            if known == name or (limiter.is_newcomer(known) and limiter.timed_out(known)):
                del self.actors[other]
        self.actors[peer] = name
        self.replay.hello(name, session)
        return True
