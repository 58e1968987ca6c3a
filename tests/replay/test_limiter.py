"""Credit, completeness and the lag bound, against slow and obvious ones."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.observability import metrics_replay as m
from asyncrl.replay.groups import ReadyGroup, number_of
from asyncrl.replay.replay import Replay
from support.episodes import make_episode
from support.replay import Clock, fill, grant_group, make_limiter, make_replay


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("per_update", [1, 2, 5])
def test_credit_and_min_version_follow_the_formula(max_lag: int, per_update: int) -> None:
    limiter = make_limiter(max_lag=max_lag, per_update=per_update)
    given_away = 0
    for version in range(4):
        limiter.version = version
        while (grant := grant_group(limiter, "a")) is not None:
            assert grant.number == given_away
            assert grant.min_version == max(0, given_away // per_update - max_lag)
            assert grant.min_version <= version
            given_away += 1
            assert given_away <= 1000, "credit without end"
        # Nothing was dropped, so all that was granted is used or of use.
        assert given_away == (max_lag + version + 1) * per_update
        for number in range(version * per_update, (version + 1) * per_update):
            limiter.make_ready(number, ReadyGroup(oldest_version=version, newest_version=version))
        limiter.use(list(range(version * per_update, (version + 1) * per_update)))


def test_a_dropped_group_gives_its_credit_back_under_a_new_number() -> None:
    limiter = make_limiter(max_lag=0, per_update=2)
    assert [grant_group(limiter, "a").number for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
    assert grant_group(limiter, "a") is None
    limiter.drop(0, "dropped_deadline")
    grant = grant_group(limiter, "a")
    assert grant is not None
    assert grant.number == 2
    assert grant.min_version == 0


def test_the_same_turn_gets_the_same_grant() -> None:
    limiter = make_limiter()
    first = grant_group(limiter, "a", 4)
    assert grant_group(limiter, "a", 4) == first
    assert grant_group(limiter, "b", 4) != first
    assert grant_group(limiter, "a", 5) != first


def test_video_is_kept_for_every_third_group() -> None:
    limiter = make_limiter(per_update=4)
    kept = [grant.keep_video for _ in range(7) if (grant := grant_group(limiter, "a"))]
    assert kept == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("text", ["", "1", "-0000001", "000000012", "\u0660" * 8, "0000000x", " 0000001"])
def test_a_group_id_that_no_grant_made_has_no_number(text: str) -> None:
    assert number_of(text) == -1


def test_a_group_is_ready_only_when_all_members_are_there(tmp_path: Path) -> None:
    replay = make_replay(tmp_path, make_limiter(group_size=3, per_update=1))
    grant = replay.grant("actor-0")
    assert grant is not None
    members = [make_episode(0, member, group_size=3, versions=(0,)) for member in (2, 0, 1)]
    assert [replay.admit(member).status for member in members[:2]] == ["held", "held"]
    assert replay.sample(1, 0) is None
    assert replay.admit(members[2]).status == "stored"
    assert {r.episode_id for _, r in replay.take_receipts()} == {x.episode_id for x in members[:2]}
    batch = replay.sample(1, 0)
    assert batch is not None
    assert [[episode.member for episode in group] for group in batch] == [[0, 1, 2]]
    assert replay.sample(1, 0) is None, "a group is used once"
    replay.close()


def test_an_incomplete_group_is_dropped_at_its_deadline_and_counted(tmp_path: Path) -> None:
    clock = Clock()
    replay = make_replay(tmp_path, make_limiter(max_lag=0, per_update=1, clock=clock))
    assert replay.grant("actor-0") is not None
    clock.now += 29.0
    assert replay.admit(make_episode(0, 0, versions=(0,))).status == "held"
    clock.now += 29.0
    replay.maintain()
    assert replay.status()[m.DROPPED_DEADLINE] == 0
    assert replay.grant("actor-0") is None
    clock.now += 2.0
    replay.maintain()
    assert replay.status()[m.DROPPED_DEADLINE] == 1
    assert replay.status()[m.GROUPS_IN_FLIGHT] == 0
    assert [receipt.status for _, receipt in replay.take_receipts()] == ["dropped_deadline"]
    assert replay.admit(make_episode(0, 1, versions=(0,))).status == "dropped_deadline", "the late sibling"
    assert replay.status()[m.DROPPED_DEADLINE] == 2
    grant = replay.grant("actor-0")
    assert grant is not None
    assert grant.number == 1
    replay.close()


def test_a_grant_without_episodes_outlives_its_deadline_while_the_actor_lives(tmp_path: Path) -> None:
    clock = Clock()
    replay = make_replay(tmp_path, make_limiter(clock=clock))
    replay.hello("actor-0", "first life")
    assert replay.grant("actor-0") is not None
    clock.now += 29.0
    replay.state.limiter.note_heartbeat("actor-0")
    clock.now += 29.0
    replay.maintain()
    assert len(replay.state.limiter.open) == 1
    clock.now += 2.0
    replay.maintain()
    assert not replay.state.limiter.open
    replay.close()


def test_the_grants_of_a_restarted_actor_are_given_up(tmp_path: Path) -> None:
    replay = make_replay(tmp_path, make_limiter())
    replay.hello("actor-0", "first life")
    replay.grant("actor-0")
    replay.hello("actor-0", "first life")
    assert len(replay.state.limiter.open) == 1
    replay.hello("actor-0", "second life")
    assert not replay.state.limiter.open
    replay.close()


def test_lag_is_checked_at_admission_and_the_siblings_go_too(tmp_path: Path) -> None:
    replay = make_replay(tmp_path, make_limiter(max_lag=1))
    replay.grant("actor-0")
    assert replay.admit(make_episode(0, 0, versions=(1, 1))).status == "held"
    replay.set_version(2)
    assert replay.admit(make_episode(0, 1, versions=(0, 2))).status == "dropped_lag"
    assert replay.status()[m.DROPPED_LAG] == 2
    assert not replay.state.limiter.open
    replay.close()


def test_lag_is_checked_when_a_batch_is_taken(tmp_path: Path) -> None:
    replay = make_replay(tmp_path, make_limiter(max_lag=1, per_update=1))
    for versions in ((0, 3), (2, 3)):
        grant = replay.grant("actor-0")
        assert grant is not None
        replay.state.limiter.version = 0
        assert fill(replay, grant.number, versions)[-1] == "stored"
    batch = replay.sample(1, 3)
    assert batch is not None
    assert [group[0].group_id for group in batch] == ["00000001"]
    assert replay.status()[m.DROPPED_LAG] == 2
    replay.close()


@pytest.mark.parametrize(
    "change",
    [
        {"group_size": 3},
        {"member": 5},
        {"task": "something else"},
        {"group_id": "00000099"},
        {"start_state": "a\0b"},
        {"logprobs": np.full((2, 8, 7), 0.5, np.float32)},
        {"end_reason": "gave up"},
    ],
)
def test_an_inconsistent_episode_is_refused_and_counted(tmp_path: Path, change: dict[str, object]) -> None:
    replay = make_replay(tmp_path, make_limiter())
    replay.grant("actor-0")
    assert replay.admit(make_episode(0, 0)).status == "held"
    receipt = replay.admit(dataclasses.replace(make_episode(0, 1), **change))  # type: ignore[arg-type]
    assert receipt.status == "dropped_invalid"
    assert receipt.reason
    assert replay.status()[m.DROPPED_INVALID] == 1
    replay.close()


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 3), st.integers(1, 2))
def test_no_batch_ever_holds_a_decision_beyond_the_lag_bound(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, max_lag: int, per_update: int
) -> None:
    """Random orders of actors with any policy version, the learner, time, and restarts of the replay."""
    folder, clock = tmp_path_factory.mktemp("replay"), Clock()

    def reopened() -> Replay:
        return make_replay(folder, make_limiter(max_lag=max_lag, per_update=per_update, clock=clock))

    def books(replay: Replay) -> list[object]:
        limiter = replay.state.limiter
        numbers = [limiter.used, limiter.next_number, sorted(limiter.ready), sorted(limiter.open)]
        return [
            *numbers,
            {n: closed.status for n, closed in limiter.closed.items()},
            +replay.state.counters.episodes,
        ]

    held = list[tuple[int, int]]()
    replay, learner, acknowledged, used, pending = (
        reopened(),
        0,
        set[str](),
        set[str](),
        list[tuple[int, int]](),
    )
    replay.begin("learner", 0)
    actions = st.sampled_from(["grant", "grant", "push", "push", "push", "sample", "sample", "wait", "kill"])
    for _ in range(data.draw(st.integers(5, 40))):
        match data.draw(actions):
            case "grant":
                grant = replay.grant("actor-0")
                if grant is not None:
                    assert grant.min_version <= learner
                    pending += [(grant.number, member) for member in range(2)]
            case "push" if pending:
                number, member = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
                versions = tuple(data.draw(st.lists(st.integers(0, learner), min_size=1, max_size=3)))
                episode = make_episode(number, member, versions=versions, image=1)
                status = replay.admit(episode).status
                if status == "held":
                    held.append((number, member))
                held = [one for one in held if one[0] in replay.state.limiter.open]
                if status == "stored":
                    acknowledged.add(episode.group_id)
            case "sample":
                batch = replay.sample(per_update, learner)
                if batch is not None:
                    for group in batch:
                        assert [episode.member for episode in group] == [0, 1]
                        assert group[0].group_id in acknowledged - used
                        used.add(group[0].group_id)
                        for episode in group:
                            assert learner - episode.policy_versions.min() <= max_lag
                    learner += 1
                    replay.set_version(learner)
            case "wait":
                clock.now += data.draw(st.sampled_from([1.0, 31.0]))
                replay.maintain()
            case "kill":
                before = books(replay)
                replay.close()
                replay = reopened()
                replay.begin("learner", learner)
                assert books(replay) == before
                pending += held  # Nobody acknowledged them, so the actor sends them again.
                held = []
        limiter = replay.state.limiter
        assert limiter.ahead <= (max_lag + learner + 1) * per_update
        assert limiter.used == len(used)
    replay.close()


def test_a_resume_keeps_what_the_checkpoint_may_use_and_counts_on(tmp_path: Path) -> None:
    replay = make_replay(tmp_path, make_limiter(max_lag=2, per_update=1))
    replay.begin("before", 0)
    for versions in ((0,), (0,), (1,)):
        grant = replay.grant("actor-0")
        assert grant is not None
        assert fill(replay, grant.number, versions)[-1] == "stored"
    assert replay.sample(1, 0) is not None
    replay.set_version(3)  # Drops group 1 (version 0) under the bound 2.
    assert replay.grant("actor-0") is not None  # Group 3: never arrives.
    assert replay.grant("actor-0") is not None  # Group 4:
    fill(replay, 4, (3,))
    replay.close()

    replay = make_replay(tmp_path, make_limiter(max_lag=2, per_update=1))
    replay.begin("resumed from version 2", 2)
    assert sorted(replay.state.limiter.ready) == [2], "group 4 was imagined by a version that is lost"
    assert not replay.state.limiter.open
    assert replay.state.limiter.used == 2
    assert [grant.number for _ in range(2) if (grant := replay.grant("actor-0"))] == [3, 4], "given again"
    assert not (tmp_path / "group-00000004.h5").exists()
    assert replay.status()[m.DROPPED_RESUME] == 2
    assert replay.admit(make_episode(4, 0, versions=(2,), episode_id="f" * 32)).status == "held"
    batch = replay.sample(1, 2)
    assert batch is not None
    assert batch[0][0].group_id == "00000002"
    replay.close()


def test_a_resume_in_an_empty_folder_begins_at_the_number_of_groups_used(tmp_path: Path) -> None:
    replay = make_replay(tmp_path, make_limiter(max_lag=1, per_update=3))
    replay.begin("resumed", 5)
    numbers = []
    while (grant := replay.grant("actor-0")) is not None:
        numbers.append(grant.number)
        assert grant.min_version == max(0, grant.number // 3 - 1)
    assert numbers == list(range(15, 21))
    replay.close()


def test_a_repeated_request_gets_the_same_batch_even_after_a_restart(tmp_path: Path) -> None:
    replay = make_replay(tmp_path, make_limiter())
    replay.begin("learner", 0)
    for _ in range(3):
        grant = replay.grant("actor-0")
        assert grant is not None
        fill(replay, grant.number, (0,))
    ids = [[[e.episode_id for e in g] for g in replay.sample(2, 0, "r1") or []]]
    ids.append([[e.episode_id for e in g] for g in replay.sample(2, 0, "r1") or []])
    replay.close()
    replay = make_replay(tmp_path, make_limiter())
    ids.append([[e.episode_id for e in g] for g in replay.sample(2, 0, "r1") or []])
    assert len(ids[0]) == 2
    assert ids[0] == ids[1] == ids[2]
    assert replay.sample(2, 0, "r2") is None, "one group is left"
    replay.close()
