"""A group that the learner cannot use, or whose file declares too much, is set aside, and the run goes on."""

import dataclasses
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings
from asyncrl.errors import ReplayError, SampleTimeout
from asyncrl.launch.roles import open_run_replay
from asyncrl.observability import metrics_system as m
from asyncrl.records import ActionSpec, Episode
from asyncrl.replay.buffer import Replay
from asyncrl.replay.client import ZmqLearnerPort
from asyncrl.replay.group_file import read_group, read_group_file
from asyncrl.replay.interface import EpisodeFormat
from asyncrl.replay.store import EpisodeStore, read_meta
from asyncrl.replay_tools.episodes import read_outcomes
from support.episodes import make_episode, with_chain
from support.group_damage import CHANGES, craft_group
from support.recorded_run import make_run, open_store
from support.replay import fill, load, next_batch, open_replay, read_batch
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


SOUND_BY_ITSELF = {"a negative group number", "texts of no fixed length"}
"""Damage of the facts about the group, which the store reads; its episodes are sound."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("original") / "run")


@pytest.fixture
def run_dir(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_declares_what_it_lacks_goes_to_quarantine(name: str, run_dir: Path) -> None:
    path = run_dir / "replay" / "group-00000002.h5"
    craft_group(path, CHANGES[name])
    if name not in SOUND_BY_ITSELF:
        with pytest.raises(ReplayError, match="is damaged"):
            read_group(path)
    warnings = list[str]()
    store = EpisodeStore(run_dir / "replay", group_size=2, max_bytes=10**9, warn=warnings.append)
    if 2 in store.group_files:  # As who reads it for a batch does.
        store.put_away(2, "damaged")
    assert sorted(store.group_files) == [0, 1, 3]
    store.close()
    assert [path.name for path in (run_dir / "replay" / "quarantine").iterdir()] == ["group-00000002.h5"]
    assert "moved group-00000002.h5 to" in warnings[0]


def test_damage_that_is_found_when_a_group_is_chosen_costs_that_group(tmp_path: Path) -> None:
    replay = open_replay(tmp_path, per_update=1)
    replay.begin("learner", 0)
    for number in range(2):
        assert replay.grant("actor-0") is not None
        assert fill(replay, number, (0,)) == ["held", "held"]
    path = replay.store.group_files[0].path
    content, frames = path.read_bytes(), load(replay.store, 0)[0].frames.tobytes()
    path.write_bytes(content.replace(frames, bytes(len(frames))))
    batch = read_batch(replay, 1, 0)
    assert batch is not None
    assert [episode.group_id for episode in batch[0]] == ["00000001"] * 2
    assert replay.status()[m.DROPPED_INVALID] == 2
    assert (tmp_path / "quarantine" / path.name).exists()
    replay.close()


NEEDED = ("ledger.log", "lock", "replay.json")


@pytest.mark.parametrize("name", [*NEEDED, "ledger.spare", "group-00000009.h5.tmp"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_file_is_an_error_only_where_the_replay_needs_it(name, kind, run_dir) -> None:
    path, outside = run_dir / "replay" / name, run_dir / "outside"
    outside.write_text("mine")
    path.unlink(missing_ok=True)
    {"pipe": os.mkfifo, "folder": Path.mkdir, "link": lambda path: path.symlink_to(outside)}[kind](path)
    if name in NEEDED:
        with pytest.raises(ReplayError, match=name.replace(".", r"\.")):
            open_store(run_dir)
    else:
        store = open_store(run_dir)
        assert sorted(store.group_files) == [0, 1, 2, 3]
        store.close()
    assert outside.read_text() == "mine"


def test_a_second_damaged_file_of_one_name_does_not_replace_the_first(run_dir: Path) -> None:
    for content in (b"first", b"second"):
        (run_dir / "replay" / "group-00000001.h5").write_bytes(content)
        open_store(run_dir).close()
    away = run_dir / "replay" / "quarantine"
    assert (away / "group-00000001.h5").read_bytes() == b"first"
    assert (away / "group-00000001.h5.2").read_bytes() == b"second"


@pytest.mark.parametrize(
    "kind", ["folder", "pipe", "link to nowhere", "another group", "empty", "half", "garbage"]
)
def test_what_has_the_name_of_a_group_and_is_none_goes_to_quarantine(kind: str, run_dir: Path) -> None:
    folder = run_dir / "replay"
    path, whole = folder / "group-00000007.h5", (folder / "group-00000001.h5").read_bytes()
    {
        "folder": lambda: path.mkdir(),
        "pipe": lambda: os.mkfifo(path),
        "link to nowhere": lambda: path.symlink_to("nowhere"),
        "another group": lambda: path.write_bytes(whole),
        "empty": path.touch,
        "half": lambda: path.write_bytes(whole[: len(whole) // 2]),
        "garbage": lambda: path.write_bytes(whole[:8] + bytes(range(256)) * 4),
    }[kind]()
    store = open_store(run_dir)
    assert sorted(store.group_files) == [0, 1, 2, 3]
    store.close()
    assert [path.name for path in (folder / "quarantine").iterdir()] == ["group-00000007.h5"]


@pytest.mark.parametrize("value", [b"Infinity", b"1" + b"0" * 30, b'"three"', b"[" * 5000 + b"]" * 5000])
def test_a_meta_file_with_the_right_checksum_and_wrong_numbers_is_refused(value, run_dir) -> None:
    body = b'{"format":"asyncrl-replay","format_version":3,"schema_version":1,"group_size":' + value + b"}"
    line = body[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(body)
    (run_dir / "replay" / "replay.json").write_bytes(line)
    if value != b'"three"':
        with pytest.raises(ReplayError, match=r"replay\.json cannot be read"):
            read_meta(run_dir / "replay")
    with pytest.raises(ReplayError):
        open_store(run_dir)
