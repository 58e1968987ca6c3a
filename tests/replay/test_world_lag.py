"""Episodes of worlds that are no longer the newest: what is dropped, what is told, what a resume forgets."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.pace import PaceSettings
from asyncrl.config.replay import ReplaySettings
from asyncrl.config.run import TrainConfig
from asyncrl.launch.learner_start import run_start
from asyncrl.observability import metrics_system as m
from asyncrl.pace import rounds
from asyncrl.replay.episode_format import EpisodeFormat
from asyncrl.replay.interface import Receipt
from asyncrl.replay.limiter import Limiter
from asyncrl.replay.replay import Replay
from asyncrl.replay.run_start import RunStart
from asyncrl.replay.store import EpisodeStore
from support.accepted_worlds import accepted_row
from support.episodes import drawn_by, make_episode
from support.replay import Clock, make_limiter, make_replay
from support.turns import Seen, learn


def opened(folder: Path, *, newest_world: int | None = 0, max_world_lag: int = 1, max_lag: int = 3) -> Replay:
    limiter = make_limiter(max_lag=max_lag, max_world_lag=max_world_lag, per_update=1)
    return make_replay(folder, limiter, newest_world)


def push(
    replay: Replay, number: int, *worlds: int, version: int = 0, actor: str = "actor-0"
) -> list[Receipt]:
    """Push both members of a group, imagined anew, each decision drawn by one of `worlds`."""
    made = [make_episode(number, k, versions=(version,) * len(worlds), actor=actor) for k in range(2)]
    fresh = [replace(one, episode_id=os.urandom(16).hex()) for one in made]
    return [replay.admit(drawn_by(one, *worlds)) for one in fresh]


def statuses(receipts: list[Receipt]) -> list[str]:
    return [receipt.status for receipt in receipts]


def grants(replay: Replay, count: int, actor: str = "actor-0") -> list[int]:
    found = [replay.grant(actor) for _ in range(count)]
    return [grant.number for grant in found if grant is not None]


def test_what_an_older_world_imagined_is_dropped_beyond_a_bound_of_its_own(tmp_path: Path) -> None:
    replay = opened(tmp_path)
    assert grants(replay, 4) == [0, 1, 2, 3]
    assert statuses(push(replay, 0, 1, 1)) == ["held", "stored"]
    assert statuses(push(replay, 1, 2, 2)) == ["held", "stored"]
    assert replay.status()[m.DROPPED_WORLD] == 0
    assert statuses(push(replay, 2, 3, 3)) == ["held", "stored"]
    replay.maintain()
    assert replay.status()[m.DROPPED_WORLD] == 2, "world 1 is two versions older than world 3"
    assert replay.status()[m.DROPPED_WORLD_DECISIONS] == 4
    assert statuses(push(replay, 3, 1, 3)) == ["dropped_world"] * 2, "one decision is enough"
    assert replay.status()[m.DROPPED_WORLD] == 4
    assert replay.status()[m.DROPPED_LAG] == 0
    assert grants(replay, 2) == [0, 3], "their numbers are granted again"
    assert statuses(push(replay, 0, 3, 3)) == ["held", "stored"]
    for world in (3, 2):
        batch = replay.sample(1, 0)
        assert batch is not None
        assert [episode.world_version for episode in batch[0]] == [world] * 2
    replay.close()


def test_a_receipt_names_the_bound_that_is_broken(tmp_path: Path) -> None:
    replay = opened(tmp_path, max_lag=1)
    assert grants(replay, 2) == [0, 1]
    assert statuses(push(replay, 0, 2)) == ["held", "stored"]
    first, _ = push(replay, 1, 0)
    assert (first.status, first.reason) == ("dropped_world", "world 0 at 2, --replay.max-world-lag is 1")
    replay.state.limiter.version = 2  # Without looking at what became too old.
    assert grants(replay, 1) == [0], "group 0 is too old by now"
    both = make_episode(0, 0, versions=(0, 2), episode_id="b" * 32)
    replay.state.limiter.open[0].granted_before = False
    receipt = replay.admit(drawn_by(both, 0, 2))
    assert (receipt.status, receipt.reason) == (
        "dropped_lag",
        "policy version 0 at 2, --replay.max-lag is 1; world 0 at 2, --replay.max-world-lag is 1",
    )
    replay.close()


def test_a_slow_actor_with_world_0_holds_up_nobody_who_has_world_2(tmp_path: Path) -> None:
    replay = opened(tmp_path)
    assert grants(replay, 1, "slow") == [0]
    assert grants(replay, 3) == [1, 2, 3]
    assert replay.admit(drawn_by(make_episode(0, 0, versions=(0,), actor="slow"), 0)).status == "held"
    assert statuses(push(replay, 1, 2)) == ["held", "stored"]
    replay.maintain()
    assert [(actor, told.status) for actor, told in replay.take_receipts() if actor == "slow"] == [
        ("slow", "dropped_world")
    ]
    late = replay.admit(drawn_by(make_episode(0, 1, versions=(0,), actor="slow"), 0))
    assert (late.status, late.reason) == ("dropped_world", "its group was given up")
    assert grants(replay, 1, "quick") == [0]
    assert statuses(push(replay, 0, 2, actor="quick")) == ["held", "stored"]
    batch = replay.sample(1, 0)
    assert batch is not None
    assert batch[0][0].group_id == "00000000", "nor is the order of the groups another one"
    replay.close()


@pytest.mark.parametrize("closed_by", ["use", "nothing, for a member is missing"])
def test_a_replay_that_comes_back_still_knows_the_newest_world(tmp_path: Path, closed_by: str) -> None:
    replay = opened(tmp_path)
    replay.begin("learner", 0)
    assert grants(replay, 2) == [0, 1]
    if closed_by == "use":
        assert statuses(push(replay, 0, 2)) == ["held", "stored"]
        assert replay.sample(1, 0, "request") is not None
    else:
        assert replay.admit(drawn_by(make_episode(0, 0, versions=(0,)), 2)).status == "held"
    replay.close()
    replay = opened(tmp_path)
    replay.begin("learner", 0)
    assert replay.state.limiter.world_version == 2
    assert statuses(push(replay, 1, 0))[0] == "dropped_world"
    replay.close()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_resume_that_forgets_a_world_is_not_held_to_it(tmp_path: Path, restarts: int) -> None:
    """Else all that the world before it draws would be too old, for ever."""
    replay = opened(tmp_path)
    replay.begin("before", 0)
    assert grants(replay, 3) == [0, 1, 2]
    assert statuses(push(replay, 0, 0)) == ["held", "stored"]
    assert replay.sample(1, 0, "request") is not None
    replay.set_version(1)
    for number, world in ((1, 1), (2, 2)):
        assert statuses(push(replay, number, world, version=1)) == ["held", "stored"]
    replay.close()
    for _ in range(restarts + 1):
        replay = opened(tmp_path, newest_world=0)
        replay.begin("resumed", 0)
        assert replay.state.limiter.world_version == 0
        assert sorted(replay.state.limiter.ready) == [0], "the lost update had used it"
        assert replay.status()[m.DROPPED_WORLD] == 0
        if not restarts:
            break
        restarts -= 1
        replay.close()
    assert grants(replay, 2) == [1, 2]
    assert replay.admit(drawn_by(make_episode(1, 0, versions=(0,), episode_id="c" * 32), 0)).status == "held"
    replay.close()


def test_a_ledger_from_before_there_were_worlds_in_it_is_read_as_before(tmp_path: Path) -> None:
    """Then the newest world is the newest that the stored groups begin with, and drops were of the lag."""
    replay = opened(tmp_path, newest_world=None)
    replay.begin("learner", 0)
    assert grants(replay, 3) == [0, 1, 2]
    for number in range(2):
        assert statuses(push(replay, number, 1 + number)) == ["held", "stored"]
    replay.lifecycle.drop(2, "dropped_lag")
    written = [entry for entry in replay.store.ledger.read() if "world" not in entry]
    replay.close()
    (tmp_path / "ledger.log").unlink()
    replay = opened(tmp_path, newest_world=None)
    for entry in written:
        replay.store.ledger.append(**entry)
    replay.close()
    replay = opened(tmp_path, newest_world=2)
    assert replay.state.limiter.world_version == 2
    assert replay.state.counters.episodes["dropped_lag"] == 0
    assert replay.state.limiter.to_grant_again == {2}
    assert sorted(replay.state.limiter.ready) == [0, 1]
    replay.close()


def test_a_world_that_only_a_file_knows_makes_nothing_old_after_a_resume_without_it(tmp_path: Path) -> None:
    """As with another --world of a lower version: what the old one drew is used, and so is what is new."""
    replay = opened(tmp_path, newest_world=3)
    replay.begin("before", 0)
    assert grants(replay, 2) == [0, 1]
    made = [make_episode(0, k, versions=(0,)) for k in range(2)]
    assert [replay.admit(one).status for one in made] == ["held", "stored"], "of world 3, which never changed"
    replay.close()
    for _ in range(2):  # The second time after a kill.
        replay = opened(tmp_path, newest_world=1)
        replay.begin("resumed", 0)
        assert replay.state.limiter.world_version == 1
        assert sorted(replay.state.limiter.ready) == [0]
        replay.close()


def test_the_replay_is_told_the_newest_world_of_a_resumed_run(tmp_path: Path) -> None:
    episodes = EpisodeFormat(world_version=5)
    config = TrainConfig(updates=20, pace=PaceSettings(every=4))
    start = run_start(config, tmp_path, episodes, None)
    assert (start.newest_world, start.episodes.world_version) == (5, 10)
    rounds.append(tmp_path, replace(accepted_row(1), world=17))
    start = run_start(config, tmp_path, episodes, None)
    assert (start.newest_world, start.episodes.world_version) == (17, 22), (
        "earlier rounds may have been denser"
    )
    assert RunStart.from_json(start.to_json()) == start
    assert RunStart.from_json(json.dumps({"ledger": None})).newest_world is None
    still = replace(config, pace=PaceSettings())
    assert run_start(still, tmp_path, episodes, None).newest_world == 5, "--world is all that there is"
    assert run_start(still, tmp_path, EpisodeFormat(world_version=-1), None).newest_world is None


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 2), st.sampled_from([0, 1, 3]))
def test_after_resumes_too_no_batch_holds_an_older_world(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, max_lag: int, max_world_lag: int
) -> None:
    """Actors with any world, kills of the replay, resumes that forget updates and the worlds made since."""
    folder = tmp_path_factory.mktemp("replay")
    worlds, learner, newest, session = [0], 0, 0, 0
    """Version of the learner at which each world was made."""

    def reopened() -> Replay:
        limiter = make_limiter(max_lag=max_lag, max_world_lag=max_world_lag, per_update=1)
        replay = make_replay(folder, limiter, newest_world=told)
        replay.begin(str(session), begun)
        replay.set_version(learner)
        return replay

    told = begun = 0
    replay, pending = reopened(), list[tuple[int, int]]()
    actions = st.sampled_from(["grant", "push", "push", "push", "sample", "refit", "kill", "resume"])
    for _ in range(data.draw(st.integers(5, 40))):
        match data.draw(actions):
            case "grant" if (grant := replay.grant("actor-0")) is not None:
                pending = [one for one in pending if one[0] != grant.number]
                pending += [(grant.number, member) for member in range(2)]
            case "push" if pending:
                number, member = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
                oldest = data.draw(st.integers(0, len(worlds) - 1))
                drawn = oldest, data.draw(st.integers(oldest, len(worlds) - 1))
                version = data.draw(st.integers(0, learner))
                name = f"{data.draw(st.integers(0, 2**32)):032x}"
                made = make_episode(number, member, versions=(version,) * 2, image=1, episode_id=name)
                receipt = replay.admit(drawn_by(made, *drawn))
                if receipt.status in ("held", "stored") or "--replay.max" in receipt.reason:
                    newest = max(newest, drawn[1])
            case "sample" if (batch := replay.sample(1, learner)) is not None:
                for episode in batch[0]:
                    assert episode.world_versions is not None
                    assert newest - episode.world_versions.min() <= max_world_lag
                    assert learner - episode.oldest_version <= max_lag
                learner += 1
                replay.set_version(learner)
            case "refit":
                worlds.append(learner)
            case "kill":
                replay.close()
                replay = reopened()
                assert replay.state.limiter.world_version == newest
                pending = []
            case "resume":
                replay.close()
                learner = begun = data.draw(st.integers(max(0, learner - 3), learner))
                worlds = [made_at for made_at in worlds if made_at <= learner]
                told, session, pending = len(worlds) - 1, session + 1, []
                newest = min(newest, told)
                replay = reopened()
                assert replay.state.limiter.world_version == newest
    replay.close()
    shutil.rmtree(folder)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(0, 2), st.integers(1, 2), st.integers(0, 1), st.integers(1, 3))
def test_a_run_in_turns_killed_anywhere_sees_the_worlds_that_an_undisturbed_one_sees(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    max_lag: int,
    per_update: int,
    max_world_lag: int,
    every: int,
) -> None:
    folder, updates = tmp_path_factory.mktemp("replay"), 7

    def opener(name: str, version: int) -> Callable[[], Replay]:
        limiter = Limiter(
            ReplaySettings(max_lag=max_lag, max_world_lag=max_world_lag, group_timeout=1e6),
            group_size=2,
            groups_per_update=per_update,
            clock=Clock(),
        )
        store = EpisodeStore(folder / name, group_size=2, max_bytes=10**9)
        return lambda: Replay(store, limiter, newest_world=version // every)

    def learned(name: str, begin: int, rounds: int = 10**6) -> Seen:
        return learn(
            opener(name, begin),
            begin=begin,
            end=updates,
            rounds=rounds,
            world_at=lambda version: version // every,
            fixed_shape=True,
        )

    whole = learned("whole", 0)
    begin, disturbed = 0, Seen()
    for _ in range(data.draw(st.integers(1, 3))):
        lost = learned("killed", begin, data.draw(st.integers(0, 40)))
        disturbed |= lost
        begin = data.draw(st.integers(begin, begin + len(lost)))
    disturbed |= learned("killed", begin)
    assert disturbed.keys() == whole.keys()
    for version, (used, _) in [*whole.items(), *disturbed.items()]:
        assert all(version // every - world <= max_world_lag for _, _, world, _ in used)
    most_drawn_since = -(-max_lag // every)  # Worlds that came while a group waited.
    if not max_world_lag or most_drawn_since <= max_world_lag:
        assert {at: disturbed[at][0] for at in whole} == {at: used for at, (used, _) in whole.items()}
    shutil.rmtree(folder)
