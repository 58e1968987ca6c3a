"""Layers that round their own weights compute, bit for bit, what FSDP computes when it rounds them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncrl.learner import fsdp
from asyncrl.learner.fsdp import RoundedLinear, round_trained_layers
from asyncrl.policies.acceleration import enable_gradient_checkpointing
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.lora import add_lora, merged_tensors
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from support.ranks import run_ranks
from support.tiny_models import small_policy

TASKS = ["lift the red block", "stack the blue block on the green block"]
CPU = torch.device("cpu")


def with_adapters(dtype: torch.dtype = torch.bfloat16, value_head: Any = "none") -> OpenVLAOFTPolicy:
    policy = small_policy(value_head=value_head).to(dtype)
    add_lora(policy, 4, 0.0)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.1)
    for parameter in policy.value_head.float().parameters() if policy.value_head is not None else ():
        parameter.data.mul_(1.001)  # No number of bfloat16 any more.
    enable_gradient_checkpointing(policy, every=2)
    return policy.eval()


def passes(policy: OpenVLAOFTPolicy) -> dict[str, Tensor]:
    """What two passes of one step compute, and their gradients."""
    rng, found = np.random.default_rng(0), dict[str, Tensor]()
    with fsdp.summed_gradient(policy) as pass_is_last:
        for number in range(2):
            frames = rng.integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
            sample = {"tokens": torch.from_numpy(rng.integers(0, 256, (2, 8, 7)))}
            inputs = policy.preprocess(frames, TASKS)
            result = policy.evaluate(inputs, sample, SamplingParams(temperature=1.0))
            loss = result.logprob.sum() + 0.1 * result.entropy.sum()
            if result.value is not None:
                loss = loss + result.value.sum()
                found[f"value {number}"] = result.value.detach()
            if number == 1:
                pass_is_last()
            loss.backward()
            found[f"logprob {number}"] = result.logprob.detach()
    for name, parameter in policy.trainable_parameters().items():
        gradient: Any = parameter.grad
        found[name] = gradient.to_local()
    return found


def both_ways() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    own = fsdp.shard(with_adapters(), CPU, "bf16")
    assert any(isinstance(module, RoundedLinear) for module in own.modules())
    rounded, fsdp.round_trained_layers = passes(own), lambda network: False
    return rounded, passes(fsdp.shard(with_adapters(), CPU, "bf16"))


@pytest.mark.timeout(60)
def test_passes_and_gradients_are_those_of_fsdp_bit_for_bit() -> None:
    ((rounded, by_fsdp),) = run_ranks(both_ways, ranks=1)
    assert rounded.keys() == by_fsdp.keys()
    for name, tensor in rounded.items():
        assert tensor.dtype == torch.float32, name
        assert torch.equal(tensor, by_fsdp[name]), name
    assert max(float(t.abs().max()) for name, t in rounded.items() if "lora" in name) > 0


def with_a_critic() -> tuple[Tensor, Tensor, Tensor]:
    """Values of the first pass: sharded, not sharded, and with FSDP's rounding."""
    policy = with_adapters(value_head="chunk")
    fsdp.make_float32_masters(policy, "bf16")
    assert round_trained_layers(policy)
    frames = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    alone = policy.values(policy.preprocess(frames, TASKS)).detach()
    sharded = passes(fsdp.shard(with_adapters(value_head="chunk"), CPU, "bf16"))
    fsdp.round_trained_layers = lambda network: False
    by_fsdp = passes(fsdp.shard(with_adapters(value_head="chunk"), CPU, "bf16"))
    return sharded["value 0"].flatten(), alone.flatten(), by_fsdp["value 0"].flatten()


@pytest.mark.timeout(60)
def test_a_critic_that_computes_in_float32_has_its_weights_as_they_are() -> None:
    ((sharded, alone, by_fsdp),) = run_ranks(with_a_critic, ranks=1)
    assert torch.equal(sharded, alone)
    assert not torch.equal(by_fsdp, alone), "there they were rounded to bfloat16 first"
    torch.testing.assert_close(by_fsdp, alone, atol=0.02, rtol=0.02)


def test_only_plain_linear_layers_are_rounded() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).requires_grad_(False)
    network[0].requires_grad_(True)
    weight = network[0].weight
    assert round_trained_layers(network)
    assert type(network[0]) is RoundedLinear
    assert network[0].weight is weight
    out = network[0](torch.ones(2, 4, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32

    other = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert not round_trained_layers(other), "a norm is trained too"
    assert type(other[0]) is nn.Linear


def test_what_is_saved_is_what_it_was() -> None:
    plain, rounded = with_adapters(), with_adapters()
    assert round_trained_layers(rounded)
    assert list(rounded.trainable_parameters()) == list(plain.trainable_parameters())
    for (name, tensor), (other, expected) in zip(merged_tensors(rounded), merged_tensors(plain), strict=True):
        assert name == other
        assert torch.equal(tensor, expected)
