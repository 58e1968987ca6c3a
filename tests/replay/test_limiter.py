"""Credit, completeness and the lag bound, against slow and obvious ones."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics_system import ACTOR_DECISIONS
from asyncrl.replay.buffer import Replay
from asyncrl.replay.interface import ReceiptStatus
from support.episodes import make_episode
from support.replay import Clock, fill, grant_group, make_limiter, make_replay, read_batch, ready

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


@pytest.mark.parametrize(
    ("status", "numbers"),
    [
        ("dropped_lag", [0, 0, 0, 0]),
        ("dropped_deadline", [0, 0, 2, 2]),
        ("dropped_invalid", [2, 3, 4, 5]),
        ("dropped_poisoned", [2, 3, 4, 5]),
    ],
)
def test_a_dropped_group_gives_its_credit_back_and_what_took_too_long_is_granted_again(
    status: ReceiptStatus, numbers: list[int]
) -> None:
    limiter = make_limiter(max_lag=0, per_update=2)
    assert [grant_group(limiter, "a").number for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
    number, found = 0, []
    for _ in range(4):
        assert grant_group(limiter, "a") is None
        limiter.drop(number, status)
        grant = grant_group(limiter, "a")
        assert grant is not None
        assert grant.min_version == 0
        number = grant.number
        found.append(number)
    assert found == numbers


def test_groups_are_used_in_the_order_of_their_grants() -> None:
    limiter = make_limiter(max_lag=1, per_update=2)
    for _ in range(4):
        assert grant_group(limiter, "a") is not None
    for number in (1, 2, 3):
        limiter.make_ready(number, ready(0, 0))
    assert limiter.pick(2) is None, "group 0 takes longer, and is not left behind"
    assert limiter.pick(2, not_awaited={0}) == [1, 2]
    limiter.make_ready(0, ready(0, 0))
    assert limiter.pick(2) == [0, 1]


def test_a_member_of_an_earlier_grant_stays_when_its_actor_imagines_it_again(tmp_path: Path) -> None:
    """An actor that was given the same group again had sent some of it before."""
    replay = make_replay(tmp_path, make_limiter(max_lag=0))
    assert replay.grant("a") is not None
    replay.lifecycle.drop(0, "dropped_deadline")
    assert replay.grant("a") is not None
    assert replay.admit(make_episode(0, 0, versions=(0,), actor="a", episode_id="a" * 32)).status == "held"
    again = replay.admit(make_episode(0, 0, versions=(0,), actor="a", episode_id="b" * 32))
    assert again.status == "dropped_outdated"
    assert 0 in replay.state.limiter.open, "nothing is wrong with it"
    assert replay.admit(make_episode(0, 1, versions=(0,), actor="a", episode_id="c" * 32)).status == "held"
    assert 0 in replay.state.limiter.ready


def test_an_episode_of_a_grant_that_was_given_up_does_not_disturb_the_next_one(tmp_path: Path) -> None:
    replay = make_replay(tmp_path, make_limiter(max_lag=0))
    assert replay.grant("slow") is not None
    assert replay.admit(make_episode(0, 0, versions=(0,), actor="slow", episode_id="a" * 32)).status == "held"
    replay.set_version(1)
    assert [receipt.status for _, receipt in replay.pop_receipts()] == ["dropped_lag"]
    assert (again := replay.grant("other")) is not None
    assert again.number == 0
    late = make_episode(0, 1, versions=(0,), actor="slow", episode_id="b" * 32)
    assert replay.admit(late).status == "dropped_outdated"
    assert fill(replay, 0, (1,), actor="other") == ["held", "held"]
    assert replay.status()[m.DROPPED_OUTDATED] == 1
    assert read_batch(replay, 1, 1) is not None


def test_video_is_kept_for_every_third_group() -> None:
    limiter = make_limiter(per_update=4)
    kept = [grant.keep_video for _ in range(7) if (grant := grant_group(limiter, "a"))]
    assert kept == [True, False, False, True, False, False, True]


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
    assert [receipt.status for _, receipt in replay.pop_receipts()] == ["dropped_deadline"]
    assert replay.admit(make_episode(0, 1, versions=(0,))).status == "dropped_deadline", "the late sibling"
    assert replay.status()[m.DROPPED_DEADLINE] == 2
    grant = replay.grant("actor-0")
    assert grant is not None
    assert grant.number == 0


def test_a_grant_outlives_its_deadline_while_its_actor_imagines_and_not_while_it_is_merely_there(
    tmp_path: Path,
) -> None:
    clock = Clock()
    replay = make_replay(tmp_path, make_limiter(clock=clock))
    replay.hello("actor-0", "first life")
    assert replay.grant("actor-0") is not None
    for decisions in (8.0, 16.0, 24.0):
        clock.now += 29.0
        replay.report("actor-0", {ACTOR_DECISIONS: decisions})
        replay.maintain()
        assert len(replay.state.limiter.open) == 1
    for _ in range(2):
        clock.now += 14.0
        replay.hello("actor-0", "first life")  # A thread says that it is there, whatever the others do.
        replay.maintain()
    assert len(replay.state.limiter.open) == 1
    clock.now += 3.0
    replay.report("actor-0", {ACTOR_DECISIONS: 24.0})
    replay.maintain()
    assert not replay.state.limiter.open


def test_a_resume_with_another_temperature_imagines_again_what_was_ready(tmp_path: Path) -> None:
    def opened(temperature: float) -> Replay:
        return make_replay(tmp_path, make_limiter(temperature=temperature, per_update=1))

    replay = opened(1.0)
    replay.begin("before", 0)
    assert replay.grant("actor-0") is not None
    assert fill(replay, 0, (0,)) == ["held", "held"]
    other = dataclasses.replace(make_episode(1, 0, versions=(0,)), temperature=1.5)
    assert replay.grant("actor-0") is not None
    assert "temperature 1.5" in replay.admit(other).reason
    replay.close()
    replay = opened(1.5)
    replay.begin("resumed", 0)
    assert not replay.state.limiter.ready
    assert replay.status()[m.DROPPED_RESUME] == 2
    assert (grant := replay.grant("actor-0")) is not None
    assert grant.number == 0


def test_lag_is_checked_at_admission_and_the_siblings_go_too(tmp_path: Path) -> None:
    replay = make_replay(tmp_path, make_limiter(max_lag=1))
    replay.grant("actor-0")
    assert replay.admit(make_episode(0, 0, versions=(1, 1))).status == "held"
    replay.set_version(2)
    assert replay.admit(make_episode(0, 1, versions=(0, 2))).status == "dropped_lag"
    assert replay.status()[m.DROPPED_LAG] == 2
    assert not replay.state.limiter.open


@pytest.mark.parametrize(
    "change", [{"task": "something else"}, {"group_id": "00000099"}, {"start_state": "a\0b"}]
)
def test_an_inconsistent_episode_is_refused_and_counted(tmp_path: Path, change: dict[str, object]) -> None:
    replay = make_replay(tmp_path, make_limiter())
    replay.grant("actor-0")
    assert replay.admit(make_episode(0, 0)).status == "held"
    receipt = replay.admit(dataclasses.replace(make_episode(0, 1), **change))  # type: ignore[arg-type]
    assert receipt.status == "dropped_invalid"
    assert receipt.reason
    assert replay.status()[m.DROPPED_INVALID] == 1


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 3), st.integers(1, 2))
def test_no_batch_ever_holds_a_decision_beyond_the_lag_bound(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, max_lag: int, per_update: int
) -> None:
    """Random orders of actors with any policy, the learner, time and restarts."""
    folder, clock = tmp_path_factory.mktemp("replay"), Clock()

    def reopened() -> Replay:
        return make_replay(folder, make_limiter(max_lag=max_lag, per_update=per_update, clock=clock))

    def books(replay: Replay) -> list[object]:
        limiter = replay.state.limiter
        numbers = [limiter.used, limiter.next_number, sorted(limiter.ready), sorted(limiter.open)]
        return [
            *numbers,
            {n: closed.answer for n, closed in limiter.closed.items()},
            +replay.state.counters.episodes,
        ]

    held, ids, fresh = list[tuple[int, int]](), dict[tuple[int, int], str](), itertools.count()
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
                    # The actor forgets what it has of an earlier grant.
                    pending = [one for one in pending if one[0] != grant.number]
                    held = [one for one in held if one[0] != grant.number]
                    ids = {one: name for one, name in ids.items() if one[0] != grant.number}
                    pending += [(grant.number, member) for member in range(2)]
            case "push" if pending:
                number, member = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
                versions = tuple(data.draw(st.lists(st.integers(0, learner), min_size=1, max_size=3)))
                name = ids.setdefault((number, member), f"{next(fresh):032x}")
                episode = make_episode(number, member, versions=versions, image=1, episode_id=name)
                receipt = replay.admit(episode)
                if receipt.status == "held":
                    held.append((number, member))
                held = [one for one in held if one[0] in replay.state.limiter.open]
                if number in replay.state.limiter.ready:
                    acknowledged.add(episode.group_id)
            case "sample":
                batch = read_batch(replay, per_update, learner)
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
                replay.maintain()  # As the one that comes back does.
                before = books(replay)
                replay.close()
                replay = reopened()
                replay.begin("learner", learner)
                assert books(replay) == before
                pending += held  # Nobody acknowledged them, so the actor sends them again.
                held = []
        limiter = replay.state.limiter
        assert limiter.uses_reserved <= (max_lag + learner + 1) * per_update
        assert limiter.used == len(used)


def test_a_resume_keeps_what_the_checkpoint_may_use_and_counts_on(tmp_path: Path) -> None:
    replay = make_replay(tmp_path, make_limiter(max_lag=2, per_update=1))
    replay.begin("before", 0)
    for versions in ((0,), (0,), (1,)):
        grant = replay.grant("actor-0")
        assert grant is not None
        assert fill(replay, grant.number, versions) == ["held", "held"]
    assert read_batch(replay, 1, 0) is not None
    replay.set_version(3)  # Drops group 1 (version 0) under the bound 2.
    assert replay.grant("actor-0") is not None  # Group 1 again: never arrives.
    assert replay.grant("actor-0") is not None  # Group 3:
    fill(replay, 3, (3,))
    replay.close()

    replay = make_replay(tmp_path, make_limiter(max_lag=2, per_update=1))
    replay.begin("resumed from version 2", 2)
    assert sorted(replay.state.limiter.ready) == [2], "group 3 was imagined by a version that is lost"
    assert not replay.state.limiter.open
    assert replay.state.limiter.used == 2
    assert [grant.number for _ in range(2) if (grant := replay.grant("actor-0"))] == [1, 3], "given again"
    assert not (tmp_path / "group-00000003.h5").exists()
    assert replay.status()[m.DROPPED_RESUME] == 2
    assert replay.admit(make_episode(3, 0, versions=(2,), episode_id="f" * 32)).status == "held"
    assert read_batch(replay, 1, 2) is None, "group 1 comes first"
    fill(replay, 1, (2,))
    batch = read_batch(replay, 1, 2)
    assert batch is not None
    assert batch[0][0].group_id == "00000001"


def test_a_resume_in_an_empty_folder_begins_at_the_number_of_groups_used(tmp_path: Path) -> None:
    replay = make_replay(tmp_path, make_limiter(max_lag=1, per_update=3))
    replay.begin("resumed", 5)
    numbers = []
    while (grant := replay.grant("actor-0")) is not None:
        numbers.append(grant.number)
        assert grant.min_version == max(0, grant.number // 3 - 1)
    assert numbers == list(range(15, 21))


def test_a_repeated_request_gets_the_same_batch_even_after_a_restart(tmp_path: Path) -> None:
    replay = make_replay(tmp_path, make_limiter())
    replay.begin("learner", 0)
    for _ in range(3):
        grant = replay.grant("actor-0")
        assert grant is not None
        fill(replay, grant.number, (0,))
    ids = [[[e.episode_id for e in g] for g in read_batch(replay, 2, 0, "r1") or []]]
    ids.append([[e.episode_id for e in g] for g in read_batch(replay, 2, 0, "r1") or []])
    replay.close()
    replay = make_replay(tmp_path, make_limiter())
    ids.append([[e.episode_id for e in g] for g in read_batch(replay, 2, 0, "r1") or []])
    assert len(ids[0]) == 2
    assert ids[0] == ids[1] == ids[2]
    assert read_batch(replay, 2, 0, "r2") is None, "one group is left"
