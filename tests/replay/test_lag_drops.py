"""Slow start states are used as often as they are granted: the real limiter with simulated actors."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.sections import ReplaySettings
from asyncrl.replay.limiter import Limiter
from support.replay import ready

GROUP = 8
EASY, HARD = (2, 6), (10, 16)
"""Fewest and most decisions of an episode."""


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


def simulate(actors: int, per_update: int, max_lag: int, *, updates: int) -> tuple[list[int], int]:
    """Run `updates` of two rounds each; return the numbers used, in order, and how many were dropped."""
    random.seed(0)
    algorithm = AlgorithmSettings(group_size=GROUP, groups_per_update=per_update)
    limiter = Limiter(ReplaySettings(max_lag=max_lag), algorithm, clock=lambda: 0.0)
    crew = [SimulatedActor(slots=32) for _ in range(actors)]
    began: dict[int, list[int]] = {}
    used: list[int] = []
    dropped = version = now = free_at = 0
    while version < updates:
        now += 1
        for index, actor in enumerate(crew):
            while len(actor.episodes) + len(actor.pending) < actor.slots + GROUP:
                event = limiter.new_grant(f"actor-{index}")
                if event is None:
                    break
                limiter.apply_grant(event)
                actor.forget(event.grant)
                actor.pending += [event.grant] * GROUP
                began[event.grant] = []
            actor.begin(now, version)
            while actor.episodes and actor.episodes[0][0] <= now:
                _, number, at = heapq.heappop(actor.episodes)
                began[number].append(at)
                if len(began[number]) == GROUP:
                    limiter.make_ready(number, ready(min(began[number]), max(began[number]), GROUP))
        open_too_old = [n for n in limiter.open if began[n] and version - min(began[n]) > max_lag]
        for number in {*limiter.stale(), *open_too_old}:
            limiter.drop(number, "dropped_lag", stored=number in limiter.ready)
            dropped += 1
            for actor in crew:
                actor.forget(number)
        if now >= free_at and (batch := limiter.pick(per_update, not_awaited=set())) is not None:
            limiter.use(batch)
            used += batch
            version, free_at = version + 1, now + 2
            limiter.advance(version)
    return used, dropped


@pytest.mark.parametrize(("actors", "per_update", "max_lag"), [(4, 16, 1), (4, 16, 2), (8, 16, 2), (4, 8, 2)])
def test_hard_start_states_are_used_as_often_as_they_are_granted(
    actors: int, per_update: int, max_lag: int
) -> None:
    used, dropped = simulate(actors, per_update, max_lag, updates=120)
    settled = range(max(used) + 1 - 8 * per_update)
    granted, chosen, first = (
        sum(map(is_hard, numbers)) / len(numbers)
        for numbers in (settled, [n for n in used if n in settled], used[: 5 * per_update])
    )
    assert chosen == pytest.approx(granted, abs=0.005)
    assert first == pytest.approx(0.5, abs=0.06)
    assert dropped == 0
