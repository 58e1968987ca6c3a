"""Verdicts of a world: what training would reward, against the truth, counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.fitting.loading import load_recordings
from asyncrl.pace.verdicts import Verdicts, verdicts
from support.broken_worlds import SoundWorld
from support.recorded import recorded_spec, write_recorded


class ByTask:
    """Calls the `frames`-th frame of a decision a success, in episodes of some tasks."""

    def __init__(self, tasks: Sequence[str], frame: int) -> None:
        self.tasks, self.frame = tasks, frame

    def score(self, frames: Tensor, tasks: Sequence[str]) -> Tensor:
        scores = torch.zeros(frames.shape[:2])
        for row, task in enumerate(tasks):
            if task in self.tasks and frames.shape[1] > self.frame:
                scores[row, self.frame] = 0.9
        return scores


@pytest.fixture
def recordings(tmp_path: Path):
    size = SoundWorld().image_size
    spec = recorded_spec(size, tasks=("open", "push", "turn"))
    write_recorded(tmp_path, spec, (17, 17, 9, 25, 17, 9))  # Odd ones are solved.
    return load_recordings([tmp_path])


@pytest.mark.parametrize(
    ("judge", "success_frames", "judged"),
    [
        (ByTask(("open",), 3), 1, [True, False, False, True, False, False]),
        (ByTask(("open", "push"), 9), 1, [True, True, False, True, True, False]),  # Two of 9 frames lack it.
        (ByTask(("open", "push", "turn"), 7), "last", [True] * 6),
        (ByTask(("open", "push", "turn"), 6), "last", [False] * 6),
    ],
)
def test_wrong_and_false_verdicts_are_counted(
    recordings, judge: Any, success_frames: Any, judged: list[bool]
) -> None:
    found = verdicts(SoundWorld(), judge, recordings, threshold=0.7, success_frames=success_frames)
    solved = [False, True, False, True, False, True]
    assert (found.judged.tolist(), found.solved.tolist()) == (judged, solved)
    assert found.wrong == sum(a != b for a, b in zip(judged, solved, strict=True))
    assert found.false == sum(a and not b for a, b in zip(judged, solved, strict=True))


def test_nothing_is_wrong_where_all_agree() -> None:
    both = np.array([True, False])
    assert (Verdicts(judged=both, solved=both).wrong, Verdicts(judged=both, solved=both).false) == (0, 0)
