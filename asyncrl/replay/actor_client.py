"""The actor's port to a replay in another process: grants, episodes and their receipts.

Everything without a final answer is repeated, at once if the replay was restarted. Episodes are recognised by
id and acquisitions by number, so repeating is harmless.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from asyncrl.errors import ReplayError
from asyncrl.messaging.episode_codec import Buffer
from asyncrl.messaging.keys import ClientKeys
from asyncrl.messaging.wire import Message, encode
from asyncrl.observability.metrics import Metric
from asyncrl.records import Episode
from asyncrl.replay.connection import PING_EVERY, Connection
from asyncrl.replay.groups import number_of
from asyncrl.replay.interface import GroupFailure, GroupGrant, RunStopped
from asyncrl.storage.run_owner import NO_RUN, RunIdentity

WINDOW: Final = 32
"""Groups with unacknowledged episodes, besides one for each slot, from which on an actor asks for no more."""
RESEND_AFTER: Final = 10.0
"""Seconds until an episode that was not answered at all is sent again."""
HELD_RESEND_AFTER: Final = 60.0
"""Seconds until an episode of an incomplete group is sent again: its final receipt may be lost."""


class ZmqActorPort:
    """`ActorPort` of an actor process."""

    def __init__(
        self,
        endpoint: str,
        actor_name: str,
        *,
        window: int = WINDOW,
        warn: Callable[[str], None] = print,
        security: ClientKeys | None = None,
        identity: RunIdentity = NO_RUN,
    ) -> None:
        """Connect."""
        self._link = Connection(endpoint, "actor", actor_name, 0, security, identity)
        self._outbox = Outbox(self._link, warn)
        self._window = window
        self._next_grant = 0
        """Number of the request that is answered next: each group is a request of its own."""
        self._asked_until, self._asked_at, self._asked_server_id = 0, -float("inf"), ""
        self._grants: dict[int, GroupGrant | None] = {}
        """Request number -> its pending answer; None: its group was given up."""
        self._quarantined: set[str] = set()

    @property
    def stopped(self) -> bool:
        """True if the learner ended the run."""
        return self._link.stopped

    @property
    def unacknowledged(self) -> int:
        """Count the episodes that are not known to be durable."""
        return len(self._outbox)

    def acquire_groups(self, groups: int, timeout: float) -> list[GroupGrant]:
        """See `ActorPort`. Requests without credit stay at the replay for the next call."""
        deadline = time.monotonic() + timeout
        while True:
            self._exchange(0)
            if self.stopped:
                raise RunStopped("the learner ended the run.")
            found = self._take_grants()
            self._ask(groups - len(found))
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            self._exchange(left)

    def _take_grants(self) -> list[GroupGrant]:
        """Pop the answers to the next requests that have arrived."""
        found = []
        while self._next_grant in self._grants:
            grant = self._grants.pop(self._next_grant)
            self._next_grant += 1
            if grant is not None:
                found.append(grant)
        return found

    def push(self, episode: Episode) -> None:
        """See `ActorPort`."""
        if self.stopped:
            return
        self._outbox.add(episode)
        self._exchange(0)

    def fail(self, failure: GroupFailure) -> None:
        """See `ActorPort`."""
        if self.stopped:
            return
        self._outbox.fail(failure)
        self._exchange(0)

    @property
    def quarantined(self) -> Collection[str]:
        """See `ActorPort`."""
        return self._quarantined

    def pop_dropped(self) -> set[int]:
        """See `ActorPort`."""
        dropped, self._outbox.dropped = self._outbox.dropped, set()
        return dropped

    def serve(self) -> None:
        """See `ActorPort`."""
        self._exchange(0)

    def report(self, metrics: Mapping[Metric, float]) -> None:
        """See `ActorPort`."""
        self._link.send_now("report", readings={metric.name: float(x) for metric, x in metrics.items()})

    def close(self, deadline: float) -> None:
        """See `ActorPort`."""
        end = time.monotonic() + deadline
        try:
            while self._outbox and not self.stopped:
                left = end - time.monotonic()
                if left <= 0:
                    raise ReplayError(
                        f"{len(self._outbox)} episodes of actor {self._link.name!r} were not "
                        f"acknowledged by the replay at {self._link.endpoint} within {deadline:g} s. Look at "
                        "the replay's log; members of incomplete groups are never acknowledged."
                    )
                self._exchange(min(left, 0.1))
            self._link.send_now("bye")
        finally:
            self._link.close()

    def leave(self, deadline: float) -> None:
        """Leave a run that goes on: deliver finished episodes within `deadline` seconds, give groups back."""
        end = time.monotonic() + deadline
        try:
            while self._outbox.undelivered and not self.stopped:
                left = end - time.monotonic()
                if left <= 0:
                    self._outbox.warn(f"left without handing over all of {self.unacknowledged} episodes")
                    break
                self._exchange(min(left, 0.1))
            while not self._link.send_now("bye") and time.monotonic() < end:
                self._exchange(0.05)  # Its queue is full of episodes.
        finally:
            self._link.close()

    def abandon(self) -> None:
        """Close without delivering: no part of the run waits for these episodes any more."""
        if self.unacknowledged:
            self._outbox.warn(f"{self.unacknowledged} episodes are given up")
        self._link.close()

    def _exchange(self, wait: float) -> None:
        self._outbox.send_due()
        for message in self._link.exchange(wait):
            self._outbox.handle(message)
            if message.kind == "quarantined":
                self._quarantined.add(message["start_state"])
            elif message.kind == "grant" and message["turn"] >= self._next_grant:
                self._grants[message["turn"]] = GroupGrant(
                    number=message["number"],
                    min_version=message["min_version"],
                    keep_video=message["keep_video"],
                )
            elif message.kind == "given_up" and message["turn"] >= self._next_grant:
                self._grants.setdefault(message["turn"], None)
        self._outbox.send_due()

    def _ask(self, groups: int) -> None:
        """Ask for `groups` from the next request on; again only for more, or if no answer came."""
        server_id, now = self._link.server_id, time.monotonic()
        groups = min(groups, self._window - self._outbox.groups)
        until = self._next_grant + groups
        asked = self._asked_server_id == server_id and until <= self._asked_until
        if groups < 1 or not server_id or (asked and now - self._asked_at < PING_EVERY):
            return
        if self._link.send_now("acquire", turn=self._next_grant, groups=groups):
            self._asked_until, self._asked_at, self._asked_server_id = until, now, server_id


@dataclass(kw_only=True)
class _Unacknowledged:
    """An episode, or the report of a group that failed, without a final receipt."""

    group_id: str
    frames: list[Buffer]
    server_id: str = ""
    """Replay process that it was sent to."""
    sent_at: float = -float("inf")
    held: bool = False
    """That process has it; the final receipt follows, but only once."""


class Outbox:
    """The unacknowledged episodes of one actor."""

    def __init__(self, link: Connection, warn: Callable[[str], None]) -> None:
        """Start empty; `warn` receives a line for each episode that the replay dropped as invalid."""
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
        """True if something may not even have reached the replay."""
        return any(not item.held for item in self._items.values())

    def add(self, episode: Episode) -> None:
        """Add an episode; its arrays must not change any more."""
        frames = encode("episode", episode)
        self._items[episode.episode_id] = _Unacknowledged(group_id=episode.group_id, frames=frames)

    def fail(self, failure: GroupFailure) -> None:
        """Add the report of a group that failed; it is acknowledged like an episode."""
        report = os.urandom(16).hex()
        frames = encode("failed", report=report, **asdict(failure))
        self._items[report] = _Unacknowledged(group_id=f"{failure.number:08d}", frames=frames)

    def handle(self, message: Message) -> None:
        """Record a receipt; other messages are ignored."""
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
        """Send without waiting everything that the replay does not have."""
        server_id, now = self._link.server_id, time.monotonic()
        if not server_id or self._link.stopped:
            return
        for item in self._items.values():
            again = item.sent_at + (HELD_RESEND_AFTER if item.held else RESEND_AFTER)
            if item.server_id != server_id or now >= again:
                if not self._link.send_frames(item.frames):
                    return
                item.server_id, item.sent_at, item.held = server_id, now, False
