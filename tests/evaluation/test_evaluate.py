"""Counting successes in the true simulator, with a pool that is decided by the seeds alone."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.evaluation.evaluate import HELD_OUT, SuccessRate, evaluate, evaluation_seeds, summarise
from asyncrl.records import DUMMY_ACTION
from asyncrl.seeds import simulated_sampling_seed
from asyncrl.simulators.rollout import SimulatedEpisode, rollout

TASKS = ["put a on b", "put c on d"]


class CountingPool:
    """Seed s has task s mod 2 and is solved at step s mod 100 (never when 0); pixels hold the steps made."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.seed: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.log: list[tuple[list[int], list[int]]] = []
        """Places and seeds of every reset."""

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        self.log.append((list(indices), list(seeds)))
        for place, seed in zip(indices, seeds, strict=True):
            self.seed[place], self.steps[place] = seed, 0
        return np.zeros((len(indices), 2, 2, 3), np.uint8), [TASKS[seed % 2] for seed in seeds]

    def step_chunk(self, indices: Sequence[int], actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chunk = actions.shape[1]
        assert actions.shape == (len(indices), chunk, 7)
        frames = np.zeros((len(indices), chunk, 2, 2, 3), np.uint8)
        success = np.zeros((len(indices), chunk), bool)
        for row, place in enumerate(indices):
            made = self.steps[place] + np.arange(1, chunk + 1)
            frames[row] = made[:, None, None, None]
            success[row] = made == self.seed[place] % 100
            self.steps[place] += chunk
        return frames, success


def act(frames: np.ndarray, tasks: list[str], seeds: list[int]) -> np.ndarray:
    """Actions that hold the first pixel of what was seen."""
    assert len(frames) == len(tasks) == len(seeds)
    return np.broadcast_to(frames[:, :1, 0, 0, None], (len(frames), 8, 7)).astype(np.float32)


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (128, 256, 0.4392, 0.5608)],
)
def test_wilson_intervals_are_the_published_ones(
    successes: int, episodes: int, low: float, high: float
) -> None:
    rate = SuccessRate.of(successes, episodes)
    assert rate.rate == successes / episodes
    assert (rate.low, rate.high) == pytest.approx((low, high), abs=5e-5)


def test_no_episodes_say_nothing() -> None:
    rate = SuccessRate.of(0, 0)
    assert math.isnan(rate.rate)
    assert (rate.low, rate.high) == (0.0, 1.0)


def test_a_rate_prints_with_its_interval() -> None:
    assert str(SuccessRate.of(8, 10)) == " 80.0%  [49.0%, 94.3%]  8/10"


def test_evaluations_own_their_seeds() -> None:
    first, second = evaluation_seeds(0, 100_000), evaluation_seeds(1, 100_000)
    assert min(first) == HELD_OUT == 1_000_000
    assert not set(first) & set(second)
    assert evaluation_seeds(0, 3) == [1_000_000, 1_000_001, 1_000_002]
    assert evaluation_seeds(2, 2) == [1_200_000, 1_200_001]


def test_recordings_cannot_reach_held_out_seeds(tmp_path) -> None:
    from asyncrl.commands.collect import CollectConfig

    CollectConfig(out=tmp_path, seed=HELD_OUT - 2, episodes=2)
    with pytest.raises(ConfigError, match="held-out seeds"):
        CollectConfig(out=tmp_path, seed=HELD_OUT - 2, episodes=3)


@pytest.mark.parametrize(("seed", "episodes"), [(-1, 5), (0, 0), (0, 100_001)])
def test_impossible_numbers_of_episodes_are_refused(seed: int, episodes: int) -> None:
    with pytest.raises(ConfigError, match="--episodes"):
        evaluation_seeds(seed, episodes)


