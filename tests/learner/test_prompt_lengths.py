"""Prompts of one length are evaluated together, compiled ones all padded: the update of single decisions."""

from dataclasses import replace
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings
from asyncrl.launch.build import build_update, compile_learning
from asyncrl.learner.batches import Batch, build_batch
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import Metric
from asyncrl.policies.acceleration import enable_gradient_checkpointing
from asyncrl.policies.interface import PolicyInputs
from asyncrl.policies.openvla.config import OpenVLAOFTConfig, TowerConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, new_policy
from support.adapters import adapted
from support.slow_update import recipe
from support.table_policy import groups_of

TASKS = ["lift it", "put the red cube on the white plate"] * 2
OUTCOMES = [[10, -1, -1], [2, 15, -1], [-1, 7, -1], [-1, -1, 4]]
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "steps": {"algorithm__minibatches": 2, "algorithm__epochs": 2, "optimizer__learning_rate": 1e-9},
    "episodes": {"correction__level": "episode", "algorithm__aggregation": "length_normalised"},
    "ppo": {"algorithm__kind": "ppo", "critic__level": "action", "algorithm__entropy_coef": 0.1},
    "vtrace": {"algorithm__kind": "ppo", "correction__kind": "vtrace"},
}

SHALLOW = TowerConfig(width=24, depth=2, heads=3, mlp=48)
FEW = 4
"""Decisions of a small pass."""
RUNS = {"grpo": 2, "steps": 5, "episodes": 3, "ppo": 4, "vtrace": 4}
"""Runs over decisions, each with one pass at most where the two lengths meet: before the first step, of final
observations, of each minibatch, and after the only step."""


def mixed_batch() -> Batch:
    """Episodes of one group have one task; a micro-batch of four decisions meets two of them and more."""
    groups = [
        [
            replace(
                episode, task=task, frames=np.random.default_rng(n).integers(0, 256, (2, 64, 64, 3), np.uint8)
            )
            for n, episode in enumerate(group, start=10 * g)
        ]
        for g, (task, group) in enumerate(zip(TASKS, groups_of(OUTCOMES, image=64), strict=True))
    ]
    return build_batch(groups, version=2)


class Watched:
    """Notes how many rows each pass had, and how many of their tokens were padding."""

    def __init__(self, policy: OpenVLAOFTPolicy) -> None:
        self.passes: list[tuple[int, int]] = []
        self.shapes: set[tuple[int, ...]] = set()
        plain = policy.preprocess

        def preprocess(*arguments: Any) -> PolicyInputs:
            inputs = plain(*arguments)
            self.passes.append((len(inputs.input_ids), int((inputs.attention_mask == 0).sum())))
            self.shapes.add((*inputs.input_ids.shape, inputs.padded))
            return inputs

        policy.preprocess = preprocess  # type: ignore[method-assign]

    @property
    def padding(self) -> int:
        """Tokens of padding in all passes."""
        return sum(padded for _, padded in self.passes)


def updated(
    name: str, *, decoding: str, micro_batch: int = 4, in_order: bool = False, fixed: bool = False
) -> tuple[dict[str, Tensor], dict[Metric, float], Watched]:
    """Gradients of the last step, metrics, and the passes.

    With `in_order` as the batch has its decisions, with `fixed` of one shape.
    """
    config = recipe(algorithm__micro_batch=micro_batch, **RECIPES[name])
    level = {"action": "action", "decision": "chunk"}[config.critic.level]
    head = level if config.algorithm.kind == "ppo" else "none"
    torch.manual_seed(0)
    sizes: Any = {
        "decoding": decoding,
        "value_head": head,
        "dino": SHALLOW,
        "siglip": SHALLOW,
        "llm_layers": 2,
    }
    policy = new_policy(OpenVLAOFTConfig.tiny(**sizes)).eval()
    if in_order:
        policy.prompt_tokens = lambda task: 0  # type: ignore[method-assign]
    seen = Watched(policy)
    update = build_update(config, policy)
    if fixed:
        policy.fix_prompts(TASKS)
        update.forward.micro_batch, update.forward.small_size = micro_batch, FEW
    values = update(mixed_batch(), version=2)
    return {n: p.grad for n, p in policy.trainable_parameters().items() if p.grad is not None}, values, seen


