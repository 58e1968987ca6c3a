"""What is evaluated beside the passes with a gradient: before the first step, and to see what moved.

The slow form evaluates every decision before the first step, whether or not anything reads it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config.run import TrainConfig
from asyncrl.launch.build import build_update
from asyncrl.learner import prepare
from asyncrl.learner.batches import Batch
from asyncrl.learner.forward import PolicyForward, Reference
from asyncrl.learner.interface import AdvantagesAndTargets
from asyncrl.learner.prepare import split_minibatches
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.recipe import build_recipe
from asyncrl.learner.update_metrics import MetricAccumulator
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import Metric
from support.slow_update import Table, name_of, recipe, stale_batch
from support.table_policy import TableActorCritic, TablePolicy

TAUGHT = 11
"""Of 18 decisions: 6 are of the middle group, and one came after the success at step 2."""


SEVERAL = [
    {},
    {"algorithm__epochs": 2},
    {"algorithm__entropy_coef": 0.3},
    {"algorithm__kl_coef": 0.7, "algorithm__epochs": 2},
    {"algorithm__level": "decision", "correction__max_weight": 5.0},
    {"correction__kind": "none", "algorithm__objective": "cispo", "algorithm__entropy_coef": 0.1},
    {"correction__level": "episode", "correction__geometric": True},
    {"correction__kind": "mis", "algorithm__level": "action", "algorithm__advantage_scale": "batch_std"},
]


def updated(config: TrainConfig, batch: Batch) -> tuple[TablePolicy, dict[Metric, float], Tensor]:
    policy = TablePolicy(rows=8)
    reference = Reference(TablePolicy(rows=8, seed=9)) if config.algorithm.kl_coef else None  # pyright: ignore
    values = build_update(config, policy, reference=reference)(batch, version=2)
    assert policy.logits.grad is not None
    return policy, values, policy.logits.grad


@pytest.mark.parametrize("changes", SEVERAL, ids=name_of)
def test_what_teaches_nothing_need_not_be_looked_at_before_the_first_step(changes, monkeypatch) -> None:
    config = recipe(algorithm__minibatches=2, algorithm__micro_batch=4, **changes)
    policy, values, gradient = updated(config, stale_batch())
    monkeypatch.setattr(prepare, "_rows_with_advantage", lambda batch, *_: torch.arange(len(batch.tasks)))
    slow, expected, slow_gradient = updated(config, stale_batch())
    assert sum(slow.evaluated) - sum(policy.evaluated) == 18 - TAUGHT
    assert slow_gradient.abs().max() > 1e-4
    torch.testing.assert_close(gradient, slow_gradient, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(policy.logits, slow.logits, atol=1e-6, rtol=0)
    assert values.keys() == expected.keys()
    for metric in values:
        if metric is not m.APPROX_KL or not config.algorithm.entropy_coef:  # It is of all that was evaluated.
            assert values[metric] == pytest.approx(expected[metric], rel=1e-5, abs=1e-7), metric.name


class OneDecision:
    """An advantage for the first decision of each episode that failed, and for no other."""

    needs: frozenset[str] = frozenset()

    def __init__(self, *settings: Any) -> None:
        self.seen: list[Any] = []

    def estimate(self, batch: Batch, old: Any, correction: Any, ranks: Any) -> AdvantagesAndTargets:
        self.seen.append(old)
        first = (batch.decision_index == 0) & ~batch.terminated[batch.episode]
        return AdvantagesAndTargets(first.float()[:, None, None], None)


class LooksBack(OneDecision):
    needs = frozenset({"old_policy"})


def prepared_rows(advantage: type, **changes: Any) -> tuple[list[int], Any]:
    """Which decisions were evaluated, and what the advantage was given; the recipe is grpo."""
    config, batch = recipe(**changes), stale_batch()
    named = f"{advantage.__module__}:{advantage.__qualname__}"
    chosen = dataclasses.replace(config.algorithm, advantage=named)
    built = build_recipe(chosen, config.correction, config.critic)
    forward = PolicyForward(TablePolicy(rows=8), LearnerRanks(), torch.device("cpu"), micro_batch=4)  # pyright: ignore
    prepared = prepare.prepare_batch(batch, built, forward, MetricAccumulator())
    assert isinstance(built.advantage, OneDecision)
    return torch.nonzero(prepared.evaluated).flatten().tolist(), built.advantage.seen


FAILED = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 16, 17]
"""Decisions of episodes that failed: two each."""


def test_a_weight_of_an_episode_is_made_of_all_its_decisions() -> None:
    assert prepared_rows(OneDecision, algorithm__minibatches=2)[0] == FAILED[::2]
    assert prepared_rows(OneDecision, correction__level="episode")[0] == FAILED
    assert prepared_rows(OneDecision)[0] == []


@pytest.mark.parametrize("minibatches", [1, 2])
def test_an_advantage_that_looks_back_is_told_of_every_decision(minibatches: int) -> None:
    rows, seen = prepared_rows(LooksBack, algorithm__minibatches=minibatches)
    assert rows == list(range(18))
    assert seen[0].logprob.shape == (18, 8, 7)
    assert prepared_rows(OneDecision, algorithm__minibatches=2)[1] == [None]


class SeesFinals(TableActorCritic):
    """Notes which final observations it is asked about."""

    def __init__(self) -> None:
        super().__init__(rows=8)
        self.finals: list[int] = []

    def values(self, inputs: Any) -> Tensor:
        self.finals += inputs.tolist()
        return super().values(inputs)


def test_only_final_observations_of_episodes_that_ran_out_of_time_are_evaluated() -> None:
    policy, batch = SeesFinals(), stale_batch()
    build_update(recipe(algorithm__kind="ppo", algorithm__micro_batch=2), policy)(batch)
    cut = batch.final_frames[~batch.terminated.numpy(), 0, 0, 0].tolist()
    assert policy.finals == cut
    assert len(cut) == 6


def kl(before: Tensor, after: Tensor, mask: Tensor) -> float:
    moved = (after - before)[mask]
    return float((moved.exp() - 1 - moved).mean())


def stopped_before_last_step(config: TrainConfig, batch: Batch) -> TablePolicy:
    """The policy as the last step found it."""
    policy = TablePolicy(rows=8)
    update = build_update(config, policy)
    steps, plain = config.algorithm.epochs * config.algorithm.minibatches, update.stepper.step
    made: list[int] = []

    def step() -> None:
        made.append(1)
        if len(made) < steps:
            plain()

    update.stepper.step = step  # type: ignore[method-assign]
    update(batch, version=2)
    assert len(made) == steps
    return policy


MOVED: list[tuple[dict[str, Any], Callable[[Batch], Tensor]]] = [
    ({"algorithm__epochs": 3}, lambda batch: torch.arange(9)),
    ({"algorithm__minibatches": 2}, lambda batch: split_minibatches(9, 2, (0, 2, 0))[-1]),
    ({"algorithm__minibatches": 2, "algorithm__epochs": 2}, lambda b: split_minibatches(9, 2, (0, 2, 1))[-1]),
]


@pytest.mark.parametrize(("changes", "last"), MOVED, ids=[name_of(changes) for changes, _ in MOVED])
def test_with_several_steps_it_is_read_in_the_passes_of_the_last_one(changes, last) -> None:
    config, batch = recipe(algorithm__micro_batch=4, **changes), stale_batch()
    before = Table.of(TablePolicy(rows=8)).logprobs(batch)[0].detach()
    after = Table.of(stopped_before_last_step(config, batch)).logprobs(batch)[0].detach()
    policy = TablePolicy(rows=8)
    values = build_update(config, policy)(batch, version=2)
    taught = torch.isin(batch.episode, last(batch)) & (batch.episode // 3 != 1)
    expected = kl(before, after, batch.mask & taught[:, None, None])
    assert values[m.APPROX_KL] == pytest.approx(expected, rel=1e-3)
    assert values[m.APPROX_KL] > 1e-5
    extra = TAUGHT if config.algorithm.minibatches > 1 else 0
    assert sum(policy.evaluated) == extra + TAUGHT * config.algorithm.epochs, "no pass of its own"
