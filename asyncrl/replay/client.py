"""Reach the replay over ZeroMQ: the ports of actors and learner in processes of their own.

What was not answered for good is repeated, at once when the replay was restarted. Episodes are recognised by
id, acquisitions by number, samples by request, so repeating is harmless. The ports of one process are in
`in_process_ports.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from asyncrl.errors import ReplayError, SampleTimeout
from asyncrl.messaging.curve_keys import ClientKeys
from asyncrl.messaging.wire import Message
from asyncrl.observability import metrics_system  # noqa: F401  What a replay reports.
from asyncrl.observability.metrics import REGISTRY, Metric
from asyncrl.records import Episode
from asyncrl.replay.connection import PING_EVERY, Connection
from asyncrl.replay.in_process_ports import InProcessActorPort, InProcessLearnerPort
from asyncrl.replay.interface import (
    BatchDescription,
    Filling,
    GroupFailure,
    GroupGrant,
    NothingToLearn,
    RunStopped,
)
from asyncrl.replay.outbox import Outbox
from asyncrl.replay.part_fetch import PartFetch, ZmqRankPort, fetch_part
from asyncrl.storage.run_identity import NO_RUN, RunIdentity

__all__ = ["InProcessActorPort", "InProcessLearnerPort", "ZmqActorPort", "ZmqLearnerPort", "ZmqRankPort"]

RESEND_AFTER: Final = 10.0
"""Seconds until a request for a batch that was not answered at all is sent again."""
WINDOW: Final = 32
"""Groups with unacknowledged episodes, besides one for each slot, from which on an actor asks for no more."""


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
        """Connect.

        Args:
            endpoint: Of the replay.
            actor_name: Unique in the run; a respawned actor keeps the name of its predecessor.
            window: Groups with unacknowledged episodes from which on no further group is acquired.
            warn: Receives one line for each episode that the replay dropped.
            security: This actor's keys, when the replay has some.
            identity: Of the run that it belongs to.
        """
        self._link = Connection(endpoint, "actor", actor_name, 0, security, identity)
        self._outbox = Outbox(self._link, warn)
        self._window = window
        self._next_grant = 0
        """Number of this actor's request that is answered next: each group is a request of its own."""
        self._asked_until, self._asked_at, self._asked_server_id = 0, -float("inf"), ""
        self._grants: dict[int, GroupGrant | None] = {}
        """Request number -> its answer, as long as nobody took it; None: its group was given up."""
        self._quarantined: set[str] = set()

    @property
    def stopped(self) -> bool:
        """Whether the learner ended the run."""
        return self._link.stopped

    @property
    def unacknowledged(self) -> int:
        """Episodes that are not known to be durable."""
        return len(self._outbox)

    def acquire_groups(self, groups: int, timeout: float) -> list[GroupGrant]:
        """See `ActorPort.acquire_groups`. Requests without credit stay at the replay for the next call."""
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
        """Take the answers to the next requests, as far as they are there."""
        found = []
        while self._next_grant in self._grants:
            grant = self._grants.pop(self._next_grant)
            self._next_grant += 1
            if grant is not None:
                found.append(grant)
        return found

    def push(self, episode: Episode) -> None:
        """See `ActorPort.push`."""
        if self.stopped:
            return
        self._outbox.add(episode)
        self._exchange(0)

    def fail(self, failure: GroupFailure) -> None:
        """See `ActorPort.fail`."""
        if self.stopped:
            return
        self._outbox.fail(failure)
        self._exchange(0)

    @property
    def quarantined(self) -> Collection[str]:
        """See `ActorPort.quarantined`."""
        return self._quarantined

    def take_dropped(self) -> set[int]:
        """See `ActorPort.take_dropped`."""
        dropped, self._outbox.dropped = self._outbox.dropped, set()
        return dropped

    def serve(self) -> None:
        """See `ActorPort.serve`."""
        self._exchange(0)

    def report(self, metrics: Mapping[Metric, float]) -> None:
        """See `ActorPort.report`."""
        self._link.send_now("report", readings={metric.name: float(x) for metric, x in metrics.items()})

    def close(self, deadline: float) -> None:
        """See `ActorPort.close`."""
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
        """Leave a run that goes on: hand over what is finished, give the open groups back.

        Args:
            deadline: Seconds that the replay has to take the finished episodes.
        """
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
        """Give up what the replay does not have: nobody in the run waits for it any more."""
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
        """Ask for `groups` requests from the next one on; again only for more, or when no answer came."""
        server_id, now = self._link.server_id, time.monotonic()
        groups = min(groups, self._window - self._outbox.groups)
        until = self._next_grant + groups
        asked = self._asked_server_id == server_id and until <= self._asked_until
        if groups < 1 or not server_id or (asked and now - self._asked_at < PING_EVERY):
            return
        if self._link.send_now("acquire", turn=self._next_grant, groups=groups):
            self._asked_until, self._asked_at, self._asked_server_id = until, now, server_id


@dataclass(kw_only=True)
class _BatchRequest:
    """A batch that was asked for. It outlives a timeout, so that an answer that comes late is not lost."""

    groups: int
    version: int
    request: str
    asked_at: float = -float("inf")
    asked_server_id: str = ""
    chosen: dict[int, int] = field(default_factory=dict)
    """Place in the batch -> group."""
    complete: bool = False

    def take(self, message: Message) -> None:
        """Add one group of the answer."""
        self.asked_at = time.monotonic()
        self.chosen[message["place"]] = message["number"]
        self.complete = len(self.chosen) == message["places"]

    def batch(self) -> BatchDescription:
        """Return the answer."""
        numbers = tuple(self.chosen[place] for place in sorted(self.chosen))
        return BatchDescription(request=self.request, numbers=numbers)


