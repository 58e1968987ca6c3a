"""Hand the groups of the chosen batch to the learner ranks, each those that it asks for.

Part of the replay's one serving thread, which waits neither for files nor for a rank: `loading.py` reads,
and what a rank does not take now is tried again. A rank asks for a few groups at a time, so that no more are
on their way to it, and what else it is told comes between them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from asyncrl.errors import OutOfFiles
from asyncrl.messaging.episode_codec import Buffer
from asyncrl.messaging.wire import Message
from asyncrl.replay.choosing import BatchChooser
from asyncrl.replay.peers import PeerSender
from asyncrl.replay.state import Session


@dataclass(kw_only=True)
class _Outgoing:
    """What one rank asked for and did not get yet."""

    request: str
    """Names the batch."""
    numbers: deque[int] = field(default_factory=deque)
    """Groups, in the order of asking; the first one may be on its way."""
    messages: deque[list[Buffer]] = field(default_factory=deque)
    """The rest of the first one; empty: it was not begun."""


class HandOver:
    """The groups on their way to the learner ranks."""

    def __init__(self, batches: BatchChooser, session: Session, sender: PeerSender) -> None:
        """Begin with nothing; ranks ask again when they find another process of the replay."""
        self._batches, self._session, self._sender = batches, session, sender
        self._outgoing: dict[bytes, _Outgoing] = {}
        """Routing id of a rank -> what it waits for."""

    @property
    def busy(self) -> bool:
        """Whether a rank waits for something."""
        return bool(self._outgoing)

    def ask(self, rank: bytes, message: Message) -> None:
        """Note that a rank asks for a group; a repeated question changes nothing."""
        request, number = message["request"], message["number"]
        if request != self._session.request or number not in self._session.batch:
            self._tell_lost(rank, request, number, "it is not of the batch that was chosen last")
            return
        outgoing = self._outgoing.get(rank)
        if outgoing is None or outgoing.request != request:
            outgoing = self._outgoing[rank] = _Outgoing(request=request)
        if number not in outgoing.numbers:
            outgoing.numbers.append(number)

    def forget(self, rank: bytes) -> None:
        """Let go of what a rank asked for: it is gone, or begins anew."""
        self._outgoing.pop(rank, None)

    def send_due(self) -> None:
        """Send to every rank what has been read and it takes; have read what is asked for next."""
        for rank, outgoing in list(self._outgoing.items()):
            while outgoing.numbers and self._begun(rank, outgoing) and self._sent(rank, outgoing):
                number = outgoing.numbers.popleft()
                if number in self._session.batch:
                    self._batches.loader.forget(number)
            if not outgoing.numbers or rank in self._sender.unreachable:
                self.forget(rank)  # It will ask again.

    def _begun(self, rank: bytes, outgoing: _Outgoing) -> bool:
        """Whether the messages of the first group are there: of those asked for, one that has been read."""
        if outgoing.messages:
            return True
        for number in list(outgoing.numbers):
            try:
                group = self._batches.load(number)
            except OutOfFiles:  # Tried again in the next pass.
                continue
            if group is None:
                continue
            outgoing.numbers.remove(number)
            if why := group.damaged or group.unusable:
                self._tell_lost(rank, outgoing.request, number, why)
            elif not outgoing.messages:
                outgoing.messages.extend(group.messages)
                outgoing.numbers.appendleft(number)
            else:
                outgoing.numbers.append(number)
        return bool(outgoing.messages)

    def _sent(self, rank: bytes, outgoing: _Outgoing) -> bool:
        """Send what the rank takes of the first group; whether that was the rest of it."""
        while outgoing.messages and self._sender.send_frames(rank, outgoing.messages[0]):
            outgoing.messages.popleft()
        return not outgoing.messages

    def _tell_lost(self, rank: bytes, request: str, number: int, why: str) -> None:
        self._sender.send(rank, "lost", request=request, number=number, reason=why[:1000])
