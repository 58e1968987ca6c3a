"""A stored group that the learner cannot use is closed, kept apart and named, and the run goes on."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings
from asyncrl.errors import SampleTimeout
from asyncrl.launch.roles import open_run_replay
from asyncrl.observability import metrics_system as m
from asyncrl.records import ActionSpec, Episode
from asyncrl.replay.buffer import Replay
from asyncrl.replay.client import ZmqLearnerPort
from asyncrl.replay.group_file import read_group_file
from asyncrl.replay.interface import EpisodeFormat
from asyncrl.replay.store import EpisodeStore
from asyncrl.replay_tools.episodes import read_outcomes
from support.episodes import make_episode, with_chain
from support.replay import next_batch, read_batch
from support.replay_server import Served

CONFIG = TrainConfig(
    algorithm=AlgorithmSettings(group_size=2, groups_per_update=1),
    replay=ReplaySettings(max_lag=1, group_timeout=60.0),
)
FORMAT = EpisodeFormat(
    image_size=4, action_spec=ActionSpec(), sample={"tokens": ("int32", (8, 7))}, max_decisions=1
)


def pair(number: int, **changes: Any) -> list[Episode]:
    made = [make_episode(number, member, versions=(0,)) for member in range(2)]
    return [dataclasses.replace(episode, **changes) for episode in made]


def with_nan(episodes: list[Episode]) -> list[Episode]:
    actions = episodes[1].actions.copy()
    actions[0, 0, 0] = np.nan
    return [episodes[0], dataclasses.replace(episodes[1], actions=actions)]


PICTURES = {
    "frames": np.zeros((1, 8, 8, 3), np.uint8),
    "final_frame": np.zeros((8, 8, 3), np.uint8),
    "video": np.zeros((0, 8, 8, 3), np.uint8),
}
FOREIGN: dict[str, tuple[Callable[[], list[Episode]], str]] = {
    "pictures": (lambda: pair(1, **PICTURES), "pictures of 8 x 8"),
    "temperature": (lambda: pair(1, temperature=2.0), "temperature or top-k"),
    "temperature of one": (
        lambda: [pair(1)[0], dataclasses.replace(pair(1)[1], temperature=2.0)],
        "temperature 2.0",
    ),
    "sample": (lambda: [with_chain(episode) for episode in pair(1)], "numbers, this run has"),
    "nan": (lambda: with_nan(pair(1)), "actions"),
    "size": (lambda: [make_episode(1, k, versions=(0,), group_size=3) for k in range(3)], "group size"),
    "a member twice": (
        lambda: [pair(1)[0], dataclasses.replace(pair(1)[0], episode_id="a" * 32)],
        "the members [0, 0]",
    ),
    "another group": (lambda: pair(1, group_id="00000007"), "another group than 00000001"),
}


def plant(folder: Path, episodes: list[Episode], *, granted: bool = True) -> Path:
    """Complete group 0 as a run does, and write a file for group 1 as no check lets it pass."""
    replay = open_run_replay(folder, CONFIG, episodes=FORMAT)
    replay.begin("before", 0)
    for _ in range(1 + granted):
        assert replay.grant("actor-0") is not None
    assert [replay.admit(episode).status for episode in pair(0)] == ["held", "held"]
    replay.close()
    store = EpisodeStore(folder, group_size=2, max_bytes=10**9)
    path = store.enter(store.write(1, episodes)).path
    store.close()
    return path


def reopened(folder: Path, said: list[str] | None = None) -> Replay:
    lines = said if said is not None else []
    return open_run_replay(folder, CONFIG, lines.append, episodes=FORMAT)


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_group_is_set_aside_and_the_learner_goes_on_with_others(tmp_path: Path, kind: str) -> None:
    made, why = FOREIGN[kind]
    path, said = plant(tmp_path, made()), list[str]()
    content = path.read_bytes()
    for session in ("before", "resumed"):
        replay = reopened(tmp_path, said)
        replay.begin(session, 0)
        first = read_batch(replay, 1, 0, "request")
        assert first is not None
        assert {episode.group_id for episode in first[0]} == {"00000000"}
        assert read_batch(replay, 1, 0) is None, "the foreign one is not offered"
        assert not path.exists()
        assert (tmp_path / "set_aside" / path.name).read_bytes() == content, "it is kept"
        assert replay.status()[m.DROPPED_UNUSABLE] == len(made())
        replay.close()
    assert len([line for line in said if "group 1 is set aside" in line]) == 1, said
    assert why in "".join(said)
    assert read_outcomes(tmp_path, print).closed[1].status == "dropped_unusable"
    assert why in (tmp_path / "ledger.log").read_text()

    replay = reopened(tmp_path)
    replay.begin("later", 1)
    numbers = []
    while (grant := replay.grant("actor-0")) is not None:
        numbers.append(grant.number)
    assert numbers, "its credit returned"
    assert 1 not in numbers, "its number is not given again"


def test_a_kill_between_the_ledger_and_the_move_loses_no_file(tmp_path, monkeypatch) -> None:
    path = plant(tmp_path, pair(1, **PICTURES))

    def killed(store: EpisodeStore, number: int) -> Path:
        raise KeyboardInterrupt

    replay = reopened(tmp_path)
    replay.begin("before", 0)
    with monkeypatch.context() as patched:
        patched.setattr(EpisodeStore, "set_aside", killed)
        with pytest.raises(KeyboardInterrupt):
            read_batch(replay, 2, 0)
    replay.close()
    assert path.exists()
    replay = reopened(tmp_path)
    assert not path.exists()
    assert read_group_file(tmp_path / "set_aside" / path.name).number == 1
    assert 1 not in replay.state.limiter.ready


def test_the_console_of_the_learner_says_it_once(tmp_path: Path, endpoint: str) -> None:
    plant(tmp_path, pair(1, **PICTURES))
    said: list[str] = []
    with Served(tmp_path, endpoint, CONFIG, FORMAT):
        learner = ZmqLearnerPort(endpoint, tell=said.append)
        with pytest.raises(SampleTimeout):
            next_batch(learner, groups=2, version=0, timeout=2.0)
        assert len(next_batch(learner, groups=1, version=0, timeout=10.0)) == 1
        status = learner.status()
        learner.close()
    assert status[m.DROPPED_UNUSABLE] == 2
    (line,) = said
    assert line.startswith("replay: group 1 is set aside, the learner cannot use it")
    assert "8 x 8" in line


def test_a_changed_setting_that_the_learner_does_not_need_sets_nothing_aside(tmp_path: Path) -> None:
    """After a resume with shorter episodes or other start states, what is stored is used."""
    plant(tmp_path, pair(1))
    other = EpisodeFormat(image_size=4, tasks={"elsewhere": ["lift"]}, max_decisions=1)
    replay = open_run_replay(tmp_path, CONFIG, episodes=other)
    replay.begin("before", 0)
    assert [len(batch) for _ in range(2) if (batch := read_batch(replay, 1, 0))] == [1, 1]


@pytest.mark.parametrize(("world", "kept"), [(None, True), (3, True), (4, False)])
def test_a_resume_in_another_world_sets_aside_what_the_older_one_imagined(tmp_path, world, kept) -> None:
    plant(tmp_path, [dataclasses.replace(episode, world_version=3) for episode in pair(1)])
    replay = open_run_replay(
        tmp_path, CONFIG, episodes=EpisodeFormat(world_version=world), warn=lambda line: None
    )
    replay.begin("before", 0)
    assert [len(batch) for _ in range(1) if (batch := read_batch(replay, 1, 0))] == [1] * kept
    assert len(list(tmp_path.glob("set_aside/*"))) == (0 if kept else 2)
