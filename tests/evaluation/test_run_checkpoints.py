"""The versions of a run are measured as they come: the newest that is due, and never one twice."""

import json
import shutil
from pathlib import Path

import pytest

from asyncrl.evaluation import run_checkpoints
from asyncrl.evaluation.run_checkpoints import RunCheckpoints, is_due
from asyncrl.evaluation.success_rate import Evaluation, SuccessRate
from asyncrl.storage import checkpoint
from asyncrl.storage.checkpoint import clean_up, forget_best_after
from asyncrl.storage.run_folder import BEFORE, BEST, HELD


def save(run: Path, version: int) -> Path:
    """A complete checkpoint whose one file says its version."""
    folder = run / "checkpoints" / f"update_{version:06d}"
    (folder / "state").mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"weights {version}")
    (folder / "state" / "part.safetensors").write_text("optimizer")
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*.safetensors")
    }
    (folder / "state.json").write_text(json.dumps({"files": files, "progress": {"version": version}}))
    return folder


class Player:
    """Measures what it is told to: version -> successes of 10. Notes what it was given."""

    def __init__(self, successes: dict[int, int]) -> None:
        self.successes = successes
        self.played: list[tuple[int, str]] = []

    def __call__(self, version: int, folder: Path | None) -> tuple[Evaluation, str, str]:
        content = "" if folder is None else (folder / "model.safetensors").read_text()
        self.played.append((version, content))
        rate = SuccessRate.of(self.successes[version], 10)
        return Evaluation(overall=rate, by_task={}, mean_steps=20.0), f"{version}.png", ""


def opened(run: Path, player: Player, every: int = 5, last: int = 100) -> RunCheckpoints:
    return RunCheckpoints(run, player, every=every, last=last, simulator="tabletop", temperature=1.0)


def test_the_first_policy_is_measured_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    player = Player({0: 4})
    checkpoints = opened(tmp_path, player)
    assert checkpoints.round()
    assert not checkpoints.round(), "nothing else is due"
    assert player.played == [(0, "")]
    (row,) = run_checkpoints.read_evaluations(tmp_path)
    assert (row.version, row.successes, row.episodes, row.success, row.best) == (0, 4, 10, 0.4, True)
    assert (row.low, row.high) == pytest.approx((0.1682, 0.6873), abs=1e-4)
    assert (row.simulator, row.temperature, row.steps, row.sheet) == ("tabletop", 1.0, 20.0, "0.png")
    assert str(row) == "40.0% [16.8%, 68.7%] of 10 (version 0)"


def test_the_newest_version_that_is_due_is_measured_and_what_was_skipped_is_counted(tmp_path: Path) -> None:
    player = Player({0: 4, 20: 5, 25: 6})
    checkpoints = opened(tmp_path, player)
    checkpoints.round()
    for version in (5, 10, 12, 15, 20, 21):
        save(tmp_path, version)
    assert checkpoints.round()
    assert not checkpoints.round(), "21 is not due, and older ones are not caught up with"
    save(tmp_path, 25)
    assert checkpoints.round()
    assert [version for version, _ in player.played] == [0, 20, 25]
    assert [row.skipped for row in run_checkpoints.read_evaluations(tmp_path)] == [0, 3, 0]


def test_the_last_version_is_due_whatever_its_number() -> None:
    assert [version for version in range(1, 8) if is_due(version, 5, 7)] == [5, 7]
    assert not is_due(7, 0, 7), "--evaluate-every 0"


def test_the_best_version_stays_and_of_two_equal_ones_the_later(tmp_path: Path) -> None:
    player = Player({0: 4, 5: 6, 10: 5, 15: 6})
    checkpoints = opened(tmp_path, player)
    kept = []
    for version in (0, 5, 10, 15):
        if version:
            save(tmp_path, version)
        checkpoints.round()
        best = tmp_path / "checkpoints" / BEST / "model.safetensors"
        kept.append(best.read_text() if best.exists() else "")
    assert kept == ["", "weights 5", "weights 5", "weights 15"]
    assert [row.best for row in run_checkpoints.read_evaluations(tmp_path)] == [True, True, False, True]
    assert not list((tmp_path / "checkpoints").glob("evaluating*"))


