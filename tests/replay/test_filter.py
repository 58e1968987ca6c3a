"""Groups that teach nothing are stored and replaced; a resume undoes exactly what was lost."""

import dataclasses
import functools
import itertools
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.errors import ConfigError
from asyncrl.observability import metrics_system as m
from asyncrl.observability import metrics_system as s
from asyncrl.records import Episode
from asyncrl.replay.buffer import Replay
from asyncrl.replay.groups import has_no_signal
from asyncrl.replay.inline_ports import InProcessActorPort, InProcessLearnerPort
from asyncrl.replay.interface import Filling, GroupGrant
from asyncrl.replay.store import EpisodeStore
from asyncrl.replay_tools.episodes import read_rows
from asyncrl.replay_tools.files import check_files
from support.episodes import make_episode
from support.replay import next_batch, open_replay, read_batch

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")
open_filter = functools.partial(open_replay, per_update=1, filtering=True)
Seen = dict[int, tuple[list[tuple[str, int, int, bool]], dict[str, float]]]
"""Version -> group, policy version, world and success of its batch's episodes; and the replay's metrics."""


class Killed(Exception):
    """The run ends here, wherever that is."""


class Dream:
    """An actor with one episode in each round.

    Outcomes follow from group, member, versions, and, unless its passes have a fixed shape, the place among
    the episodes of that version: as in a real actor, whose batches round differently with other neighbours.
    """

    def __init__(self, replay: Replay, rounds: int = 10**6, *, fixed_shape: bool = False) -> None:
        """It is killed after so many rounds."""
        self.port, self.replay, self.left = InProcessActorPort(replay), replay, rounds
        self.pending: list[tuple[GroupGrant, int]] = []
        self.version, self.place = -1, 0
        self.fixed_shape = fixed_shape

    def round(self) -> bool:
        dropped = self.port.pop_dropped()
        self.pending = [one for one in self.pending if one[0].number not in dropped]
        for grant in [] if self.pending else self.port.acquire_groups(1, 0.0):
            self.pending = [(grant, 0), (grant, 1)]
        if not self.pending:
            return False
        if not self.left:
            raise Killed
        self.left -= 1
        grant, member = self.pending.pop(0)
        self.port.push(self.imagine(grant, member))
        self.port.deliver()
        return True

    def imagine(self, grant: GroupGrant, member: int) -> Episode:
        version = self.replay.state.limiter.version
        assert grant.min_version <= version
        self.version, self.place = version, self.place + 1 if version == self.version else 0
        place = 0 if self.fixed_shape else self.place
        won = zlib.crc32(f"{grant.number} {member} {version} {place}".encode()) % 3 == 0
        fresh = f"{np.random.default_rng().integers(2**63):032x}"  # Imagined again, it is another episode.
        return make_episode(
            grant.number, member, versions=(version,), success=won, image=1, episode_id=fresh, actor="inline"
        )


def learn(
    open_it: Callable[[], Replay], *, begin: int, end: int, rounds: int = 10**6, fixed_shape: bool = False
) -> Seen:
    """Update from version `begin` to `end`, or until the actor made `rounds`; return what was seen."""
    replay, seen = open_it(), Seen()
    learner = InProcessLearnerPort(replay, version=begin, imagine=lambda: dream.round())
    dream = Dream(replay, rounds, fixed_shape=fixed_shape)
    per_update = replay.state.limiter.groups_per_update
    try:
        for version in range(begin, end):
            batch = next_batch(learner, groups=per_update, version=version, timeout=60.0)
            assert not replay.state.limiter.open, "nothing is in flight when an update begins"
            assert replay.state.limiter.credit == 0
            learner.report_version(version + 1)
            about = [
                (e.group_id, e.oldest_version, e.world_version, e.success) for group in batch for e in group
            ]
            counted = (m.EPISODES, m.DROPPED_RESUME, m.DROPPED_DECISIONS[m.DROPPED_RESUME], m.REPLAY_BYTES)
            status = {x.name: value for x, value in learner.status().items() if x not in counted}
            seen[version] = about, status
    except Killed:
        pass
    finally:
        learner.close()
    return seen


