"""Keeps an actor's episodes and sends them until the replay says that they are durable or dropped."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from asyncrl.messaging.episode_codec import Buffer
from asyncrl.messaging.wire import Message, encode
from asyncrl.records import Episode
from asyncrl.replay.connection import Connection
from asyncrl.replay.groups import number_of
from asyncrl.replay.interface import GroupFailure

RESEND_AFTER: Final = 10.0
"""Seconds until an episode that was not answered at all is sent again."""
HELD_RESEND_AFTER: Final = 60.0
"""Seconds until an episode of an incomplete group is sent again: the receipt that settles it may be lost."""


@dataclass(kw_only=True)
class _Unacknowledged:
    """An episode, or the report of a group that failed, that is not known to be durable."""

    group_id: str
    frames: list[Buffer]
    server_id: str = ""
    """Replay process it was sent to."""
    sent_at: float = -float("inf")
    held: bool = False
    """That process said it has it; what became of its group is said later, but only once."""

    def due(self, server_id: str, now: float) -> bool:
        """Tell whether it should be sent (again) to the replay process `server_id`."""
        return self.server_id != server_id or now - self.sent_at >= (
            HELD_RESEND_AFTER if self.held else RESEND_AFTER
        )


class Outbox:
    """The unacknowledged episodes of one actor."""

    def __init__(self, link: Connection, warn: Callable[[str], None]) -> None:
        """Begin empty; `warn` receives a line for each episode that the replay dropped as invalid."""
        self._link, self.warn = link, warn
        self._items: dict[str, _Unacknowledged] = {}
        self.dropped: set[int] = set()
        """Groups that were given up."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def groups(self) -> int:
        """Count the groups with unacknowledged episodes."""
        return len({item.group_id for item in self._items.values()})

    @property
    def undelivered(self) -> bool:
        """Tell whether the replay may not even have received something."""
        return any(not item.held for item in self._items.values())

    def add(self, episode: Episode) -> None:
        """Take over an episode; its arrays must not change any more.

        Raises:
            WireError: It cannot be sent.
        """
        frames = encode("episode", episode)
        self._items[episode.episode_id] = _Unacknowledged(group_id=episode.group_id, frames=frames)

    def fail(self, failure: GroupFailure) -> None:
        """Take over the report of a group that failed; it is settled like an episode."""
        report = os.urandom(16).hex()
        frames = encode("failed", report=report, **dataclasses.asdict(failure))
        self._items[report] = _Unacknowledged(group_id=f"{failure.number:08d}", frames=frames)

    def handle(self, message: Message) -> None:
        """Follow a receipt; other messages are none of its business."""
        if message.kind != "receipt" or (item := self._items.get(message["episode_id"])) is None:
            return
        if message["status"] == "held":
            item.held = True
            return
        del self._items[message["episode_id"]]
        if message["status"].startswith("dropped") and message["status"] != "dropped_outdated":
            self.dropped.add(number_of(item.group_id))
        if message["status"] == "dropped_invalid":
            self.warn(f"replay: episode {message['episode_id']} was dropped: {message['reason']}")

    def send_due(self) -> None:
        """Send what the replay does not have, without waiting."""
        server_id, now = self._link.server_id, time.monotonic()
        if not server_id or self._link.stopped:
            return
        for item in self._items.values():
            if item.due(server_id, now):
                if not self._link.send_frames(item.frames):
                    return
                item.server_id, item.sent_at, item.held = server_id, now, False
