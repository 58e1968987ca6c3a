"""The folder of a run: made fresh, refused, or found again."""

import os
import re
from pathlib import Path

import pytest

from asyncrl.config.loading import load_file
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.storage import run_folder


def make_run(folder: Path, started: float, checkpoint: str | None = None) -> None:
    run_folder.claim(TrainConfig(run_dir=str(folder))).lock.release()
    os.utime(folder / "config.json", (started, started))
    if checkpoint:
        (folder / "checkpoints" / checkpoint).mkdir()


def test_a_new_run_gets_its_folders_and_its_configuration(tmp_path):
    config = TrainConfig(run_dir=str(tmp_path / "a"), seed=7, updates=3)
    run = run_folder.claim(config)
    folder = run.path
    assert folder == (tmp_path / "a").resolve()
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.json",
        "identity.json",
        "lock",
        "logs",
        "replay",
        "videos",
    ]
    assert load_file(folder / "config.json") == config


def test_the_time_is_filled_in_and_two_runs_within_a_second_do_not_meet(tmp_path):
    config = TrainConfig(run_dir=str(tmp_path / "{time}"))
    names = [run_folder.claim(config).path.name for _ in range(3)]
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?", name) for name in names)
    assert load_file(tmp_path / names[0] / "config.json").run_dir.endswith("{time}")


def test_an_empty_folder_is_used_and_a_full_one_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    config = TrainConfig(run_dir=str(tmp_path / "a"))
    run_folder.claim(config)
    with pytest.raises(ConfigError) as caught:
        run_folder.claim(config)
    assert str(caught.value) == (
        f"--run-dir {tmp_path}/a already exists and is not empty, and a new run would mix with it. "
        "To continue it add --resume, or choose another folder."
    )


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(ConfigError, match="a is a file"):
        run_folder.claim(TrainConfig(run_dir=str(tmp_path / "a")))
    with pytest.raises(ConfigError, match=r"cannot be written \(Not a directory\)"):
        run_folder.claim(TrainConfig(run_dir=str(tmp_path / "a" / "b")))


def test_resume_continues_a_named_run_with_the_new_settings(tmp_path):
    make_run(tmp_path / "a", 1000, "update_000010")
    config = TrainConfig(run_dir=str(tmp_path / "a"), resume=True, updates=80)
    assert run_folder.claim(config).path == (tmp_path / "a").resolve()
    written = load_file(tmp_path / "a" / "config.json")
    assert (written.updates, written.resume) == (80, False)


def test_resume_without_a_name_takes_the_run_that_was_started_last(tmp_path):
    make_run(tmp_path / "z-old", 1000, "update_000010")
    make_run(tmp_path / "a-new", 2000, "update_000010")
    assert run_folder.newest(tmp_path) == tmp_path / "a-new"
    run = run_folder.claim(TrainConfig(run_dir=str(tmp_path / "{time}"), resume=True))
    assert run.path.name == "a-new"
    assert run_folder.newest(tmp_path) == tmp_path / "z-old", "a run that is alive is not resumed"
    run.lock.release()
    assert run_folder.newest(tmp_path) == tmp_path / "a-new"


def test_resume_needs_a_run(tmp_path):
    (tmp_path / "empty").mkdir()
    for run_dir, message in (
        (
            tmp_path / "{time}",
            f"there is no run to resume in {tmp_path}. Leave it out, or name a run with --run-dir.",
        ),
        (tmp_path / "empty", f"--run-dir {tmp_path}/empty is not the folder of a run: it has no config.json"),
        (tmp_path / "no", f"--run-dir {tmp_path}/no does not exist"),
        (tmp_path / "{time}" / "a", "--resume cannot tell which run is meant"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            run_folder.claim(TrainConfig(run_dir=str(run_dir), resume=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_resume_needs_a_whole_checkpoint_and_names_a_run_that_has_one(tmp_path):
    make_run(tmp_path / "a", 1000, "update_000010")
    make_run(tmp_path / "b", 2000, "update_000010.tmp")
    with pytest.raises(ConfigError) as caught:
        run_folder.claim(TrainConfig(run_dir=str(tmp_path / "{time}"), resume=True))
    assert f"{tmp_path}/b has no checkpoint yet" in str(caught.value)
    assert f"{tmp_path}/a has one: name it with --run-dir." in str(caught.value)