def push(
    replay: Replay,
    number: int,
    outcomes: tuple[bool, bool],
    version: int = 0,
    *,
    ids: Iterator[int] | None = None,
) -> list[str]:
    """Push both members; return what became of them. The ids are fresh, or follow from the number."""
    made = [
        make_episode(number, member, versions=(version,), success=won, image=1)
        for member, won in enumerate(outcomes)
    ]
    if ids is not None:
        made = [dataclasses.replace(episode, episode_id=f"{next(ids):032x}") for episode in made]
    return [replay.admit(episode).status for episode in made]


def granted(replay: Replay) -> list[int]:
    """Take all credit."""
    numbers = []
    while (grant := replay.grant("actor-0")) is not None:
        numbers.append(grant.number)
    return numbers


def begun(folder: Path, *, max_lag: int = 1, max_bytes: int = 10**9, filtering: bool = True) -> Replay:
    """A new run at version 0 whose credit is taken."""
    replay = open_filter(folder, max_lag=max_lag, max_bytes=max_bytes, filtering=filtering)
    replay.begin("learner", 0)
    assert granted(replay) == list(range(max_lag + 1))
    return replay


def reopened(replay: Replay, *, learner: str = "learner", version: int = 0) -> Replay:
    """The same replay in a new process, without a limit on its size."""
    replay.close()
    replay = open_filter(replay.store.folder, max_lag=replay.state.limiter.max_lag)
    replay.begin(learner, version)
    return replay


def test_a_constant_group_is_stored_but_never_ready_and_its_credit_returns(tmp_path: Path) -> None:
    replay = begun(tmp_path)
    assert push(replay, 0, (True, True)) == ["held", "held"]
    assert [receipt.status for _, receipt in replay.pop_receipts()] == ["stored", "stored"]
    assert replay.status()[s.FILTERED_GROUPS] == 1
    assert replay.status()[s.GROUPS_READY] == 0
    assert replay.state.limiter.used == 0
    assert (
        "0 groups ready, 1 in flight with 0 episodes; 1 filtered; episodes dropped: none" in replay.contents()
    )
    assert granted(replay) == [2], "a fresh group in its place"
    push(replay, 1, (False, False))
    assert granted(replay) == [3]
    push(replay, 2, (True, False))
    batch = read_batch(replay, 1, 0)
    assert batch is not None
    assert batch[0][0].group_id == "00000002"
    assert replay.admit(make_episode(0, 1, success=True, image=1)).status == "duplicate"
    replay.close()
    assert [(row.number, row.outcome == "filtered", row.used_at) for row in read_rows(tmp_path)][::2] == [
        (0, True, None),
        (1, True, None),
        (2, False, 0),
    ]
    assert check_files(tmp_path)[0] == []


def test_a_group_sealed_just_before_a_crash_is_filtered_when_the_folder_is_opened(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, group_size=2, max_bytes=10**9)
    store.enter(store.write(0, [make_episode(0, member, image=1) for member in range(2)]))
    store.close()
    for _ in range(2):
        replay = open_filter(tmp_path)
        filtered = [n for n, group in replay.state.limiter.closed.items() if group.filtered]
        assert (filtered, sorted(replay.state.limiter.ready)) == ([0], [])
        assert replay.status()[s.EPISODES] == 2
        replay.close()


def test_filtered_groups_are_deleted_beyond_the_size_limit_and_stay_counted(tmp_path: Path) -> None:
    replay = begun(tmp_path, max_bytes=1)
    push(replay, 0, (True, True))
    assert not replay.store.group_files
    replay = reopened(replay)
    replay.set_version(1)
    assert replay.status()[s.FILTERED_GROUPS] == 1
    assert replay.status()[s.REPLAY_SUCCESS] == 1.0


