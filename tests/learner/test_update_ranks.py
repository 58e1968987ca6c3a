"""The real update on two sharded ranks (FSDP2, gloo) equals the one on one rank: gradients and metrics."""

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.launch.build import build_update
from asyncrl.learner.batches import build_batch
from asyncrl.learner.fsdp import shard
from asyncrl.learner.ranks import DistributedRanks, LearnerRanks
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import Metric
from support.ranks import run_ranks
from support.slow_update import recipe
from support.table_policy import groups_of
from support.tiny_models import small_policy

OUTCOMES = [[3, -1], [-1, -1], [-1, 12], [-1, -1], [5, -1]]
"""Five groups: rank 0 gets 0, 2 and 4, rank 1 gets 1 and 3, whose episodes all failed alike."""
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm__advantage_scale": "batch_std"},
    "ppo": {"algorithm__kind": "ppo", "algorithm__minibatches": 2, "correction__kind": "vtrace"},
    "steps": {"algorithm__minibatches": 2},
    "episode": {
        "correction__level": "episode",
        "correction__geometric": True,
        "algorithm__entropy_coef": 0.1,
    },
}


def updated(
    name: str, ranks: LearnerRanks, own_groups: slice, *, fixed: bool = False
) -> tuple[dict[str, Tensor], dict[Metric, float]]:
    """Gradients of the last step and metrics; the policy is sharded when there are ranks to shard over.

    With `fixed` all passes have five decisions.
    """
    config = recipe(algorithm__group_size=2, algorithm__micro_batch=3, **RECIPES[name])
    policy = small_policy(value_head="chunk" if config.algorithm.kind == "ppo" else "none")
    if ranks.size > 1:
        policy = shard(policy, torch.device("cpu"), "fp32")
    groups = groups_of(OUTCOMES, image=64)[own_groups]
    batch = build_batch(groups, version=0)
    update = build_update(config, policy, ranks=ranks)
    if fixed:
        update.forward.micro_batch = update.forward.small_size = 5
    values = update(batch)
    gradients = {n: p.grad for n, p in policy.trainable_parameters().items() if p.grad is not None}
    return ranks.gather_full(gradients), values


def on_ranks(name: str, fixed: bool = False) -> tuple[dict[str, Tensor], dict[str, float]]:
    ranks = DistributedRanks(20.0)
    gradients, values = updated(name, ranks, slice(ranks.rank, None, ranks.size), fixed=fixed)
    return {n: g.clone() for n, g in gradients.items()}, {metric.name: v for metric, v in values.items()}


@pytest.mark.parametrize(("name", "fixed"), [("grpo", False), ("episode", False), ("grpo", True)])
def test_two_ranks_make_the_update_of_one(name: str, fixed: bool) -> None:
    expected, alone = updated(name, LearnerRanks(), slice(None))
    (actual, values), (_, others) = run_ranks(on_ranks, name, fixed)
    assert actual.keys() == expected.keys()
    for parameter, gradient in actual.items():
        scale = float(expected[parameter].abs().max())
        torch.testing.assert_close(gradient, expected[parameter], atol=1e-6 * max(scale, 1.0), rtol=1e-4)
    assert values == others
    for metric, value in alone.items():
        if metric is not m.APPROX_KL:  # Each rank takes a sample of its own decisions.
            assert values[metric.name] == pytest.approx(value, rel=1e-3, abs=1e-6), metric.name


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("ppo", (m.ADVANTAGES_MAX, m.VALUES_MEAN, m.RETURNS_MEAN, m.EXPLAINED_VARIANCE, m.MISMATCH_KL)),
        ("steps", (m.MISMATCH_KL, m.ESS, m.IMPORTANCE_MEAN, m.IMPORTANCE_MAX)),
    ],
    ids=["ppo", "steps"],
)
def test_several_steps_keep_two_ranks_in_step_also_where_one_learns_nothing(name, metrics) -> None:
    # Minibatches are dealt per rank, so only what no dealing changes is compared with one rank.
    _, alone = updated(name, LearnerRanks(), slice(None))
    (gradients, values), (_, others) = run_ranks(on_ranks, name)
    assert values == others
    assert max(float(g.abs().max()) for g in gradients.values()) > 0
    assert values[m.APPROX_KL.name] > 0
    for metric in metrics:
        assert values[metric.name] == pytest.approx(alone[metric], rel=1e-3, abs=1e-6), metric.name
