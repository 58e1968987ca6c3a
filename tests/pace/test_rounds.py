"""What a run keeps of its rounds: the file, the folders, and what a resume forgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from asyncrl.launch.fitter import is_best, metrics_of
from asyncrl.observability import metrics_pace as m
from asyncrl.pace import rounds
from asyncrl.pace.rounds import Round

FIRST = Round(
    version=6,
    time=1000.0,
    world=1,
    published=True,
    accepted=True,
    keyframes=0,
    source="tabletop",
    episodes=40,
    successes=20,
    success=0.5,
    low=0.352,
    high=0.648,
    audited=10,
    solved=4,
    judged=8,
    wrong=6,
    false=5,
    wrong_after=3,
    false_after=2,
    collect_seconds=12.0,
    fit_seconds=34.0,
)
REFUSED = replace(FIRST, version=12, published=False, accepted=False, wrong_after=6)


def make_folders(run: Path) -> None:
    for version in (1, 2):
        rounds.world_folder(run, version).mkdir(parents=True)
    for version in (6, 12, 18):
        rounds.round_folder(run, version).mkdir(parents=True)


def test_a_refit_that_judges_no_better_changes_nothing(tmp_path: Path) -> None:
    assert rounds.newest_world(tmp_path) is None
    rounds.append(tmp_path, FIRST)
    rounds.append(tmp_path, REFUSED)
    assert rounds.read(tmp_path) == [FIRST, REFUSED]
    assert rounds.newest_world(tmp_path) == 1
    assert str(FIRST) == (
        "true success 50.0% [35.2%, 64.8%] of 40 (version 6); wrong verdicts 60.0% -> 30.0% of 10: "
        "world 1 accepted"
    )
    assert str(REFUSED).endswith("wrong verdicts 60.0% -> 60.0% of 10: world 1 stays")


def test_a_resume_forgets_later_rounds_and_what_was_not_finished(tmp_path: Path) -> None:
    make_folders(tmp_path)
    (tmp_path / "worlds" / "version_000003.tmp").mkdir()
    (tmp_path / "true" / "round_000024.tmp").mkdir()
    second = replace(FIRST, version=12, world=2)
    for row in (FIRST, second, replace(REFUSED, version=18, world=2)):
        rounds.append(tmp_path, row)
    with (tmp_path / rounds.NAME).open("a") as file:
        file.write('{"version": 24, "torn')

    def left() -> tuple[list[str], list[str]]:
        folders = (tmp_path / name for name in ("worlds", "true"))
        worlds, true = (sorted(path.name for path in folder.iterdir()) for folder in folders)
        return worlds, true

    rounds.cut_after(tmp_path, 18)
    played = ["round_000006", "round_000012", "round_000018"]
    assert left() == (["version_000001", "version_000002"], played)
    rounds.cut_after(tmp_path, 11)
    assert rounds.read(tmp_path) == [FIRST]
    assert left() == (["version_000001"], ["round_000006"])
    rounds.cut_after(tmp_path, 5)
    assert (rounds.read(tmp_path), left()) == ([], ([], []))


def test_the_best_version_is_the_later_one_of_two_that_are_equal() -> None:
    rates = (0.4, 0.6, 0.6, 0.5)
    made = [replace(FIRST, version=6 * (n + 1), success=rate) for n, rate in enumerate(rates)]
    assert [is_best(row, made) for row in made] == [True, True, True, False]


def test_what_curves_say_of_a_round() -> None:
    found = metrics_of(FIRST, 104)
    assert found[m.TRUE_EPISODES] == 104
    assert found[m.GAP] == (8 - 4) / 10
    assert (found[m.VERDICT_WRONG], found[m.VERDICT_WRONG_AFTER]) == (0.6, 0.3)
    assert found[m.FALSE_SUCCESS] == 5 / 8
    assert m.FALSE_SUCCESS not in metrics_of(replace(FIRST, judged=0, false=0), 40)
    assert m.KEYFRAMES not in found
    assert metrics_of(replace(FIRST, keyframes=7), 40)[m.KEYFRAMES] == 7
