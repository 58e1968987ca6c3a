"""What the world model makes of true actions is judged as in training, and drawn so that errors are seen."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from asyncrl.evaluation.contact_sheet import (
    JudgedEpisode,
    judge,
    judged_sheet,
    unjudged,
    verdicts,
    write_judged_movie,
    write_judged_sheet,
)
from asyncrl.records import ActionSpec
from asyncrl.simulators.rollout import SimulatedEpisode
from support.simulated import simulated_episode

SIZE = 8


class CountingWorld:
    """Every frame is one brighter than the one before, from what it is given on."""

    version, image_size, action_spec, device = 0, SIZE, ActionSpec(), torch.device("cpu")

    def start(self, states: Any, *, decisions: int = 0) -> Any:
        return np.array([int(state.frame[0, 0, 0]) for state in states])

    def imagine(self, state: Any, actions: Any, noise_seeds: Any) -> Any:
        values = state[:, None] + np.arange(1, 9)
        frames = torch.from_numpy(values.astype(np.uint8))[:, :, None, None, None]
        return frames.expand(-1, -1, SIZE, SIZE, 3), values[:, -1]


class Brightness:
    """The probability of success of a picture is its brightness / 100."""

    image_size = 0

    def score(self, frames: torch.Tensor, tasks: list[str]) -> torch.Tensor:
        assert frames.shape[0] == len(tasks)
        return frames[..., 0, 0, 0].float() / 100


def played(start: int, steps: int, solved: bool) -> SimulatedEpisode:
    success = np.zeros(steps + 1, bool)
    success[-1] = solved
    return simulated_episode(
        1,
        task="put the red cube on the white plate",
        frames=np.full((steps + 1, SIZE, SIZE, 3), start, np.uint8),
        actions=np.zeros((steps + 1, 7), np.float32),
        success=success,
    )


def judged(start: int, steps: int, solved: bool = False, frames: Any = 1) -> JudgedEpisode:
    world, reward = CountingWorld(), Brightness()
    (found,) = judge([played(start, steps, solved)], world, reward, threshold=0.7, frames=frames)  # type: ignore[arg-type]
    return found


def test_every_imagined_picture_has_its_score_and_the_first_that_reaches_the_threshold_is_judged() -> None:
    found = judged(58, 20)
    assert found.scores.tolist() == pytest.approx([0] + [(58 + i) / 100 for i in range(1, 21)])
    assert found.judged_at == 12, "58 + 12 = 70"
    assert found.shown_step == 12
    assert (found.solved_at, len(found.truth), len(found.imagined)) == (None, 21, 21)
    assert found.imagined[12, 0, 0, 0] == 70


def test_the_rule_is_the_runs() -> None:
    assert judged(58, 20, frames=3).judged_at == 14, "the third scoring picture in a row"
    assert judged(58, 20, frames="last").judged_at == 16, "the last picture of the second decision"


def test_an_episode_that_ended_within_a_decision_is_not_judged_beyond_its_end() -> None:
    found = judged(50, 19, solved=True)
    assert found.judged_at is None
    assert found.shown_step == 19, "the best score"
    assert found.solved_at == 19
    assert judged(58, 12, frames="last").judged_at is None, "its decision's last picture was never reached"


@pytest.mark.parametrize(
    ("start", "steps", "solved", "said"),
    [
        (58, 20, True, ["truth: solved in step 20", "imagined: success in step 12, score 0.70", ""]),
        (58, 20, False, ["truth: not solved", "imagined: success in step 12, score 0.70", "wrong verdict"]),
        (
            10,
            16,
            True,
            ["truth: solved in step 16", "imagined: best score 0.26: no success", "wrong verdict"],
        ),
        (10, 16, False, ["truth: not solved", "imagined: best score 0.26: no success", ""]),
    ],
)
def test_both_verdicts_are_said_and_whether_they_differ(
    start: int, steps: int, solved: bool, said: list[str]
) -> None:
    assert verdicts(judged(start, steps, solved)) == said


def test_a_simulator_alone_has_one_verdict() -> None:
    assert verdicts(unjudged(played(58, 20, True))) == ["truth: solved in step 20"]


def test_the_sheet_shows_the_picture_that_was_judged() -> None:
    found = replace(judged(58, 20), truth=np.full((21, SIZE, SIZE, 3), 200, np.uint8))
    sheet = np.asarray(judged_sheet([found], "version 5"))
    greys = {int(value) for value in np.unique(sheet[60])}
    assert {70, 200} <= greys, "the imagined picture of step 12 and the truth stand in one row"
    assert 71 not in greys
    assert 78 not in greys, "not the last imagined one"


def test_the_movie_stops_the_imagined_half_at_the_judged_step(tmp_path: Path) -> None:
    write_judged_movie(tmp_path / "movie.gif", [judged(58, 20), judged(10, 16)], "version 5")
    with Image.open(tmp_path / "movie.gif") as movie:
        count = getattr(movie, "n_frames", 1)
        movie.seek(count - 1)
        last = np.asarray(movie.convert("RGB")).astype(int)
    assert count <= 21
    middle = last[100, 10 + 128 + 2 + 64]  # In the right half of the first tile.
    assert np.abs(middle - 70).max() <= 2, middle
    assert not list(tmp_path.glob("*.tmp*"))


def test_sheets_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_judged_sheet(tmp_path / "sheet.png", [judged(58, 20)], "version 5")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]
