"""What counts as a sound episode, and what is said about one that is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.records import Episode, problem_with
from support.table_policy import episode


def sound(**changes: Any) -> Episode:
    return replace(episode(rows=(0, 1, 2), success_at=19, versions=(4, 3, 5)), **changes)


def test_a_sound_episode_has_no_problem() -> None:
    assert problem_with(sound()) is None


def test_an_episode_knows_its_outcome_and_its_oldest_decision() -> None:
    assert (sound().success, sound().oldest_version, sound().steps) == (True, 3, 20)
    failed = episode(success_at=-1)
    assert (failed.success, failed.steps) == (False, failed.rewards.size)


def test_a_video_of_eight_frames_per_decision_is_sound() -> None:
    assert problem_with(sound(video=np.zeros((24, 2, 2, 3), np.uint8))) is None


LOGPROBS = np.full((3, 8, 7), -1.0, np.float32)
TOKENS = np.zeros((3, 8, 7), np.int32)


def with_one(array: np.ndarray, value: float) -> np.ndarray:
    changed = array.copy()
    changed[1, 2, 3] = value
    return changed


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sample": {"tokens": TOKENS.astype(np.int64)}}, "tokens is int64"),
        ({"values": np.zeros((3, 1), np.float32)}, "values is float32[3, 1]"),
        ({"noise_seeds": np.zeros(2, np.int64)}, "noise_seeds has shape [2], expected N = 3"),
        ({"rewards": np.zeros((3, 7), np.float32)}, "rewards has shape [3, 7], expected C = 8"),
        ({"final_frame": np.zeros((4, 2, 3), np.uint8)}, "final_frame has shape [4, 2, 3], expected H = 2"),
        ({"video": np.zeros((23, 2, 2, 3), np.uint8)}, "3 decisions and 23 video frames"),
        ({"member": 2}, "member 2 of a group of 2"),
        ({"member": -1}, "member -1 of a group of 2"),
        ({"logprobs": with_one(LOGPROBS, np.nan)}, "finite"),
        ({"logprobs": with_one(LOGPROBS, -np.inf)}, "finite"),
        ({"logprobs": with_one(LOGPROBS, 1e-3)}, "at most 0"),
        ({"sample": {"tokens": with_one(TOKENS, 256)}}, "0..255"),
        ({"sample": {"tokens": with_one(TOKENS, -1)}}, "0..255"),
        ({"policy_versions": np.array([0, -1, 0])}, "negative"),
        ({"rewards": np.full((3, 8), np.nan, np.float32)}, "rewards must be finite"),
        ({"actions": with_one(LOGPROBS, np.inf)}, "actions must be finite"),
        ({"success_scores": np.full((3, 8), np.nan, np.float32)}, "success_scores must be finite"),
        ({"rewards": np.zeros((3, 8), np.float32)}, "no step of the last decision"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"top_k": -1}, "top_k -1"),
        ({"end_reason": "crashed"}, "end_reason is 'crashed'"),
    ],
)
def test_an_unsound_episode_is_told_what_is_wrong(changes: dict[str, Any], problem: str) -> None:
    assert problem in (problem_with(sound(**changes)) or "nothing")


def test_an_episode_without_decisions_is_unsound() -> None:
    arrays = ("frames", "logprobs", "values", "actions", "rewards", "success_scores")
    arrays += ("policy_versions", "noise_seeds")
    empty = {name: getattr(sound(), name)[:0] for name in arrays} | {"sample": {"tokens": TOKENS[:0]}}
    assert "0 decisions" in (problem_with(sound(**empty)) or "nothing")
