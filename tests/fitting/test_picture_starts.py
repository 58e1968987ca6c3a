"""Start states from pictures, instructions and key frames, and words that a policy cannot read."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from asyncrl import cli
from asyncrl.commands.fit import main as fit
from asyncrl.errors import ConfigError
from asyncrl.fitting.recording_files import Recordings
from asyncrl.fitting.settings import DataSetSettings
from asyncrl.fitting.sources import load_recordings
from asyncrl.fitting.starts import keyframe_states, keyframes, picture_starts
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.records import StartState
from asyncrl.rewards.resnet import ResNetReward, RewardConfig, RewardNetwork, save_reward
from asyncrl.storage.assets import world_folder
from asyncrl.worlds.start_states import StartStateStream, check_elapsed, load_start_states
from support.recorded import recorded_spec, write_recorded
from support.tiny_models import start_state
from support.whole_runs import refused


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, suffix in enumerate(("png", "bmp")):
        Image.new("RGB", (64, 64), (10 + number, 20, 30)).save(folder / f"view{number}.{suffix}")
    (folder / "notes.md").write_text("no picture")
    return folder


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "i.txt",
            "Fold the towel.\n\nwipe the window\n",
            {
                ("view0.png/0", "fold the towel"),
                ("view0.png/1", "wipe the window"),
                ("view1.bmp/0", "fold the towel"),
                ("view1.bmp/1", "wipe the window"),
            },
        ),
        (
            "i.csv",
            'picture,instruction\nview1.bmp,"fold, then wipe"\nview0.png,wipe\n',
            {("view0.png/0", "wipe"), ("view1.bmp/0", "fold, then wipe")},
        ),
    ],
)
def test_pictures_and_instructions_become_start_states(tmp_path, pictures, name, content, expected) -> None:
    (tmp_path / name).write_text(content)
    out, flags = tmp_path / "starts.h5", ["--instructions", str(tmp_path / name)]
    fit(["starts", "--pictures", str(pictures), *flags, "--out", str(out), "--dataset.image-size", "32"])
    states = load_start_states(out)
    assert {(state.name, state.task) for state in states} == expected
    for state in states:
        assert state.frame.shape == (32, 32, 3)
        assert state.frame[0, 0].tolist() == [10 + int(state.name[4]), 20, 30]
        assert (len(state.context_frames), state.ee_pose) == (0, None)


def test_endings_in_capitals_are_read_and_other_files_are_named(tmp_path, pictures: Path, caplog) -> None:
    for old, new in (("view0.png", "view0.PNG"), ("view1.bmp", "view1.Bmp")):
        (pictures / old).rename(pictures / new)
    for name in ("view2.tiff", ".DS_Store"):
        (pictures / name).write_bytes(b"")
    (tmp_path / "i.txt").write_text("fold\n")
    states = picture_starts(pictures, tmp_path / "i.txt", DataSetSettings(), 9)
    assert [state.name for state in states] == ["view0.PNG/0", "view1.Bmp/0"]
    assert "notes.md, view2.tiff (pictures end in .png" in caplog.text
    assert "DS_Store" not in caplog.text


def test_fewer_start_states_are_spread_over_all_pictures(tmp_path: Path, pictures: Path) -> None:
    (tmp_path / "i.txt").write_text("a\nb\nc\n")
    states = picture_starts(pictures, tmp_path / "i.txt", DataSetSettings(), 2)
    assert [(state.name, state.task) for state in states] == [("view0.png/0", "a"), ("view1.bmp/0", "c")]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("i.txt", "\n", "has no instruction"),
        ("i.csv", "file,text\nview0.png,x\n", "its first line is not picture,instruction"),
        ("i.csv", "picture,instruction\nview0.png,\n", "instruction '' is no text like"),
        ("i.csv", "picture,instruction\nview9.png,x\n", r"names view9.png, which is not in the folder"),
        ("i.csv", "picture,instruction\nview0.png,x\nview0.png,X.\n", "twice for a picture"),
    ],
)
def test_instructions_that_cannot_be_used_are_refused(tmp_path, pictures, name, content, said) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        picture_starts(pictures, tmp_path / name, DataSetSettings(), 9)


def test_pictures_that_cannot_be_used_are_refused(tmp_path: Path, pictures: Path) -> None:
    (tmp_path / "i.txt").write_text("fold\n")
    with pytest.raises(ConfigError, match="is no folder with pictures"):
        picture_starts(tmp_path, tmp_path / "i.txt", DataSetSettings(), 9)
    Image.new("RGB", (48, 48)).save(pictures / "view2.png")
    with pytest.raises(ConfigError, match=r"view2.png has 48 x 48 pixels, but view0.png"):
        picture_starts(pictures, tmp_path / "i.txt", DataSetSettings(), 9)
    assert len(picture_starts(pictures, tmp_path / "i.txt", DataSetSettings(image_size=16), 9)) == 3
    Image.new("RGB", (48, 40)).save(pictures / "view2.png")
    with pytest.raises(ConfigError, match=r"view2.png has 40 x 48 pixels.* square pictures"):
        picture_starts(pictures, tmp_path / "i.txt", DataSetSettings(), 9)
    (pictures / "view2.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    with pytest.raises(ConfigError, match=r"view2.png: a picture cannot be read"):
        picture_starts(pictures, tmp_path / "i.txt", DataSetSettings(), 9)


@pytest.mark.parametrize("flags", [[], ["--data", "a", "--pictures", "b"], ["--pictures", "b"]])
def test_start_states_come_from_recordings_or_from_pictures(flags: list[str], tmp_path, capsys) -> None:
    assert "--pictures" in refused(capsys, "fit", ["starts", *flags, "--out", str(tmp_path / "x.h5")])


def test_a_refined_policy_must_know_the_words_of_the_recordings(tmp_path, capsys) -> None:
    policy = tmp_path / "policy"
    OpenVLAOFTPolicy(OpenVLAOFTConfig.tiny(llm_layers=1, image_size=32, patch_size=4)).save(policy)
    write_recorded(tmp_path / "data", recorded_spec(32, tasks=("fold the towel",)), (17,))
    flags = ["--data", str(tmp_path / "data"), "--refine", str(policy), "--out", str(tmp_path / "out")]
    steps = ["--steps", "1", "--batch", "1", "--device", "cpu"]
    assert "'fold', 'towel'" in refused(capsys, "fit", ["policy", *flags, *steps])
    assert not (tmp_path / "out").exists()


def test_a_run_refuses_start_states_whose_instructions_the_policy_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pictures: Path
) -> None:
    (tmp_path / "i.txt").write_text("unplug the charger\n")
    starts = tmp_path / "starts.h5"
    flags = ["--pictures", str(pictures), "--instructions", str(tmp_path / "i.txt")]
    fit(["starts", *flags, "--out", str(starts)])
    run, world = tmp_path / "run", tmp_path / "world"
    shutil.copytree(world_folder("tabletop"), world)
    judge = RewardConfig.tiny(("unplug the charger",))
    save_reward(world, ResNetReward(RewardNetwork(judge), judge))
    flags = ["--world", str(world), "--start-states", str(starts), "--run-dir", str(run)]
    said = refused(capsys, "train", [*flags, "--updates", "1", "--inline", "--device", "cpu"])
    assert "'unplug', 'charger'" in said
    assert np.size(list(run.glob("*"))) == 0


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
