"""The learner ranks' ports to a replay in another process: batches, and each rank's part of them.

Rank 0 asks which groups make a batch; every rank fetches its groups, a few at a time. A group is requested by
number until all its episodes arrived: again if the replay was restarted, or sent nothing for long. Its file
never changes, so repeating is harmless.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Final

from asyncrl.errors import ReplayError, SampleTimeout
from asyncrl.messaging.keys import ClientKeys
from asyncrl.messaging.wire import Message
from asyncrl.observability import metrics_system, process_status  # noqa: F401  They define the replay's metrics.
from asyncrl.observability.metrics import REGISTRY, Metric
from asyncrl.records import Episode
from asyncrl.replay.connection import PING_EVERY, Connection
from asyncrl.replay.interface import BatchDescription, Filling, GroupLost, NothingToLearn, NullLearnerPort
from asyncrl.replay.peers import RANK
from asyncrl.storage.run_owner import NO_RUN, RunIdentity

RESEND_AFTER: Final = 10.0
"""Seconds without an answer after which a request is sent again."""
WINDOW: Final = 4
"""Groups that a rank has requested and not received: as many are on their way in the replay's memory."""
LOOK_EVERY: Final = 1.0
"""Seconds between two calls of `while_waiting`."""


@dataclass(kw_only=True)
class _BatchRequest:
    """A pending batch. It outlives a timeout, so that a late answer is not lost."""

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
        """Connect."""
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
        """See `LearnerPort`. After a timeout the same request goes on waiting."""
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
        numbers = tuple(wanted.chosen[place] for place in sorted(wanted.chosen))
        return BatchDescription(request=wanted.request, numbers=numbers)

    def fetch(
        self, wanted: BatchDescription, *, timeout: float, while_waiting: Callable[[], object] = lambda: None
    ) -> list[list[Episode]]:
        """See `LearnerPort`."""
        fetch = self._fetch = PartFetch(self._link, wanted)
        try:
            return fetch.run(self._exchange, timeout, while_waiting)
        finally:
            self._fetch = None

    def report_version(self, version: int) -> None:
        """See `LearnerPort`."""
        self._link.version = max(self._link.version, version)
        self._exchange(0)
        if self._link.server_id:  # Otherwise the hello says it.
            self._link.send_now("version", version=version)

    def status(self) -> dict[Metric, float]:
        """See `LearnerPort`.

        Raises:
            ReplayError: No answer within 10 seconds.
        """
        reply = self._ask_status(10.0)
        if reply is None:
            raise ReplayError(f"the replay at {self._link.endpoint} does not answer. Look at its log.")
        return {REGISTRY[name]: value for name, value in reply["readings"].items() if name in REGISTRY}

    def stop(self) -> None:
        """See `LearnerPort`. Waits up to 5 s for the answer; a replay that is gone needs no stop."""
        deadline, asked_at = time.monotonic() + 5.0, -float("inf")
        while not self._link.stopped and (left := deadline - time.monotonic()) > 0:
            now = time.monotonic()
            if self._link.server_id and now - asked_at >= PING_EVERY and self._link.send_now("stop"):
                asked_at = now
            self._exchange(min(left, 0.05))

    def close(self) -> None:
        """See `LearnerPort`."""
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


class PartFetch:
    """One part of a batch on its way."""

    def __init__(self, link: Connection, wanted: BatchDescription) -> None:
        self._link, self._wanted = link, wanted
        self._missing = dict.fromkeys(wanted.numbers)
        """Groups that are not complete, in the order of the part."""
        self._asked = set[int]()
        self._asked_server_id = ""
        self._members: dict[int, dict[int, Episode]] = {number: {} for number in wanted.numbers}
        """Group -> member -> episode."""
        self._heard_at = time.monotonic()
        """When the last episode came."""
        self._asked_at = self._heard_at

    def _ask(self) -> None:
        """Request the next groups; all of them again if the replay restarted or sent nothing for long."""
        server_id, now = self._link.server_id, time.monotonic()
        if not server_id:
            return
        if server_id != self._asked_server_id or now - max(self._heard_at, self._asked_at) > RESEND_AFTER:
            self._asked_server_id = server_id
            self._asked.clear()
        for number in self._missing:
            if number in self._asked:
                continue
            if len(self._asked) >= WINDOW or not self._link.send_now(
                "fetch", request=self._wanted.request, number=number
            ):
                return
            self._asked.add(number)
            self._asked_at = now

    def take(self, message: Message) -> None:
        """Add an episode of the part; other messages are ignored."""
        if message.kind == "lost" and message["request"] == self._wanted.request:
            raise GroupLost(f"Group {message['number']} of the batch is lost: {message['reason']}.")
        if message.kind != "batch" or message["number"] not in self._missing:
            return
        assert message.episode is not None
        number, members = message["number"], self._members[message["number"]]
        members[message.episode.member] = message.episode
        self._heard_at = time.monotonic()
        process_status.progress()
        if len(members) == message["size"]:
            del self._missing[number]
            self._asked.discard(number)

    def run(
        self, exchange: Callable[[float], None], timeout: float, while_waiting: Callable[[], object]
    ) -> list[list[Episode]]:
        """Exchange messages until the part is complete; see `LearnerPort.fetch`.

        Args:
            exchange: Waits up to so many seconds and passes messages to `take`.
            while_waiting: Called about once a second.
        """
        looked_at = -float("inf")
        while self._missing:
            now = time.monotonic()
            if now - looked_at >= LOOK_EVERY:
                looked_at = now
                while_waiting()
            if self._link.stopped:
                raise ReplayError("The run was ended while a learner rank fetched its part of a batch.")
            if now - self._heard_at > timeout:
                raise ReplayError(
                    f"The replay at {self._link.endpoint} sent nothing of a chosen batch for {timeout:g} s "
                    "(--batch-timeout). See its log."
                )
            self._ask()
            exchange(LOOK_EVERY if self._link.server_id else 0.05)
        return [[x for _, x in sorted(self._members[n].items())] for n in self._wanted.numbers]


class ZmqRankPort(NullLearnerPort):
    """`LearnerPort` of a learner rank other than 0: it only fetches."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        security: ClientKeys | None = None,
        identity: RunIdentity = NO_RUN,
    ) -> None:
        """Connect."""
        self._link = Connection(endpoint, RANK, name, 0, security, identity)

    def fetch(
        self, wanted: BatchDescription, *, timeout: float, while_waiting: Callable[[], object] = lambda: None
    ) -> list[list[Episode]]:
        """See `LearnerPort`."""
        fetch = PartFetch(self._link, wanted)

        def exchange(wait: float) -> None:
            for message in self._link.exchange(wait):
                fetch.take(message)

        return fetch.run(exchange, timeout, while_waiting)

    def close(self) -> None:
        """See `LearnerPort`."""
        self._link.close()