def test_a_checkpoint_may_be_deleted_while_it_is_measured(tmp_path: Path) -> None:
    class Slow(Player):
        def __call__(self, version: int, folder: Path | None) -> tuple[Evaluation, str, str]:
            if version:
                shutil.rmtree(tmp_path / "checkpoints" / f"update_{version:06d}")
            return super().__call__(version, folder)

    player = Slow({0: 4, 5: 6})
    checkpoints = opened(tmp_path, player)
    checkpoints.round()
    save(tmp_path, 5)
    assert checkpoints.round()
    assert player.played[-1] == (5, "weights 5")
    assert (tmp_path / "checkpoints" / BEST / "state" / "part.safetensors").read_text() == "optimizer"


def test_a_checkpoint_that_goes_away_is_left_for_the_next_round(tmp_path: Path) -> None:
    player = Player({0: 4, 10: 5})
    checkpoints = opened(tmp_path, player)
    checkpoints.round()
    (save(tmp_path, 5) / "state" / "part.safetensors").unlink()  # It is being deleted, file by file.
    assert not checkpoints.round()
    assert not (tmp_path / "checkpoints" / HELD).exists()
    save(tmp_path, 10)
    assert checkpoints.round()
    assert [version for version, _ in player.played] == [0, 10]


def test_files_are_copied_where_there_are_no_links(tmp_path: Path, monkeypatch) -> None:
    def refused(source: Path, copy: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    source = save(tmp_path, 5)
    monkeypatch.setattr(checkpoint.os, "link", refused)
    checkpoint.keep_copy(source, tmp_path / "copy")
    shutil.rmtree(source)
    assert (tmp_path / "copy" / "model.safetensors").read_text() == "weights 5"


def test_a_process_that_comes_back_measures_nothing_twice(tmp_path: Path) -> None:
    first = Player({0: 4, 5: 6})
    checkpoints = opened(tmp_path, first)
    checkpoints.round()
    save(tmp_path, 5)
    checkpoints.round()
    assert not opened(tmp_path, Player({})).round()


def test_a_resumed_run_forgets_what_it_makes_anew(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path, Player({0: 4, 5: 6, 10: 7}))
    checkpoints.round()
    for version in (5, 10):
        save(tmp_path, version)
        checkpoints.round()
    best = tmp_path / "checkpoints" / BEST
    forget_best_after(tmp_path, 10)
    assert best.is_dir()
    run_checkpoints.cut_evaluations(tmp_path, 5)
    forget_best_after(tmp_path, 9)
    assert not best.exists()
    assert [row.version for row in run_checkpoints.read_evaluations(tmp_path)] == [0, 5]


def test_lines_that_are_none_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(tmp_path, Player({0: 4})).round()
    path = tmp_path / "evaluations.jsonl"
    whole = json.loads(path.read_text())
    wrong = [{**whole, "version": "1"}, {**whole, "version": True}, {"version": 3}, [1]]
    wrong += [{**whole, "success": None}]
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in wrong)
        file.write('{"version": 9, "ti')
    assert [row.version for row in run_checkpoints.read_evaluations(tmp_path)] == [0]
    assert caplog.text.count("evaluations.jsonl: line") == len(wrong)
    checkpoints = opened(tmp_path, Player({5: 6}))
    save(tmp_path, 5)
    checkpoints.round()
    assert [row.version for row in run_checkpoints.read_evaluations(tmp_path)] == [0, 5], "behind a torn one"


def test_a_best_version_that_was_being_replaced_is_put_back(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(tmp_path, 5).rename(folder / BEFORE)
    save(tmp_path, 10).rename(folder / HELD)
    clean_up(tmp_path)
    assert (folder / BEST / "model.safetensors").read_text() == "weights 5"
    assert sorted(path.name for path in folder.iterdir()) == [BEST]
