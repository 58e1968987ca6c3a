"""The real limiter with simulated actors: half of the start states are hard, and their episodes take longer.

Settings with `overtaking` are the baseline: groups are used in the order of becoming ready.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.config.sections import ReplaySettings
from asyncrl.replay.limiter import Limiter
from support.replay import ready

GROUP = 8
EASY, HARD = (2, 6), (10, 16)
"""Fewest and most decisions of an episode."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run."""

    actors: int
    slots: int
    groups_per_update: int
    max_lag: int
    overtaking: bool = False

    @property
    def name(self) -> str:
        """Of its row."""
        order = "as ready" if self.overtaking else "oldest"
        return f"{self.actors} x {self.slots}, {self.groups_per_update} groups, lag {self.max_lag}, {order}"


SETTINGS = (
    Setting(actors=4, slots=32, groups_per_update=16, max_lag=1, overtaking=True),
    Setting(actors=4, slots=32, groups_per_update=16, max_lag=2, overtaking=True),
    Setting(actors=8, slots=32, groups_per_update=16, max_lag=2, overtaking=True),
    Setting(actors=4, slots=32, groups_per_update=8, max_lag=2, overtaking=True),
    Setting(actors=4, slots=32, groups_per_update=16, max_lag=1),
    Setting(actors=4, slots=32, groups_per_update=16, max_lag=2),
    Setting(actors=8, slots=32, groups_per_update=16, max_lag=2),
    Setting(actors=4, slots=32, groups_per_update=8, max_lag=2),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a simulated run came to."""

    granted_hard: float
    used_hard: float
    """Shares in [0, 1], of the numbers that were settled."""
    first_hard: float
    """The same of the first five batches."""
    dropped: int
    grants: int
    rounds_per_update: float


def is_hard(number: int) -> bool:
    """Whether the start state of a group is a hard one: by chance, half of them."""
    return random.Random(f"start {number}").random() < 0.5


@dataclass
class SimulatedActor:
    """Slots that make one decision in each round."""

    slots: int
    episodes: list[tuple[int, int, int]] = field(default_factory=list)
    """Round at whose end an episode ends, group, version at which it began."""
    pending: list[int] = field(default_factory=list)

    def begin(self, now: int, version: int) -> None:
        """Fill free slots, lowest numbers first."""
        self.pending.sort()
        while self.pending and len(self.episodes) < self.slots:
            number = self.pending.pop(0)
            low, high = HARD if is_hard(number) else EASY
            heapq.heappush(self.episodes, (now + random.randint(low, high), number, version))

    def forget(self, number: int) -> None:
        """Stop what is left of a group."""
        self.pending = [n for n in self.pending if n != number]
        self.episodes = [x for x in self.episodes if x[1] != number]
        heapq.heapify(self.episodes)


def simulate(setting: Setting, updates: int, rounds_of_update: int = 2) -> Outcome:
    """Run one setting until it made `updates`; the learner takes `rounds_of_update` rounds for each."""
    random.seed(0)
    limiter = Limiter(
        ReplaySettings(max_lag=setting.max_lag),
        group_size=GROUP,
        groups_per_update=setting.groups_per_update,
        clock=lambda: 0.0,
    )
    actors = [SimulatedActor(setting.slots) for _ in range(setting.actors)]
    began: dict[int, list[int]] = {}
    used: list[int] = []
    dropped = grants = version = now = 0
    free_at = 0
    while version < updates:
        now += 1
        for index, actor in enumerate(actors):
            while len(actor.episodes) + len(actor.pending) < actor.slots + GROUP:
                event = limiter.new_grant(f"actor-{index}")
                if event is None:
                    break
                limiter.apply_grant(event)
                actor.forget(event.grant)
                actor.pending += [event.grant] * GROUP
                began[event.grant] = []
                grants += 1
            actor.begin(now, version)
            while actor.episodes and actor.episodes[0][0] <= now:
                _, number, at = heapq.heappop(actor.episodes)
                began[number].append(at)
                if len(began[number]) == GROUP:
                    complete = ready(min(began[number]), max(began[number]), GROUP)
                    limiter.make_ready(number, complete)
        open_too_old = [n for n in limiter.open if began[n] and version - min(began[n]) > setting.max_lag]
        for number in {*limiter.stale(), *open_too_old}:
            limiter.drop(number, "dropped_lag", stored=number in limiter.ready)
            dropped += 1
            for actor in actors:
                actor.forget(number)
        if now >= free_at and (batch := _pick(limiter, setting)) is not None:
            limiter.use(batch)
            used += batch
            version, free_at = version + 1, now + rounds_of_update
            limiter.advance(version)
    settled = range(max(used) + 1 - 8 * setting.groups_per_update)
    chosen = [number for number in used if number in settled]

    def share(numbers: Sequence[int]) -> float:
        return sum(map(is_hard, numbers)) / len(numbers)

    return Outcome(
        granted_hard=share(settled),
        used_hard=share(chosen),
        first_hard=share(used[: 5 * setting.groups_per_update]),
        dropped=dropped,
        grants=grants,
        rounds_per_update=now / updates,
    )


def _pick(limiter: Limiter, setting: Setting) -> list[int] | None:
    not_awaited = set(limiter.open) if setting.overtaking else set[int]()
    return limiter.pick(setting.groups_per_update, not_awaited=not_awaited)
