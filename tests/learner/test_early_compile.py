"""Compiling before the first batch: updates have nothing left to compile, and nothing else is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partialmethod
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, LearnerSettings, OptimizerSettings
from asyncrl.launch.build import _early_compile, build_update, compile_learning
from asyncrl.learner.batches import Batch, build_batch
from asyncrl.learner.early_compile import (
    EarlyCompile,
    ObservationShapes,
    dummy_batch,
    fix_sizes,
    observation_shapes,
    passes_of,
)
from asyncrl.learner.update import Update
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.observability.metrics_system import GROUPS_READY
from asyncrl.policies.acceleration import enable_gradient_checkpointing
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.openvla.config import TowerConfig
from asyncrl.replay.interface import EpisodeFormat, LearnerPort, SimulatorFormat
from support.adapters import TASKS, adapted
from support.table_policy import groups_of

SHOWN = ObservationShapes(image_size=64, tasks=tuple(TASKS))
SAMPLING = SamplingParams(temperature=1.0)
OUTCOMES = [[[3, -1], [10, -1], [-1, -1]], [[3, -1], [10, -1], [-1, 5]], [[10, -1], [-1, -1], [-1, -1]]]
"""Steps of success of three updates that leave different numbers of decisions with a gradient. No minibatch
is left with a single one: passes of one decision are graphs of their own."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    """Graphs that were compiled since the test began."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def an_update(compiled: bool = True, checkpointed: bool = False, **changes: Any) -> Update:
    shallow = TowerConfig(width=24, depth=2, heads=3, mlp=48)
    policy = adapted(dino=shallow, siglip=shallow, llm_layers=1)
    if checkpointed:
        enable_gradient_checkpointing(policy)
    algorithm = AlgorithmSettings(**{"group_size": 2, "groups_per_update": 3, "micro_batch": 4, **changes})
    config = TrainConfig(
        actor=ActorSettings(max_decisions=2),
        algorithm=algorithm,
        optimizer=OptimizerSettings(learning_rate=1e-3),
    )
    update = build_update(config, policy)
    if compiled:
        compile_learning(update, SHOWN)
    else:
        fix_sizes(update)
    return update


def batch_of(version: int) -> Batch:
    batch = build_batch(groups_of(OUTCOMES[version], image=64, versions=(version, version)), version=version)
    return replace(batch, tasks=tuple(TASKS[int(episode) % 2] for episode in batch.episode))


def module_of(update: Update) -> nn.Module:
    policy: object = update.policy
    assert isinstance(policy, nn.Module)
    return policy


