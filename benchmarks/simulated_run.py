"""Simulate a run as events over the real limiter: actors, learner, replay and network are times.

    python benchmarks/simulated_run.py

makes the measured whole runs of docs/measurements/run_speed.md from the rates of their learner
and actors alone: the simulation adds waiting.

An episode occupies its slot for as many rounds of its actor as it has decisions; its first decision has the
policy version that the actor holds then, its last one that which it holds at the end.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from measuring import table

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.sections import ReplaySettings
from asyncrl.records import SamplingParams
from asyncrl.replay.group_file import GroupFile
from asyncrl.replay.interface import ReceiptStatus
from asyncrl.replay.limiter import Limiter

FREE = float("inf")
"""Bytes per second of what costs nothing."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A run as times."""

    actors: int
    slots: int
    """Of each actor."""
    round_seconds: float
    """A decision of all slots of an actor."""
    update_seconds: float
    group_size: int
    groups_per_update: int
    decisions: int
    """Of an episode of full length."""
    max_lag: int
    shortest: float = 1.0
    """Episodes have between this share of `decisions` and all, evenly; 1: all are of full length."""
    decision_bytes: float = 256 * 256 * 3
    ingest: float = FREE
    """Bytes per second that the replay takes in and stores."""
    hand_over: float = FREE
    """Bytes per second of a batch on its way to the learner, during which nothing is taken in."""
    weights_seconds: float = 0.0
    """From the end of an update to the actors."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a simulated run did, after the updates that do not count."""

    seconds: float
    """From one update to the next."""
    decisions_per_second: float
    lag_mean: float
    """Versions, over the decisions that were used."""
    lag_max: int
    dropped: int
    """Groups beyond the lag bound."""
    learner_waits: float
    """Share of the time; the hand-over of the batch counts."""
    actors_wait: float
    """Share of the slots' time without an episode: for credit, or for weights."""
    replay_busy: float
    """Share of the time."""
    bytes_per_second: float
    """Into the replay, and as many out of it."""


@dataclass(frozen=True, kw_only=True)
class _Episode:
    first: int
    """Version of its first decision."""
    last: int
    decisions: int


@dataclass(frozen=True, kw_only=True)
class _Update:
    waited: float
    """Seconds that the learner had nothing to learn from."""
    version: int
    episodes: list[_Episode]


@dataclass(kw_only=True)
class _Actor:
    name: str
    phase: float
    """When one of its rounds ended."""
    version: int = 0
    free: int
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    """Episodes that are granted and not begun: group and the version that it asks for."""
    idle: float = 0.0
    """Seconds of slots that were free."""
    since: float = 0.0
    """When `idle` was last added to."""


