"""`asyncrl runs`: what runs there are, how they differ, what they take of the disk, and what can go."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli
from asyncrl.commands import runs as runs_command
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import OptimizerSettings, ReplaySettings
from asyncrl.storage import run_owner
from asyncrl.storage.checkpoint import keep_copy
from asyncrl.storage.run_folder import State
from support.run_folders import contents, kill_owner, write_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs and two folders that are none, under 'runs' of the working folder."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    write_run(runs / "first", started=1e9, true={2: 0.5})
    write_run(runs / "second", made=2, started=1.1e9)
    kill_owner(write_run(runs / "third", made=3, started=1.2e9))
    (runs / "notes").mkdir()
    (runs / "notes" / "update_000001").mkdir()
    (runs / "elsewhere").symlink_to(runs / "first")
    return runs


def said(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    capsys.readouterr()
    assert cli.run("runs", arguments) == code
    return capsys.readouterr().out


def test_list_has_a_row_per_run_the_newest_last(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = run_owner.acquire(write_run(folder / "fourth", started=1.3e9, made=1))
    expected = [
        ["run", "started", "state", "updates", "imagined", "true", "MB"],
        ["first", "2001-09-09", "finished", "4/4", "40.0%", "50.0%", "0.0"],
        ["second", "2004-11-09", "stopped", "2/4", "20.0%", "-", "0.0"],
        ["third", "2008-01-10", "dead", "3/4", "30.0%", "-", "0.0"],
        ["fourth", "2011-03-13", "running", "1/4", "10.0%", "-", "0.0"],
    ]
    for arguments in ([], ["list"], ["runs"], ["list", "runs"]):
        assert [line.split() for line in said(arguments, capsys).splitlines()] == expected
    assert [line.split() for line in said(["runs/third"], capsys).splitlines()] == [expected[0], expected[3]]
    rows = json.loads(said(["list", "--json"], capsys))
    assert [row["state"] for row in rows] == ["finished", "stopped", "dead", "running"]
    assert (rows[0]["true_success"], rows[0]["imagined_success"], rows[0]["version"]) == (0.5, 0.4, 4)
    assert rows[0]["bytes"] == sum(
        path.stat().st_size for path in (folder / "first").rglob("*") if path.is_file()
    )
    lock.release()


def test_a_damaged_run_does_not_hide_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "second" / "config.json").write_text("{")
    assert cli.run("runs", []) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 4
    assert "second: " in captured.err
    assert "config.json cannot be read" in captured.err


def test_a_folder_without_runs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said([str(tmp_path)], capsys) == f"There are no runs in {tmp_path}.\n"
    assert cli.run("runs", ["lst"]) == 2
    assert "lst is no folder that holds runs" in capsys.readouterr().err


def test_tables_show_long_names_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "a_name_that_is_much_longer_than_a_terminal_is_wide_with_all_that_stands_behind_it"
    write_run(folder / long)
    for arguments in (["list"], ["compare", "runs/first", f"runs/{long}"]):
        assert long in said(arguments, capsys)


def test_compare_shows_what_differs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = TrainConfig(
        updates=4,
        run_dir="elsewhere",
        replay=ReplaySettings(max_lag=5),
        optimizer=OptimizerSettings(learning_rate=3e-5),
    )
    write_run(folder / "other", config=config, made=2)
    text = said(["compare", "runs/first", "runs/other"], capsys)
    assert [line.split() for line in text.splitlines()] == [
        ["setting", "first", "other"],
        ["optimizer.learning_rate", "0.0001", "3e-05"],
        ["replay.max_lag", "2", "5"],
        [],
        ["last", "first", "other"],
        ["step", "4", "2"],
        ["env/success_once", "0.4", "0.2"],
        ["eval/success_once", "0.5", "-"],
    ]
    assert "The settings are the same." in said(["compare", "runs/first", "runs/second"], capsys)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["runs/first"], "One run cannot be compared"),
        (["runs/first", "runs/notes"], "is not the folder of a run"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    names: list[str], why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run("runs", ["compare", *names]) == 2
    assert why in capsys.readouterr().err


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_gc_lists_first_and_deletes_when_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(folder)
    listed = said(["gc"], capsys)
    assert contents(folder) == before
    assert [line.split()[:5] for line in listed.splitlines()[1:4]] == [
        ["first", "finished", "older", "checkpoints", "3"],
        ["second", "stopped", "older", "checkpoints", "1"],
        ["third", "dead", "older", "checkpoints", "2"],
    ]
    assert "--yes does it" in listed
    said(["gc", "--yes"], capsys)
    assert kept(folder / "first") == ["update_000004"]
    assert kept(folder / "second") == ["update_000002"]
    assert kept(folder / "third") == ["update_000003"]
    gone = set(before) - set(contents(folder))
    assert all(re.match(r"(first|second|third)/checkpoints/update_00000[123]", name) for name in gone)
    assert "dead" in said(["list", "runs/third"], capsys), "what became of a run is still known"
    assert "would free 0.0 MB" in said(["gc"], capsys)


def test_gc_keeps_what_is_asked_for_what_is_best_and_what_it_does_not_know(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = folder / "first" / "checkpoints"
    keep_copy(checkpoints / "update_000002", checkpoints / "best")
    listed = runs_command.leftovers_of(folder / "first", State.FINISHED, keep=1)
    sizes = {one.path.name: one.nbytes for one in listed}
    shared = {"update_000001": 1026, "update_000002": 0, "update_000003": 1026}
    assert sizes == shared, "files that the best checkpoint shares free nothing"
    (checkpoints / "link").symlink_to("update_000001")
    (checkpoints / "mine").mkdir()
    (checkpoints / "update_2").mkdir()
    (checkpoints / "update_000002.txt").touch()
    (checkpoints / "update_000005.tmp").mkdir()
    (checkpoints / "other.tmp").mkdir()
    said(["gc", "runs/first", "--yes", "--keep-checkpoints", "2"], capsys)
    odd = ["best", "link", "mine", "other.tmp", "update_000001"]
    assert (checkpoints / "best" / "model").read_bytes() == bytes(1000)
    assert kept(folder / "first") == [*odd, "update_000002.txt", "update_000003", "update_000004", "update_2"]


def test_gc_keeps_the_older_checkpoints_of_a_newest_that_is_not_whole(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "first" / "checkpoints" / "update_000004" / "model").write_bytes(b"short")
    assert cli.run("runs", ["gc", "runs/first", "--yes"]) == 0
    assert "update_000004 is not whole" in capsys.readouterr().err
    assert len(kept(folder / "first")) == 4


def test_a_run_that_begins_meanwhile_or_runs_is_not_touched(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summarise, held = runs_command.summarise, list[run_owner.RunLock]()

    def begins(run: Path) -> Any:
        found = summarise(run)
        held.append(run_owner.acquire(run))
        return found

    monkeypatch.setattr(runs_command, "summarise", begins)
    assert cli.run("runs", ["gc", str(folder / "first"), "--yes"]) == 1
    assert "runs gc would change a folder that is in use" in capsys.readouterr().err
    assert len(kept(folder / "first")) == 4
    monkeypatch.undo()
    monkeypatch.chdir(folder.parent)
    assert "left alone, for it runs: first" in said(["gc", "--yes"], capsys)
    assert (len(kept(folder / "first")), kept(folder / "second")) == (4, ["update_000002"])
    held.pop().release()
