"""Reach a replay in the same thread by plain calls: the ports of `--inline` and of tests.

Learner, actor and replay take turns, so runs are repeatable.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Final

from asyncrl.errors import ReplayError, SampleTimeout
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.records import Episode
from asyncrl.replay.buffer import Replay
from asyncrl.replay.groups import number_of
from asyncrl.replay.interface import BatchDescription, GroupFailure, GroupGrant, NothingToLearn, RunStopped

IDLE: Final = 0.01  # Seconds between rounds of an actor with nothing to imagine while groups are missing


class InProcessActorPort:
    """`ActorPort` onto a replay in the same thread."""

    def __init__(
        self, replay: Replay, actor_name: str = "inline", *, warn: Callable[[str], None] = print
    ) -> None:
        """Introduce the actor; `warn` receives one line for each invalid episode."""
        self._replay, self._name, self._warn = replay, actor_name, warn
        self._dropped: set[int] = set()
        self._pushed: list[Episode] = []
        replay.state.limiter.heartbeat_timeout = math.inf  # Within one thread a long round is no silence.
        replay.hello(actor_name, os.urandom(8).hex())

    @property
    def stopped(self) -> bool:
        """True if the learner ended the run."""
        return self._replay.stopped

    def acquire_groups(self, groups: int, timeout: float) -> list[GroupGrant]:
        """See `ActorPort`. Returns at once: credit cannot come while this thread waits."""
        if self.stopped:
            raise RunStopped("the learner ended the run.")
        found: list[GroupGrant] = []
        while len(found) < groups and (grant := self._replay.grant(self._name)) is not None:
            found.append(grant)
        return found

    def push(self, episode: Episode) -> None:
        """See `ActorPort`. The replay admits it in its own turn (`deliver`)."""
        self._pushed.append(episode)

    def deliver(self) -> None:
        """Let the replay admit the pushed episodes."""
        self._replay.pop_receipts()
        pushed, self._pushed = self._pushed, []
        for episode in pushed:
            receipt = self._replay.admit(episode)
            if receipt.status.startswith("dropped") and receipt.status != "dropped_outdated":
                self._dropped.add(number_of(episode.group_id))
            if receipt.status == "dropped_invalid":
                self._warn(f"replay: episode {receipt.episode_id} was dropped: {receipt.reason}")

    def fail(self, failure: GroupFailure) -> None:
        """See `ActorPort`."""
        self._replay.fail(failure)

    @property
    def quarantined(self) -> Collection[str]:
        """See `ActorPort`."""
        return self._replay.state.quarantine.names

    def pop_dropped(self) -> set[int]:
        """See `ActorPort`."""
        dropped, self._dropped = self._dropped, set()
        return dropped

    def serve(self) -> None:
        """See `ActorPort`."""
        self._replay.state.limiter.record_heartbeat(self._name)

    def report(self, metrics: Mapping[Metric, float]) -> None:
        """See `ActorPort`."""
        self._replay.report(self._name, metrics)

    def close(self, timeout: float) -> None:
        """See `ActorPort`. Nothing is in flight."""


class InProcessLearnerPort:
    """`LearnerPort` onto a replay in the same thread."""

    def __init__(
        self, replay: Replay, *, version: int = 0, imagine: Callable[[], bool] | None = None
    ) -> None:
        """Begin or resume the run."""
        self._replay, self._imagine = replay, imagine
        self._actors: list[InProcessActorPort] = []
        replay.begin(os.urandom(8).hex(), version, in_turns=True)

    def actor_port(self, name: str = "inline", *, warn: Callable[[str], None] = print) -> InProcessActorPort:
        """Introduce an actor, whose episodes `choose` delivers."""
        self._actors.append(InProcessActorPort(self._replay, name, warn=warn))
        return self._actors[-1]

    def choose(self, *, groups: int, version: int, timeout: float) -> BatchDescription:
        """See `LearnerPort`. Lets the actor imagine until nothing is in flight."""
        deadline = time.monotonic() + timeout
        self._replay.set_version(version)
        while True:
            busy = self._imagine is not None and self._imagine()
            for actor in self._actors:
                actor.deliver()
            self._replay.maintain()
            in_flight = busy or self._replay.lifecycle.disk.groups
            if not in_flight and (numbers := self._replay.choose(groups, version)) is not None:
                return BatchDescription(request="", numbers=tuple(numbers))
            if not in_flight and self._replay.exhausted_reason:
                raise ReplayError(self._replay.exhausted_reason)
            if end := self._replay.filter_end_reason:
                raise NothingToLearn(end)
            if self._imagine is None or time.monotonic() >= deadline:
                raise SampleTimeout(
                    f"No batch of {groups} groups at version {version} within {timeout:g} s: "
                    f"the replay holds {self._replay.contents()}.",
                    **asdict(self._replay.filling),
                )
            if not busy:
                time.sleep(IDLE)

    def fetch(
        self, wanted: BatchDescription, *, timeout: float, while_waiting: Callable[[], object] = lambda: None
    ) -> list[list[Episode]]:
        """See `LearnerPort`. The groups were read when they were chosen."""
        return self._replay.batches.pop(wanted.numbers)

    def report_version(self, version: int) -> None:
        """See `LearnerPort`."""
        self._replay.set_version(version)

    def status(self) -> dict[Metric, float]:
        """See `LearnerPort`. Nothing passes a wire."""
        wire = dict.fromkeys((m.WIRE_BYTES, m.WIRE_ERRORS), 0.0)
        return self._replay.status() | wire

    def stop(self) -> None:
        """See `LearnerPort`."""
        self._replay.stopped = True

    def close(self) -> None:
        """See `LearnerPort`."""
        self._replay.close()
