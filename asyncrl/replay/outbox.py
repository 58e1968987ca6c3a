"""Episodes of an actor on their way to being durable: pushed in, messages out until the last receipt.

Large arrays go through a ring of shared memory when the replay could map it, else through the socket. An
episode's place in the ring is the replay's until the final receipt. To one process of the replay an episode
goes by the ring once: repeated, it goes through the socket, because by the time the repetition is read, the
place may hold another episode.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from asyncrl.errors import WireError
from asyncrl.messaging.episode_codec import NOT_SHARED, Buffer
from asyncrl.messaging.shared_memory import RingWriter, same_host
from asyncrl.messaging.wire import Message, encode
from asyncrl.records import Episode
from asyncrl.replay.connection import PING_EVERY, Connection
from asyncrl.replay.interface import GroupFailure

RESEND_AFTER: Final = 10.0
"""Seconds until an episode that was not answered at all is sent again."""
HELD_RESEND_AFTER: Final = 60.0
"""Seconds until an episode of an incomplete group is sent again: the receipt that settles it may be lost."""


@dataclass(kw_only=True)
class _Unacknowledged:
    """An episode, or the report of a group that failed, that is not known to be durable."""

    group_id: str
    episode: Episode | None
    """Its large arrays are views of the ring. None: a report."""
    offsets: Mapping[str, int]
    """Array -> its place in the ring."""
    frames: list[Buffer]
    """They name those places, where there are some."""
    server_id: str = ""
    """Replay process it was sent to."""
    sent_at: float = -float("inf")
    held: bool = False
    """That process said it has it; what became of its group is said later, but only once."""

    def due(self, server_id: str, now: float) -> bool:
        """Whether it should be sent (again) to the replay process `server_id`."""
        return self.server_id != server_id or now - self.sent_at >= (
            HELD_RESEND_AFTER if self.held else RESEND_AFTER
        )

    def copy_for_socket(self) -> list[Buffer]:
        """Encode it for the socket. What the socket still holds must not change, so this copies."""
        return [bytes(frame) for frame in encode("episode", self.episode)] if self.episode else self.frames


class Outbox:
    """The unacknowledged episodes of one actor."""

    def __init__(self, link: Connection, shared_bytes: int, warn: Callable[[str], None]) -> None:
        """Begin empty.

        Args:
            link: To the replay.
            shared_bytes: Size of the ring; 0, or a replay on another host: there is none.
            warn: Receives a line when there is no shared memory.
        """
        self._link, self.warn = link, warn
        self._items: dict[str, _Unacknowledged] = {}
        self._ring: RingWriter | None = None
        self._asked, self._asked_at = 0, -float("inf")
        self._answered, self._mapped = False, False
        if shared_bytes and same_host(link.endpoint):
            try:
                self._ring = RingWriter(shared_bytes)
            except (OSError, OverflowError) as error:
                warn(f"replay: no ring of {shared_bytes} bytes ({error}), so episodes use the socket.")

    def __len__(self) -> int:
        return len(self._items)

    @property
    def groups(self) -> int:
        """Groups with unacknowledged episodes."""
        return len({item.group_id for item in self._items.values()})

    @property
    def undelivered(self) -> bool:
        """Whether the replay may not even have received something."""
        return any(not item.held for item in self._items.values())

    def add(self, episode: Episode) -> None:
        """Take over an episode.

        Raises:
            WireError: It cannot be sent.
        """
        ring = self._ring if self._mapped else None
        offsets = NOT_SHARED if ring is None else ring.put_episode(episode)
        try:
            frames = encode("episode", episode, offsets)
        except WireError:
            if ring is not None:
                ring.give_back(offsets)
            raise
        if ring is not None and offsets:
            views = {name: ring.view(at, getattr(episode, name)) for name, at in offsets.items()}
            episode = dataclasses.replace(episode, **views)
        self._items[episode.episode_id] = _Unacknowledged(
            group_id=episode.group_id, episode=episode, offsets=offsets, frames=frames
        )

    def fail(self, failure: GroupFailure) -> None:
        """Take over the report of a group that failed; it is settled like an episode."""
        report = os.urandom(16).hex()
        frames = encode("failed", report=report, **dataclasses.asdict(failure))
        self._items[report] = _Unacknowledged(
            group_id=f"{failure.number:08d}", episode=None, offsets=NOT_SHARED, frames=frames
        )

    def handle(self, message: Message) -> None:
        """Take in a receipt, or the answer about the ring."""
        if message.kind == "ring_answer":
            self._answered, self._mapped = True, message["mapped"]
        elif message.kind == "receipt":
            self._settle(message)

    def send_due(self) -> None:
        """Send what the replay does not have, without waiting."""
        server_id, now = self._link.server_id, time.monotonic()
        if not server_id or self._link.stopped:
            return
        self._announce(now)
        for item in self._items.values():
            if not item.due(server_id, now):
                continue
            if item.offsets and not self._answered:
                continue
            by_socket = item.offsets and (item.server_id == server_id or not self._mapped)
            if not self._link.send_frames(item.copy_for_socket() if by_socket else item.frames):
                return
            item.server_id, item.sent_at, item.held = server_id, now, False

    def close(self) -> None:
        """Let go of the ring."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _announce(self, now: float) -> None:
        """Introduce the ring to every process of the replay that this actor was introduced to."""
        if self._ring is None:
            return
        if self._asked != self._link.introductions:
            self._answered, self._mapped = False, False
        elif self._answered or now - self._asked_at < PING_EVERY:
            return
        if self._link.send_now("ring", **self._ring.announcement()):
            self._asked, self._asked_at = self._link.introductions, now

    def _settle(self, message: Message) -> None:
        status, item = message["status"], self._items.get(message["episode_id"])
        if item is None:
            return
        if status == "held":
            item.held = True
            return
        del self._items[message["episode_id"]]
        if self._ring is not None:
            self._ring.give_back(item.offsets)
        if status == "dropped_invalid":
            self.warn(f"replay: episode {message['episode_id']} was dropped: {message['reason']}")