@pytest.mark.parametrize(
    ("name", "decoding"), [*[(name, "parallel") for name in RECIPES], ("steps", "autoregressive")]
)
def test_the_update_is_that_of_decisions_evaluated_alone_with_less_padding_or_one_shape(
    name: str, decoding: str
) -> None:
    alone, values, unpadded = updated(name, decoding=decoding, micro_batch=1)
    _, _, in_order = updated(name, decoding=decoding, in_order=True)
    found, other, seen = updated(name, decoding=decoding)
    assert unpadded.padding == 0
    assert seen.padding < in_order.padding
    assert sum(padded > 0 for _, padded in seen.passes) <= RUNS[name]
    assert len(seen.passes) == len(in_order.passes)
    assert_same(found, other, alone, values)

    found, other, seen = updated(name, decoding=decoding, micro_batch=9, fixed=True)
    _, length, padded = next(iter(seen.shapes))
    few = {(FEW, length, padded)} if name in ("grpo", "episodes", "ppo", "vtrace") else set()
    assert seen.shapes == {(9, length, True)} | few
    assert_same(found, other, alone, values)


def assert_same(
    found: dict[str, Tensor],
    values: dict[Metric, float],
    alone: dict[str, Tensor],
    values_alone: dict[Metric, float],
) -> None:
    """Compare gradients and metrics with those of decisions that were evaluated alone."""
    assert found.keys() == alone.keys()
    for parameter, gradient in alone.items():
        scale = max(float(gradient.abs().max()), 1.0)
        torch.testing.assert_close(found[parameter], gradient, atol=1e-6 * scale, rtol=1e-4)
    assert max(float(gradient.abs().max()) for gradient in alone.values()) > 1e-3
    for metric, value in values_alone.items():
        if metric is not m.APPROX_KL:  # After one step it is read from as many decisions as a pass takes.
            assert values[metric] == pytest.approx(value, rel=1e-3, abs=1e-6), metric.name


def test_a_policy_counts_the_tokens_that_it_reads() -> None:
    policy = new_policy(OpenVLAOFTConfig.tiny())
    frames = np.zeros((1, 64, 64, 3), np.uint8)
    for task in TASKS[:2]:
        assert policy.preprocess(frames, [task]).input_ids.shape[1] == policy.prompt_tokens(task)


def few_decisions(algorithm: dict[str, int]) -> TrainConfig:
    config = recipe(**{f"algorithm__{name}": value for name, value in algorithm.items()})
    return replace(config, actor=ActorSettings(max_decisions=2))


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"micro_batch": 9}, (9, 4)),
        ({"micro_batch": 100}, (12, 4)),
        ({"micro_batch": 8}, (8, 8)),  # A small pass of 4 would cost as much.
        ({"micro_batch": 9, "minibatches": 2}, (6, 6)),
        ({"micro_batch": 9, "groups_per_update": 3000}, (9, 9)),
    ],
)
def test_passes_have_one_size_and_the_small_pass_another_if_less_than_half(changes, sizes) -> None:
    settings = {"group_size": 2, "groups_per_update": 3, **changes}
    update = build_update(few_decisions(settings), new_policy(OpenVLAOFTConfig.tiny()))
    update.fix_sizes()
    assert (update.forward.micro_batch, update.forward.small_size) == sizes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler reads
@pytest.mark.parametrize("minibatches", [1, pytest.param(2, marks=pytest.mark.long)])
def test_only_the_first_update_compiles(minibatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    policy = adapted(dino=SHALLOW, siglip=SHALLOW, llm_layers=1)
    if minibatches > 1:
        enable_gradient_checkpointing(policy)
    sizes = {"group_size": 2, "groups_per_update": 3, "micro_batch": 4, "minibatches": minibatches}
    update = build_update(few_decisions(sizes), policy)
    compile_learning(update, TASKS[:2])
    graphs = []
    # Updates with different numbers of decisions with a gradient.
    for version, outcomes in enumerate(
        [[[3, -1], [10, -1], [-1, -1]], [[3, -1], [10, -1], [-1, 5]], [[10, -1], [-1, -1], [-1, -1]]]
    ):
        groups = groups_of(outcomes, image=64, versions=(version, version))
        batch = build_batch(groups, version=version)
        update(replace(batch, tasks=tuple(TASKS[int(n) % 2] for n in batch.episode)), version)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 3
