"""However long a run is, the replay remembers as much: closed groups are forgotten, and stay closed."""

import functools
import itertools
import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.run import TrainConfig, overlay
from asyncrl.launch.roles import open_run_replay
from asyncrl.observability import metrics_system as m
from asyncrl.replay.buffer import Replay
from support.episodes import make_episode
from support.replay import load, open_replay, read_batch

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")
HORIZON = 4
open_small = functools.partial(open_replay, max_bytes=1, filtering=True, horizon=HORIZON)
"""A replay whose files go as soon as they may, unless `max_bytes` is larger."""


def push(replay: Replay, number: int, *, mixed: bool = True, version: int | None = None) -> list[str]:
    """Push both members of a group, imagined anew by the learner's version unless said otherwise."""
    versions = (replay.state.limiter.version if version is None else version,)
    ids = [os.urandom(16).hex() for _ in range(2)]
    pair = [
        make_episode(number, k, versions=versions, image=1, success=mixed and k == 1, episode_id=ids[k])
        for k in (0, 1)
    ]
    return [replay.admit(episode).status for episode in pair]


def imagine(replay: Replay) -> None:
    """Use all credit. Of eight groups one teaches nothing, one is given up, one loses a member."""
    while (grant := replay.grant("actor-0")) is not None:
        if grant.number % 8 == 3:
            replay.lifecycle.drop(grant.number, "dropped_deadline")
        elif grant.number % 8 == 5:
            replay.admit(make_episode(grant.number, 7, versions=(replay.state.limiter.version,), image=1))
        else:
            push(replay, grant.number, mixed=grant.number % 8 != 1)
    replay.pop_receipts()


def update(replay: Replay) -> list[int]:
    """Imagine, use a batch and go on to the next version; return the groups of the batch."""
    imagine(replay)
    batch = read_batch(replay, 2, replay.state.limiter.version, f"request {replay.state.limiter.version}")
    assert batch is not None, replay.contents()
    replay.set_version(replay.state.limiter.version + 1)
    return [int(group[0].group_id) for group in batch]


def held(thing: Any, name: str = "replay") -> dict[str, int]:
    """Every container that a replay's object reaches through its attributes -> its length."""
    if isinstance(thing, dict | list | tuple | set | deque):
        return {name: len(thing)}
    if type(thing).__module__.startswith("asyncrl.replay"):
        parts = (held(part, f"{name}.{key}") for key, part in vars(thing).items())
        return dict(itertools.chain.from_iterable(found.items() for found in parts))
    return {}


def test_no_book_grows_with_the_length_of_a_run(tmp_path: Path) -> None:
    replay = open_small(tmp_path)
    replay.begin("learner", 0)
    replay.hello("actor-0", "first life")
    largest, turns = list[dict[str, int]](), 90
    for third in range(3):
        found = held(replay)
        for _ in range(turns):
            update(replay)
            found = {name: max(size, found.get(name, 0)) for name, size in held(replay).items()}
        largest.append(found)
        assert replay.state.limiter.next_number > (third + 1) * turns * 2
    books = {f"replay.state.limiter.{name}" for name in ("closed", "ready")}
    assert books <= largest[2].keys()
    assert largest[2] == largest[1]
    # Per version two places are used, and of eight groups three never are: at most four groups are closed.
    bound = (HORIZON + 3) * 4
    assert max(largest[2].values()) <= bound
    replay.close()
    assert max(held(open_small(tmp_path)).values()) <= bound, "recalled from the ledger"


def test_a_file_whose_grant_is_hidden_by_damage_is_ready(tmp_path: Path) -> None:
    replay = open_small(tmp_path, filtering=False, max_bytes=10**9)
    replay.begin("learner", 0)
    imagine(replay)
    batch = read_batch(replay, 2, 0, "request")
    assert batch is not None
    closed = {n for n in range(replay.state.limiter.next_number) if replay.state.limiter.is_closed(n)}
    ready = set(replay.state.limiter.ready)
    hidden = min(ready)
    replay.close()
    lines = (tmp_path / "ledger.log").read_text().splitlines(keepends=True)
    (place,) = [k for k, line in enumerate(lines) if f'"grant":{hidden},' in line]
    lines[place] = lines[place].replace("actor-0", "actor-X")
    (tmp_path / "ledger.log").write_text("".join(lines))
    replay = open_small(tmp_path, filtering=False, max_bytes=10**9)
    assert set(replay.state.limiter.ready) == ready, "its file is there and nothing says that it was used"
    assert closed == {n for n in range(replay.state.limiter.next_number) if replay.state.limiter.is_closed(n)}


