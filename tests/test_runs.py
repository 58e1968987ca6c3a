"""`asyncrl runs`: what runs there are, how far they are, and what they take of the disk."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from asyncrl import cli
from asyncrl.storage import run_owner
from support.run_folders import kill_owner, write_run


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
    assert long in said([], capsys)


def test_a_plot_has_a_line_per_run_and_their_mean(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = list[Figure]()
    monkeypatch.setattr(Figure, "savefig", lambda figure, out: figures.append(figure))
    said(["plot", "runs/first", "runs/second", "--out", "two.png"], capsys)
    lines = {line.get_label(): line for line in figures[0].axes[0].lines}
    assert lines["imagined"].get_xydata().tolist() == [[1, 0.1], [2, 0.2], [3, 0.3], [4, 0.4]]
    assert lines["true"].get_xydata().tolist() == [[2, 0.5]]
    assert len(figures[0].axes[0].lines) == 6
    assert {"mean -", "largest -"} <= {line.get_label() for line in figures[0].axes[1].lines}, (
        "without values"
    )
    monkeypatch.undo()
    monkeypatch.chdir(folder.parent)
    said(["plot", "runs/first", "--panels", "success", "--out", "one.png"], capsys)
    with Image.open("one.png") as picture:
        assert 700 < picture.width < 800  # One panel of three.
    assert cli.run("runs", ["plot", "runs/notes", "--out", "x.png"]) == 2
    assert "runs/notes/metrics.jsonl has no update" in capsys.readouterr().err