def test_too_many_filtered_groups_in_a_row_end_the_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("asyncrl.replay.buffer.MAX_FILTERED_BATCHES", 3)
    outcomes = (True, True)
    replay = open_filter(tmp_path, per_update=2)
    replay.begin("learner", 0)
    for number in range(5):
        granted(replay)
        push(replay, number, outcomes)
        assert replay.filter_end_reason == ""
    replay.close()
    replay = open_filter(tmp_path, per_update=2)
    replay.begin("learner", 0)  # The replay was restarted, the learner was not: the count goes on.
    push(replay, min(replay.state.limiter.open), outcomes)
    assert replay.filter_end_reason.startswith(
        "within each of the last 6 groups all episodes scored the same (6 groups succeeded, 0 failed): there"
    )
    replay.begin("resumed", 0)
    assert replay.filter_end_reason == "", "whoever resumes may have changed something"


def test_a_batch_begins_the_count_of_filtered_groups_anew_and_one_that_is_full_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.replay.buffer.MAX_FILTERED_BATCHES", 1)
    replay = open_filter(tmp_path, per_update=2)
    replay.begin("learner", 0)
    numbers = granted(replay)
    push(replay, numbers[0], (True, False))
    push(replay, numbers[1], (True, True))
    push(replay, numbers[2], (False, False))
    assert replay.filter_end_reason.startswith(
        "within each of the last 2 groups all episodes scored the same (1 groups succeeded, 1 failed), and "
        "only 1 of the 2 groups of a batch differ"
    )
    push(replay, numbers[3], (True, False))
    assert replay.filter_end_reason == ""
    assert read_batch(replay, 2, 0) is not None
    assert replay.filter_end_reason == ""


def test_how_far_the_batch_is_counts_ready_filtered_and_incomplete_groups(tmp_path: Path) -> None:
    replay = open_filter(tmp_path, per_update=4)
    replay.begin("learner", 0)
    numbers = granted(replay)
    push(replay, numbers[0], (True, False))
    push(replay, numbers[1], (True, True))
    replay.admit(make_episode(numbers[2], 0, versions=(0,), image=1))
    replay.report("actor-0", {s.ACTOR_DECISIONS: 10.0})
    replay.report("actor-0", {s.ACTOR_DECISIONS: 12.0})
    replay.report("actor-1", {s.ACTOR_DECISIONS: 3.0})
    assert replay.filling == Filling(groups=1, episodes=5, decisions=15)
    replay.hello("actor-1", "respawned")
    replay.report("actor-1", {s.ACTOR_DECISIONS: 1.0})
    assert replay.filling.decisions == 16


def test_success_covers_all_groups_completed_at_the_last_version(tmp_path: Path) -> None:
    replay = begun(tmp_path, max_lag=3)
    push(replay, 0, (True, True))
    push(replay, 1, (True, False))
    assert s.REPLAY_SUCCESS not in replay.status()
    replay.set_version(1)
    for _ in range(2):  # Reading it changes nothing.
        assert replay.status()[s.REPLAY_SUCCESS] == 0.75
    push(replay, 2, (False, False), version=1)
    replay = reopened(replay, learner="resumed", version=1)
    replay.set_version(2)
    assert replay.status()[s.REPLAY_SUCCESS] == 0.0
    replay.set_version(3)
    assert s.REPLAY_SUCCESS not in replay.status(), "no group became complete at version 2"


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_filter_that_would_replace_every_group_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="group-size"):
        AlgorithmSettings(kind=kind, group_size=1, filter_groups=True)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(0, 2), st.integers(1, 3))
