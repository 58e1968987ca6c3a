"""Group files that declare what they do not hold: refused, and set aside."""

import os
import shutil
import zlib
from pathlib import Path

import pytest

from asyncrl.errors import ReplayError
from asyncrl.observability import metrics_system as m
from asyncrl.replay.group_file import read_group
from asyncrl.replay.store import EpisodeStore, read_meta
from support.group_damage import CHANGES, craft_group
from support.recorded_run import make_run, open_store
from support.replay import fill, load, open_replay, read_batch

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