def test_an_episode_ends_with_the_decision_that_solves_it_or_the_last_one() -> None:
    seeds = [101, 108, 109, 100]  # solved at step 1, 8, 9, never
    played = {e.seed: e for e in rollout(CountingPool(4), act, seeds, max_decisions=3)}
    assert {seed: len(e.frames) for seed, e in played.items()} == {101: 9, 108: 9, 109: 17, 100: 25}
    assert {seed: np.flatnonzero(e.success).tolist() for seed, e in played.items()} == {
        101: [1],
        108: [8],
        109: [9],
        100: [],
    }


def test_action_i_made_frame_i() -> None:
    (episode,) = rollout(CountingPool(1), act, [100], max_decisions=2)
    assert episode.frames[:, 0, 0, 0].tolist() == list(range(17))
    np.testing.assert_array_equal(episode.actions[0], DUMMY_ACTION)
    assert episode.actions[1:9].max() == 0  # decided on frame 0
    assert (episode.actions[9:17] == 8).all()  # decided on frame 8


@pytest.mark.parametrize(
    ("chunk", "lengths"), [(1, {101: 2, 109: 10, 100: 25}), (5, {101: 6, 109: 11, 100: 26})]
)
def test_a_policy_of_another_chunk_gets_as_many_steps(chunk: int, lengths: dict[int, int]) -> None:
    def short(frames: np.ndarray, tasks: list[str], seeds: list[int]) -> np.ndarray:
        return act(frames, tasks, seeds)[:, :chunk]

    played = {e.seed: e for e in rollout(CountingPool(2), short, list(lengths), max_decisions=3)}
    assert {seed: len(e.frames) for seed, e in played.items()} == lengths
    for episode in played.values():
        assert len(episode.actions) == len(episode.success) == len(episode.frames)
        decided_on = [0] + [(step - 1) // chunk * chunk for step in range(1, len(episode.frames))]
        assert episode.actions[1:, 0].tolist() == decided_on[1:]


def test_a_place_is_refilled_as_soon_as_it_is_free() -> None:
    pool = CountingPool(2)
    order = [e.seed for e in rollout(pool, act, [100, 101, 102, 116, 103], max_decisions=3)]
    assert pool.log == [([0, 1], [100, 101]), ([1], [102]), ([1], [116]), ([0], [103])]
    assert sorted(order) == [100, 101, 102, 103, 116]
    assert order[:2] == [101, 102]


def test_sampling_seeds_differ_between_episodes_and_decisions() -> None:
    seeds = {simulated_sampling_seed(seed, n) for seed in evaluation_seeds(0, 200) for n in range(6)}
    assert len(seeds) == 200 * 6
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_an_evaluation_counts_by_task_and_does_not_depend_on_the_places() -> None:
    one, played = evaluate(CountingPool(1), act, episodes=100, seed=0, max_decisions=2)
    many, again = evaluate(CountingPool(7), act, episodes=100, seed=0, max_decisions=2)
    assert one == many
    assert [e.seed for e in played] == [e.seed for e in again] == evaluation_seeds(0, 100)
    # Held-out seed 1000000 + i is solved at step i; 16 steps are allowed.
    assert (one.overall.successes, one.overall.episodes) == (16, 100)
    assert {task: rate.successes for task, rate in one.by_task.items()} == {TASKS[0]: 8, TASKS[1]: 8}
    assert one.mean_steps == 8.5


def test_without_a_success_there_are_no_steps_to_average() -> None:
    failed = SimulatedEpisode(
        seed=1,
        task="t",
        frames=np.zeros((9, 2, 2, 3), np.uint8),
        actions=np.zeros((9, 7), np.float32),
        success=np.zeros(9, bool),
    )
    assert math.isnan(summarise([failed]).mean_steps)


def test_a_result_is_plain_values() -> None:
    result, _ = evaluate(CountingPool(3), act, episodes=10, seed=0, max_decisions=2)
    read = json.loads(json.dumps(result.as_dict()))
    assert read["overall"]["episodes"] == 10
    assert set(read["by_task"]) == set(TASKS)
