"""What counts as a sound episode, and what is said about one that is not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.episode_layout import episode_arrays, version_of
from asyncrl.records import EndReason, Episode
from asyncrl.replay.admission import problem_with
from support.episodes import make_episode, simulated, with_chain
from support.table_policy import episode


def sound(**changes: Any) -> Episode:
    return replace(episode(rows=(0, 1, 2), success_at=19, versions=(4, 3, 5)), **changes)


def test_an_episode_knows_its_outcome_and_its_oldest_decision() -> None:
    assert (sound().success, sound().oldest_version, sound().steps) == (True, 3, 20)
    failed = episode(success_at=-1)
    assert (failed.success, failed.steps) == (False, failed.rewards.size)


def test_an_episode_with_or_without_a_video_is_sound() -> None:
    assert problem_with(sound()) is None
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
        ({"values": np.zeros((3, 1), np.float32)}, "values has shape [3, 1]"),
        ({"noise_seeds": np.zeros(2, np.int64)}, "noise_seeds has shape [2], expected N = 3"),
        ({"rewards": np.zeros((3, 7), np.float32)}, "rewards has shape [3, 7], expected C = 8"),
        ({"final_frame": np.zeros((4, 2, 3), np.uint8)}, "final_frame has shape [4, 2, 3], expected H = 2"),
        ({"video": np.zeros((23, 2, 2, 3), np.uint8)}, "3 decisions and 23 video frames"),
        ({"member": 2}, "member 2 of a group of 2"),
        ({"logprobs": with_one(LOGPROBS, np.nan)}, "finite"),
        ({"logprobs": with_one(LOGPROBS, 1e-3)}, "at most 0"),
        ({"sample": {"tokens": with_one(TOKENS, 256)}}, "0..255"),
        ({"sample": {"tokens": with_one(TOKENS, -1)}}, "0..255"),
        ({"policy_versions": np.array([0, -1, 0])}, "negative"),
        ({"rewards": np.full((3, 8), np.nan, np.float32)}, "rewards holds a number that is not finite"),
        ({"actions": with_one(LOGPROBS, np.inf)}, "actions holds a number that is not finite"),
        ({"success_scores": np.full((3, 8), np.nan, np.float32)}, "success_scores are probabilities"),
        ({"rewards": np.zeros((3, 8), np.float32)}, "no step of the last decision"),
        ({"temperature": float("nan")}, "temperature nan"),
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


@pytest.mark.parametrize("end", ["success", "terminated", "truncated"])
@pytest.mark.parametrize("steps", [9, 12, 16])
def test_a_simulator_says_how_many_steps_count_whatever_the_rewards_are(end: EndReason, steps: int) -> None:
    played = simulated(make_episode(video=True), steps=steps, end=end)
    assert problem_with(played) is None
    assert (played.steps, played.success, version_of(played)) == (steps, end == "success", 3)
    by_hand = sum(float(x) for x in played.rewards.reshape(-1)[:steps])
    assert played.total_reward == pytest.approx(by_hand, abs=1e-5)


def test_what_tells_episodes_apart_is_what_is_said_not_what_could_be() -> None:
    assert version_of(sound()) == 1
    assert version_of(with_chain(make_episode())) == 2
    assert version_of(replace(sound(), steps_taken=20)) == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"steps_taken": 8}, "8 steps were taken in 2 decisions of 8"),
        ({"steps_taken": -2}, "-2 steps were taken"),
        ({"steps_taken": -1}, "belongs to episodes that say how many steps"),
        ({"steps_taken": 11}, "rewards behind the step"),
        ({"video": np.zeros((16, 4, 4, 3), np.uint8)}, "16 video frames"),
        ({"final_state": None}, "states and final_state belong together"),
        ({"more_frames": None}, "more_frames and final_more_frames belong together"),
        ({"more_frames": np.zeros((2, 2, 4, 4, 3), np.uint8)}, "final_more_frames has shape [1, 4, 4, 3]"),
        ({"states": np.full((2, 3), np.nan, np.float32)}, "states holds a number that is not finite"),
        ({"final_state": np.full(3, np.inf, np.float32)}, "final_state holds a number that is not finite"),
        ({"sample": {"states": np.zeros((2, 3), np.float32)}}, "cannot be the name of a sample's array"),
    ],
)
def test_an_unsound_episode_of_a_simulator_is_told_what_is_wrong(changes, problem) -> None:
    assert problem in (problem_with(replace(simulated(make_episode()), **changes)) or "nothing")


def test_only_what_counts_its_steps_is_terminated_or_has_states() -> None:
    assert "how many steps" in (problem_with(sound(end_reason="terminated")) or "nothing")
    states = {"states": np.zeros((3, 2), np.float32), "final_state": np.zeros(2, np.float32)}
    assert "how many steps" in (problem_with(sound(**states)) or "nothing")


def test_a_policy_whose_sample_is_called_like_an_optional_array_is_still_read() -> None:
    named = sound(sample={"states": np.zeros((3, 2), np.float32)})
    assert problem_with(named) is None
    assert list(episode_arrays(named))[:2] == ["frames", "states"]
