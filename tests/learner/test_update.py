"""One update: gradients and steps against `slow_update`, invariances, the guard, and what is reported."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.config.run import TrainConfig
from asyncrl.launch.build import build_update
from asyncrl.learner.advantages import group_relative_advantages
from asyncrl.learner.batches import Batch, build_batch
from asyncrl.learner.forward import Reference
from asyncrl.learner.prepare import split_minibatches
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import LAG_RANGES
from support.slow_update import OUTCOMES, Table, name_of, recipe, slow_loss, stale_batch
from support.table_policy import TableActorCritic, TablePolicy, groups_of


def policy_for(config: TrainConfig) -> TablePolicy:
    if config.algorithm.kind == "grpo":
        return TablePolicy(rows=8)
    return TableActorCritic(rows=8, width=8 if config.critic.level == "action" else 1)


def gradients(
    policy: TablePolicy, batch: Batch, config: TrainConfig, **more: Any
) -> tuple[Tensor, Tensor | None]:
    build_update(config, policy, **more)(batch)
    assert policy.logits.grad is not None
    return policy.logits.grad, policy.table.grad if isinstance(policy, TableActorCritic) else None


GRPO = [
    {},
    {"correction__kind": "none"},
    {"correction__kind": "naive"},
    {"correction__kind": "tis", "correction__max_weight": 1.1, "correction__min_weight": 0.9},
    {"correction__kind": "mis", "correction__max_weight": 1.2, "correction__min_weight": 0.8},
    {"correction__kind": "decoupled", "correction__max_weight": 1.2},
    {"correction__level": "decision", "correction__geometric": True},
    {"correction__level": "episode", "correction__max_weight": 5.0},
    {"correction__level": "episode", "correction__geometric": True},
    {"algorithm__level": "action"},
    {"algorithm__level": "decision", "correction__max_weight": 5.0},
    {"correction__trust_region": 0.0},
    {"correction__trust_region": 0.001},
    {"correction__kind": "none", "correction__trust_region": 0.0005, "algorithm__level": "decision"},
    {"correction__kind": "naive", "correction__trust_region": 0.001, "algorithm__level": "action"},
    {"algorithm__dual_clip": 0.0, "algorithm__level": "action", "correction__kind": "naive"},
    {"algorithm__level": "action", "correction__kind": "naive", "algorithm__dual_clip": 1.5},
    {"algorithm__objective": "cispo", "correction__kind": "naive"},
    {"algorithm__objective": "cispo", "algorithm__level": "action"},
    {"algorithm__objective": "gspo", "algorithm__level": "decision", "correction__kind": "naive"},
    {"algorithm__objective": "gspo", "algorithm__level": "decision", "correction__geometric": True},
    {"algorithm__aggregation": "length_normalised"},
    {"algorithm__aggregation": "length_normalised", "algorithm__level": "action"},
    {"algorithm__aggregation": "constant", "algorithm__level": "decision"},
    {"algorithm__advantage_scale": "none"},
    {"algorithm__advantage_scale": "batch_std"},
    {"algorithm__entropy_coef": 0.3},
    {"algorithm__kl_coef": 0.7, "algorithm__aggregation": "constant"},
]
PPO = [
    {},
    {"critic__level": "action"},
    {"critic__level": "action", "algorithm__level": "action", "critic__gamma": 0.9},
    {"algorithm__level": "decision", "critic__normalize_advantages": False, "critic__huber": 0.5},
    {"correction__kind": "none", "critic__lam": 0.5},
    {"correction__kind": "naive", "critic__truncation": "failure"},
    {"correction__kind": "mis", "correction__level": "episode", "correction__geometric": True},
    {"correction__kind": "vtrace", "critic__level": "action", "critic__gamma": 0.9, "critic__lam": 0.8},
    {"correction__kind": "vtrace", "critic__normalize_advantages": False},
    {"algorithm__entropy_coef": 0.3, "algorithm__aggregation": "length_normalised"},
]
RECIPES = GRPO + [{"algorithm__kind": "ppo", **changes} for changes in PPO]


@pytest.mark.parametrize("changes", RECIPES, ids=name_of)
def test_loss_and_gradient_match_the_slow_formula(changes: dict[str, Any]) -> None:
    config, batch = recipe(**changes), stale_batch()
    policy, start = policy_for(config), Table.of(policy_for(config))
    other = TablePolicy(rows=8, seed=9)
    reference = Table.of(other) if config.algorithm.kl_coef else None
    slow = Table.of(policy_for(config))
    loss = slow_loss(config, batch, slow, start, reference, list(range(9)))
    loss.backward()
    update = build_update(config, policy, reference=Reference(other) if reference else None)  # pyright: ignore
    values = update(batch)
    assert values[m.LOSS] == pytest.approx(float(loss.detach()), abs=2e-5, rel=1e-4)
    assert slow.logits.grad is not None
    assert slow.logits.grad.abs().max() > 1e-4
    assert policy.logits.grad is not None
    torch.testing.assert_close(policy.logits.grad.double(), slow.logits.grad, atol=2e-6, rtol=1e-3)
    if isinstance(policy, TableActorCritic):
        assert policy.table.grad is not None
        assert slow.values is not None
        assert slow.values.grad is not None
        torch.testing.assert_close(policy.table.grad.double(), slow.values.grad, atol=2e-6, rtol=1e-3)


SEVERAL = [
    {"algorithm__epochs": 3},
    {"algorithm__epochs": 2, "algorithm__minibatches": 3},
    {"algorithm__epochs": 3, "correction__kind": "naive"},
    {"algorithm__epochs": 3, "algorithm__kind": "ppo", "critic__value_clip": 0.02},
    {"algorithm__minibatches": 2, "algorithm__kind": "ppo", "correction__kind": "vtrace"},
]


@pytest.mark.parametrize("changes", SEVERAL, ids=name_of)
def test_several_steps_match_a_slow_loop(changes: dict[str, Any]) -> None:
    config = recipe(**{"optimizer__learning_rate": 0.1, "algorithm__micro_batch": 4, **changes})
    batch, policy = stale_batch(), policy_for(config)
    start, slow = Table.of(policy_for(config)), Table.of(policy_for(config))
    groups: list[dict[str, Any]] = [{"params": [slow.logits], "lr": 0.1}]
    if slow.values is not None:
        groups.append({"params": [slow.values], "lr": 0.01})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for epoch in range(config.algorithm.epochs):
        for episodes in split_minibatches(9, config.algorithm.minibatches, (0, 2, epoch)):
            optimizer.zero_grad()
            slow_loss(config, batch, slow, start, None, episodes.tolist()).backward()
            optimizer.step()
    policy.scale.requires_grad_(False)
    update = build_update(config, policy)
    values = update(batch, version=2)
    # Adam turns a gradient of rounding noise into a full step: compare where there is a gradient.
    moved = (slow.logits.grad.abs() > 1e-6) if slow.logits.grad is not None else None
    assert moved is not None
    torch.testing.assert_close(policy.logits[moved].double(), slow.logits[moved], atol=2e-3, rtol=0)
    if isinstance(policy, TableActorCritic):
        assert slow.values is not None
        torch.testing.assert_close(policy.table.double(), slow.values, atol=1e-3, rtol=0)
    if config.algorithm.epochs > 2:
        assert values[m.CLIP_FRACTION] > 0
    assert values[m.APPROX_KL] > 0


@pytest.mark.parametrize(
    "changes", [{}, {"algorithm__kind": "ppo"}, {"correction__level": "episode"}], ids=name_of
)
@settings(max_examples=10, deadline=None)
@given(micro_batch=st.integers(1, 20))
def test_micro_batches_do_not_change_the_gradient(micro_batch: int, changes: dict[str, Any]) -> None:
    batch, whole, cut = (
        stale_batch(),
        recipe(**changes),
        recipe(**changes, algorithm__micro_batch=micro_batch),
    )
    for a, b in zip(
        gradients(policy_for(whole), batch, whole), gradients(policy_for(cut), batch, cut), strict=True
    ):
        if a is not None:
            torch.testing.assert_close(b, a, atol=1e-6, rtol=0)


def test_decisions_without_signal_are_not_evaluated_but_stay_in_the_denominator() -> None:
    policy, config = TablePolicy(rows=8), recipe(algorithm__micro_batch=1000)
    gradient, _ = gradients(policy, stale_batch(), config)
    # Of 18 decisions, the 6 of the constant group and the one that came after the success at step 2 rest.
    assert policy.evaluated[0] == 11
    everything = TablePolicy(rows=8)
    tiny_bonus = recipe(algorithm__micro_batch=1000, algorithm__entropy_coef=1e-12)
    assert torch.allclose(gradients(everything, stale_batch(), tiny_bonus)[0], gradient, atol=1e-9)
    assert everything.evaluated[0] == 17


# --- the critic ---------------------------------------------------------------


def test_the_critic_learns_alone_during_its_warm_up() -> None:
    config = recipe(algorithm__kind="ppo", critic__warmup_updates=2)
    policy, batch = TableActorCritic(rows=8), stale_batch()
    update, before = build_update(config, policy), policy.logits.detach().clone()
    values = [update(batch, version) for version in range(2)]
    assert torch.equal(policy.logits, before)
    assert m.POLICY_LOSS not in values[0]
    assert values[1][m.VALUE_LOSS] < values[0][m.VALUE_LOSS]
    assert m.POLICY_LOSS in update(batch, version=2)
    assert not torch.equal(policy.logits, before)


def test_explained_variance_by_hand() -> None:
    # Lambda 1, gamma 1: the targets are 1, 1 (success) and v, v (cut, with v the final observation's value).
    config = recipe(algorithm__kind="ppo", critic__gamma=1.0, critic__lam=1.0, algorithm__group_size=2)
    policy, batch = TableActorCritic(rows=8), stale_batch([[15, -1]])
    table = policy.table.detach()[:, 0].double()
    rows = batch.frames[:, 0, 0, 0].tolist()
    cut = float(table[int(batch.final_frames[1, 0, 0, 0])])
    targets = torch.tensor([1.0, 1.0, cut, cut], dtype=torch.float64)
    errors = targets - table[rows]
    values = build_update(config, policy)(batch)
    expected = 1 - errors.var(correction=0) / targets.var(correction=0)
    assert values[m.EXPLAINED_VARIANCE] == pytest.approx(float(expected), rel=1e-4)
    assert values[m.RETURNS_MEAN] == pytest.approx(float(targets.mean()), rel=1e-5)
    assert values[m.VALUES_MEAN] == pytest.approx(float(table[rows].mean()), rel=1e-5)


def test_the_value_clip_is_counted() -> None:
    config = recipe(
        algorithm__kind="ppo", algorithm__epochs=4, critic__value_clip=0.01, critic__learning_rate=0.1
    )
    assert 0 < build_update(config, TableActorCritic(rows=8))(stale_batch())[m.VALUE_CLIP_RATIO] < 1


# --- what is reported ---------------------------------------------------------


def evaluated(batch: Batch) -> Tensor:
    """``[D, 8, 7]`` bool: valid tokens of decisions with an advantage."""
    score = torch.tensor([o >= 0 for group in OUTCOMES for o in group]).view(3, 3)
    signal = (score.any(dim=1) & ~score.all(dim=1)).repeat_interleave(3)
    return batch.mask & signal[batch.episode][:, None, None]


@pytest.mark.parametrize("micro_batch", [3, 1000])
def test_staleness_metrics_are_means_over_valid_tokens(micro_batch: int) -> None:
    batch, config = stale_batch(spread=0.8), recipe(algorithm__micro_batch=micro_batch)
    policy = TablePolicy(rows=8)
    logprob, entropy = Table.of(policy).logprobs(batch)
    chosen = evaluated(batch)
    delta = (logprob.detach() - batch.behaviour_logprob)[chosen]
    raw, weight = delta.exp(), delta.exp().clamp(max=2.0)
    values = build_update(config, policy)(batch)
    expected = {
        m.IMPORTANCE_MEAN: weight.mean(),
        m.IMPORTANCE_MAX: raw.max(),
        m.IMPORTANCE_CAPPED: (raw > 2).double().mean(),
        m.ESS: raw.sum() ** 2 / (raw.numel() * (raw**2).sum()),
        m.IMPORTANCE_ESS: weight.sum() ** 2 / (weight.numel() * (weight**2).sum()),
        m.MISMATCH_KL: (raw - 1 - delta).mean(),
        m.ENTROPY_LOSS: entropy.detach()[chosen].mean(),
        m.RATIO: torch.tensor(1.0),
        m.CLIP_FRACTION: torch.tensor(0.0),
        m.CLIPPED_RATIO: torch.tensor(1.0),
    }
    for metric, value in expected.items():
        assert values[metric] == pytest.approx(float(value), rel=1e-4), metric.name


def test_the_kl_that_the_update_moved_is_k3_over_valid_tokens() -> None:
    batch, policy, config = stale_batch(), TablePolicy(rows=8), recipe(algorithm__micro_batch=1000)
    rows = torch.nonzero(evaluated(batch).flatten(1).any(1)).flatten()[::3]  # 4 of 11, evenly
    before = Table.of(policy).logprobs(batch)[0].detach()
    values = build_update(config, policy)(batch)
    assert policy.evaluated == [11, 4]
    moved = (Table.of(policy).logprobs(batch)[0].detach() - before)[rows][batch.mask[rows]]
    assert values[m.APPROX_KL] == pytest.approx(float((moved.exp() - 1 - moved).mean()), rel=1e-3)


def test_advantage_metrics_are_over_valid_tokens() -> None:
    batch = stale_batch([[10, -1, -1], [-1, -1, -1]])
    tokens = batch.mask.flatten(1).sum(dim=1)
    high, low = 2 / math.sqrt(3), -1 / math.sqrt(3)  # mean 1/3, unbiased deviation 1/sqrt(3)
    per_decision = torch.tensor([high] * 2 + [low] * 4 + [0.0] * 6)
    values = build_update(recipe(), TablePolicy(rows=8))(batch)
    assert values[m.ADVANTAGES_MEAN] == pytest.approx(
        float((per_decision * tokens).sum() / tokens.sum()), rel=1e-4
    )
    assert values[m.ADVANTAGES_MAX] == pytest.approx(high, rel=1e-4)
    assert values[m.ADVANTAGES_MIN] == pytest.approx(low, rel=1e-4)


def test_tokens_are_evaluated_at_the_temperature_they_were_sampled_with() -> None:
    batch = build_batch(groups_of(OUTCOMES, temperature=1.6), version=0)
    logprob = Table.of(TablePolicy(rows=8)).logprobs(batch)[0].detach().float()
    fresh = dataclasses.replace(batch, behaviour_logprob=logprob)
    # The settings' temperature does not matter here.
    values = build_update(recipe(algorithm__temperature=0.7), TablePolicy(rows=8))(fresh)
    assert values[m.MISMATCH_KL] == pytest.approx(0.0, abs=1e-6)


def test_a_token_outside_the_top_k_has_a_number_and_a_gradient() -> None:
    batch = build_batch(groups_of(OUTCOMES, top_k=40), version=0)
    policy = TablePolicy(rows=8)
    values = build_update(recipe(), policy)(batch)
    assert policy.logits.grad is not None
    assert policy.logits.grad.isfinite().all()
    assert math.isfinite(values[m.LOSS])


# --- steps --------------------------------------------------------------------


def test_a_batch_without_signal_still_decays_the_momentum_of_the_one_before() -> None:
    policy = TablePolicy(rows=8)
    update = build_update(recipe(), policy)
    update(stale_batch())
    before = update.optimizer.state[policy.logits]["exp_avg"].clone()
    update(stale_batch([[-1, -1, -1]]))
    torch.testing.assert_close(update.optimizer.state[policy.logits]["exp_avg"], 0.9 * before)


def test_policy_and_critic_are_clipped_apart_and_reported_before_clipping() -> None:
    config = recipe(algorithm__kind="ppo")
    whole = build_update(config, TableActorCritic(rows=8))(stale_batch())
    clipped = recipe(algorithm__kind="ppo", optimizer__max_grad_norm=whole[m.GRAD_NORM] / 10)
    policy = TableActorCritic(rows=8)
    values = build_update(clipped, policy)(stale_batch())
    assert values[m.GRAD_NORM] == pytest.approx(whole[m.GRAD_NORM])
    assert values[m.CRITIC_GRAD_NORM] == pytest.approx(whole[m.CRITIC_GRAD_NORM])
    for parameters in ([policy.logits, policy.scale], [policy.table]):
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        assert float(norm) <= whole[m.GRAD_NORM] / 10 * 1.001


def test_learning_rates_follow_the_schedule_and_are_reported() -> None:
    config = dataclasses.replace(
        recipe(algorithm__kind="ppo", optimizer__schedule="linear", optimizer__warmup_updates=2), updates=6
    )
    update = build_update(config, TableActorCritic(rows=8))
    values = update(stale_batch(), version=4)
    assert values[m.LEARNING_RATE] == pytest.approx(0.005)
    assert values[m.CRITIC_LEARNING_RATE] == pytest.approx(0.005)


@pytest.mark.parametrize("kind", ["tis", "naive"])
def test_several_epochs_evaluate_no_decision_more_often_and_measure_staleness_once(kind: str) -> None:
    one, three = (
        recipe(algorithm__epochs=n, algorithm__micro_batch=1000, correction__kind=kind) for n in (1, 3)
    )
    policy, batch = TablePolicy(rows=8), stale_batch()
    first, values = build_update(one, TablePolicy(rows=8))(batch), build_update(three, policy)(batch)
    assert policy.evaluated == [11, 11, 11]
    for metric in (m.MISMATCH_KL, m.ESS, m.IMPORTANCE_MAX):
        assert values[metric] == first[metric]


# --- what the readings are of -------------------------------------------------


def test_readings_are_of_the_same_decisions_whether_or_not_all_are_evaluated() -> None:
    plain = build_update(recipe(), TablePolicy(rows=8))(stale_batch())
    other = build_update(recipe(algorithm__entropy_coef=1e-9), TablePolicy(rows=8))(stale_batch())
    for metric in (m.ESS, m.MISMATCH_KL, m.ENTROPY_LOSS, m.IMPORTANCE_MEAN, m.IMPORTANCE_CAPPED):
        assert other[metric] == pytest.approx(plain[metric], rel=1e-5), metric.name


def test_readings_by_lag_add_up_to_those_of_all() -> None:
    batch = stale_batch()
    batch = dataclasses.replace(batch, lag=torch.arange(len(batch.tasks)) % 4)
    values = build_update(recipe(correction__trust_region=0.001), TablePolicy(rows=8))(batch)
    taught = group_relative_advantages(batch.returns, batch.group_size)[batch.episode] != 0
    tokens = (batch.mask & taught[:, None, None]).flatten(1).sum(1).double()
    at = [tokens[(batch.lag >= x.low) & (batch.lag <= x.high)].sum() for x in LAG_RANGES]
    for metrics, whole in ((m.MISMATCH_KL_AT_LAG, m.MISMATCH_KL), (m.CLIPPED_AT_LAG, m.OUTSIDE_TRUST_REGION)):
        parts = [values.get(metric, 0.0) * float(n) for metric, n in zip(metrics, at, strict=True)]
        assert sum(parts) / float(sum(at)) == pytest.approx(values[whole], rel=1e-5)
    assert values[m.OUTSIDE_TRUST_REGION] > 0
    assert m.RATIO_AT_LAG[-1] not in values, "there is no such lag"


@pytest.mark.parametrize("episodes", [(3, 2, 4), (0, 5, 1), (1, 1, 1), (4, 4, 1)])
@pytest.mark.parametrize("minibatches", [2, 3])
def test_minibatches_of_all_ranks_together_differ_by_one_episode_at_most(episodes, minibatches) -> None:
    sizes = [0] * minibatches
    for rank, own in enumerate(episodes):
        shares = split_minibatches(own, minibatches, (0, rank), before=sum(episodes[:rank]))
        assert sorted(int(x) for share in shares for x in share) == list(range(own))
        sizes = [size + len(share) for size, share in zip(sizes, shares, strict=True)]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1, "an empty one would move the weights by momentum alone"
