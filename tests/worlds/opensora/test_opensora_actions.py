"""The range that actions are scaled to, and the files that say it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import CheckpointError
from asyncrl.records import Bounds
from asyncrl.worlds.opensora.files import ends_on, read_action_range
from asyncrl.worlds.opensora.world import normalise

LOW = [-0.7, -0.6, -0.9, -0.1, -0.2, -0.3, 0.0]
HIGH = [0.9, 0.8, 0.7, 0.2, 0.1, 0.4, 1.0]
ENDS = Bounds(q01=tuple(LOW), q99=tuple(HIGH), mask=(True,) * 7)


def write(folder: Path, content: Any) -> Path:
    (folder / "dataset_statistics.json").write_text(json.dumps(content))
    return folder


def entry(**changes: Any) -> dict[str, Any]:
    return {"action": {"q01": LOW, "q99": HIGH, "mask": [True] * 6 + [False], "mean": [0] * 7, **changes}}


def test_percentiles_become_one_and_nothing_is_clipped_not_even_the_gripper() -> None:
    actions = torch.randn(3, 8, 7, generator=torch.Generator().manual_seed(0))
    low, high = ends_on(ENDS, torch.device("cpu"))
    scaled = normalise(actions, low, high)
    for i in range(3):
        for j in range(8):
            for k in range(7):
                expected = 2 * (actions[i, j, k].item() - LOW[k]) / (HIGH[k] - LOW[k]) - 1
                assert scaled[i, j, k].item() == pytest.approx(expected, abs=1e-5)
    assert scaled.abs().max() > 2
    torch.testing.assert_close(
        normalise(torch.tensor([LOW, HIGH]), low, high)[:, 6], torch.tensor([-1.0, 1.0])
    )


@pytest.mark.parametrize("nested", [False, True])
def test_both_published_forms_are_read(tmp_path: Path, nested: bool) -> None:
    content = {"libero_spatial_train": {**entry(), "num_trajectories": 3}} if nested else entry()
    assert read_action_range(write(tmp_path, content)) == ENDS


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"b_spatial": entry(), "a_object": entry()}, "one data set with q01 and q99.*too many values"),
        ({"libero": {"proprio": {}}}, "one data set.*not enough values"),
        ({}, "one data set.*not enough values"),
        (entry(q01=LOW[:6]), "7 finite numbers each.*have 6, 7 and 7 numbers"),
        ([1], r"is not JSON \(it holds a list, expected a dict\)"),
    ],
)
def test_wrong_statistics_are_refused_by_file_and_reason(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"dataset_statistics\.json.*{words}"):
        read_action_range(write(tmp_path, content))


def test_missing_statistics_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"dataset_statistics\.json is missing\. Copy the one"):
        read_action_range(tmp_path)