class ZmqLearnerPort:
    """`LearnerPort` of the learner process."""

    def __init__(
        self,
        endpoint: str,
        *,
        version: int = 0,
        security: ClientKeys | None = None,
        identity: RunIdentity = NO_RUN,
        tell: Callable[[str], None] = print,
    ) -> None:
        """Connect.

        Args:
            endpoint: Of the replay.
            version: Policy version the run begins or resumes at.
            security: The learner's keys, when the replay has some.
            identity: Of the run.
            tell: Receives what the replay says to whoever watches the run, a line each.
        """
        self._tell = tell
        self._link = Connection(endpoint, "learner", "learner", version, security, identity)
        self._requests = 0
        self._request: _BatchRequest | None = None
        self._fetch: PartFetch | None = None
        self._reply: Message | None = None

    def sample(self, *, groups: int, version: int, timeout: float) -> list[list[Episode]]:
        """Choose a batch and fetch all of it; see `LearnerPort`."""
        batch = self.choose(groups=groups, version=version, timeout=timeout)
        return self.fetch(batch, timeout=timeout)

    def choose(self, *, groups: int, version: int, timeout: float) -> BatchDescription:
        """See `LearnerPort.choose`. After a timeout the same question goes on waiting."""
        self._link.version = max(self._link.version, version)
        wanted = self._request
        if wanted is None or (wanted.groups, wanted.version) != (groups, version):
            self._requests += 1
            request = f"{self._link.session}-{self._requests}"
            wanted = self._request = _BatchRequest(groups=groups, version=version, request=request)
        deadline = time.monotonic() + timeout
        while not wanted.complete and (left := deadline - time.monotonic()) > 0:
            self._ask(wanted)
            self._exchange(left if self._link.server_id else min(left, 0.05))
        if not wanted.complete:
            reply = self._ask_status(1.0)
            if not wanted.complete:
                raise self._timeout(reply, f"No batch of {groups} groups at version {version}", timeout)
        self._request = None
        return wanted.batch()

    def fetch(
        self, wanted: BatchDescription, *, timeout: float, while_waiting: Callable[[], object] = lambda: None
    ) -> list[list[Episode]]:
        """See `LearnerPort.fetch`."""
        fetch = self._fetch = PartFetch(self._link, wanted)
        try:
            return fetch_part(fetch, self._link, self._exchange, timeout, while_waiting)
        finally:
            self._fetch = None

    def report_version(self, version: int) -> None:
        """See `LearnerPort.report_version`."""
        self._link.version = max(self._link.version, version)
        self._exchange(0)
        if self._link.server_id:  # Otherwise the hello says it.
            self._link.send_now("version", version=version)

    def status(self) -> dict[Metric, float]:
        """See `LearnerPort.status`.

        Raises:
            ReplayError: No answer within 10 seconds.
        """
        reply = self._ask_status(10.0)
        if reply is None:
            raise ReplayError(f"the replay at {self._link.endpoint} does not answer. Look at its log.")
        return {REGISTRY[name]: value for name, value in reply["readings"].items() if name in REGISTRY}

    def stop(self) -> None:
        """See `LearnerPort.stop`. Waits up to 5 s for the answer; a replay that is gone needs no stop."""
        deadline, asked_at = time.monotonic() + 5.0, -float("inf")
        while not self._link.stopped and (left := deadline - time.monotonic()) > 0:
            now = time.monotonic()
            if self._link.server_id and now - asked_at >= PING_EVERY and self._link.send_now("stop"):
                asked_at = now
            self._exchange(min(left, 0.05))

    def close(self) -> None:
        """See `LearnerPort.close`."""
        self._link.close()

    def _exchange(self, wait: float) -> None:
        for message in self._link.exchange(wait):
            if message.kind == "status_reply":
                self._reply = message
            elif message.kind == "notice":
                self._tell(f"replay: {message['text']}")
            elif message.kind == "nothing_to_learn" and self._request:
                if message["request"] == self._request.request:
                    raise NothingToLearn(message["reason"])
            elif message.kind == "chosen" and self._request:
                if message["request"] == self._request.request:
                    self._request.take(message)
            elif self._fetch is not None:
                self._fetch.take(message)

    def _ask(self, wanted: _BatchRequest) -> None:
        server_id, now = self._link.server_id, time.monotonic()
        if not server_id or (server_id == wanted.asked_server_id and now - wanted.asked_at < RESEND_AFTER):
            return
        about = {"request": wanted.request, "groups": wanted.groups, "version": wanted.version}
        if self._link.send_now("sample", **about):
            wanted.asked_at, wanted.asked_server_id = now, server_id

    def _timeout(self, reply: Message | None, what: str, timeout: float) -> SampleTimeout:
        """Say what the replay holds, and how far the batch is, when it answered."""
        contents = "does not answer" if reply is None else f"holds {reply['contents']}"
        filling = {} if reply is None else {x.name: reply[x.name] for x in fields(Filling)}
        said = f"{what} within {timeout:g} s: the replay at {self._link.endpoint} {contents}."
        return SampleTimeout(said, **filling)

    def _ask_status(self, timeout: float) -> Message | None:
        deadline, asked_at = time.monotonic() + timeout, -float("inf")
        self._reply = None
        while self._reply is None and (left := deadline - time.monotonic()) > 0:
            now = time.monotonic()
            if self._link.server_id and now - asked_at >= PING_EVERY and self._link.send_now("status"):
                asked_at = now
            self._exchange(min(left, 0.05))
        return self._reply
