"""Adapters: against peft and W + s B A by hand; gradient checkpointing: the same gradients."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.weight_export import copy_policy
from asyncrl.policies.acceleration import enable_gradient_checkpointing
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.lora import adapters_disabled, add_lora, merged_tensors, save_adapter
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, load_policy
from asyncrl.weights.packing import build_manifest, require_same
from support.adapters import (
    ALPHA,
    RANK,
    SCALE,
    adapted,
    logits_of,
    move_adapters,
    small,
    some_inputs,
    some_tokens,
)

AS_IS = SamplingParams(temperature=1.0)
LLAMA = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
DINO = {f"attention.{x}_proj" for x in "qkvo"} | {"mlp.fc1", "mlp.fc2"}
SIGLIP = {f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "out_proj")} | {"mlp.fc1", "mlp.fc2"}


def merged_by_hand(plain: OpenVLAOFTPolicy, trained: OpenVLAOFTPolicy) -> dict[str, Tensor]:
    """``W + s B A``, one number pair after the other summed in float64."""
    learned = trained.trainable_tensors()
    found = {}
    for name, weight in plain.trainable_tensors().items():
        stem = name.removesuffix("weight")
        if f"{stem}lora_A.weight" in learned:
            into, out = learned[f"{stem}lora_A.weight"].double(), learned[f"{stem}lora_B.weight"].double()
            extra = sum(torch.outer(out[:, i], into[i]) for i in range(RANK))
            found[name] = weight.double() + SCALE * extra
        else:
            found[name] = weight.double()
    return found


@pytest.mark.parametrize("targets", ["all", "language"])
def test_the_layers_on_the_list_get_adapters_and_no_other(targets: str) -> None:
    expected = {f"llm.layers.{i}.{kind}" for i in range(2) for kind in LLAMA}
    if targets == "all":
        expected |= {f"projector.fc{i}" for i in (1, 2, 3)}
        expected |= {f"vision.dino.encoder.layer.{i}.{kind}" for i in range(2) for kind in DINO}
        expected |= {f"vision.siglip.encoder.layers.{i}.{kind}" for i in range(3) for kind in SIGLIP}
    names = set(adapted(targets).trainable_tensors())
    assert names == {f"{layer}.lora_{x}.weight" for layer in expected for x in "AB"}


def test_only_adapters_and_the_critic_learn() -> None:
    policy = small(value_head="chunk")
    policy.requires_grad_(False)
    add_lora(policy, RANK, ALPHA, "language")
    learning = {name for name in policy.trainable_parameters() if ".lora_" not in name}
    assert learning == {
        f"value_head.mlp.{i}" for i in ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight")
    }
    groups = policy.parameter_groups(lr=1e-4, value_lr=1e-3)
    assert [(g["name"], len(g["params"])) for g in groups] == [("policy", 2 * 14), ("value", 5)]


@pytest.mark.parametrize("targets", ["all", "language"])
def test_a_gradient_reaches_every_adapter(targets: str) -> None:
    policy = adapted(targets)
    policy.evaluate(some_inputs(policy), {"tokens": some_tokens()}, AS_IS).logprob.square().sum().backward()
    unreached = {n for n, p in policy.trainable_parameters().items() if p.grad is None or not p.grad.any()}
    assert unreached == set()
    assert all(p.grad is None for p in policy.parameters() if not p.requires_grad)


def test_learner_and_actor_agree_on_what_is_sent() -> None:
    learner, actor = small(value_head="action"), small(dtype="bfloat16")
    for policy in (learner, actor):
        add_lora(policy, RANK, ALPHA)
    sent, wanted = learner.acting_tensors(), actor.acting_tensors()
    require_same(build_manifest(sent), build_manifest(wanted), "actor-0")
    assert len(sent) == len(learner.trainable_tensors()) - 5  # the critic stays
    move_adapters(learner)
    for name, tensor in wanted.items():
        tensor.copy_(sent[name])
    assert not torch.equal(logits_of(actor), logits_of(small(dtype="bfloat16")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("weights", "targets"), [("float32", "all"), ("bfloat16", "all"), ("float32", "language")]
)
def test_fresh_adapters_change_nothing_bit_for_bit(weights: str, targets: Any, dtype: torch.dtype) -> None:
    policy = small(dtype=weights)
    before = logits_of(policy)
    add_lora(policy, RANK, ALPHA, targets, dtype=dtype)
    assert torch.equal(logits_of(policy), before)
    assert {t.dtype for t in policy.trainable_tensors().values()} == {dtype}


@pytest.mark.parametrize(("alpha", "scale"), [(ALPHA, 1.5), (0.0, 1.0), (2.0, 0.5)])
def test_a_layer_adds_alpha_over_rank_times_b_a_x(alpha: float, scale: float) -> None:
    policy = small()
    add_lora(policy, RANK, alpha)
    move_adapters(policy)
    weight = small().projector.fc1.weight
    bias = small().projector.fc1.bias
    learned = policy.trainable_tensors()
    into, out = (learned[f"projector.fc1.lora_{x}.weight"] for x in "AB")
    x = torch.randn(5, 56, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([weight @ v + bias + scale * (out @ (into @ v)) for v in x])
    torch.testing.assert_close(policy.projector.fc1(x), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("targets", ["all", "language"])
def test_the_merged_policy_is_built_as_by_hand_and_acts_as_with_adapters(targets: str) -> None:
    plain, trained = small(), adapted(targets)
    expected = merged_by_hand(plain, trained)
    merged = dict(merged_tensors(trained))
    assert list(merged) == list(plain.trainable_tensors())  # names and order
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor.double(), expected[name], atol=1e-6, rtol=0)
    assert (logits_of(trained) - logits_of(plain)).abs().max() > 0.1
    for name, tensor in plain.trainable_tensors().items():
        tensor.copy_(expected[name])
    torch.testing.assert_close(logits_of(plain), logits_of(trained), atol=1e-5, rtol=0)


def test_half_precision_weights_are_merged_in_full_precision_and_rounded_once() -> None:
    plain, trained = small(dtype="bfloat16"), adapted(dtype="bfloat16")
    expected = merged_by_hand(plain, trained)
    for name, tensor in merged_tensors(trained):
        assert tensor.dtype == torch.bfloat16
        rounded = expected[name].float().bfloat16()
        far = (tensor.float() - rounded.float()).abs() > 2**-7 * rounded.float().abs()
        assert not far.any(), name  # at most the last bit, where float32 and float64 round differently
        assert (tensor != rounded).float().mean() < 1e-2


def test_disabled_adapters_give_the_policy_of_the_start() -> None:
    trained = adapted(value_head="chunk")
    with_adapters, learning = logits_of(trained), trained.trainable_parameters().keys()
    with adapters_disabled(trained):
        assert torch.equal(logits_of(trained), logits_of(small(value_head="chunk")))
        with adapters_disabled(trained):
            pass
        assert torch.equal(logits_of(trained), logits_of(small(value_head="chunk")))
        assert trained.trainable_parameters().keys() == learning
    assert torch.equal(logits_of(trained), with_adapters)
    with pytest.raises(KeyError), adapters_disabled(trained):
        raise KeyError
    assert torch.equal(logits_of(trained), with_adapters)


def test_a_gradient_taken_around_a_disabled_pass_is_unharmed() -> None:
    gradients = []
    for interrupted in (False, True):
        policy = adapted()
        loss = policy.evaluate(some_inputs(policy), {"tokens": some_tokens()}, AS_IS).logprob.sum()
        if interrupted:
            with adapters_disabled(policy):
                logits_of(policy)
        loss.backward()
        gradients.append([p.grad for p in policy.trainable_parameters().values()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]


def test_peft_itself_loads_the_folder(tmp_path: Path) -> None:
    for targets in ("all", "language"):
        trained = adapted(targets)
        save_adapter(trained, tmp_path)
        fresh = small()
        wrapped = PeftModel.from_pretrained(fresh, str(tmp_path))
        assert torch.equal(logits_of(fresh), logits_of(trained))
        assert wrapped.peft_config["default"].r == RANK
        assert sum(".lora_" in name for name, _ in fresh.named_parameters()) == len(
            trained.trainable_tensors()
        )


def test_a_checkpoint_of_adapters_holds_the_merged_policy_and_the_adapters_alone(tmp_path: Path) -> None:
    policy = OpenVLAOFTPolicy(OpenVLAOFTConfig.tiny()).eval()
    policy.save(tmp_path / "start")
    add_lora(policy, 2, 0.0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.normal_()
    copy_policy(policy, LearnerRanks())(tmp_path)
    again = load_policy(tmp_path / "start")
    PeftModel.from_pretrained(again, str(tmp_path / "adapter"))
    merged, adapted = dict(merged_tensors(load_policy(tmp_path))), dict(merged_tensors(again))
    assert all(torch.equal(merged[name], adapted[name]) for name in merged | adapted)


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
