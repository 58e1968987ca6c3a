"""Advantages: literal numbers, slow formulas, groups that stay apart, and episodes of a simulator."""

import dataclasses
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.learner.advantages import (
    Estimates,
    GeneralizedAdvantage,
    GroupRelative,
    generalized_advantages,
    group_relative_advantages,
    moments_of_all,
    vtrace,
)
from asyncrl.learner.batches import Batch, batch_metrics, build_batch, group_outcome
from asyncrl.learner.corrections import NoCorrection
from asyncrl.learner.forward import PolicyForward
from asyncrl.learner.interface import OldPolicy
from asyncrl.learner.prepare import PreparedBatch, prepare_batch
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.recipe import build_recipe
from asyncrl.learner.update_metrics import MetricAccumulator
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics_system import SIGNAL_GROUPS
from asyncrl.records import EndReason, Episode
from asyncrl.replay.admission import problem_with
from asyncrl.replay.groups import has_no_signal
from support.episodes import make_episode
from support.slow_update import recipe
from support.table_policy import Evaluation, TableActorCritic, TablePolicy, episode


def by_definition(returns: list[float], group_size: int, spread: str) -> list[float]:
    out = []
    for start in range(0, len(returns), group_size):
        group = returns[start : start + group_size]
        for score in group:
            difference = score - statistics.fmean(group)
            among = {"group_std": group, "batch_std": returns}.get(spread)
            out.append(difference if among is None else difference / (statistics.stdev(among) + 1e-6))
    return out


@pytest.mark.parametrize("spread", ["group_std", "batch_std", "none"])
@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_group_advantages_match_the_definition(group_size: int, spread: str) -> None:
    returns = torch.rand(16, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor(by_definition(returns.tolist(), group_size, spread))
    actual = group_relative_advantages(returns, group_size, scale=spread)  # pyright: ignore
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("spread", ["group_std", "batch_std", "none"])
@given(score=st.floats(-10, 10, width=32), group_size=st.integers(2, 9))
def test_a_group_that_scored_all_the_same_gets_exactly_zero(spread, score, group_size) -> None:
    returns = torch.cat([torch.full((group_size,), score), torch.arange(group_size).float()])
    advantages = group_relative_advantages(returns, group_size, scale=spread)  # pyright: ignore
    assert advantages[:group_size].tolist() == [0.0] * group_size
    assert advantages[group_size:].abs().min() > 0 or group_size % 2


SHUFFLED = {
    "dense": np.linspace(0, 1, 64),
    "rewards and penalties": np.linspace(-1, 1, 64),
    "large": np.linspace(900, 1000, 256),
    "few": np.repeat([0.7, 0.0], [7, 249]),
}


@pytest.mark.parametrize("rewards", SHUFFLED.values(), ids=SHUFFLED)
@pytest.mark.parametrize("spread", ["group_std", "batch_std"])
def test_equal_rewards_in_another_order_are_equal_returns_everywhere(rewards, spread) -> None:
    rng, shape = np.random.default_rng(0), (len(rewards) // 8, 8)

    def group(more: float) -> list[Episode]:
        drawn = [rng.permutation(rewards).astype(np.float32).reshape(shape) for _ in range(8)]
        drawn[0][0, 0] += more
        made = [make_episode(0, m, versions=(0,) * shape[0], group_size=8) for m in range(8)]
        return [dataclasses.replace(x, rewards=row) for x, row in zip(made, drawn, strict=True)]

    settings = AlgorithmSettings(group_size=8, advantage_scale=spread)  # pyright: ignore
    advantages, correction = (GroupRelative(settings, CriticSettings()), NoCorrection(CorrectionSettings()))
    for more, differ in ((0.0, False), (0.001 * np.abs(rewards).sum(), True)):
        batch = build_batch([group(more)], version=0)
        found = advantages.estimate(batch, None, correction, LearnerRanks()).advantages
        assert bool(found.any()) is differ
        assert has_no_signal(group(more)) is not differ
        outcome = group_outcome(group(more))
        assert batch_metrics([outcome], 0)[SIGNAL_GROUPS] == differ
    returns = torch.tensor([x.total_reward for x in group(0.0)])
    if rewards.min() >= 0:
        assert not group_relative_advantages(returns, 8, scale=spread).any()  # pyright: ignore


def test_advantages_that_differ_by_a_rounding_are_not_normalised_to_full_size() -> None:
    batch = build_batch([[make_episode(0, m, versions=(0,) * 4) for m in range(2)]], version=0)
    rewards = 1000 + torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) * 1e-3
    estimator = GeneralizedAdvantage(AlgorithmSettings(), CriticSettings(gamma=0.0))
    old = OldPolicy(batch.behaviour_logprob, torch.zeros(8, 1), torch.zeros(2))
    for spread, largest in ((rewards, 0.0), (rewards + torch.arange(8.0)[:, None], 1.5)):
        found = estimator.estimate(
            dataclasses.replace(batch, rewards=spread),
            old,
            NoCorrection(CorrectionSettings()),
            LearnerRanks(),
        )
        assert found.advantages.abs().max().item() == pytest.approx(largest, abs=0.1)


def test_moments_of_all_ranks_are_those_of_torch_in_float64() -> None:
    values = torch.randn(12, generator=torch.Generator().manual_seed(1))
    mean, std = moments_of_all(values, LearnerRanks())
    assert mean.equal(values.double().mean().float())
    assert std.equal(values.double().std().float())
    assert moments_of_all(values[:0], LearnerRanks()) == (0, 0)
    assert moments_of_all(values[:1], LearnerRanks()) == (values[0], 0)


@pytest.mark.parametrize(("count", "group_size"), [(7, 2), (4, 1)])
def test_what_is_no_whole_number_of_groups_is_refused_with_its_shape(count: int, group_size: int) -> None:
    with pytest.raises(ValueError, match=rf"group_size={group_size}.*\({count},\)"):
        group_relative_advantages(torch.zeros(count), group_size)


def episodes(seed: int, lengths: tuple[int, ...] = (5, 1, 3)) -> dict[str, Tensor]:
    """Random rows of several lengths; what is masked holds large nonsense."""
    g = torch.Generator().manual_seed(seed)
    rows, longest = len(lengths), max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]

    def noise() -> Tensor:
        return torch.where(mask, torch.randn(rows, longest, generator=g, dtype=torch.float64), 1e6)

    return {
        "rewards": noise(),
        "values": noise(),
        "final_values": torch.randn(rows, generator=g, dtype=torch.float64),
        "mask": mask,
        "terminated": torch.arange(rows) % 2 == 0,
        "log_ratios": noise().clamp(max=3.0),
    }


