"""A run of the replay with restarts gets the batches of the undisturbed one, within the lag bound."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Set
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.observability import metrics_system as m
from asyncrl.replay.replay import Replay
from support.episodes import make_episode
from support.replay import open_replay, read_batch

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def books(replay: Replay) -> list[object]:
    """What a restart must bring back."""
    limiter = replay.state.limiter
    return [limiter.ready, limiter.closed, replay.state.counters.episodes, limiter.used]


def imagine_all(replay: Replay) -> None:
    """Take all credit and complete every group with the learner's version. Every third group has a spread."""
    while (grant := replay.grant("actor-0")) is not None:
        assert grant.min_version <= replay.state.limiter.version
        for member in range(2):
            won = bool(member) and grant.number % 3 == 0
            versions = (replay.state.limiter.version,)
            replay.admit(
                make_episode(
                    grant.number,
                    member,
                    versions=versions,
                    image=1,
                    success=won,
                    episode_id=random.randbytes(16).hex(),
                )
            )


def batch_of(replay: Replay, version: int, groups: int) -> list[int]:
    batch = read_batch(replay, groups, version, f"request-{version}")
    assert batch is not None, replay.contents()
    for group in batch:
        assert all(version - episode.oldest_version <= replay.state.limiter.max_lag for episode in group)
    return [int(group[0].group_id) for group in batch]


def batches_of(
    folder: Path, max_lag: int, per_update: int, restarts: Set[int] = frozenset()
) -> list[list[int]]:
    """The groups of eight batches, each of others; the replay is opened again before some of them."""
    replay, batches, count = open_replay(folder, per_update=per_update, max_lag=max_lag), [], Counter[int]()
    replay.begin("learner", 0)
    for version in range(8):
        replay.set_version(version)
        if version in restarts:
            before = books(replay)
            replay.close()
            replay = open_replay(folder, per_update=per_update, max_lag=max_lag)
            replay.begin("learner", version)
            assert books(replay) == before
        imagine_all(replay)
        numbers = batch_of(replay, version, per_update)
        assert len(set(numbers)) == per_update, "different groups"
        count.update(numbers)
        batches.append(numbers)
        assert max(count.values()) == 1
        assert replay.state.limiter.used == per_update * (version + 1)
    assert set(count) <= replay.store.group_files.keys()
    replay.close()
    return batches


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], list[list[int]]]:
    """The batches without a restart, made once for each lag and size of a batch."""
    return cache(lambda *sizes: batches_of(tmp_path_factory.mktemp("replay"), *sizes))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(1, 3), st.sets(st.integers(0, 7), min_size=1))
def test_restarts_change_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    undisturbed: Callable[[int, int], list[list[int]]],
    max_lag: int,
    per_update: int,
    restarts: set[int],
) -> None:
    found = batches_of(tmp_path_factory.mktemp("replay"), max_lag, per_update, restarts)
    assert found == undisturbed(max_lag, per_update)


def test_dropped_decisions_are_counted_and_survive_a_restart(tmp_path: Path) -> None:
    replay = open_replay(tmp_path, max_lag=0, per_update=1)
    replay.begin("learner", 0)
    assert replay.grant("actor-0") is not None
    for member in range(2):
        replay.admit(make_episode(0, member, versions=(0, 0, 0), image=1))
    replay.set_version(1)
    for _ in range(2):
        assert replay.status()[m.DROPPED_LAG] == 2
        assert replay.status()[m.DROPPED_DECISIONS[m.DROPPED_LAG]] == 6
        replay.close()
        replay = open_replay(tmp_path, max_lag=0, per_update=1)
