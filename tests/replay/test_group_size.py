"""A resume with another --algorithm.group-size gives up, by name, what has the old one, and goes on."""

import os
from pathlib import Path

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings
from asyncrl.launch.roles import open_run_replay
from asyncrl.observability import metrics_system as m
from asyncrl.replay.buffer import Replay
from asyncrl.replay_tools.files import Verify
from support.episodes import make_episode
from support.replay import read_batch


def opened(folder: Path, size: int, said: list[str] | None = None) -> Replay:
    config = TrainConfig(
        algorithm=AlgorithmSettings(group_size=size, groups_per_update=1, filter_groups=False),
        replay=ReplaySettings(max_lag=2, group_timeout=60.0),
    )
    return open_run_replay(folder, config, print if said is None else said.append)


def fill(replay: Replay, number: int, versions: tuple[int, ...]) -> list[str]:
    """Push all members of a group, imagined anew; return what became of them."""
    size = replay.state.limiter.group_size
    made = [
        make_episode(number, k, group_size=size, versions=versions, episode_id=os.urandom(16).hex())
        for k in range(size)
    ]
    return [replay.admit(episode).status for episode in made]


def begun(folder: Path) -> None:
    """A run with groups of two: 0 was used, 1 and 2 are ready, 3 is open."""
    replay = opened(folder, 2)
    replay.begin("before", 0)
    for number in range(3):
        assert replay.grant("actor-0") is not None
        assert fill(replay, number, (0,)) == ["held", "held"]
    assert read_batch(replay, 1, 0) is not None
    replay.set_version(1)
    assert replay.grant("actor-0") is not None
    replay.close()


def test_groups_of_another_size_are_given_up_and_imagined_again(tmp_path: Path) -> None:
    size = 3
    begun(tmp_path)
    said: list[str] = []
    replay = opened(tmp_path, size, said)
    replay.begin("resumed", 1)
    assert not replay.state.limiter.ready
    assert not replay.state.limiter.open
    assert replay.status()[m.DROPPED_RESUME] == 4, "two groups of two episodes"
    assert replay.status()[m.EPISODES] == 6
    (line,) = [line for line in said if "--algorithm.group-size" in line]
    assert "2 stored groups" in line
    for number in (1, 2, 3):
        assert (grant := replay.grant("actor-0")) is not None
        assert grant.number == number
        assert fill(replay, number, (1,))[-1] == "held"
    batch = read_batch(replay, 1, 1)
    assert batch is not None
    assert [len(group) for group in batch] == [size]
    assert replay.status()[m.EPISODES] == 6 + 3 * size
    replay.close()
    assert Verify(path=tmp_path).run() == 0, "files of both sizes are sound"
    replay = opened(tmp_path, size, said)
    assert replay.status()[m.EPISODES] == 6 + 3 * size, "counted alike after a restart"
    replay.begin("resumed", 1)
    assert sorted(replay.state.limiter.ready) == [2, 3]


def test_a_used_group_whose_update_is_lost_is_imagined_again_in_the_new_size(tmp_path: Path) -> None:
    begun(tmp_path)
    replay = opened(tmp_path, 3)
    replay.begin("resumed", 0)
    assert not replay.state.limiter.ready
    assert [grant.number for _ in range(3) if (grant := replay.grant("actor-0"))] == [0, 1, 2]
    assert fill(replay, 0, (0,)) == ["held"] * 3
    assert read_batch(replay, 1, 0) is not None


def test_back_to_the_first_size_and_a_kill_before_the_learner_came(tmp_path: Path) -> None:
    begun(tmp_path)
    for size in (3, 3, 2, 4):
        opened(tmp_path, size).close()  # No learner came.
    replay = opened(tmp_path, 2)
    replay.begin("resumed", 1)
    assert sorted(replay.state.limiter.ready) == [1, 2], "they have the run's size again"
    assert replay.status()[m.EPISODES] == 6
