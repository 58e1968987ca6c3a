"""Key frames become start states on the way: chosen by the rule, alike from every task, with what is left."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl import cli
from asyncrl.errors import ConfigError
from asyncrl.fitting.recording_files import Recordings
from asyncrl.fitting.sources import load_recordings
from asyncrl.fitting.starts import keyframe_states, keyframes
from asyncrl.records import StartState
from asyncrl.worlds.start_states import StartStateStream, check_elapsed, load_start_states
from support.recorded import recorded_spec, write_recorded
from support.tiny_models import start_state

LENGTHS = (49, 41, 33, 57, 49, 25, 9)


@pytest.fixture
def recordings(tmp_path: Path) -> Recordings:
    """Seven episodes of three tasks by turns; the last one is too short for a key frame."""
    write_recorded(tmp_path / "data", recorded_spec(16, poses=True), LENGTHS)
    return load_recordings([tmp_path / "data"])


def test_states_are_true_frames_of_the_rule_with_the_decisions_that_were_made(recordings: Recordings) -> None:
    spans = [recordings.span(episode) for episode in range(len(recordings))]
    wanted = [
        (episode, step)
        for episode, span in enumerate(spans)
        for step in keyframes(recordings.actions[span], recordings.success[span])
    ]
    states = keyframe_states(recordings, 100)
    assert len(states) == len(wanted) > 5
    for state, (episode, step) in zip(states, wanted, strict=True):
        row = int(recordings.offsets[episode]) + step
        np.testing.assert_array_equal(state.frame, recordings.frames[row - step])
        np.testing.assert_array_equal(state.context_frames, recordings.frames[row - 3 : row + 1])
        np.testing.assert_array_equal(state.context_actions, recordings.actions[row - 3 : row + 1])
        np.testing.assert_array_equal(state.ee_pose, recordings.poses[row])
        assert (state.elapsed, state.task) == (step // 8, recordings.tasks[episode])


def gripper(changes_at: int, steps: int) -> np.ndarray:
    """``[steps + 1, 7]``: open until the action `changes_at`, which is the first that closes."""
    return np.where(np.arange(steps + 1) >= changes_at, 1.0, -1.0)[:, None] * np.ones((1, 7))


@pytest.mark.parametrize(
    ("changes_at", "solved_at", "steps", "expected"),
    [
        (25, 41, 48, [16, 32]),  # in decision 3, and solved in decision 5
        (32, 48, 48, [16, 32]),
        (33, 40, 48, [24]),  # in decision 4, and solved in the same: one key frame
        (5, 12, 48, []),  # nothing lies before them
        (17, -1, 48, [8, 32]),  # not solved: two decisions before the end
        (99, -1, 48, [32]),
        (99, -1, 17, []),
        (99, -1, 8, []),
    ],
)
def test_key_frames_follow_the_documented_rule(changes_at, solved_at, steps, expected) -> None:
    assert keyframes(gripper(changes_at, steps), np.arange(steps + 1) == solved_at) == expected


def test_no_episode_has_more_than_two_and_a_few_come_from_all_tasks(recordings: Recordings) -> None:
    everything = keyframe_states(recordings, 100)
    by_episode = Counter(state.name.partition("-seed")[0] for state in everything)
    assert max(by_episode.values()) <= 2
    few = keyframe_states(recordings, 5)
    counts = Counter(state.task for state in few)
    assert sorted(counts.values()) == [1, 2, 2]
    assert {state.name for state in few} <= {state.name for state in everything}


def test_recordings_without_a_key_frame_are_refused(tmp_path: Path) -> None:
    write_recorded(tmp_path / "data", recorded_spec(16), (9, 9))
    with pytest.raises(ConfigError, match="None of the 2 episodes of --data has a key frame"):
        keyframe_states(load_recordings([tmp_path / "data"]), 3)


def test_the_command_writes_our_file_and_rlinfs_folder(recordings: Recordings, tmp_path, capsys) -> None:
    data = ["--data", str(tmp_path / "data")]
    assert cli.run("fit", ["keyframes", *data, "--out", str(tmp_path / "k.h5"), "--count", "6"]) == 0
    assert "6 key frames of 3 tasks in" in capsys.readouterr().out
    for read, made in zip(load_start_states(tmp_path / "k.h5"), keyframe_states(recordings, 6), strict=True):
        assert (read.name, read.task, read.elapsed) == (made.name, made.task, made.elapsed)
        np.testing.assert_array_equal(read.context_frames, made.context_frames)
        np.testing.assert_array_equal(read.ee_pose, made.ee_pose)


def states(ordinary: int, marked: int, elapsed: int = 2) -> list[StartState]:
    on_the_way = (replace(start_state(100 + n, 8, context=4), elapsed=elapsed) for n in range(marked))
    return [*(start_state(n, 8) for n in range(ordinary)), *on_the_way]


def test_key_frames_come_as_often_as_any_start_state() -> None:
    stream = StartStateStream(states(5, 3), seed=7)
    assert Counter(stream[n].name for n in range(80)) == Counter({s.name: 10 for s in states(5, 3)})
    assert stream.left([]) == 8


def test_a_key_frame_with_no_decision_left_is_refused() -> None:
    with pytest.raises(ConfigError, match="begins after 6 decisions, but an episode ends after"):
        check_elapsed(states(1, 1, elapsed=6), 6)
    check_elapsed(states(1, 1, elapsed=2), 3)
