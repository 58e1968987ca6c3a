"""The folder of a run: made fresh, refused or found again; its state is read from its files."""

import json
import os
import re
from pathlib import Path

import pytest

from asyncrl.config.run import TrainConfig, load_file
from asyncrl.errors import ConfigError
from asyncrl.storage import run_folder, run_owner
from asyncrl.storage.run_folder import State, newest_rows, runs_in, summarise
from asyncrl.storage.run_owner import FolderInUse
from support.run_folders import kill_owner, row, write_run


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
        (tmp_path / "{time}" / "a", f"there is no run to resume in {tmp_path}/{{time}}."),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            run_folder.claim(TrainConfig(run_dir=str(run_dir), resume=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_resume_needs_a_whole_checkpoint(tmp_path):
    make_run(tmp_path / "b", 2000, "update_000010.tmp")
    with pytest.raises(ConfigError, match=f"{tmp_path}/b has no checkpoint yet"):
        run_folder.claim(TrainConfig(run_dir=str(tmp_path / "{time}"), resume=True))


def test_a_run_that_is_alive_before_its_first_checkpoint_is_in_use(tmp_path: Path) -> None:
    run = run_folder.claim(TrainConfig(run_dir=str(tmp_path / "a")))
    with pytest.raises(FolderInUse, match=f"is in use by process {os.getpid()} on "):
        run_folder.locate(TrainConfig(run_dir=str(tmp_path / "a"), resume=True))
    run.lock.release()


def test_a_run_of_a_version_without_lock_is_judged_by_its_rows(tmp_path: Path) -> None:
    for name, made, expected in (("all", 4, State.FINISHED), ("some", 2, State.STOPPED)):
        (write_run(tmp_path / name, made=made) / "lock").unlink()
        assert summarise(tmp_path / name).state is expected
        assert not (tmp_path / name / "lock").exists()


def test_a_summary_has_the_newest_numbers(tmp_path: Path) -> None:
    found = summarise(write_run(tmp_path / "run", updates=9, made=5, true={2: 0.25, 4: 0.75}))
    assert (found.version, found.updates) == (5, 9)
    assert (found.imagined_success, found.true_success) == (0.5, 0.75)
    assert found.started == 1_700_000_000.0
    nothing = summarise(write_run(tmp_path / "new", made=0))
    assert (nothing.version, nothing.imagined_success, nothing.true_success) == (0, None, None)


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [row(step, 0.0) for step in range(1, 101)]
    rows.insert(3, {"step": 2, "time": 0.0, "eval/success_once": 0.5})
    lines = [json.dumps(one) + "\n" for one in rows]
    path.write_text("".join(lines) + '{"step": 101, "ti')  # The crash cut the last one short.
    monkeypatch.setattr(run_folder, "TAIL_BYTES", 5 * len(lines[-1]))
    assert newest_rows(path) == (rows[-1], {})
    monkeypatch.undo()
    assert newest_rows(path) == (rows[-1], rows[3])
    path.write_text('{"step": 1}\nnonsense\n{"step": "two"}\n')
    assert newest_rows(path) == ({"step": 1}, {})


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert "named pipe" in summarise(run).problem
    (run / "config.json").write_text("{")
    found = summarise(run)
    assert "config.json cannot be read" in found.problem
    assert (found.updates, found.state) == (0, State.STOPPED)


def test_runs_are_the_folders_with_settings_in_the_order_of_their_starts(tmp_path: Path) -> None:
    second = write_run(tmp_path / "a", started=2e9)
    first = write_run(tmp_path / "b", started=1e9)
    (tmp_path / "no_run").mkdir()
    (tmp_path / "link").symlink_to(first)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").symlink_to(first / "config.json")
    assert runs_in(tmp_path) == [first, second]
    assert runs_in(first) == [first]
    with pytest.raises(ConfigError, match="is no folder that holds runs"):
        runs_in(tmp_path / "absent")


def test_an_unowned_folder_is_kept_without_a_trace(tmp_path: Path) -> None:
    kill_owner(write_run(tmp_path / "dead", made=3))
    before = (tmp_path / "dead" / "lock").read_bytes()
    with run_owner.kept_unowned(tmp_path / "dead", "cleaning"):
        with pytest.raises(FolderInUse), run_owner.kept_unowned(tmp_path / "dead", "cleaning"):
            pass
        with pytest.raises(FolderInUse):
            run_owner.join(tmp_path / "dead")
    assert (tmp_path / "dead" / "lock").read_bytes() == before
    assert summarise(tmp_path / "dead").state is State.DEAD
    lock = run_owner.acquire(tmp_path / "dead")
    with (
        pytest.raises(FolderInUse, match="cleaning would change"),
        run_owner.kept_unowned(tmp_path / "dead", "cleaning"),
    ):
        pass
    lock.release()
    assert run_owner.left_by(tmp_path / "dead") is None
