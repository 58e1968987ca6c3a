"""Inline runs with --pace.every: rounds take turns with updates, and a run repeats itself bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from asyncrl import cli
from asyncrl.keyframe_names import version_named
from asyncrl.observability import metrics_guard as g
from asyncrl.observability import metrics_pace as m
from asyncrl.pace import fitter, rounds
from asyncrl.pace.verdicts import Verdicts
from asyncrl.replay_tools.episodes import read_rows, replay_folder
from asyncrl.worlds import mined_keyframes
from support.pace_runs import flags, train, worlds_of, write_models_and_base
from support.tiny_models import GROUP_SIZE
from support.whole_runs import rows

pytestmark = pytest.mark.render


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("models")
    return folder, write_models_and_base(folder)


def assert_alike(run: Path, other: Path, *, updates: int) -> None:
    """Compare rounds, the worlds that drew what is stored, and the last weights of two runs bit for bit."""
    kept = {"time", "collect_seconds", "fit_seconds"}
    ours, theirs = (
        [{k: v for k, v in vars(row).items() if k not in kept} for row in rounds.read(folder)]
        for folder in (run, other)
    )
    assert ours == theirs
    assert worlds_of(run) == worlds_of(other)
    last = Path("checkpoints") / f"update_{updates:06d}"
    for path in sorted((other / last).rglob("model.safetensors")):
        mine, its = load_file(run / path.relative_to(other)), load_file(path)
        assert [name for name in its if not mine[name].equal(its[name])] == []


class Judged:
    """Audits of models of random weights say anything: here it is said how many verdicts are wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrong: list[int]) -> None:
        """`wrong[version]`: of the held-out episodes."""
        self.wrong = wrong
        monkeypatch.setattr(fitter, "verdicts", self.verdicts)

    def verdicts(self, world: Any, reward: Any, recordings: Any, **rule: Any) -> Verdicts:
        solved = recordings.solved()
        judged = solved.copy()
        judged[: self.wrong[world.version]] ^= True
        return Verdicts(judged=judged, solved=solved)


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory) -> Iterator[Path]:
    run = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        Judged(patch, [3, 2, 2])
        settings = [*flags(models), "--imagination.fixed-shape", "--keep-checkpoints", 9]
        train(*settings, "--inline", "--updates", 6, "--checkpoint-every", 3, "--run-dir", run)
        yield run


def test_an_inline_run_makes_a_round_at_every_version_that_is_due(whole: Path) -> None:
    made = rounds.read(whole)
    assert [row.version for row in made] == [2, 4], "nothing is imagined after the last update"
    assert all((row.episodes, row.audited, row.source) == (8, 4, "tabletop") for row in made)
    assert [(row.accepted, row.world, row.wrong, row.wrong_after) for row in made] == [
        (True, 1, 3, 2),
        (False, 1, 2, 2),
    ]
    assert rounds.newest_world(whole) == 1
    assert {version for found in worlds_of(whole).values() for version in found} == {0, 1}
    assert [path.name for path in (whole / "worlds").iterdir()] == ["version_000001"]
    logged = rows(whole)
    assert m.TRUE_SUCCESS.name not in logged[1]
    assert [row[m.ROUND_VERSION.name] for row in logged[2:]] == [2, 2, 4, 4]
    assert logged[-1][m.TRUE_EPISODES.name] == 16
    assert logged[-1][m.WORLD_VERSION.name] == 1


def test_an_interrupted_run_ends_where_the_undisturbed_one_does(models, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*flags(models), "--imagination.fixed-shape", "--keep-checkpoints", 9]
    settings += ["--inline", "--checkpoint-every", 3, "--run-dir", run]
    train(*settings, "--updates", 3)
    train("--updates", 6, "--run-dir", run, "--resume")
    assert_alike(run, whole, updates=6)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_nine_updates_a_resume_and_nine_more_are_eighteen(models, tmp_path: Path, monkeypatch) -> None:
    """With a bound of 0, so that every accepted world has what waits imagined again."""
    Judged(monkeypatch, [4, 3, 2, 1, 0, 0])
    about = {"pace.every": 3, "replay.max-world-lag": 0}
    settings = [*flags(models, **about), "--imagination.fixed-shape", "--inline", "--checkpoint-every", 9]
    train(*settings, "--updates", 18, "--run-dir", tmp_path / "whole")
    train(*settings, "--updates", 9, "--run-dir", tmp_path / "run")
    train("--updates", 18, "--run-dir", tmp_path / "run", "--resume")
    assert [row.accepted for row in rounds.read(tmp_path / "whole")] == [True] * 4 + [False]
    dropped = [rows(run)[-1]["replay/dropped_world"] for run in (tmp_path / "whole", tmp_path / "run")]
    assert dropped[0] == dropped[1] > 0
    assert_alike(tmp_path / "run", tmp_path / "whole", updates=18)


