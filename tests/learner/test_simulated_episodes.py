"""What is learned from episodes of a simulator: dense rewards, three ends, and the last observation."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.learner.batches import Batch, batch_metrics, build_batch, group_outcome
from asyncrl.learner.forward import PolicyForward
from asyncrl.learner.prepare import PreparedBatch, prepare_batch
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.recipe import build_recipe
from asyncrl.learner.update_metrics import MetricAccumulator
from asyncrl.observability import metrics_training as m
from asyncrl.records import EndReason, Episode
from asyncrl.replay.admission import problem_with
from support.slow_update import recipe
from support.table_policy import Evaluation, TableActorCritic, TablePolicy, episode

GAMMA, LAM, STEPS = 0.9, 0.8, 11
CPU = torch.device("cpu")


def played(member: int, end: EndReason, *, rows: tuple[int, ...] = (0, 1), steps: int = STEPS) -> Episode:
    """Two decisions on table rows `rows`, `steps` steps with rewards at each, and a final frame of row 5."""
    made = episode(member=member, group_size=2, rows=rows)
    counted = np.arange(16) < steps
    rewards = np.random.default_rng([3, member]).normal(size=16)
    scores = np.zeros(16, np.float32)
    scores[steps - 1] = float(end == "success")
    final = np.zeros_like(made.final_frame)
    final[0, 0, 0] = 5
    return replace(
        made,
        world_version=-1,
        end_reason=end,
        steps_taken=steps,
        rewards=np.where(counted, rewards, 0).astype(np.float32).reshape(2, 8),
        success_scores=scores.reshape(2, 8),
        final_frame=final,
    )


def learned_from(
    groups: list[list[Episode]], policy: TablePolicy, **changes: Any
) -> tuple[Batch, PreparedBatch]:
    batch = build_batch(groups, version=0)
    config = recipe(
        **{"critic__normalize_advantages": False, "critic__gamma": GAMMA, "critic__lam": LAM, **changes}
    )
    chosen = build_recipe(config.algorithm, config.correction, config.critic)
    forward = PolicyForward(policy, LearnerRanks(), CPU, micro_batch=3)  # type: ignore[arg-type]
    return batch, prepare_batch(batch, chosen, forward, MetricAccumulator())


def test_dense_rewards_add_up_to_the_return_whatever_their_signs() -> None:
    group = [played(0, "truncated"), played(1, "terminated", steps=9)]
    batch = build_batch([group], version=0)
    for row, (made, steps) in enumerate(zip(group, (11, 9), strict=True)):
        total, flat = 0.0, made.rewards.reshape(-1).tolist()
        for step in range(steps):
            total += flat[step]
        assert batch.returns[row] == pytest.approx(total, abs=1e-6)
        assert int(batch.mask[batch.episode == row].sum()) == steps * 7
    assert batch.lengths.tolist() == [11, 9]
    metrics = batch_metrics([group_outcome(group)], version=0)
    assert metrics[m.SUCCESS_ONCE] == 0
    assert metrics[m.REWARD] == pytest.approx(float((batch.returns / torch.tensor([11, 9])).mean()), abs=1e-6)


@pytest.mark.parametrize("end", ["success", "terminated", "truncated"])
def test_the_bootstrap_at_the_end_by_hand(end: EndReason) -> None:
    """The next episode begins on rows 2 and 3, whose values must not appear anywhere."""
    policy = TableActorCritic(rows=8)
    known, neighbour = played(0, end), played(1, "truncated", rows=(2, 3))
    _, prepared = learned_from([[known, neighbour]], policy, algorithm__kind="ppo")
    first, second, final = (float(policy.table.detach()[row, 0]) for row in (0, 1, 5))
    flat = known.rewards.reshape(-1).astype(np.float64)
    reward_0, reward_1 = float(flat[:8].sum()), float(flat[8:STEPS].sum())
    after = final if end == "truncated" else 0.0
    advantage_1 = reward_1 + GAMMA * after - second
    advantage_0 = reward_0 + GAMMA * second - first + GAMMA * LAM * advantage_1
    found = prepared.estimates.advantages[:2, 0, 0].tolist()
    assert found == pytest.approx([advantage_0, advantage_1], abs=1e-6)
    assert prepared.estimates.targets is not None
    targets = prepared.estimates.targets[:2, 0].tolist()
    assert targets == pytest.approx([advantage_0 + first, advantage_1 + second], abs=1e-6)
    assert abs(final) > 1e-3, "else a missing bootstrap would not be noticed"


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_with_one_value_per_step_the_bootstrap_follows_the_last_step_taken(end: EndReason) -> None:
    policy = TableActorCritic(rows=8, width=8)
    known, neighbour = played(0, end), played(1, "truncated", rows=(2, 3))
    _, prepared = learned_from(
        [[known, neighbour]], policy, algorithm__kind="ppo", critic__level="action", algorithm__level="action"
    )
    values = [float(policy.table.detach()[row, step]) for row in (0, 1) for step in range(8)][:STEPS]
    rewards = known.rewards.reshape(-1).tolist()[:STEPS]
    after = float(policy.table.detach()[5, 0]) if end == "truncated" else 0.0
    advantages, later = [0.0] * STEPS, 0.0
    for step in reversed(range(STEPS)):
        following = values[step + 1] if step + 1 < STEPS else after
        later = rewards[step] + GAMMA * following - values[step] + GAMMA * LAM * later
        advantages[step] = later
    found = prepared.estimates.advantages[:2, :, 0].reshape(-1).tolist()
    assert found[:STEPS] == pytest.approx(advantages, abs=1e-6)
    assert found[STEPS:] == [0.0] * (16 - STEPS)


class SeesAll(TableActorCritic):
    """Its values are what the second camera and the robot's state say; it keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__(rows=8)
        self.shown: list[tuple[tuple[int, ...], np.ndarray]] = []

    def preprocess(self, frames: np.ndarray, tasks: list[str], proprio: np.ndarray | None = None) -> Any:
        assert proprio is not None
        assert frames.shape[1] == 2
        self.shown.append((frames.shape, proprio))
        rows = torch.from_numpy(frames[:, 0, 0, 0, 0].astype(np.int64))
        seen = frames[:, 1, 0, 0, 0].astype(np.float32) + proprio.sum(axis=1)
        return torch.stack([rows.float(), torch.from_numpy(seen)], dim=1)

    def values(self, inputs: Tensor) -> Tensor:
        return inputs[:, 1:]

    def evaluate(self, inputs: Tensor, sample: Any, sampling: Any, **through: Any) -> Any:
        found = TablePolicy.evaluate(self, inputs[:, 0].long(), sample, sampling)
        return Evaluation(found.logprob, found.entropy, self.values(inputs))