def gae_by_sum(e: dict[str, Tensor], gamma: float, lam: float) -> list[list[float]]:
    """``A_t = sum over k of (gamma lambda)^k delta_{t+k}``, one episode after the other."""
    out = []
    for b, mask in enumerate(e["mask"]):
        n = int(mask.sum())
        rewards, values = e["rewards"][b].tolist()[:n], e["values"][b].tolist()[:n]
        after = [*values[1:], 0.0 if e["terminated"][b] else float(e["final_values"][b])]
        deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
        out.append([sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(n)])
    return out


def without_ratios(e: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in e.items() if name != "log_ratios"}


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("seed", range(3))
def test_gae_matches_the_sum_of_discounted_differences(seed: int, gamma: float, lam: float) -> None:
    e = episodes(seed)
    estimates = generalized_advantages(**without_ratios(e), gamma=gamma, lam=lam)
    for b, expected in enumerate(gae_by_sum(e, gamma, lam)):
        actual = estimates.advantages[b, : len(expected)]
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))
        targets = estimates.targets[b, : len(expected)]
        torch.testing.assert_close(targets, actual + e["values"][b, : len(expected)])
    assert estimates.advantages[~e["mask"]].abs().max() == 0


def vtrace_by_definition(
    e: dict[str, Tensor], gamma: float, lam: float
) -> list[tuple[list[float], list[float]]]:
    """``v_s = V_s + sum over t >= s of gamma^(t-s) (product of c_s .. c_{t-1}) delta_t`` (equation 1)."""
    out = []
    for b, mask in enumerate(e["mask"]):
        n = int(mask.sum())
        rewards, values = e["rewards"][b].tolist()[:n], e["values"][b].tolist()[:n]
        ratios = e["log_ratios"][b].exp().tolist()[:n]
        end = 0.0 if e["terminated"][b] else float(e["final_values"][b])
        after = [*values[1:], end]
        rho = [min(1.0, r) for r in ratios]
        c = [lam * r for r in rho]
        v = []
        for s in range(n):
            total, product = values[s], 1.0
            for t in range(s, n):
                total += gamma ** (t - s) * product * rho[t] * (rewards[t] + gamma * after[t] - values[t])
                product *= c[t]
            v.append(total)
        later = [lam * x + (1 - lam) * y for x, y in zip([*v[1:], end], after, strict=True)]
        pg = [rho[t] * (rewards[t] + gamma * later[t] - values[t]) for t in range(n)]
        out.append((pg, v))
    return out


@pytest.mark.parametrize("lam", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("seed", range(2))
def test_vtrace_matches_equation_one(seed: int, lam: float) -> None:
    e = episodes(seed)
    estimates = vtrace(**e, gamma=0.97, lam=lam)
    for b, (pg, v) in enumerate(vtrace_by_definition(e, 0.97, lam)):
        torch.testing.assert_close(estimates.advantages[b, : len(pg)], torch.tensor(pg, dtype=torch.float64))
        torch.testing.assert_close(estimates.targets[b, : len(v)], torch.tensor(v, dtype=torch.float64))


@given(order=st.permutations(range(3)), longer=st.integers(0, 3))
def test_rows_are_islands(order: list[int], longer: int) -> None:
    """Neither their order, nor padding, nor what the padding holds changes an episode's numbers."""
    e = episodes(6)
    straight = vtrace(**e, gamma=0.9, lam=0.8)

    def changed(name: str, value: Tensor) -> Tensor:
        if value.ndim == 2:
            value = torch.nn.functional.pad(value, (0, longer), value=0 if name == "mask" else -77.0)
        return value[order]

    shuffled = vtrace(**{name: changed(name, value) for name, value in e.items()}, gamma=0.9, lam=0.8)
    for name in Estimates._fields:
        assert torch.equal(getattr(shuffled, name)[:, :5], getattr(straight, name)[order])


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
