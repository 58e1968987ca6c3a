"""The reference stays the policy of the start while the trained one moves."""

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.learner.forward import Reference
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.lora import add_lora
from support.adapters import ALPHA, RANK, move_adapters, small, some_inputs, some_tokens

SAMPLING = SamplingParams(temperature=1.6)


@pytest.mark.parametrize("lora", [False, True])
def test_the_reference_is_the_policy_of_the_start(lora: bool) -> None:
    policy = small(value_head="chunk")
    inputs, tokens = some_inputs(policy), some_tokens()
    start = policy.evaluate(inputs, {"tokens": tokens}, SAMPLING).logprob.detach()
    if lora:
        add_lora(policy, RANK, ALPHA)
    reference = Reference(policy if lora else small(value_head="chunk"), without_adapters=lora)
    if lora:
        move_adapters(policy)
    else:
        optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
        policy.evaluate(inputs, {"tokens": tokens}, SAMPLING).logprob.mean().backward()
        optimizer.step()
    found = reference.logprob(inputs, {"tokens": tokens}, SAMPLING)
    moved = policy.evaluate(inputs, {"tokens": tokens}, SAMPLING).logprob
    assert torch.equal(found, start)
    assert (found.dtype, tuple(found.shape), found.requires_grad) == (torch.float32, (2, 8, 7), False)
    assert (moved - start).abs().max() > 1e-3
    assert moved.requires_grad


def test_a_frozen_reference_cannot_learn() -> None:
    policy = small()
    Reference(policy)
    assert policy.trainable_parameters() == {}


def test_a_policy_without_adapters_is_no_reference_to_itself() -> None:
    with pytest.raises(ConfigError, match=r"--lora\.rank"):
        Reference(small(), without_adapters=True)
