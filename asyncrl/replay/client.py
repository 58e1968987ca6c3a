"""Ports of actors and learner ranks to a replay in another process.

Everything without a final answer is repeated, at once if the replay was restarted. Episodes are recognised by
id, requests by number, and the files of groups never change, so repeating is harmless.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, Final

from asyncrl.errors import ReplayError, SampleTimeout
from asyncrl.messaging.keys import ClientKeys
from asyncrl.messaging.wire import Message
from asyncrl.observability import metrics_system, process_status, waits  # noqa: F401  They define the replay's metrics.
from asyncrl.observability.metrics import REGISTRY, Metric
from asyncrl.records import Episode
from asyncrl.replay import interface
from asyncrl.replay.connection import NOT_SENT, PING_EVERY, RANK, RESEND_AFTER, Connection, Outbox
from asyncrl.replay.interface import BatchDescription, GroupGrant, GroupLost
from asyncrl.storage.run_owner import NO_RUN, RunIdentity

WINDOW: Final = 32  # Groups with unacknowledged episodes, besides one per slot, that stop requests
FETCH_WINDOW: Final = 4  # Groups requested and not received: as many are in the replay's memory
POLL_SECONDS: Final = 1.0  # Seconds between two calls of while_waiting
ANSWER_DEADLINE: Final = 60.0  # Seconds a replay, perhaps a respawned one, has to answer


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
        self._link = Connection(endpoint, "actor", actor_name, 0, security, identity)
        self._outbox = Outbox(self._link, warn)
        self._window = window
        self._next_grant = 0  # Number of the request that is answered next; each group is one request.
        self._asked_until, self._asked = 0, NOT_SENT
        self._grants: dict[int, GroupGrant | None] = {}  # Request -> answer; None: its group was given up.
        self._quarantined: set[str] = set()

    @property
    def stopped(self) -> bool:
        """True if the learner ended the run."""
        return self._link.stopped

    @property
    def unacknowledged(self) -> int:
        """Count of the episodes that are not known to be durable."""
        return len(self._outbox)

    def acquire_groups(self, groups: int, timeout: float) -> list[GroupGrant]:
        """See `ActorPort`. Requests without credit stay at the replay for the next call."""
        deadline = time.monotonic() + timeout
        while True:
            self._exchange(0)
            if self.stopped:
                raise interface.RunStopped("the learner ended the run.")
            found = list[GroupGrant]()
            while self._next_grant in self._grants:
                if (grant := self._grants.pop(self._next_grant)) is not None:
                    found.append(grant)
                self._next_grant += 1
            self._ask(groups - len(found))
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            self._exchange(left)

    def push(self, episode: Episode) -> None:
        """See `ActorPort`."""
        if not self.stopped:
            self._outbox.add(episode)
            self._exchange(0)

    def fail(self, failure: interface.GroupFailure) -> None:
        """See `ActorPort`."""
        if not self.stopped:
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

    def close(self, timeout: float) -> None:
        """See `ActorPort`."""
        if not self._leave(lambda: bool(self._outbox), timeout):
            raise ReplayError(
                f"{len(self._outbox)} episodes of actor {self._link.name!r} were not acknowledged by the "
                f"replay at {self._link.endpoint} within {timeout:g} s. Look at the replay's log; members "
                "of incomplete groups are never acknowledged."
            )

    def leave(self, timeout: float) -> None:
        """Deliver finished episodes within `timeout` seconds and give groups back; the run goes on."""
        if not self._leave(lambda: self._outbox.undelivered, timeout):
            self._outbox.warn(f"left without handing over all of {self.unacknowledged} episodes")

    def _leave(self, pending: Callable[[], bool], timeout: float) -> bool:
        end = time.monotonic() + timeout
        try:
            while pending() and not self.stopped and (left := end - time.monotonic()) > 0:
                self._exchange(min(left, 0.1))
            while not self._link.send_now("bye") and time.monotonic() < end:
                self._exchange(0.05)  # Its queue is full of episodes.
            handed_over = self.stopped or not pending()
            self._link.await_farewell()
            return handed_over
        finally:
            self._link.close()

    def _exchange(self, wait: float) -> None:
        self._outbox.send_due()
        for message in self._link.exchange(wait):
            self._outbox.handle(message)
            if message.kind == "quarantined":
                self._quarantined.add(message["start_state"])
            elif message.kind == "grant" and message["turn"] >= self._next_grant:
                about = {x.name: message[x.name] for x in fields(GroupGrant)}
                self._grants[message["turn"]] = GroupGrant(**about)
            elif message.kind == "given_up" and message["turn"] >= self._next_grant:
                self._grants.setdefault(message["turn"], None)
        self._outbox.send_due()

    def _ask(self, groups: int) -> None:
        """Request groups; repeat the request only for more groups, or if no answer came."""
        groups = min(groups, self._window - self._outbox.groups)
        until = self._next_grant + groups
        if groups < 1 or not self._link.due(self._asked, PING_EVERY if until <= self._asked_until else 0.0):
            return
        if self._link.send_now("acquire", turn=self._next_grant, groups=groups):
            self._asked_until, self._asked = until, self._link.sent()


class ZmqLearnerPort:
    """`LearnerPort` of a learner rank; ranks other than 0 only fetch."""

    def __init__(
        self,
        endpoint: str,
        *,
        version: int = 0,
        rank: int = 0,
        security: ClientKeys | None = None,
        identity: RunIdentity = NO_RUN,
        tell: Callable[[str], None] = print,
        poll: Callable[[], object] = lambda: None,
    ) -> None:
        """Open the port; `poll` is called during waits for a status; its exceptions end the wait."""
        self._tell, self._poll, self._leads = tell, poll, rank == 0
        self._stop_sent = False
        role, name = (RANK, f"learner-{rank}") if rank else ("learner", "learner")
        self._link = Connection(endpoint, role, name, version, security, identity)
        # The pending batch: it outlives a timeout, so that a late answer is not lost.
        self._requests = 0
        self._wanted: dict[str, Any] = {}  # Fields of the message `sample`; empty: none is pending.
        self._chosen: tuple[int, ...] = ()  # The answer; empty until it comes.
        self._asked = NOT_SENT
        self._reply: Message | None = None

    def choose(self, *, groups: int, version: int, timeout: float) -> BatchDescription:
        """See `LearnerPort`. After a timeout, the same request goes on waiting."""
        self._link.version = max(self._link.version, version)
        about = {"groups": groups, "version": version}
        if not self._wanted.items() >= about.items():
            self._requests += 1
            self._wanted = about | {"request": f"{self._link.session}-{self._requests}"}
            self._chosen, self._asked = (), NOT_SENT
        deadline = time.monotonic() + timeout
        while not self._chosen and (left := deadline - time.monotonic()) > 0:
            if self._link.due(self._asked, RESEND_AFTER) and self._link.send_now("sample", **self._wanted):
                self._asked = self._link.sent()
            self._exchange(left if self._link.server_id else min(left, 0.05))
        if not self._chosen:
            reply = self._ask_status(1.0)
            if not self._chosen:
                contents = "does not answer" if reply is None else f"holds {reply['contents']}"
                raise SampleTimeout(
                    f"No batch of {groups} groups at version {version} within {timeout:g} s: "
                    f"the replay at {self._link.endpoint} {contents}.",
                    **({} if reply is None else {x.name: reply[x.name] for x in fields(interface.Filling)}),
                )
        chosen = BatchDescription(request=self._wanted["request"], numbers=self._chosen)
        self._wanted = {}
        return chosen

    def fetch(
        self, wanted: BatchDescription, *, timeout: float, while_waiting: Callable[[], object] = lambda: None
    ) -> list[list[Episode]]:
        """See `LearnerPort`."""
        members: dict[int, dict[int, Episode]] = {number: {} for number in wanted.numbers}
        missing, asked = dict.fromkeys(wanted.numbers), set[int]()  # Incomplete; of these, those requested.
        heard_at, looked_at, active = time.monotonic(), -math.inf, NOT_SENT  # `active`: request or answer.
        while missing:
            if (now := time.monotonic()) - looked_at >= POLL_SECONDS:
                looked_at = now
                while_waiting()
            if self._link.stopped:
                raise ReplayError("The run was ended while a learner rank fetched its part of a batch.")
            if now - heard_at > timeout:
                raise ReplayError(
                    f"The replay at {self._link.endpoint} sent nothing of a chosen batch for {timeout:g} s "
                    "(--batch-timeout). See its log."
                )
            if self._link.due(active, RESEND_AFTER):  # All again: it restarted, or sent nothing for long.
                asked.clear()
            for number in [number for number in missing if number not in asked][: FETCH_WINDOW - len(asked)]:
                about = {"request": wanted.request, "number": number}
                if self._link.server_id and self._link.send_now("fetch", **about):
                    asked.add(number)
                    active = self._link.sent()
            for message in self._exchange(POLL_SECONDS if self._link.server_id else 0.05):
                if message.kind == "lost" and message["request"] == wanted.request:
                    raise GroupLost(f"Group {message['number']} of the batch is lost: {message['reason']}.")
                if message.episode is None or message["number"] not in missing:
                    continue
                found = members[message["number"]]
                found[message.episode.member] = message.episode
                heard_at = time.monotonic()
                active = active._replace(at=heard_at)
                process_status.progress()
                if len(found) == message["size"]:
                    del missing[message["number"]]
                    asked.discard(message["number"])
        return [[x for _, x in sorted(members[n].items())] for n in wanted.numbers]

    def report_version(self, version: int) -> None:
        """See `LearnerPort`."""
        if not self._leads:
            return
        self._link.version = max(self._link.version, version)
        self._exchange(0)
        if self._link.server_id:  # Otherwise the hello has it.
            self._link.send_now("version", version=version)

    def status(self) -> dict[Metric, float]:
        """See `LearnerPort`."""
        if not self._leads:
            return {}
        with process_status.waiting(waits.REPLAY_STATUS, ANSWER_DEADLINE):
            reply = self._ask_status(ANSWER_DEADLINE, self._poll)
        if reply is None:
            raise ReplayError(f"the replay at {self._link.endpoint} does not answer. Look at its log.")
        return {REGISTRY[name]: value for name, value in reply["readings"].items() if name in REGISTRY}

    def stop(self) -> None:
        """See `LearnerPort`. Waits once, up to 5 s, for the answer; a replay that is gone needs no stop."""
        if self._leads and not self._stop_sent:
            self._stop_sent = True
            self._repeat("stop", 5.0, lambda: self._link.stopped)

    def close(self) -> None:
        """See `LearnerPort`."""
        self._link.close()

    def _ask_status(self, timeout: float, poll: Callable[[], object] = lambda: None) -> Message | None:
        self._reply = None
        self._repeat("status", timeout, lambda: self._reply is not None, poll)
        return self._reply

    def _repeat(
        self,
        kind: str,
        timeout: float,
        answered: Callable[[], bool],
        poll: Callable[[], object] = lambda: None,
    ) -> None:
        deadline, asked = time.monotonic() + timeout, NOT_SENT
        while not answered() and (left := deadline - time.monotonic()) > 0:
            poll()
            if self._link.due(asked, PING_EVERY) and self._link.send_now(kind):
                asked = self._link.sent()
            self._exchange(min(left, 0.05))

    def _exchange(self, wait: float) -> list[Message]:
        others = list[Message]()
        for message in self._link.exchange(wait):
            if message.kind == "status_reply":
                self._reply = message
            elif message.kind == "notice":
                self._tell(f"replay: {message['text']}")
            elif message.kind in ("lost", "batch"):
                others.append(message)
            elif message["request"] == self._wanted.get("request"):
                if message.kind == "nothing_to_learn":
                    raise interface.NothingToLearn(message["reason"])
                self._chosen = tuple(message["numbers"])
        return others