def test_batches_are_full_and_mixed_and_every_grant_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, max_lag: int, per_update: int
) -> None:
    """Random outcomes, orders, ages and restarts of the replay."""
    folder, learner, grants, ids = tmp_path_factory.mktemp("replay"), 0, 0, itertools.count()
    pending: list[GroupGrant] = []

    def opened() -> Replay:
        replay = open_filter(folder, per_update=per_update, max_lag=max_lag, horizon=0)
        replay.begin("learner", learner)
        return replay

    replay = opened()
    actions = st.sampled_from(["grant", "grant", "finish", "finish", "finish", "drop", "sample", "restart"])
    for _ in range(data.draw(st.integers(5, 40))):
        match data.draw(actions):
            case "grant" if (grant := replay.grant("actor-0")) is not None:
                assert grant.number <= grants
                assert grant.min_version <= learner
                grants = max(grants, grant.number + 1)
                pending.append(grant)
            case "finish" if pending:
                grant = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
                version = data.draw(st.integers(grant.min_version, learner))
                outcomes = (data.draw(st.booleans()), data.draw(st.booleans()))
                statuses = push(replay, grant.number, outcomes, version, ids=ids)
                assert statuses == ["held", "held"] or learner - version > max_lag
            case "drop" if pending:
                bad = dataclasses.replace(make_episode(pending.pop(0).number, 0, image=1), end_reason="no")
                replay.admit(bad)
            case "sample":
                batch = read_batch(replay, per_update, learner)
                if batch is not None:
                    assert len(batch) == per_update
                    assert not any(has_no_signal(group) for group in batch)
                    assert all(learner - e.oldest_version <= max_lag for group in batch for e in group)
                    learner += 1
                    replay.set_version(learner)
            case "restart":
                replay.close()
                replay = opened()
        limiter = replay.state.limiter
        ledger = list(replay.store.ledger.read())
        used = {number for entry in ledger for number in entry.get("used", ())}
        filtered, dropped = ({e[key] for e in ledger if key in e} for key in ("filtered", "dropped"))
        here = {*limiter.open, *limiter.ready}
        assert {*used, *filtered, *dropped, *here} == set(range(grants))
        assert (limiter.next_number, limiter.filtered_groups) == (grants, len(filtered))
        assert len(used | filtered | here) == len(used) + len(filtered) + len(here), "each in one place"
        assert limiter.to_grant_again <= dropped - used - filtered - here
        assert limiter.used == len(used) == learner * per_update
        assert limiter.credit == (max_lag + learner + 1) * per_update - limiter.used - len(here)


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(0, 3), st.integers(1, 3), st.booleans(), st.integers(0, 5))
def test_a_run_killed_anywhere_and_resumed_sees_what_an_undisturbed_one_sees(
    tmp_path_factory, data, max_lag, per_update, filtering, horizon
) -> None:
    """Killed in the middle of a group or not, resumed from any version up to the horizon, several times."""
    folder, updates = tmp_path_factory.mktemp("replay"), 7
    about = {"per_update": per_update, "max_lag": max_lag, "filtering": filtering, "horizon": horizon}

    def opener(name: str) -> Callable[[], Replay]:
        return lambda: open_filter(folder / name, **about)  # type: ignore[arg-type]

    whole = learn(opener("whole"), begin=0, end=updates)
    for version, (used, _) in whole.items():
        assert {made_by for _, made_by, _, _ in used} == {max(0, version - max_lag)}
    begin, reached, disturbed = 0, 0, Seen()
    for _ in range(data.draw(st.integers(1, 3))):
        lost = learn(opener("killed"), begin=begin, end=updates, rounds=data.draw(st.integers(0, 50)))
        disturbed |= lost
        reached = max(reached, begin + len(lost))
        earliest = max(begin, reached - max(horizon, max_lag))
        begin = data.draw(st.integers(earliest, begin + len(lost)))
    disturbed |= learn(opener("killed"), begin=begin, end=updates)
    assert disturbed == whole
    shutil.rmtree(folder)


def test_a_resume_whose_used_files_were_deleted_imagines_those_groups_again(tmp_path: Path) -> None:
    replay = begun(tmp_path)
    push(replay, 0, (True, False))
    push(replay, 1, (True, False))
    assert read_batch(replay, 1, 0) is not None
    replay.close()
    (tmp_path / "group-00000000.h5").unlink()
    for _ in range(2):  # The second time from the ledger alone.
        replay = open_filter(tmp_path)
        replay.begin("second", 0)
        assert (sorted(replay.state.limiter.ready), replay.state.limiter.to_grant_again) == ([1], {0})
        assert replay.status()[s.DROPPED_RESUME] == 2
        replay.close()
    replay = open_filter(tmp_path)
    assert replay.admit(make_episode(0, 0, image=1, versions=(0,))).status == "dropped_resume", "too early"
    assert granted(replay) == [0]
    assert push(replay, 0, (True, False)) == ["held", "held"]
