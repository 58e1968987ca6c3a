"""The range that actions are scaled to, and the files that say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import CheckpointError
from asyncrl.worlds.opensora.files import ActionRange, read_action_range
from asyncrl.worlds.opensora.world import normalise

LOW = [-0.7, -0.6, -0.9, -0.1, -0.2, -0.3, 0.0]
HIGH = [0.9, 0.8, 0.7, 0.2, 0.1, 0.4, 1.0]


def write(folder: Path, content: Any) -> Path:
    (folder / "dataset_statistics.json").write_text(json.dumps(content))
    return folder


def entry(**changes: Any) -> dict[str, Any]:
    return {"action": {"q01": LOW, "q99": HIGH, "mask": [True] * 6 + [False], "mean": [0] * 7, **changes}}


def test_percentiles_become_one_and_nothing_is_clipped_not_even_the_gripper() -> None:
    actions = torch.randn(3, 8, 7, generator=torch.Generator().manual_seed(0))
    low, high = ActionRange(low=tuple(LOW), high=tuple(HIGH)).tensors(torch.device("cpu"))
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
    assert read_action_range(write(tmp_path, content)) == ActionRange(low=tuple(LOW), high=tuple(HIGH))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    ends = ActionRange(low=tuple(LOW), high=tuple(HIGH))
    ends.write(tmp_path)
    assert read_action_range(tmp_path) == ends


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"b_spatial": entry(), "a_object": entry()}, "one data set with q01 and q99.*too many values"),
        ({"libero": {"proprio": {}}}, "one data set.*not enough values"),
        ({}, "one data set.*not enough values"),
        ({"action": {"q01": LOW}}, "7 finite numbers each.*'q99'"),
        (entry(q01=LOW[:6]), "7 finite numbers each.*longer"),
        (entry(q99=["wide", *HIGH[1:]]), "7 finite numbers each"),
        (entry(q99=[*HIGH[:2], LOW[2], *HIGH[3:]]), "q01 below q99; it does not"),
        ([1], r"is not JSON \(it holds a list, expected a dict\)"),
    ],
)
def test_wrong_statistics_are_refused_by_file_and_reason(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"dataset_statistics\.json.*{words}"):
        read_action_range(write(tmp_path, content))


def test_missing_statistics_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"dataset_statistics\.json is missing\. Copy the one"):
        read_action_range(tmp_path)
