"""True and imagined episodes side by side, and what the reward model makes of them, as in training."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from asyncrl.commands.evaluate import main, movie_writer
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.evaluation.contact_sheet import (
    JudgedEpisode,
    check_imagines,
    imagine_again,
    judge,
    unjudged,
    verdicts,
    write_contact_sheet,
    write_judged_movie,
    write_judged_sheet,
)
from asyncrl.records import ActionSpec, StartState
from asyncrl.simulators.interface import SimulatorSpec
from asyncrl.simulators.rollout import SimulatedEpisode
from support.simulated import RowsState, simulated_episode
from support.tiny_models import nano_wan


def episode(seed: int, decisions: int, *, solved: bool = False, size: int = 2) -> SimulatedEpisode:
    """Frame i is all 10 seed + i; action i is all i."""
    count = 1 + 8 * decisions
    numbers = np.arange(count)
    success = np.zeros(count, bool)
    success[-1] = solved
    frames = np.broadcast_to((10 * seed + numbers)[:, None, None, None], (count, size, size, 3))
    actions = np.broadcast_to(numbers[:, None], (count, 7)).astype(np.float32)
    return simulated_episode(seed, frames.astype(np.uint8), actions, success)


class AddingWorld:
    """Frame after an action: the start frame plus all actions so far, which is the state of a slot."""

    version, action_spec, device = 0, ActionSpec(), torch.device("cpu")

    def __init__(self, size: int = 2) -> None:
        self.image_size = size

    def start(self, states: Sequence[StartState], *, decisions: int = 0) -> Any:
        assert all(len(state.context_frames) == 0 for state in states)
        return np.array([int(state.frame[0, 0, 0]) for state in states]).view(RowsState)

    def imagine(self, state: Any, actions: Any, noise_seeds: Sequence[int]) -> tuple[torch.Tensor, Any]:
        assert len(noise_seeds) == len(state)
        values = state[:, None] + np.cumsum(np.asarray(actions)[:, :, 0], axis=1)
        frames = torch.from_numpy(values.astype(np.uint8))[:, :, None, None, None]
        return frames.expand(-1, -1, self.image_size, self.image_size, 3), values[:, -1]


def test_only_the_first_frame_and_the_actions_are_used() -> None:
    long, short = episode(1, 2), episode(2, 1)
    drawn = imagine_again(AddingWorld(), [long, short, episode(3, 2)])
    triangular = [i * (i + 1) // 2 for i in range(17)]
    assert drawn[0][:, 0, 0, 0].tolist() == [10 + t for t in triangular]
    assert drawn[1][:, 1, 1, 2].tolist() == [20 + t for t in triangular[:9]]
    assert drawn[2][:, 0, 0, 0].tolist() == [30 + t for t in triangular]


def test_the_world_is_told_where_the_hand_is_where_that_is_known() -> None:
    class Told(AddingWorld):
        def start(self, states: Sequence[StartState], *, decisions: int = 0) -> Any:
            poses.extend(state.ee_pose for state in states)
            return super().start(states, decisions=decisions)

    poses: list[np.ndarray | None] = []
    known = replace(episode(1, 1), poses=np.arange(72, dtype=np.float32).reshape(9, 8))
    imagine_again(Told(), [known, episode(2, 1)])
    assert poses[0] is not None
    assert poses[0].tolist() == list(range(8))
    assert poses[1] is None


def test_a_world_that_needs_poses_cannot_redraw_a_simulator_without() -> None:
    class Needing(AddingWorld):
        needs_pose = True

    silent = SimulatorSpec(name="lab", tasks=(), trials=0, max_steps=8, image_size=2)
    world: Any = Needing()
    with pytest.raises(ConfigError, match="where the robot's hand is, but lab does not say it"):
        check_imagines(world, silent)
    check_imagines(world, replace(silent, poses=True))
    plain: Any = AddingWorld()
    check_imagines(plain, silent)


def test_an_episode_that_ends_within_a_chunk_is_imagined_to_its_end() -> None:
    whole = episode(1, 2)
    cut = replace(whole, frames=whole.frames[:12], actions=whole.actions[:12], success=whole.success[:12])
    (drawn,) = imagine_again(AddingWorld(), [cut])
    assert drawn[:, 0, 0, 0].tolist() == [10 + i * (i + 1) // 2 for i in range(12)]


def test_another_suffix_and_a_world_that_is_not_there_are_named_before_an_episode_is_played(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.gif or \.mp4"):
        main(["tabletop", "--video", str(tmp_path / "sheet.png")])
    with pytest.raises(CheckpointError, match="--world nowhere"):
        main(["tabletop", "--video", str(tmp_path / "sheet.gif"), "--world", "nowhere"])


def test_a_sheet_has_a_frame_per_step_and_an_edge_per_outcome(tmp_path: Path) -> None:
    world = nano_wan(1)
    episodes = [episode(0, 1, solved=True, size=64), episode(1, 1, size=64)]
    path = tmp_path / "videos" / "sheet.gif"
    write_contact_sheet(path, episodes, world)
    with Image.open(path) as sheet:
        last = np.asarray(sheet.convert("RGB")).astype(int)
        durations = 0
        for index in range(getattr(sheet, "n_frames", 0)):
            sheet.seek(index)
            durations += sheet.info["duration"]
            last = np.asarray(sheet.convert("RGB")).astype(int)
    assert durations == 8 * 100 + 2000  # frames that do not change are joined
    width, below = 2 * 128 + 2 + 10, 24 + 5 + 18 + 128 + 8
    (r, g, _), (r2, g2, _) = last[below, 11], last[below, width + 11]
    assert g > r + 50, "solved: green"
    assert r2 > g2 + 50, "not solved: red"


SIZE = 8


class Brightness:
    """The probability of success of a picture is its brightness / 100."""

    image_size = 0

    def score(self, frames: torch.Tensor, tasks: list[str]) -> torch.Tensor:
        assert frames.shape[0] == len(tasks)
        return frames[..., 0, 0, 0].float() / 100


def played(start: int, steps: int, solved: bool) -> SimulatedEpisode:
    """All pictures have the brightness `start`; every action makes the next imagined one brighter by one."""
    success = np.zeros(steps + 1, bool)
    success[-1] = solved
    frames = np.full((steps + 1, SIZE, SIZE, 3), start, np.uint8)
    return simulated_episode(1, frames, np.ones((steps + 1, 7), np.float32), success)


def judged(start: int, steps: int, solved: bool = False, frames: Any = 1) -> JudgedEpisode:
    world, reward = AddingWorld(SIZE), Brightness()
    (found,) = judge([played(start, steps, solved)], world, reward, threshold=0.7, frames=frames)  # type: ignore[arg-type]
    return found


def test_every_imagined_picture_has_its_score_and_the_first_that_reaches_the_threshold_is_judged() -> None:
    found = judged(58, 20)
    assert found.scores.tolist() == pytest.approx([0] + [(58 + i) / 100 for i in range(1, 21)])
    assert found.judged_at == 12, "58 + 12 = 70"
    assert found.shown_step == 12
    assert (found.solved_at, len(found.truth), len(found.imagined)) == (None, 21, 21)
    assert found.imagined[12, 0, 0, 0] == 70


def test_the_rule_is_the_runs_and_nothing_is_judged_beyond_an_episodes_end() -> None:
    assert judged(58, 20, frames=3).judged_at == 14, "the third scoring picture in a row"
    assert judged(58, 20, frames="last").judged_at == 16, "the last picture of the second decision"
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
        (10, 16, False, ["truth: not solved", "imagined: best score 0.26: no success", ""]),
    ],
)
def test_both_verdicts_are_said_and_whether_they_differ(start, steps, solved, said) -> None:
    assert verdicts(judged(start, steps, solved)) == said


def test_a_simulator_alone_has_one_verdict() -> None:
    assert verdicts(unjudged(played(58, 20, True))) == ["truth: solved in step 20"]


def test_the_sheet_shows_the_picture_that_was_judged_and_is_written_whole(tmp_path: Path) -> None:
    found = replace(judged(58, 20), truth=np.full((21, SIZE, SIZE, 3), 200, np.uint8))
    write_judged_sheet(tmp_path / "sheet.png", [found], "version 5")
    with Image.open(tmp_path / "sheet.png") as written:
        assert written.format == "PNG"
        sheet = np.asarray(written)
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]
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


def test_a_movie_of_an_episode_says_what_it_shows(tmp_path: Path) -> None:
    """Small frames are enlarged; task, step and outcome stand below them."""
    movie_writer(tmp_path)(played(58, 20, True))
    (path,) = tmp_path.iterdir()
    assert path.stem == "counting_seed-1_0_solved"
    with Image.open(path) as movie:
        frames = [np.asarray(frame.convert("L")) for frame in ImageSequence.Iterator(movie)]
    assert len(frames) == 21
    rows = ((np.abs(frames[0].astype(int) - 58) <= 1).sum(1) == 256).nonzero()[0]
    assert len(rows) == 256
    below = frames[-1][rows.max() + 1 :]
    lines = [below[top : top + 18, 8:].min() < 100 for top in range(0, 54, 18)]
    assert lines == [True, True, True], "task, step, outcome"
