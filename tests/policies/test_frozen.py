"""--learner.frozen-precision float8: which layers, what a gradient keeps of its direction, what stays."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from asyncrl.config.run import TrainConfig, parse
from asyncrl.config.sections import LearnerSettings, LoraSettings
from asyncrl.devices.float8 import FrozenFloat8Linear
from asyncrl.errors import ConfigError
from asyncrl.launch.named_models import build_policy
from asyncrl.learner.forward import Reference
from asyncrl.learner.fsdp import shard
from asyncrl.policies.acceleration import (
    enable_gradient_checkpointing,
    frozen_float8_bytes,
    use_float8_where_frozen,
)
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.lora import add_lora, merged_tensors
from asyncrl.policies.openvla.config import TowerConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from support.adapters import ALPHA, RANK, move_adapters, small, some_inputs, some_tokens
from support.ranks import run_ranks

CPU = torch.device("cpu")
SAMPLING = SamplingParams(temperature=1.6)
TOWERS = {
    "dino": TowerConfig(width=32, depth=2, heads=2, mlp=64),
    "siglip": TowerConfig(width=32, depth=2, heads=2, mlp=40),
}
"""Widths that fit, but for one MLP."""
ROUNDED = LearnerSettings(precision="bf16", frozen_precision="float8")


def learning(*, rounded: bool = True, dtype: torch.dtype = torch.bfloat16) -> OpenVLAOFTPolicy:
    policy = small(**TOWERS).to(dtype)
    add_lora(policy, RANK, ALPHA)
    move_adapters(policy)
    if rounded:
        use_float8_where_frozen(policy)
    return policy


def layers(policy: nn.Module) -> set[str]:
    return {name for name, module in policy.named_modules() if isinstance(module, FrozenFloat8Linear)}


def test_frozen_layers_of_blocks_below_adapters_that_fit_are_rounded_and_no_other() -> None:
    found = layers(learning())
    llama = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    assert {name for name in found if name.startswith("llm.")} == {
        f"llm.layers.{i}.{kind}.base_layer" for i in range(2) for kind in llama
    }
    siglip = {name.partition("layers.0.")[2] for name in found if "siglip" in name and "layers.0" in name}
    assert siglip == {f"self_attn.{x}.base_layer" for x in ("q_proj", "k_proj", "v_proj", "out_proj")}
    assert sum("dino" in name for name in found) == TOWERS["dino"].depth * 6 - 6  # The last is not run.
    assert not any(name.startswith("projector.") for name in found)
    language = small(**TOWERS)
    add_lora(language, RANK, ALPHA, "language")
    use_float8_where_frozen(language)
    assert layers(language) == {name for name in found if name.startswith("llm.")}


def test_what_is_saved_published_and_trained_is_as_without_it() -> None:
    exact, policy = learning(rounded=False), learning(rounded=False)
    expected = frozen_float8_bytes(policy)
    before = sum(buffer.nbytes for buffer in policy.buffers())
    use_float8_where_frozen(policy)
    assert sum(buffer.nbytes for buffer in policy.buffers()) - before == expected > 0
    assert list(dict(merged_tensors(policy))) == list(dict(merged_tensors(exact)))
    for found, plain in (
        (policy.state_dict(), exact.state_dict()),
        (dict(policy.named_parameters()), dict(exact.named_parameters())),
        (dict(merged_tensors(policy)), dict(merged_tensors(exact))),
        (dict(policy.saved_tensors()), dict(exact.saved_tensors())),
        (policy.acting_tensors(), exact.acting_tensors()),
        (policy.trainable_parameters(), exact.trainable_parameters()),
    ):
        assert list(found) == list(plain)
        assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
        assert all(found[name].dtype == tensor.dtype for name, tensor in plain.items())
    assert layers(copy.deepcopy(policy)) == layers(policy)


def gradients(policy: OpenVLAOFTPolicy) -> dict[str, Tensor]:
    """Of a policy-gradient loss, sharded by one rank: bfloat16 passes."""
    policy.zero_grad()
    result = policy.evaluate(some_inputs(policy), {"tokens": some_tokens()}, SAMPLING)
    advantages = torch.tensor([1.0, -0.5])[:, None, None]
    (-(advantages * result.logprob).mean() - 0.01 * result.entropy.mean()).backward()
    found = {n: p.grad for n, p in policy.trainable_parameters().items() if p.grad is not None}
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for n, g in found.items()}  # type: ignore[operator]


def cosine(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    pair = [torch.cat([tensors[name] for name in expected]).double() for tensors in (found, expected)]
    return nn.functional.cosine_similarity(*pair, dim=0).item()


def gradients_on_one_rank() -> dict[str, float]:
    told: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):  # Frozen weights stay whole; frozen weights are sharded.
        exact = gradients(shard(learning(rounded=False, dtype=dtype), CPU, "bf16"))
        policy = shard(learning(dtype=dtype), CPU, "bf16")
        found = gradients(policy)
        told[f"cosine {dtype}"] = cosine(found, exact)
        told[f"least {dtype}"] = min(cosine({n: found[n]}, {n: exact[n]}) for n in exact)
        told[f"equal {dtype}"] = sum(torch.equal(found[n], exact[n]) for n in exact)
        recomputed = learning(dtype=dtype)
        enable_gradient_checkpointing(recomputed)
        again = gradients(shard(recomputed, CPU, "bf16"))
        told[f"again {dtype}"] = max((again[n] - found[n]).abs().max().item() for n in exact)
        # Adapters that are disabled leave the layers rounded; what is trained does not change them.
        with torch.no_grad():
            start = small(**TOWERS).to(dtype)
            add_lora(start, RANK, ALPHA)  # B is 0.
            use_float8_where_frozen(start)
            shard(start, CPU, "bf16")
            expected = start.evaluate(some_inputs(start), {"tokens": some_tokens()}, SAMPLING).logprob
        inputs = some_inputs(policy)
        reference = Reference(policy, without_adapters=True).logprob(
            inputs, {"tokens": some_tokens()}, SAMPLING
        )
        told[f"reference {dtype}"] = (reference - expected).abs().max().item()
    return told


def test_adapters_of_a_tiny_policy_get_almost_the_same_gradient_in_bf16() -> None:
    (told,) = run_ranks(gradients_on_one_rank, ranks=1)
    for dtype in ("torch.bfloat16", "torch.float32"):
        assert 0.97 < told[f"cosine {dtype}"] < 0.99999, told
        assert told[f"least {dtype}"] > 0.8, told
        assert told[f"equal {dtype}"] == 0, told
        assert told[f"again {dtype}"] == 0, told
        assert told[f"reference {dtype}"] == 0, told


def test_a_learner_has_rounded_layers_and_an_actor_has_none() -> None:
    config = TrainConfig(learner=ROUNDED, lora=LoraSettings(rank=4))
    learner, actor = build_policy(config, CPU, learns=True), build_policy(config, CPU)
    assert layers(learner)  # type: ignore[arg-type]
    assert not layers(actor)  # type: ignore[arg-type]
    plain = build_policy(replace(config, learner=LearnerSettings(precision="bf16")), CPU, learns=True)
    assert not layers(plain)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--learner.precision", "bf16"], r"--lora\.rank is 0: all weights.*Set --lora\.rank 32"),
        (["--lora.rank", "4"], r"--learner\.precision is fp32.*bfloat16\. Use --learner\.precision bf16"),
    ],
)
def test_settings_that_leave_nothing_to_round_are_refused(flags: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parse(["--learner.frozen-precision", "float8", *flags])
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "--learner.frozen-precision is float8" in shown
    assert re.search(said, shown), shown


def test_a_gpu_without_8_bit_products_is_refused_by_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    config = TrainConfig(learner=ROUNDED, lora=LoraSettings(rank=4))
    with pytest.raises(ConfigError, match=r"--learner\.frozen-precision is float8, but A100 .* stored"):
        build_policy(config, torch.device("cuda"), learns=True)


class Own(nn.Module):
    """A policy of a user's whose only layer with an adapter does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 7)

    def blocks(self) -> list[nn.Module]:
        return [self.layer]


def test_a_policy_without_a_layer_to_round_is_refused() -> None:
    said = r"--learner\.frozen-precision is float8, but no layer of Own can be rounded: .* multiples of 16"
    for action in (use_float8_where_frozen, frozen_float8_bytes):
        with pytest.raises(ConfigError, match=said):
            action(Own())
    with pytest.raises(ConfigError, match="no layer of OpenVLAOFTPolicy can be rounded"):
        use_float8_where_frozen(small(**TOWERS))
