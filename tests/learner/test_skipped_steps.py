"""A step whose gradient is not finite changes nothing; weights that are not finite are named."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.config.sections import OptimizerSettings
from asyncrl.learner.fsdp import shard
from asyncrl.learner.optimizer import ClippedOptimizer
from asyncrl.learner.ranks import LearnerRanks, not_finite
from asyncrl.observability import metrics_training as m
from support.ranks import run_ranks
from support.tiny_models import small_policy

GOOD = 0.5
STEPS = [GOOD, 2 * GOOD, GOOD]


def steps(scales: list[float], *, fused: bool, sharded: bool = False) -> tuple[dict[str, Tensor], list[Any]]:
    """Weights and optimizer state after one update for each gradient, all of whose numbers are so large."""
    policy = small_policy(value_head="chunk")
    if sharded:
        policy = shard(policy, torch.device("cpu"), "fp32")
    stepper = ClippedOptimizer(
        policy, OptimizerSettings(max_grad_norm=0.1), updates=9, critic_learning_rate=1e-3, fused=fused
    )
    found: list[Any] = []
    for scale in scales:
        stepper.set_version(0)
        stepper.optimizer.zero_grad()
        for parameter in policy.trainable_parameters().values():
            parameter.grad = torch.full_like(parameter, scale)
        stepper.step()
        found.append(stepper.end_update())
    state = stepper.optimizer.state_dict()["state"]
    tensors = {f"{i} {name}": x for i, held in state.items() for name, x in held.items()}
    tensors |= policy.trainable_parameters()
    local = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in local.items()}, found


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_leaves_no_trace_but_its_count(fused: bool, bad: float) -> None:
    expected, good = steps(STEPS, fused=fused)
    actual, found = steps([STEPS[0], bad, bad, *STEPS[1:]], fused=fused)
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)
    assert [row[m.BAD_UPDATES] for row in found] == [0, 1, 2, 2, 2]
    norms = [row.get(m.GRAD_NORM) for row in found]
    assert norms == [good[0][m.GRAD_NORM], None, None, good[1][m.GRAD_NORM], good[2][m.GRAD_NORM]]
    assert norms[3] == pytest.approx(2 * norms[0])


def test_a_fused_step_is_the_other_one_up_to_rounding() -> None:
    (fused, one), (plain, other) = (steps(STEPS, fused=fused) for fused in (True, False))
    torch.testing.assert_close(fused, plain, atol=1e-7, rtol=1e-5)
    assert [row[m.GRAD_NORM] for row in one] == [row[m.GRAD_NORM] for row in other]


def skipped_on_shards() -> list[float]:
    expected, _ = steps(STEPS, fused=True, sharded=True)
    # One rank's part alone is not finite: all skip.
    bad = math.nan if torch.distributed.get_rank() else GOOD
    actual, found = steps([STEPS[0], bad, *STEPS[1:]], fused=True, sharded=True)
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)
    return [row[m.BAD_UPDATES] for row in found]


@pytest.mark.timeout(60)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one() -> None:
    assert run_ranks(skipped_on_shards) == [[0, 1, 1, 1]] * 2


def test_within_one_update_the_largest_good_norm_is_told_and_the_fault_counts_once() -> None:
    policy = small_policy()
    stepper = ClippedOptimizer(policy, OptimizerSettings(), updates=9, critic_learning_rate=1e-3, fused=True)
    parameters = list(policy.trainable_parameters().values())
    told = []
    for scales in ([GOOD, math.nan, 3 * GOOD, math.nan], [math.nan, GOOD], [GOOD], []):
        stepper.set_version(0)
        for scale in scales:
            stepper.optimizer.zero_grad()
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, scale)
            stepper.step()
        told.append((stepper.end_update(), stepper.bad_in_a_row, stepper.stepped))
    numbers = sum(p.numel() for p in parameters)
    assert [found.get(m.GRAD_NORM) for found, _, _ in told] == [
        pytest.approx(3 * GOOD * numbers**0.5, rel=1e-5),
        pytest.approx(GOOD * numbers**0.5, rel=1e-5),
        pytest.approx(GOOD * numbers**0.5, rel=1e-5),
        None,
    ]
    assert [(found[m.BAD_UPDATES], row, stepped) for found, row, stepped in told] == [
        (1, 1, True),
        (2, 2, True),
        (2, 0, True),
        (2, 0, False),
    ]


def weights() -> dict[str, Tensor]:
    return {
        "half": torch.full((3, 5), -3e38).bfloat16(),
        "scalar": torch.tensor(2.0),
        "full": torch.tensor([[3.4e38, -3.4e38], [0.0, 1e-45]]),
        "nothing": torch.empty(0, 4),  # A rank's shard may be empty.
    }


def test_the_largest_numbers_are_finite() -> None:
    assert not_finite(weights(), LearnerRanks()) == []


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("names", [["half"], ["scalar"], ["full", "half"]])
def test_one_number_is_enough_to_be_named(names: list[str], number: float) -> None:
    tensors = weights()
    for name in names:
        tensors[name].view(-1)[-1] = number
    assert sorted(not_finite(tensors, LearnerRanks())) == names


def test_shards_that_are_all_empty_are_finite() -> None:
    assert not_finite({"nothing": torch.empty(0, 4)}, LearnerRanks()) == []


class Two(LearnerRanks):
    """A second rank whose tensors are all as `other` says."""

    def __init__(self, other: float) -> None:
        self.other = other

    def max(self, values: Tensor) -> Tensor:
        return torch.maximum(values, torch.full_like(values, self.other))


def test_what_another_rank_found_is_named_here_too() -> None:
    assert not_finite(weights(), Two(1.0)) == list(weights())
