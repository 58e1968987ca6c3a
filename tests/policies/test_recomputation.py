"""Gradient checkpointing: the same gradients from fewer kept bytes, in eval mode, under sharding."""

import copy
from collections.abc import Callable, Iterator
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from asyncrl.policies.acceleration import enable_gradient_checkpointing
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.lora import adapters_disabled, merged_tensors
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from support.adapters import adapted, logits_of, small, some_inputs, some_tokens

AS_IS = SamplingParams(temperature=1.0)


def loss_of(policy: OpenVLAOFTPolicy) -> Tensor:
    inputs = some_inputs(policy)
    result = OpenVLAOFTPolicy.evaluate(policy, inputs, {"tokens": some_tokens()}, AS_IS)
    return result.logprob.square().mean() + (0.0 if result.value is None else result.value.square().mean())


def gradients(
    policy: OpenVLAOFTPolicy, loss: Callable[[OpenVLAOFTPolicy], Tensor] = loss_of
) -> dict[str, Tensor]:
    policy.zero_grad()
    loss(policy).backward()
    found = {name: p.grad for name, p in policy.trainable_parameters().items() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def kept_bytes(policy: OpenVLAOFTPolicy) -> int:
    """Bytes of the activations that a forward pass keeps for its backward pass, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = loss_of(policy)
    assert loss.requires_grad
    return sum(kept.values())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, atol=1e-7, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_one_of_several_blocks_is_recomputed_and_gradients_stay_the_same(every: int, lora: bool) -> None:
    policy = (adapted if lora else small)(value_head="action", llm_layers=6)
    expected, plain_bytes, names = gradients(policy), kept_bytes(policy), list(policy.state_dict())
    calls: list[int] = []
    for number, block in enumerate(policy.blocks()):
        norm = next(module for module in block.modules() if type(module).__name__.endswith("Norm"))
        norm.register_forward_hook(lambda *_, i=number: calls.append(i))
    enable_gradient_checkpointing(policy, every=every)
    assert (policy.training, list(policy.state_dict())) == (False, names)
    found = gradients(policy)
    assert sorted(calls) == sorted([*range(11), *range(0, 11, every)])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    some = kept_bytes(policy)
    enable_gradient_checkpointing(policy)
    assert (kept_bytes(policy) < some) == (every > 1)
    assert some < plain_bytes / (4 if every == 1 else 1)


def test_a_copy_runs_its_own_blocks() -> None:
    policy = small()
    enable_gradient_checkpointing(policy)
    twin = copy.deepcopy(policy)
    expected = gradients(twin)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    assert_same(gradients(twin), expected)
    assert max(g.abs().max().item() for g in expected.values()) > 0


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.usefixtures("group_of_one")
def test_it_nests_inside_sharding(lora: bool) -> None:
    policy = (adapted if lora else small)(value_head="chunk")
    expected, names = gradients(policy), [n for n, _ in policy.named_parameters()]
    before = logits_of(policy)
    enable_gradient_checkpointing(policy)
    policy.zero_grad()
    policy.forward = MethodType(loss_of, policy)  # sharding hooks onto `forward`, which may return no views
    for block in policy.blocks():
        fully_shard(block)
    fully_shard(policy, reshard_after_forward=True)  # else a pass without gradient leaves it gathered
    assert [n for n, _ in policy.named_parameters()] == names
    assert_same(gradients(policy, lambda sharded: sharded()), expected)
    for method in ("act", "evaluate", "values"):
        register_fsdp_forward_method(policy, method)
    with torch.no_grad():
        acted = policy.act(some_inputs(policy), SamplingParams(temperature=0.0), [1, 2])
    assert torch.equal(acted.sample["tokens"].flatten(1).long(), before.argmax(-1))
    if lora:
        with torch.no_grad(), adapters_disabled(policy):
            free = policy.evaluate(some_inputs(policy), {"tokens": some_tokens()}, AS_IS).logprob
        plain = (
            small(value_head="chunk").evaluate(some_inputs(policy), {"tokens": some_tokens()}, AS_IS).logprob
        )
        torch.testing.assert_close(free, plain.detach(), atol=1e-6, rtol=0)
        assert_same(gradients(policy, lambda sharded: sharded()), expected)
        whole = {n: m.full_tensor() for n, m in merged_tensors(policy) if isinstance(m, DTensor)}
        assert_same(whole, dict(merged_tensors(adapted(value_head="chunk"))))