def with_senses(made: Episode, seen: tuple[int, ...], states: list[float]) -> Episode:
    """A second camera of constant pictures, and two numbers of state; the last of each is the final one."""
    pictures = np.stack([np.full((1, 2, 2, 3), number, np.uint8) for number in seen])
    numbers = np.array(states, np.float32)[:, None] * np.array([1.0, 0.5], np.float32)
    return replace(
        made,
        more_frames=pictures[:-1],
        final_more_frames=pictures[-1],
        states=numbers[:-1],
        final_state=numbers[-1],
    )


def test_a_policy_sees_all_cameras_and_the_state_also_in_the_observation_before_the_reset() -> None:
    policy = SeesAll()
    known = with_senses(played(0, "truncated"), (1, 2, 3), [0.1, 0.2, 0.4])
    neighbour = with_senses(played(1, "terminated"), (7, 8, 9), [0.7, 0.8, 0.9])
    assert problem_with(known) is None
    batch, prepared = learned_from([[known, neighbour]], policy, algorithm__kind="ppo")
    value = [1 + 0.15, 2 + 0.3, 3 + 0.6]  # The camera's number, and 1.5 times the first number of the state.
    assert batch.final_more_frames is not None
    assert batch.final_more_frames[:, 0, 0, 0, 0].tolist() == [3, 9]
    reward_1 = float(known.rewards.reshape(-1)[8:STEPS].sum())
    expected = reward_1 + GAMMA * value[2] - value[1]
    assert float(prepared.estimates.advantages[1, 0, 0]) == pytest.approx(expected, abs=1e-6)
    assert {shape[1:] for shape, _ in policy.shown} == {(2, 2, 2, 3)}
    last = np.concatenate([states for shape, states in policy.shown[-1:]])
    np.testing.assert_allclose(last, [[0.4, 0.2]], rtol=1e-6)  # The other one was not cut off.
