"""Decisions per second and MFU against FLOPs counted by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.launch.build import build_update
from asyncrl.learner.batches import Batch, build_batch
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.update import update_loss
from asyncrl.learner.update_metrics import Throughput, forward_flops, peak_flops
from asyncrl.observability import metrics_system as m
from support.ranks import run_ranks
from support.table_policy import BINS, Evaluation, TableActorCritic, TablePolicy, groups_of

CPU = torch.device("cpu")
WIDTH = 12
FORWARD = 2 * WIDTH * 56 * BINS
"""A decision is one row through one matrix: two FLOPs for each of its WIDTH x (56 * 256) numbers."""
PEAK = 1e9


class LinearPolicy(nn.Module):
    """One matrix, from a picture of 2 x 2 x 3 numbers to the logits of 56 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(WIDTH, 56 * BINS, bias=False)

    def preprocess(self, frames: Any, tasks: Any) -> Tensor:
        return torch.from_numpy(frames).flatten(1).float()

    def evaluate(self, inputs: Tensor, sample: Any, sampling: Any, **more: Any) -> Any:
        logp = self.matrix(inputs).view(-1, 8, 7, BINS).log_softmax(-1)
        return Evaluation(logp.gather(-1, sample["tokens"][..., None])[..., 0], -(logp.exp() * logp).sum(-1))

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def parameter_groups(self, lr: float, value_lr: float) -> list[dict[str, Any]]:
        return [{"name": "policy", "params": list(self.parameters()), "lr": lr}]


def a_batch() -> Batch:
    """Three groups of two episodes of two decisions.

    The middle group carries no signal, and the last decision came after its episode's success.
    """
    return build_batch(groups_of([[10, -1], [-1, -1], [-1, 3]]), version=0)


def on_known_device(ranks: Any = None, **more: Any) -> Throughput:
    throughput = Throughput(LinearPolicy(), ranks or LearnerRanks(), micro_batch=3, **more)  # type: ignore[arg-type]
    throughput.own_peak = PEAK
    return throughput


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_a_forward_pass_of_one_matrix_is_counted_as_by_hand(rows: int) -> None:
    assert forward_flops(LinearPolicy(), a_batch(), rows, CPU) == FORWARD  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("adapters", "learned", "passes"), [(False, True, 3), (True, True, 2), (False, False, 1)]
)
def test_mfu_counts_what_learns(adapters: bool, learned: bool, passes: int) -> None:
    found = on_known_device(adapters=adapters).measure(a_batch(), 7, 4.0, policy_learned=learned)
    assert found[m.DECISIONS_PER_SECOND] == 7 / 4
    assert found[m.MFU] == pytest.approx(passes * FORWARD * 7 / (4 * PEAK))


def test_counting_leaves_compiled_layers_compiled() -> None:
    """A compiler that meets the counter never runs what it compiled again, and says nothing."""
    ran: list[int] = []

    def backend(graph: Callable[..., Any], _inputs: Any) -> Callable[..., Any]:
        return lambda *given: ran.append(1) or graph(*given)

    class Layer(nn.Linear):  # A compiler does not look into torch's own.
        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.linear(input, self.weight)

    torch.compiler.reset()
    policy, batch = LinearPolicy(), a_batch()
    policy.matrix = Layer(WIDTH, 56 * BINS, bias=False)
    policy.matrix.compile(backend=backend)
    inputs = policy.preprocess(batch.frames, batch.tasks)
    policy.evaluate(inputs, batch.sample, None)
    assert len(ran) == 1
    assert forward_flops(policy, batch, 4, CPU) == FORWARD  # type: ignore[arg-type]
    assert len(ran) == 1
    policy.evaluate(inputs, batch.sample, None)
    assert len(ran) == 2


def test_on_a_device_without_known_peak_there_is_no_mfu_and_no_extra_pass() -> None:
    policy = TablePolicy()
    throughput = Throughput(policy, LearnerRanks(), micro_batch=3)  # type: ignore[arg-type]
    assert throughput.measure(a_batch(), 7, 2.0).keys() == {m.DECISIONS_PER_SECOND}
    assert policy.evaluated == []
    assert peak_flops(CPU, "fp32") == 0


def test_tf32_is_no_known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert (peak_flops(cuda, "bf16"), peak_flops(cuda, "fp32")) == (989e12, 67e12)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert (peak_flops(cuda, "bf16"), peak_flops(cuda, "fp32")) == (989e12, 0)


@pytest.mark.parametrize(
    ("changes", "decisions"),
    [
        ({}, 7),
        ({"epochs": 3}, 21),
        ({"minibatches": 2}, 7),
        ({"entropy_coef": 0.1}, 11),
        ({"kind": "ppo"}, 11),
    ],
)
def test_the_decisions_that_count_are_those_with_a_gradient(changes, decisions, monkeypatch) -> None:
    counted: list[int] = []

    def counting(recipe: Any, now: Any, micro: Any, *others: Any, **more: Any) -> Any:
        counted.append(len(micro.mask))
        return update_loss(recipe, now, micro, *others, **more)

    monkeypatch.setattr("asyncrl.learner.update.update_loss", counting)
    config = TrainConfig(algorithm=AlgorithmSettings(group_size=2, micro_batch=3, **changes))
    update = build_update(
        config, TableActorCritic(rows=8) if config.algorithm.kind == "ppo" else TablePolicy()
    )  # type: ignore[arg-type]
    update(a_batch())
    assert update.decisions == sum(counted) == decisions


def read_on_one_of_two_ranks() -> tuple[float, float, float]:
    """Both ranks have half of the decisions; only rank 1's device is known at first."""
    import torch.distributed as dist

    from asyncrl.learner.fsdp import shard
    from asyncrl.learner.ranks import DistributedRanks
    from asyncrl.policies.openvla.policy import load_policy
    from asyncrl.storage.assets import policy_folder

    ranks = DistributedRanks(30.0)
    alone = on_known_device(ranks)
    alone.own_peak = PEAK * dist.get_rank()
    unknown = alone.measure(a_batch(), 7, 1.0).get(m.MFU, 0.0)
    both = on_known_device(ranks)
    whole = both.measure(a_batch(), 7, 1.0)[m.MFU]
    policy = load_policy(policy_folder("tabletop"), device=CPU)
    batch = build_batch(groups_of([[10, -1]], image=64), version=0)
    plain = forward_flops(policy, batch, 2, CPU)
    sharded = forward_flops(shard(policy, CPU, "fp32"), batch, 2, CPU)
    return unknown, whole, sharded / plain


def test_ranks_add_up_and_count_together_or_not_at_all() -> None:
    pace, peak = 2 * 7, 2 * PEAK
    expected = (0.0, pytest.approx(3 * FORWARD * pace / peak), 1.0)
    assert run_ranks(read_on_one_of_two_ranks) == [expected, expected]