def test_what_refitted_worlds_drew_is_imagined_again_bit_for_bit(whole: Path, capsys) -> None:
    drawn = worlds_of(whole)
    mixed = max(drawn, key=lambda number: (len(set(drawn[number])), number))
    later = max(number for number, found in drawn.items() if set(found) == {1})
    for number in (mixed, later):
        assert cli.run("replay", ["imagine", str(whole), str(number), "--device", "cpu"]) == 0
        said = capsys.readouterr().out
        assert "version 0, and 1 of its refits" in said
        assert f"{GROUP_SIZE} members: {GROUP_SIZE} equal" in said, said


def test_a_checkpoint_is_audited_in_the_world_that_it_was_trained_in(whole: Path, capsys) -> None:
    short = ["--episodes", "2", "--rows", "2", "--workers", "1"]
    for version, world in ((3, "version_000001"), (2, "models")):
        folder = whole / "checkpoints" / f"update_{version:06d}"
        assert cli.run("audit", [str(folder), *short]) == 0
        assert world in capsys.readouterr().out.splitlines()[0]


def test_a_resume_without_refits_does_not_go_back_to_the_first_world(
    whole: Path, tmp_path: Path, capsys
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    again = ["--updates", "7", "--run-dir", str(run), "--resume", "--pace.every", "0"]
    world = rounds.world_folder(run, 1)
    assert cli.run("train", again) == 2
    assert "has refitted its world, and would go back to" in capsys.readouterr().err
    train(*again, "--world", str(world))
    assert len(rows(run)) == 7


def test_a_resume_from_an_earlier_checkpoint_forgets_the_later_rounds(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for version in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"update_{version:06d}", ignore_errors=True)
    train("--updates", 4, "--run-dir", run, "--resume")
    assert [row.version for row in rounds.read(run)] == [2]
    assert not rounds.round_folder(run, 4).exists()


def test_successes_are_imagined_again_in_a_world_that_is_refitted(models, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ["--inline", "--updates", 4, "--guard.kind", "second", "--run-dir", run]
    with pytest.MonkeyPatch.context() as patch:
        Judged(patch, [3, 2, 2])
        train(*flags(models), *more)
    assert {version for found in worlds_of(run).values() for version in found} == {0, 1}
    episodes = [row.episode for row in read_rows(replay_folder(run), more=["world_versions"])]
    assert {episode.weight for episode in episodes if episode.success} <= {0.0, 1.0}
    assert {episode.weight for episode in episodes if not episode.success} <= {1.0}
    assert any(episode.success for episode in episodes)
    logged = [row for row in rows(run) if g.DISAGREE.name in row]
    assert logged, "there are successes"


def test_groups_begin_at_key_frames_of_the_run_and_are_imagined_again_bit_for_bit(
    models, tmp_path: Path, capsys
) -> None:
    run = tmp_path / "run"
    keyframes = {"pace.siblings": 0, "pace.keyframes": 4, "actor.max-decisions": 4, "keyframe-share": 0.5}
    settings = [*flags(models, **keyframes), "--imagination.fixed-shape", "--inline", "--run-dir", run]
    train(*settings, "--updates", 4)
    (made,) = [row for row in rounds.read(run) if row.version == 2]
    assert made.published
    assert made.keyframes > 0
    begun = {row.number: row.episode for row in read_rows(replay_folder(run), more=["world_versions"])}
    mined = {number: one for number, one in begun.items() if version_named(one.start_state) is not None}
    assert mined, "some begin on the way"
    assert all(number % 2 for number in mined), "every second group does, from then on"
    for one in mined.values():
        version = version_named(one.start_state)
        (state,) = [
            s
            for s in mined_keyframes.load(rounds.world_folder(run, version or 0))
            if s.name == one.start_state
        ]
        assert len(one.world_versions) + state.elapsed <= 4
    capsys.readouterr()
    assert cli.run("replay", ["imagine", str(run), str(max(mined)), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"{GROUP_SIZE} members: {GROUP_SIZE} equal" in said, said