def state_of(update: Update) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module_of(update).state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler reads
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="one step"),
        pytest.param({"minibatches": 2, "checkpointed": True}, marks=pytest.mark.long, id="two"),
    ],
)
def test_no_update_compiles_anything_afterwards_and_learns_the_same(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    weights = []
    for early in (True, False):
        torch.compiler.reset()
        update = an_update(**changes)
        if early:
            EarlyCompile(update, SHOWN, SAMPLING)(0)
        before = graphs()
        metrics = [update(batch_of(version), version) for version in range(3)]
        compiled_in_updates = graphs() - before
        assert compiled_in_updates == 0 if early else compiled_in_updates > 0
        weights.append((state_of(update), metrics))
    assert_same(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)  # With an empty cache it is minutes.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # of torch's own modules
def test_what_the_true_compiler_makes_learns_the_same_with_and_without() -> None:
    weights = []
    for early in (True, False):
        torch.compiler.reset()
        update = an_update()
        if early:
            EarlyCompile(update, SHOWN, SAMPLING)(0)
        for version in range(2):
            update(batch_of(version), version)
        weights.append(state_of(update))
    assert_same(*weights)


def test_nothing_but_graphs_is_left_behind() -> None:
    update = an_update(compiled=False)
    module = module_of(update)
    module.train()
    generator, weights = torch.get_rng_state(), state_of(update)
    optimizer = update.optimizer.state_dict()
    found = EarlyCompile(update, SHOWN, SAMPLING)(0)
    assert list(found) == [m.COMPILE_SECONDS]
    assert_same(state_of(update), weights)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert (update.optimizer.state_dict(), update.decisions) == (optimizer, 0)
    assert module.training


def test_a_gradient_that_was_there_stays() -> None:
    update = an_update(compiled=False)
    update(batch_of(0), 0)
    before = {
        n: p.grad.clone() for n, p in update.policy.trainable_parameters().items() if p.grad is not None
    }
    assert any(gradient.any() for gradient in before.values())
    EarlyCompile(update, SHOWN, SAMPLING)(1)
    after = {n: p.grad for n, p in update.policy.trainable_parameters().items() if p.grad is not None}
    assert_same(after, before)


def counting(update: Update, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for every pass from now on."""
    made: list[int] = []
    evaluate: Callable[..., Any] = update.forward.evaluate
    monkeypatch.setattr(update.forward, "evaluate", lambda *a, **k: made.append(1) or evaluate(*a, **k))
    return made


def test_neither_a_stop_nor_a_batch_that_is_ready_waits_for_more_than_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    update, asked = an_update(compiled=False), list[int]()
    made = counting(update, monkeypatch)
    EarlyCompile(update, SHOWN, SAMPLING, lambda: asked.append(1) or len(asked) > 1)(0)
    assert len(made) == 1
    EarlyCompile(update, SHOWN, SAMPLING, batch_ready=lambda: True)(0)
    assert len(made) == 2


def test_placeholders_have_the_types_and_shapes_of_true_decisions() -> None:
    true = batch_of(0)
    update = an_update(compiled=False)
    made = dummy_batch(update.policy, SHOWN, true.tasks, SAMPLING)
    for name in (
        "sample",
        "frames",
        "behaviour_logprob",
        "mask",
        "rewards",
        "lag",
        "episode",
        "decision_index",
    ):
        found, expected = getattr(made, name), getattr(true, name)
        if name == "sample":
            assert found.keys() == expected.keys()
            found, expected = found["tokens"], expected["tokens"]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({"micro_batch": 9}, [(9, True, False), (4, False, True)]),
        ({"micro_batch": 100}, [(12, True, False), (4, False, True)]),
        ({"micro_batch": 8}, [(8, True, False), (8, False, False)]),  # A reading of 4 would cost as much.
        ({"micro_batch": 9, "minibatches": 2}, [(6, True, False), (6, False, False)]),
        ({"micro_batch": 9, "groups_per_update": 3000}, [(9, True, False), (9, False, False)]),
    ],
)
def test_there_is_one_pass_of_each_kind_where_sizes_are_fixed(
    changes: dict[str, Any], passes: list[tuple[int, bool, bool]]
) -> None:
    update = an_update(compiled=False, **changes)
    found = [tuple(each) for each in passes_of(update)]
    assert found == passes


def test_what_is_shown_travels_as_text_and_is_read_from_the_format_of_episodes() -> None:
    imagined = EpisodeFormat(image_size=64, tasks={"a": ["lift it", "push it"], "b": ["lift it"]})
    assert observation_shapes(imagined) == ObservationShapes(image_size=64, tasks=["lift it", "push it"])
    simulator = SimulatorFormat(name="s", tasks=("lift it",), more_cameras=1, state_dim=8)
    found = observation_shapes(EpisodeFormat(image_size=64, simulator=simulator))
    assert found == ObservationShapes(image_size=64, tasks=["lift it"], more_cameras=1, state_dim=8)
    assert found is not None
    assert ObservationShapes(*json.loads(json.dumps(found))) == found
    assert observation_shapes(EpisodeFormat(image_size=64)) is None


class Port:
    """A replay that says how many groups are ready, and can do nothing else."""

    def __init__(self, readings: dict[Metric, float]) -> None:
        self.status: Any = lambda: readings


@pytest.mark.parametrize(
    ("changes", "compiles"),
    [
        ({"learner": LearnerSettings(compile=True)}, True),
        ({"learner": LearnerSettings()}, False),
        ({"learner": LearnerSettings(compile=True, offload=True)}, False),
        ({"learner": LearnerSettings(compile=True), "inline": True}, False),
    ],
)
def test_it_is_done_where_somebody_gains(changes: dict[str, Any], compiles: bool) -> None:
    update = an_update(compiled=False)
    ready = {GROUPS_READY: 15.0}
    found = _early_compile(
        TrainConfig(**changes), update, SHOWN, lambda: False, cast("LearnerPort", Port(ready))
    )
    assert (found is not None) == compiles
    if found is not None:
        needed = TrainConfig(**changes).algorithm.groups_per_update
        for number in (needed - 1, needed):
            ready[GROUPS_READY] = float(number)
            assert found.batch_ready() == (number == needed)
