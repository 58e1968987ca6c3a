"""Start states with a pose of the hand: RLinf's files, ours, and old ones of ours."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.worlds.rlinf_start_states import load_trajectory
from asyncrl.worlds.start_states import load_start_states, save_start_states
from support.evac import start_state
from support.tiny_models import POSE

OTHER = [float(i) for i in range(8)]


def write_npy(path: Path, poses: list[dict[str, Any]]) -> None:
    frames = np.empty(len(poses), dtype=object)
    for i, pose in enumerate(poses):
        image = np.full((4, 4, 3), i, np.uint8)
        frames[i] = {"image": image, "delta_action": np.zeros(7, np.float32), "task": "Go.", **pose}
    np.save(path, frames)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"init_ee_pose": np.array(OTHER, np.float64)}, OTHER),
        ({"init_ee_pose": OTHER}, OTHER),
        ({"abs_action": np.array(OTHER, np.float32)}, OTHER),
        ({"init_ee_pose": np.array(OTHER), "abs_action": np.zeros(8)}, OTHER),
        ({"init_ee_pose": None, "abs_action": np.array(OTHER)}, OTHER),
        ({"init_ee_pose": np.zeros(7), "abs_action": np.array(OTHER)}, OTHER),
        ({}, None),
        ({"abs_action": np.zeros(16)}, None),
        ({"init_ee_pose": "here"}, None),
        ({"init_ee_pose": np.full(8, np.nan)}, None),
        ({"init_ee_pose": np.full(8, 1e300)}, None),
    ],
)
def test_a_pose_is_read_where_there_is_one(tmp_path: Path, said: dict, expected: list[float] | None) -> None:
    write_npy(tmp_path / "traj0.npy", [said])
    pose = load_trajectory(tmp_path / "traj0.npy").ee_pose
    if expected is None:
        assert pose is None
    else:
        assert pose is not None
        assert pose.dtype == np.float32
        assert pose.tolist() == expected


def test_with_a_context_the_pose_is_that_of_the_last_frame(tmp_path: Path) -> None:
    write_npy(tmp_path / "traj0_kir.npy", [{"init_ee_pose": np.full(8, i, np.float32)} for i in range(5)])
    pose = load_trajectory(tmp_path / "traj0_kir.npy").ee_pose
    assert pose is not None
    assert pose.tolist() == [4.0] * 8


def test_poses_survive_our_files(tmp_path: Path) -> None:
    states = [start_state(1), start_state(2, pose=None), start_state(3, pose=OTHER)]
    save_start_states(tmp_path / "a.h5", states)
    poses = [state.ee_pose for state in load_start_states(tmp_path / "a.h5")]
    assert poses[1] is None
    assert np.array_equal(poses[0], np.array(POSE, np.float32))
    assert np.array_equal(poses[2], np.array(OTHER, np.float32))


def test_files_without_poses_are_written_and_read_as_before(tmp_path: Path) -> None:
    states = [replace(start_state(i), ee_pose=None) for i in range(2)]
    save_start_states(tmp_path / "a.h5", states)
    with h5py.File(tmp_path / "a.h5") as file:
        assert set(file) == {"name", "task", "frame", "context_length"}
    assert [state.ee_pose for state in load_start_states(tmp_path / "a.h5")] == [None, None]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("ee_pose", lambda rows: rows[:, 1:], r"ee_pose is float32\[2, 7\], expected float32 \[2, 8\]"),
        ("ee_pose", lambda rows: np.zeros((3, 8), np.float32), r"float32\[3, 8\], expected float32 \[2, 8\]"),
        ("ee_pose", lambda rows: rows.astype(float), r"ee_pose is float64\[2, 8\], expected"),
        (
            "ee_pose",
            lambda rows: np.where(np.arange(8) == 3, np.float32("nan"), rows),
            "neither finite nor all",
        ),
        (
            "ee_pose",
            lambda rows: np.where(np.arange(8) == 3, np.float32("inf"), rows),
            "neither finite nor all",
        ),
        ("elapsed", lambda rows: [0, -1], "elapsed is below 0"),
        ("elapsed", lambda rows: [0.0, 1.0], r"elapsed is float64\[2\], expected int64 \[2\]"),
        ("elapsed", lambda rows: [[0], [1]], r"elapsed is int64\[2, 1\]"),
        ("name", lambda rows: rows[:1], r"a.h5: name is \|S7\[1\], expected S \[2\]\. Write it again"),
        ("name", lambda rows: rows[[0, 0]], "a name stands there twice"),
        ("name", lambda rows: [1, 2], r"name is int64\[2\]"),
        ("task", lambda rows: np.concatenate([rows, rows]), r"task is .*\[4\], expected S \[2\]"),
        ("context_length", lambda rows: rows[:1], r"context_length is int64\[1\], expected int64 \[2\]"),
        ("context_length", lambda rows: rows - 1, "context_length is neither 0 nor 4"),
        ("context_length", lambda rows: rows.astype(float), "context_length is float64"),
        ("context_actions", lambda rows: rows[:, 1:], r"context_actions is float32\[2, 3, 7\], expected"),
        ("context_actions", lambda rows: rows * np.float32("nan"), "context_actions are not all finite"),
        ("context_actions", lambda rows: rows.astype(int), "context_actions is int64"),
        ("context_frames", lambda rows: rows[1:], r"context_frames are uint8\[1, 4,"),
        ("frame", lambda rows: rows[1:], "context_frames are uint8"),
    ],
)
def test_damaged_start_states_are_refused(tmp_path: Path, name: str, change: Any, said: str) -> None:
    path = tmp_path / "a.h5"
    states = [start_state(number, context=4) for number in (1, 2)]
    save_start_states(path, [replace(state, elapsed=1) for state in states])
    with h5py.File(path, "a") as file:
        rows = file[name][:]
        del file[name]
        file[name] = change(rows)
    with pytest.raises(ConfigError, match=said):
        load_start_states(path)
