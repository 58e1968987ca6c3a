"""What a name on the command line stands for: shipped files, folders, runs and their newest checkpoint."""

from pathlib import Path

import pytest

from asyncrl.errors import CheckpointError
from asyncrl.storage.assets import policy_folder, shipped, start_states_path, world_folder


@pytest.fixture(autouse=True)
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for shipped files, whatever this checkout ships, and a working folder beside it."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setattr("asyncrl.storage.assets.ASSETS", tmp_path / "assets")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "assets"


def make_policy(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def make_run(run: Path, *names: str) -> Path:
    for name in names:
        make_policy(run / "checkpoints" / name)
    return run


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (("update_000009", "update_000100", "update_000020"), "update_000100"),
        (("update_999999", "update_1000000"), "update_1000000"),
    ],
)
def test_a_run_stands_for_its_newest_checkpoint(tmp_path: Path, names: tuple[str, ...], newest: str) -> None:
    run = make_run(tmp_path / "run", *names)
    assert policy_folder(str(run)) == run / "checkpoints" / newest


def test_a_checkpoint_that_was_never_finished_does_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "update_000010", "update_000020.tmp", "update_000010.replaced.tmp")
    assert policy_folder(str(run)) == run / "checkpoints" / "update_000010"
    only = make_run(tmp_path / "only", "update_000020.tmp")
    with pytest.raises(CheckpointError, match=r"holds no config\.json with model.safetensors"):
        policy_folder(str(only))


def test_a_checkpoint_and_a_policy_folder_stand_for_themselves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "update_000010", "update_000020")
    older = run / "checkpoints" / "update_000010"
    assert policy_folder(str(older)) == older
    inner = make_policy(tmp_path / "models" / "policy")
    assert policy_folder(str(inner)) == inner
    assert policy_folder(str(tmp_path / "models")) == inner


def test_a_shipped_name_goes_before_a_folder_of_the_same_name(assets: Path) -> None:
    make_policy(Path("tabletop"))
    assert policy_folder("tabletop") == Path("tabletop")
    policy = make_policy(assets / "tabletop" / "policy")
    assert policy_folder("tabletop") == policy


def test_shipped_worlds_and_start_states_are_found_by_name_others_by_path(assets: Path, tmp_path) -> None:
    for world in (assets / "tabletop" / "world", tmp_path / "mine"):
        world.mkdir(parents=True)
        (world / "world.json").write_text("{}")
    for file in (assets / "tabletop" / "start_states.h5", tmp_path / "mine.h5"):
        file.write_bytes(b"")
    assert shipped("world") == shipped("start_states.h5") == ["tabletop"]
    assert shipped("policy") == []
    assert world_folder("tabletop") == assets / "tabletop" / "world"
    assert world_folder(str(tmp_path / "mine")) == tmp_path / "mine"
    assert start_states_path("tabletop", "tabletop") == assets / "tabletop" / "start_states.h5"
    assert start_states_path(str(tmp_path / "mine.h5"), "tabletop") == tmp_path / "mine.h5"


def test_an_unknown_name_is_answered_with_the_names_there_are(assets: Path) -> None:
    for part in ("policy", "world"):
        (assets / "kitchen" / part).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"'tabletpo' does not exist.*a shipped name: kitchen\."):
        policy_folder("tabletpo")
    with pytest.raises(CheckpointError, match=r"--world tabletpo is neither a shipped world \(kitchen\)"):
        world_folder("tabletpo")
    with pytest.raises(CheckpointError, match="--start-states tabletpo is neither a shipped collection"):
        start_states_path("tabletpo", "tabletop")


def test_a_shipped_world_begins_where_its_own_start_states_are(assets: Path, tmp_path: Path) -> None:
    for name in ("tabletop", "tabletop_evac", "tabletop_opensora"):
        (assets / name / "world").mkdir(parents=True)
    for file in (assets / "tabletop" / "start_states.h5", assets / "tabletop_evac" / "start_states.h5"):
        file.write_bytes(b"")
    (tmp_path / "mine.h5").write_bytes(b"")
    assert start_states_path("tabletop", "tabletop_evac") == assets / "tabletop_evac" / "start_states.h5"
    assert start_states_path("tabletop", "tabletop_opensora") == assets / "tabletop" / "start_states.h5"
    assert start_states_path("tabletop_evac", "tabletop") == assets / "tabletop_evac" / "start_states.h5"
    assert start_states_path(str(tmp_path / "mine.h5"), "tabletop_evac") == tmp_path / "mine.h5"
