"""Several uses and other orders than the oldest first: bounds hold, runs end, and the seed decides."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySampler, ReplaySettings
from asyncrl.errors import ConfigError
from asyncrl.observability import metrics_system as m
from asyncrl.replay.groups import ReadyGroup
from asyncrl.replay.limiter import Limiter, pick_in_order
from asyncrl.replay.replay import Replay
from asyncrl.replay.store import EpisodeStore
from asyncrl.replay_tools.episodes import read_outcomes
from support.episodes import make_episode
from support.replay import Clock

ORDERS = ["oldest", "newest", "uniform", "prioritized"]


def open_replay(
    folder: Path,
    *,
    per_update: int = 2,
    max_lag: int = 2,
    uses: int = 1,
    order: ReplaySampler = "oldest",
    seed: int = 0,
    max_age: int = 0,
) -> Replay:
    settings = ReplaySettings(
        max_lag=max_lag, max_reuse=uses, sampler=order, group_timeout=1e6, max_age_versions=max_age
    )
    limiter = Limiter(settings, group_size=2, groups_per_update=per_update, seed=seed, clock=Clock())
    return Replay(EpisodeStore(folder, group_size=2, max_bytes=10**9), limiter)


def books(replay: Replay) -> list[object]:
    """What a restart must bring back."""
    limiter = replay.state.limiter
    return [limiter.ready, limiter.used_at, replay.state.counters.episodes, limiter.used]


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
    batch = replay.sample(groups, version, f"request-{version}")
    assert batch is not None, replay.contents()
    for group in batch:
        assert all(version - episode.oldest_version <= replay.state.limiter.max_lag for episode in group)
    return [int(group[0].group_id) for group in batch]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ORDERS),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 9),
    st.sets(st.integers(0, 7)),
)
def test_every_order_ends_within_its_bounds_and_restarts_change_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    order: ReplaySampler,
    uses: int,
    max_lag: int,
    per_update: int,
    seed: int,
    restarts: set[int],
) -> None:
    runs = list[list[list[int]]]()
    for restarting in (False, True):
        folder, batches, count = tmp_path_factory.mktemp("replay"), list[list[int]](), Counter[int]()

        def reopened(folder: Path = folder) -> Replay:
            about = {"per_update": per_update, "max_lag": max_lag, "uses": uses}
            return open_replay(folder, order=order, seed=seed, **about)  # type: ignore[arg-type]

        replay = reopened()
        replay.begin("learner", 0)
        for version in range(8):
            replay.set_version(version)
            if restarting and version in restarts:
                before = (
                    replay.state.limiter.ready,
                    replay.state.limiter.used_at,
                    replay.state.counters.episodes,
                    replay.state.limiter.used,
                )
                replay.close()
                replay = reopened()
                replay.begin("learner", version)
                after = (
                    replay.state.limiter.ready,
                    replay.state.limiter.used_at,
                    replay.state.counters.episodes,
                    replay.state.limiter.used,
                )
                assert before == after
            imagine_all(replay)
            numbers = batch_of(replay, version, per_update)
            assert len(set(numbers)) == per_update, "different groups"
            count.update(numbers)
            batches.append(numbers)
            assert max(count.values()) <= uses
            assert replay.state.limiter.used == per_update * (version + 1)
        assert set(count) <= replay.store.group_files.keys()
        replay.close()
        runs.append(batches)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("order", ORDERS)
def test_a_resumed_run_gets_the_batches_of_the_undisturbed_one(tmp_path: Path, order: ReplaySampler) -> None:
    replay = open_replay(tmp_path, uses=2, order=order)
    replay.begin("first", 0)
    batches = list[list[int]]()
    for version in range(6):
        replay.set_version(version)
        imagine_all(replay)
        batches.append(batch_of(replay, version, 2))
    replay.close()
    replay = open_replay(tmp_path, uses=2, order=order)
    replay.begin("resumed from a checkpoint", 3)
    again = list[list[int]]()
    for version in range(3, 6):
        replay.set_version(version)
        imagine_all(replay)
        again.append(batch_of(replay, version, 2))
    assert again == batches[3:]
    used = read_outcomes(tmp_path, print).used
    assert all(used[number] == 5 for number in again[-1])
    replay.close()


def test_used_groups_that_become_too_old_are_no_drops(tmp_path: Path) -> None:
    replay = open_replay(tmp_path, uses=2, max_lag=1, per_update=1)
    replay.begin("learner", 0)
    imagine_all(replay)
    assert batch_of(replay, 0, 1) == [0]
    assert sorted(replay.state.limiter.ready) == [0]
    replay.set_version(2)
    assert not replay.state.limiter.ready
    assert replay.state.limiter.closed[0].status == "duplicate"
    assert replay.status()[m.DROPPED_LAG] == 0
    replay.close()


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
    replay.close()


def test_orders_by_definition() -> None:
    usable = {n: ReadyGroup(oldest_version=0, newest_version=0, spread=0.5 * (n == 4)) for n in range(8)}
    assert pick_in_order(usable, 3, "oldest", seed=0, cursor=0) == [0, 1, 2]
    assert pick_in_order(usable, 3, "newest", seed=0, cursor=0) == [7, 6, 5]
    firsts = {
        order: Counter(pick_in_order(usable, 1, order, seed=1, cursor=cursor)[0] for cursor in range(4000))
        for order in ("uniform", "prioritized")
    }
    assert all(400 < firsts["uniform"][n] < 600 for n in range(8))
    expected = 4000 * 0.5 / (0.5 + 7 * 0.05)
    assert abs(firsts["prioritized"][4] - expected) < 150
    assert len(firsts["prioritized"]) == 8, "groups without spread come, too"


def test_old_files_are_deleted_by_age_but_nothing_that_may_be_used(tmp_path: Path) -> None:
    replay = open_replay(tmp_path, max_lag=3, per_update=1, max_age=1, order="newest")
    replay.begin("learner", 0)
    for version in range(5):
        replay.set_version(version)
        imagine_all(replay)
        batch_of(replay, version, 1)
        assert replay.state.limiter.ready.keys() <= replay.store.group_files.keys()
        closed = (
            replay.store.group_files.keys()
            - replay.state.limiter.ready.keys()
            - set(replay.state.session.batch)
        )
        assert all(replay.store.group_files[number].newest_version >= version - 1 for number in closed)
    assert len(replay.store.group_files) < replay.state.limiter.next_number
    replay.close()


def test_more_uses_than_the_lag_lets_a_group_live_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--replay\.max-reuse is 4.*at most 3"):
        TrainConfig(replay=ReplaySettings(max_reuse=4, max_lag=2))
    with pytest.raises(ConfigError, match="--synchronous"):
        TrainConfig(replay=ReplaySettings(max_reuse=2), synchronous=True)