class Simulation:
    """One run."""

    def __init__(self, scale: Scale, seed: int = 0) -> None:
        self.scale, self.now, self.random = scale, 0.0, random.Random(seed)
        self.limiter = Limiter(
            ReplaySettings(max_lag=scale.max_lag),
            AlgorithmSettings(group_size=scale.group_size, groups_per_update=scale.groups_per_update),
            clock=lambda: self.now,
        )
        self.actors = [
            _Actor(name=f"actor-{k}", phase=scale.round_seconds * self.random.random(), free=scale.slots)
            for k in range(scale.actors)
        ]
        self.waiting = deque(self.actors)
        self.members: dict[int, list[_Episode]] = {}
        """Group -> its episodes that are there."""
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.replay_free = self.replay_busy = self.learner_free = self.taken = 0.0
        self.learning, self.dropped = False, 0
        self.no_credit = False
        """Nothing that gives credit has happened since there was none, so asking again is for nothing."""
        self.awaited = -1
        """An open group that stands before a batch: while it is open, no batch is picked."""
        self.updates: list[_Update] = []

    def run(self, updates: int, *, skip: int) -> Outcome:
        self._fill_all()
        marks: dict[int, tuple[float, ...]] = {}
        while len(self.updates) < updates:
            self.now, _, happen = heapq.heappop(self.events)
            happen()
            if len(self.updates) not in marks:
                marks[len(self.updates)] = self._totals()
        spent, idle, busy, taken, dropped = (
            end - begin for end, begin in zip(self._totals(), marks[skip], strict=True)
        )
        used = [(update, episode) for update in self.updates[skip:] for episode in update.episodes]
        decisions = sum(episode.decisions for _, episode in used)
        lags = sum((2 * u.version - e.first - e.last) / 2 * e.decisions for u, e in used)
        return Outcome(
            seconds=spent / (updates - skip),
            decisions_per_second=decisions / spent,
            lag_mean=lags / decisions,
            lag_max=max(update.version - episode.first for update, episode in used),
            dropped=int(dropped),
            learner_waits=sum(update.waited for update in self.updates[skip:]) / spent,
            actors_wait=idle / spent / (self.scale.actors * self.scale.slots),
            replay_busy=busy / spent,
            bytes_per_second=taken / spent,
        )

    def _totals(self) -> tuple[float, ...]:
        for actor in self.actors:
            self._count_idle(actor)
        idle = sum(actor.idle for actor in self.actors)
        return self.now, idle, self.replay_busy, self.taken, self.dropped

    def _count_idle(self, actor: _Actor) -> None:
        actor.idle += actor.free * (self.now - actor.since)
        actor.since = self.now

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), happen))

    def _fill_all(self) -> None:
        for _ in range(len(self.waiting)):
            self._fill(self.waiting.popleft())

    def _fill(self, actor: _Actor) -> None:
        self._count_idle(actor)
        while actor.free:
            if not actor.queue:
                event = None if self.no_credit else self.limiter.new_grant(actor.name)
                if event is None:
                    self.no_credit = True
                    break
                self.limiter.apply_grant(event)
                actor.queue.extend([(event.grant, event.min_version)] * self.scale.group_size)
            number, asked = actor.queue[0]
            if asked > actor.version:
                break
            actor.queue.popleft()
            self._begin(actor, number)
        if actor.free and actor not in self.waiting:
            self.waiting.append(actor)

    def _begin(self, actor: _Actor, number: int) -> None:
        scale, version = self.scale, actor.version
        if actor.free == scale.slots:
            actor.phase = self.now
        fewest = max(1, round(scale.shortest * scale.decisions))
        length = self.random.randint(fewest, scale.decisions)
        late = (self.now - actor.phase) % scale.round_seconds
        lead = 0.0 if min(late, scale.round_seconds - late) < 1e-9 else scale.round_seconds - late
        actor.free -= 1
        self._after(lead + length * scale.round_seconds, lambda: self._end(actor, number, version, length))

    def _end(self, actor: _Actor, number: int, first: int, length: int) -> None:
        self._count_idle(actor)
        actor.free += 1
        episode = _Episode(first=first, last=actor.version, decisions=length)
        nbytes = length * self.scale.decision_bytes
        self.taken += nbytes
        self._serve(nbytes / self.scale.ingest, lambda: self._arrive(number, episode))
        self._fill(actor)

    def _serve(self, seconds: float, then: Callable[[], None]) -> None:
        self.replay_free = max(self.replay_free, self.now) + seconds
        self.replay_busy += seconds
        self._after(self.replay_free - self.now, then)

    def _arrive(self, number: int, episode: _Episode) -> None:
        members = self.members.setdefault(number, [])
        members.append(episode)
        if len(members) < self.scale.group_size:
            return
        oldest, newest = min(e.first for e in members), max(e.last for e in members)
        group = GroupFile(
            path=Path(),
            number=number,
            oldest_version=oldest,
            newest_version=newest,
            size=0,
            decisions=0,
            sampling=SamplingParams(temperature=1.0),
            world_version=0,
            episode_ids=(),
            group_size=self.scale.group_size,
            task="",
            successes=0,
        )
        self.limiter.make_ready(number, group)
        if self.limiter.too_old(group, self.limiter.version):
            self._drop(number, "dropped_lag")
        self._learn()

    def _drop(self, number: int, why: ReceiptStatus) -> None:
        self.limiter.drop(number, why, stored=True)
        self.no_credit = False
        self.members.pop(number, None)
        self.dropped += 1

    def _learn(self) -> None:
        needed = self.scale.groups_per_update
        if self.learning or len(self.limiter.ready) < needed or self.awaited in self.limiter.open:
            return
        if (numbers := self.limiter.pick(needed)) is None:
            self.awaited = min(self.limiter.open, default=-1)
            return
        self.learning, self.no_credit = True, False
        self.limiter.use(numbers)
        episodes = [episode for number in numbers for episode in self.members.pop(number)]
        nbytes = sum(episode.decisions for episode in episodes) * self.scale.decision_bytes
        self._serve(nbytes / self.scale.hand_over, lambda: self._update(episodes))
        self._fill_all()

    def _update(self, episodes: list[_Episode]) -> None:
        waited = self.now - self.learner_free
        self.updates.append(_Update(waited=waited, version=self.limiter.version, episodes=episodes))
        self._after(self.scale.update_seconds, self._publish)

    def _publish(self) -> None:
        version = self.limiter.version + 1
        self.limiter.advance(version)
        self.learning, self.no_credit, self.learner_free = False, False, self.now
        self._after(self.scale.weights_seconds, lambda: self._receive(version))
        for number in self.limiter.stale():
            self._drop(number, "dropped_lag")
        self._learn()
        self._fill_all()

    def _receive(self, version: int) -> None:
        for actor in self.actors:
            actor.version = max(actor.version, version)
        self._fill_all()


MEASURED = (
    # GPUs, actors, steps per hour asynchronous, synchronous, learner alone, actors alone; waits of both sides
    (2, 1, 457_650, 222_942, 446_021, 473_715, 0.014, 0.008),
    (4, 2, 668_414, 378_705, 670_580, 1_025_215, 0.020, 0.255),
)
"""docs/measurements/run_speed.md: 4 groups of 8 episodes of 2 decisions."""
STEPS = 8 * 64
"""Per update of those runs."""


def measured_scale(actors: int, learner: float, imagining: float, *, max_lag: int) -> Scale:
    return Scale(
        actors=actors,
        slots=16,
        round_seconds=16 * actors * 3600 * 8 / imagining,
        update_seconds=3600 * STEPS / learner,
        group_size=8,
        groups_per_update=4,
        decisions=2,
        max_lag=max_lag,
        weights_seconds=0.007,
    )


def main() -> None:
    rows: list[list[object]] = []
    for gpus, actors, asynchronous, synchronous, learner, imagining, waits, credit in MEASURED:
        for how, lag, measured in (("asynchronous", 2, asynchronous), ("synchronous", 0, synchronous)):
            scale = measured_scale(actors, learner, imagining, max_lag=lag)
            found = Simulation(scale, 0).run(40, skip=10)
            steps = found.decisions_per_second * 8 * 3600
            rows.append([
                f"{gpus} GPUs, {how}", f"{measured:,}", f"{steps:,.0f}", f"{steps / measured - 1:+.1%}",
                f"{waits:.1%} / {credit:.1%}" if lag else "-",
                f"{found.learner_waits:.1%} / {found.actors_wait:.1%}",
                f"{found.lag_mean:.1f} / {found.lag_max}",
            ])  # fmt: skip
    titles = ["", "measured", "simulated", "off by", "measured waits", "simulated", "lag avg / max"]
    print(table(titles, rows))


if __name__ == "__main__":
    main()
