"""What became of a run is read from its folder: running, finished, stopped or dead."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.storage import run_folder, run_lock
from asyncrl.storage.run_folder import State, newest_rows, runs_in, summarise
from asyncrl.storage.run_lock import FolderInUse
from support.run_folders import kill_owner, row, write_run


def test_the_four_states_are_told_apart(tmp_path: Path) -> None:
    assert summarise(write_run(tmp_path / "finished")).state is State.FINISHED
    assert summarise(write_run(tmp_path / "stopped", made=3)).state is State.STOPPED
    assert summarise(write_run(tmp_path / "empty", made=0)).state is State.STOPPED
    kill_owner(write_run(tmp_path / "dead", made=3))
    assert summarise(tmp_path / "dead").state is State.DEAD
    lock = run_lock.acquire(write_run(tmp_path / "running", made=4))
    assert summarise(tmp_path / "running").state is State.RUNNING  # Also when all updates are made.
    lock.release()
    assert summarise(tmp_path / "running").state is State.FINISHED


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
    with run_lock.kept_unowned(tmp_path / "dead", "cleaning"):
        with pytest.raises(FolderInUse), run_lock.kept_unowned(tmp_path / "dead", "cleaning"):
            pass
        with pytest.raises(FolderInUse):
            run_lock.join(tmp_path / "dead")
    assert (tmp_path / "dead" / "lock").read_bytes() == before
    assert summarise(tmp_path / "dead").state is State.DEAD
    lock = run_lock.acquire(tmp_path / "dead")
    with (
        pytest.raises(FolderInUse, match="cleaning would change"),
        run_lock.kept_unowned(tmp_path / "dead", "cleaning"),
    ):
        pass
    lock.release()
    assert run_lock.left_by(tmp_path / "dead") is None
