"""Fetch a learner rank's part of a batch from the replay, a few groups at a time.

A group is asked for by number until all its episodes are there: again when the replay was restarted, or said
nothing for long. Its file never changes, so what arrives twice is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from asyncrl.errors import ReplayError
from asyncrl.messaging.curve_keys import ClientKeys
from asyncrl.messaging.wire import Message
from asyncrl.observability import process_status
from asyncrl.records import Episode
from asyncrl.replay.connection import Connection
from asyncrl.replay.interface import BatchDescription, GroupLost, NullLearnerPort
from asyncrl.replay.peers import RANK
from asyncrl.storage.run_identity import NO_RUN, RunIdentity

RESEND_AFTER: Final = 10.0
"""Seconds without an episode after which a rank asks again for what it has asked for."""
WINDOW: Final = 4
"""Groups that a rank has asked for and not got yet: as many are on their way in the replay's memory."""
LOOK_EVERY: Final = 1.0
"""Seconds between two calls of `while_waiting`."""


class PartFetch:
    """One part of a batch on its way."""

    def __init__(self, link: Connection, wanted: BatchDescription) -> None:
        """Ask for nothing yet."""
        self._link, self._wanted = link, wanted
        self._missing = dict.fromkeys(wanted.numbers)
        """Groups that are not complete here, in the order of the part."""
        self._asked = set[int]()
        self._asked_server_id = ""
        self._members: dict[int, dict[int, Episode]] = {number: {} for number in wanted.numbers}
        """Group -> member -> episode."""
        self.heard_at = time.monotonic()
        """When the last episode came."""
        self._asked_at = self.heard_at

    @property
    def complete(self) -> bool:
        """Whether all groups are here."""
        return not self._missing

    def ask(self) -> None:
        """Ask for the next groups, and again for those that were asked for when there is reason to."""
        server_id, now = self._link.server_id, time.monotonic()
        if not server_id:
            return
        if server_id != self._asked_server_id or now - max(self.heard_at, self._asked_at) > RESEND_AFTER:
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
        """Take in an episode, or that there is none; other messages are none of its business.

        Raises:
            GroupLost: A group cannot be read any more.
        """
        if message.kind == "lost" and message["request"] == self._wanted.request:
            raise GroupLost(f"Group {message['number']} of the batch is lost: {message['reason']}.")
        if message.kind != "batch" or message["number"] not in self._missing:
            return
        assert message.episode is not None
        number, members = message["number"], self._members[message["number"]]
        members[message.episode.member] = message.episode
        self.heard_at = time.monotonic()
        process_status.progress()
        if len(members) == message["size"]:
            del self._missing[number]
            self._asked.discard(number)

    def groups(self) -> list[list[Episode]]:
        """Return the groups in the order of the part, each in the order of its members."""
        return [[x for _, x in sorted(self._members[n].items())] for n in self._wanted.numbers]


def fetch_part(
    fetch: PartFetch,
    link: Connection,
    exchange: Callable[[float], None],
    timeout: float,
    while_waiting: Callable[[], object],
) -> list[list[Episode]]:
    """Exchange messages until the part is complete; see `LearnerPort.fetch`.

    Args:
        fetch: Not begun.
        link: Where it asks.
        exchange: Waits up to so many seconds and hands messages to `fetch`.
        timeout: Seconds since the last episode that came.
        while_waiting: Called about once a second.
    """
    looked_at = -float("inf")
    while not fetch.complete:
        now = time.monotonic()
        if now - looked_at >= LOOK_EVERY:
            looked_at = now
            while_waiting()
        if link.stopped:
            raise ReplayError("The run was ended while a learner rank fetched its part of a batch.")
        if now - fetch.heard_at > timeout:
            raise ReplayError(
                f"The replay at {link.endpoint} sent nothing of a chosen batch for {timeout:g} s "
                "(--batch-timeout). See its log."
            )
        fetch.ask()
        exchange(LOOK_EVERY if link.server_id else 0.05)
    return fetch.groups()


class ZmqRankPort(NullLearnerPort):
    """`LearnerPort` of a learner rank but 0: it only fetches."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        security: ClientKeys | None = None,
        identity: RunIdentity = NO_RUN,
    ) -> None:
        """Connect.

        Args:
            endpoint: Of the replay.
            name: Unique among the learner ranks of the run; a rank that starts again has the same.
            security: The learner's keys, when the replay has some.
            identity: Of the run.
        """
        self._link = Connection(endpoint, RANK, name, 0, security, identity)

    def fetch(
        self, wanted: BatchDescription, *, timeout: float, while_waiting: Callable[[], object] = lambda: None
    ) -> list[list[Episode]]:
        """See `LearnerPort.fetch`."""
        fetch = PartFetch(self._link, wanted)

        def exchange(wait: float) -> None:
            for message in self._link.exchange(wait):
                fetch.take(message)

        return fetch_part(fetch, self._link, exchange, timeout, while_waiting)

    def close(self) -> None:
        """See `LearnerPort.close`."""
        self._link.close()