def test_late_episodes_get_a_final_receipt_before_and_after_their_group_is_forgotten(tmp_path: Path) -> None:
    replay = open_small(tmp_path)
    replay.begin("learner", 0)
    used = update(replay)[0]
    given_up, filtered = 3, 1
    for version in range(1, HORIZON + 3):
        for _ in range(2):  # The second time from the ledger alone.
            assert push(replay, used, version=0) == ["duplicate"] * 2, version
            assert push(replay, filtered, mixed=False, version=0) == ["duplicate"] * 2
            late = push(replay, given_up, version=0)
            assert late == ["dropped_deadline" if version <= HORIZON else "duplicate"] * 2, version
            assert push(replay, 9999) == ["dropped_invalid"] * 2, "never granted"
            replay.close()
            replay = open_small(tmp_path)
            replay.begin("learner", version)
        assert (used in replay.store.group_files) == (version == 1), "deleted with the next batch"
        update(replay)
    assert replay.status()[m.FILTERED_GROUPS] == sum(
        n % 8 == 1 for n in range(replay.state.limiter.next_number)
    )


def test_members_of_a_group_that_was_stored_and_then_dropped_are_duplicates(tmp_path: Path) -> None:
    replay = open_small(tmp_path, filtering=False, max_lag=0)
    replay.begin("learner", 0)
    for number in (0, 1):
        assert replay.grant("actor-0") is not None
        push(replay, number)
    replay.set_version(1)
    replay.lifecycle.trim()
    assert not replay.store.group_files
    for _ in range(2):
        assert replay.status()[m.DROPPED_LAG] == replay.status()[m.DROPPED_DECISIONS[m.DROPPED_LAG]] == 4
        assert push(replay, 0, version=0) == ["duplicate"] * 2
        replay.close()
        replay = open_small(tmp_path, filtering=False, max_lag=0)
        replay.begin("learner", 1)


def test_a_resume_knows_the_episodes_whose_files_it_removed(tmp_path: Path) -> None:
    replay = open_small(tmp_path, max_bytes=10**9)
    replay.begin("first", 1)
    imagine(replay)
    number = min(replay.store.group_files)
    lost = load(replay.store, number)
    replay.begin("resumed", 0)
    assert not replay.store.group_files
    assert replay.admit(lost[0]).status == "duplicate"
    assert replay.grant("actor-0") is not None
    assert replay.admit(lost[0]).status == "held", "known, but what becomes of its group is not"
    assert not replay.state.limiter.open[number].members
    assert push(replay, number) == ["held", "held"]
    assert replay.admit(lost[0]).status == "duplicate"


@settings(max_examples=20, deadline=None)
@given(
    reached=st.integers(3, 8),
    horizon=st.integers(1, 4),
    begin=st.integers(0, 7),
    max_bytes=st.sampled_from([1, 10**9]),
)
def test_a_resume_from_before_the_horizon_goes_on_and_uses_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, reached: int, horizon: int, begin: int, max_bytes: int
) -> None:
    begin, folder = min(begin, reached), tmp_path_factory.mktemp("replay")

    def opened() -> Replay:
        return open_small(folder, horizon=horizon, max_bytes=max_bytes)

    replay, used_at = opened(), dict[int, list[int]]()
    replay.begin("first", 0)
    for version in range(reached):
        for number in update(replay):
            used_at.setdefault(number, []).append(version)
    replay.close()
    kept = {number: [v for v in versions if v < begin] for number, versions in used_at.items()}
    lost = {n for n, versions in used_at.items() if kept[n] != versions}
    replay = opened()
    limiter = replay.state.limiter
    closed = {n for n in range(limiter.next_number) if limiter.is_closed(n)}
    forgotten = closed - limiter.closed.keys()
    replay.begin("resumed", begin)
    for version in range(begin, reached + 3):
        for number in update(replay):
            assert number not in forgotten
            kept.setdefault(number, []).append(version)
    assert all(len(versions) <= 1 for versions in kept.values())
    # The ledger's last line is the batch of version `reached - 1`.
    assert bool(forgotten & lost) == (begin < reached - 1 - horizon)


def test_a_run_remembers_enough_for_its_oldest_checkpoint(tmp_path: Path) -> None:
    table = {"checkpoint_every": 10, "keep_checkpoints": 2, "replay": {"max_lag": 3}}
    replay = open_run_replay(tmp_path, overlay(TrainConfig(), table, "test"))
    # At update 39 that of update 30 may still be on its way to the disk, and those of 20 and 10 are there.
    assert replay.state.limiter.resume_window >= 39 - 10
