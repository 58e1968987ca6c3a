"""Every variant of the policy equals an independent construction: results and gradients."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.policies.action_tokens import Bounds, NormStats, uniforms_for
from asyncrl.policies.interface import PolicyInputs, SamplingParams
from asyncrl.policies.openvla.config import OpenVLAOFTConfig, TowerConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, OpenVLAPolicy, load_policy, new_policy
from support.formulas import gelu, layer_norm, rms_norm

Weights = Mapping[str, Tensor]


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    bias = w.get(f"{name}.bias")
    return x @ w[f"{name}.weight"].T + (0 if bias is None else bias)


def attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, turn: Callable[[Tensor], Tensor], causal: bool
) -> Tensor:
    """``[S, D]`` each; place i sees every place j, or only j <= i."""
    size = q.shape[1] // heads
    out = []
    for h in range(heads):
        cut = slice(h * size, (h + 1) * size)
        scores = turn(q[:, cut]) @ turn(k[:, cut]).T / math.sqrt(size)
        if causal:
            later = torch.arange(len(q))[None, :] > torch.arange(len(q))[:, None]
            scores = torch.where(later, -math.inf, scores)
        out.append(scores.softmax(-1) @ v[:, cut])
    return torch.cat(out, dim=1)


def patches_of(levels: Tensor, mean: Sequence[float], std: Sequence[float], w: Weights, name: str) -> Tensor:
    """``[S, S, 3]`` grey levels to ``[P, D]``: every patch times the kernel, row by row."""
    kernel = w[f"{name}.weight"]
    size = kernel.shape[-1]
    colours = (levels / 255 - torch.tensor(mean, dtype=torch.float64)) / torch.tensor(
        std, dtype=torch.float64
    )
    found = []
    for top in range(0, len(levels), size):
        for left in range(0, len(levels), size):
            patch = colours[top : top + size, left : left + size].permute(2, 0, 1)
            found.append((kernel * patch).sum((1, 2, 3)) + w[f"{name}.bias"])
    return torch.stack(found)


def tower(x: Tensor, w: Weights, blocks: str, names: Mapping[str, str], depth: int, heads: int) -> Tensor:
    """All blocks but the last, no norm at the end."""
    for i in range(depth - 1):
        block = f"{blocks}.{i}."
        y = layer_norm(x, w, block + names["norm1"])
        q, k, v = (linear(y, w, f"{block}{names['attention']}.{n}_proj") for n in "qkv")
        y = linear(attention(q, k, v, heads, lambda part: part, causal=False), w, block + names["out"])
        x = x + y * w.get(f"{block}layer_scale1.lambda1", torch.ones(()))
        y = layer_norm(x, w, block + names["norm2"])
        y = linear(gelu(linear(y, w, f"{block}mlp.fc1")), w, f"{block}mlp.fc2")
        x = x + y * w.get(f"{block}layer_scale2.lambda1", torch.ones(()))
    return x


def dino(levels: Tensor, w: Weights, depth: int, heads: int) -> Tensor:
    part = "vision.dino.embeddings."
    mean, std = (0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375)
    patches = patches_of(levels, mean, std, w, part + "patch_embeddings.projection")
    x = torch.cat([w[part + "cls_token"][0], patches]) + w[part + "position_embeddings"][0]
    x = torch.cat([x[:1], w[part + "register_tokens"][0], x[1:]])  # registers have no place
    names = {"norm1": "norm1", "norm2": "norm2", "attention": "attention", "out": "attention.o_proj"}
    return tower(x, w, "vision.dino.encoder.layer", names, depth, heads)[5:]


def siglip(levels: Tensor, w: Weights, depth: int, heads: int) -> Tensor:
    part = "vision.siglip.embeddings."
    x = patches_of(levels, (0.5,) * 3, (0.5,) * 3, w, part + "patch_embedding")
    x = x + w[part + "position_embedding.weight"]
    names = {
        "norm1": "layer_norm1",
        "norm2": "layer_norm2",
        "attention": "self_attn",
        "out": "self_attn.out_proj",
    }
    return tower(x, w, "vision.siglip.encoder.layers", names, depth, heads)


def llama(x: Tensor, w: Weights, layers: int, heads: int, *, causal: bool) -> Tensor:
    """Final hidden states ``[S, D]``."""
    size = x.shape[1] // heads
    places = torch.arange(len(x), dtype=torch.float64)
    angles = places[:, None] / 10_000 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)

    def turn(part: Tensor) -> Tensor:
        a, b = part[:, : size // 2], part[:, size // 2 :]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=1)

    for i in range(layers):
        layer = f"llm.layers.{i}."
        y = rms_norm(x, w[layer + "input_layernorm.weight"])
        q, k, v = (linear(y, w, f"{layer}self_attn.{n}_proj") for n in "qkv")
        x = x + linear(attention(q, k, v, heads, turn, causal), w, layer + "self_attn.o_proj")
        y = rms_norm(x, w[layer + "post_attention_layernorm.weight"])
        gate = linear(y, w, layer + "mlp.gate_proj")
        x = x + linear(
            gate * gate.sigmoid() * linear(y, w, layer + "mlp.up_proj"), w, layer + "mlp.down_proj"
        )
    return rms_norm(x, w["llm.norm.weight"])


class SlowResult(NamedTuple):
    features: Tensor
    """``[P, D]`` of both towers, all pictures one after another."""
    logprobs: Tensor
    """``[K, 256]``."""
    value: Tensor


class SlowPolicy:
    """The same weights in float64, every one of them a leaf that collects its gradient."""

    def __init__(self, policy: OpenVLAOFTPolicy) -> None:
        self.config = policy.config
        self.ids = policy.tokenizer.ids
        self.end_id = policy.tokenizer.end_id
        self.weights = {name: t.double().requires_grad_() for name, t in policy.trainable_tensors().items()}

    def decide(
        self, pictures: np.ndarray, task: str, tokens: Sequence[int], proprio: Tensor | None = None
    ) -> SlowResult:
        """One row: ``[N, S, S, 3]`` pictures of the right size, K bins, ``[Q]`` proprio in [-1, 1]."""
        w, config = self.weights, self.config
        features = torch.cat([self.see(torch.from_numpy(picture).double()) for picture in pictures])
        x = gelu(linear(gelu(linear(features, w, "projector.fc1")), w, "projector.fc2"))
        seen = [linear(x, w, "projector.fc3")]
        if proprio is not None:
            x = gelu(linear(proprio.double()[None], w, "proprio_projector.fc1"))
            seen.append(linear(x, w, "proprio_projector.fc2"))
        words = w["llm.embed_tokens.weight"][list(self.ids(task))]
        prompt = torch.cat([words[:1], *seen, words[1:]])
        first = config.token_count - 256
        if config.decoding == "autoregressive":
            tail = w["llm.embed_tokens.weight"][[first + token for token in tokens]]
        else:
            tail = torch.zeros(len(tokens), config.llm_width, dtype=torch.float64)
        parts = [prompt, tail]
        if config.stop_token:
            parts.append(w["llm.embed_tokens.weight"][[self.end_id]])
        causal = config.decoding == "autoregressive"
        hidden = llama(torch.cat(parts), w, config.llm_layers, config.llm_heads, causal=causal)
        spoken = hidden[len(prompt) - 1 : len(prompt) - 1 + len(tokens)]
        logits = spoken @ w["lm_head.weight"][first : first + 256].T
        return SlowResult(features, logits.log_softmax(-1), self.value_of(hidden[len(prompt) - 1].detach()))

    def see(self, levels: Tensor) -> Tensor:
        """``[S, S, 3]`` grey levels to ``[P, D]``."""
        w, config = self.weights, self.config
        left = dino(levels, w, config.dino.depth, config.dino.heads)
        return torch.cat([left, siglip(levels, w, config.siglip.depth, config.siglip.heads)], dim=1)

    def value_of(self, hidden: Tensor) -> Tensor:
        x = gelu(linear(hidden, self.weights, "value_head.mlp.0"))
        return linear(gelu(linear(x, self.weights, "value_head.mlp.2")), self.weights, "value_head.mlp.4")


SHORT, LONG = "lift the cube", "put the red cube on the white plate"
AS_IS = SamplingParams(temperature=1.0)
STATS = NormStats(
    q01=(-0.5,) * 6 + (0.0,),
    q99=(0.5,) * 6 + (1.0,),
    mask=(True,) * 6 + (False,),
    proprio=Bounds(q01=(-1.0, 0.0, 2.0), q99=(1.0, 4.0, 3.0), mask=(True, True, True)),
)
STATE = {"proprio_dim": 3, "norm_key": "data", "norm_stats": {"data": STATS}}
VARIANTS: dict[str, dict[str, Any]] = {
    "oft": {},
    "stop token": {"stop_token": True},
    "two pictures": {"images": 2},
    "proprioception": STATE,
    "all of it": {"images": 2, "stop_token": True, **STATE},
    "a value per step": {"value_head": "action"},
    "openvla": {"decoding": "autoregressive", "chunk": 1},
    "openvla with a chunk": {"decoding": "autoregressive", "chunk": 3},
    "openvla with all of it": {"decoding": "autoregressive", "chunk": 2, "images": 2, **STATE},
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def small(**changes: Any) -> OpenVLAOFTPolicy:
    """Two blocks per tower, 16 patches, two Llama layers; weights large enough to matter everywhere."""
    torch.manual_seed(0)
    sizes = {
        "image_size": 32,
        "dino": TowerConfig(width=24, depth=3, heads=3, mlp=48),
        "siglip": TowerConfig(width=32, depth=3, heads=2, mlp=40),
        "llm_width": 64,
        "llm_layers": 2,
        "llm_mlp": 96,
        "value_head": "chunk",
    }
    policy = new_policy(OpenVLAOFTConfig.tiny(**(sizes | changes)))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return policy.eval()


def raw_inputs(policy: OpenVLAOFTPolicy, rows: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Frames (of the policy's size) and proprioception, partly out of bounds."""
    rng = np.random.default_rng(0)
    config = policy.config
    several = (config.images,) if config.images > 1 else ()
    frames = rng.integers(0, 256, (rows, *several, config.image_size, config.image_size, 3), dtype=np.uint8)
    states = np.array([[0.5, 1.0, 2.9], [-3.0, 5.0, 2.5]])[:rows]
    return frames, states if config.proprio_dim else None


def inputs_of(policy: OpenVLAOFTPolicy, tasks: list[str]) -> PolicyInputs:
    frames, proprio = raw_inputs(policy, len(tasks))
    return policy.preprocess(frames, tasks, proprio)


SCALED = torch.tensor([[0.5, -0.5, 0.8], [-1.0, 1.0, 0.0]], dtype=torch.float64)
"""The proprioception of `raw_inputs` by hand: 2 (x - q01) / (q99 - q01) - 1, clipped."""


def some_tokens(policy: OpenVLAOFTPolicy, rows: int) -> Tensor:
    shape = (rows, policy.config.chunk, policy.config.action_dim)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(2), dtype=torch.int32)


@variants
@pytest.mark.parametrize("tasks", [[LONG, LONG], [SHORT, LONG]], ids=["unpadded", "padded"])
def test_the_policy_equals_the_slow_construction(variant: str, tasks: list[str]) -> None:
    policy = small(**VARIANTS[variant])
    slow = SlowPolicy(policy)
    inputs, tokens = inputs_of(policy, tasks), some_tokens(policy, 2)
    assert inputs.padded == (tasks[0] != tasks[1])
    found = policy.evaluate(inputs, {"tokens": tokens}, AS_IS)
    assert found.value is not None
    frames, _ = raw_inputs(policy, 2)
    pictures = frames.reshape(2, -1, *frames.shape[-3:])
    for row, task in enumerate(tasks):
        bins = tokens[row].flatten()
        proprio = SCALED[row] if policy.config.proprio_dim else None
        expected = slow.decide(pictures[row], task, bins.tolist(), proprio)
        with torch.no_grad():
            features = policy.vision(torch.from_numpy(pictures[row])).flatten(0, 1)
        entropy = -(expected.logprobs.exp() * expected.logprobs).sum(-1)
        for name, mine, theirs in [
            ("features", features, expected.features),
            ("log-prob", found.logprob[row].flatten(), expected.logprobs[range(len(bins)), bins.long()]),
            ("entropy", found.entropy[row].flatten(), entropy),
            ("value", found.value[row], expected.value),
        ]:
            difference = (mine.double() - theirs).abs().max().item()
            assert difference < 1e-5, f"{name} of row {row} differs by {difference}"


@variants
def test_gradients_equal_those_of_the_slow_construction(variant: str) -> None:
    policy = small(**VARIANTS[variant])
    slow = SlowPolicy(policy)
    inputs, tokens = inputs_of(policy, [SHORT, LONG]), some_tokens(policy, 2)
    result = policy.evaluate(inputs, {"tokens": tokens}, AS_IS)
    assert result.value is not None
    (result.logprob.sum() + result.value.sum()).backward()
    frames, _ = raw_inputs(policy, 2)
    pictures = frames.reshape(2, -1, *frames.shape[-3:])
    for row, task in enumerate([SHORT, LONG]):
        bins = tokens[row].flatten()
        proprio = SCALED[row] if policy.config.proprio_dim else None
        expected = slow.decide(pictures[row], task, bins.tolist(), proprio)
        (expected.logprobs[range(len(bins)), bins.long()].sum() + expected.value.sum()).backward()
    for name, parameter in policy.trainable_parameters().items():
        theirs = slow.weights[name].grad
        assert theirs is not None, name
        assert parameter.grad is not None, name
        scale = theirs.abs().max().item()
        if name.endswith(("k_proj.bias",)):
            assert scale < 1e-9  # softmax does not see a shift that all keys share
            continue
        assert scale > 1e-6, name
        assert (parameter.grad.double() - theirs).abs().max().item() < 1e-4 * scale, name


@variants
@pytest.mark.parametrize("sampling", [AS_IS, SamplingParams(temperature=1.6, top_k=20)])
def test_acting_and_evaluating_agree(variant: str, sampling: SamplingParams) -> None:
    policy = small(**VARIANTS[variant])
    for tasks in ([LONG, LONG], [SHORT, LONG]):
        inputs = inputs_of(policy, tasks)
        acted = policy.act(inputs, sampling, [5, 6])
        again = policy.train().evaluate(inputs, {"tokens": acted.sample["tokens"]}, sampling)
        assert (again.logprob.requires_grad, acted.logprob.requires_grad) == (True, False)
        torch.testing.assert_close(again.logprob, acted.logprob, atol=1e-5, rtol=0)
        torch.testing.assert_close(again.entropy, acted.entropy, atol=1e-5, rtol=0)
        torch.testing.assert_close(again.value, acted.value, atol=1e-5, rtol=0)
        torch.testing.assert_close(policy.values(inputs), acted.value, atol=1e-5, rtol=0)
        assert len(acted.sample["tokens"].unique()) > 5


@pytest.mark.parametrize("variant", ["oft", "openvla", "openvla with all of it"])
def test_token_k_is_drawn_with_uniform_k(variant: str) -> None:
    policy = small(**VARIANTS[variant])
    inputs = inputs_of(policy, [SHORT, LONG])
    tokens = policy.act(inputs, AS_IS, [5, 6]).sample["tokens"].flatten(1)
    with torch.no_grad():
        hidden = policy.readout(inputs, tokens)
        cumulated = policy.lm_head(hidden).double().softmax(-1).cumsum(-1)
    uniforms = uniforms_for(AS_IS, [5, 6], policy.config.slots, policy.device)
    assert uniforms is not None
    for row in range(2):
        for k, bin in enumerate(tokens[row].tolist()):
            below = 0.0 if bin == 0 else cumulated[row, k, bin - 1].item()
            assert below - 1e-5 <= uniforms[row, k].item() <= cumulated[row, k, bin].item() + 1e-5


@torch.no_grad()
def test_an_openvla_action_is_found_by_taking_the_best_token_again_and_again() -> None:
    policy = small(**VARIANTS["openvla"])
    slow = SlowPolicy(policy)
    frames, _ = raw_inputs(policy, 2)
    acted = policy.act(inputs_of(policy, [SHORT, LONG]), SamplingParams(temperature=0.0), [1, 2])
    for row, task in enumerate([SHORT, LONG]):
        found: list[int] = []
        for _ in range(7):
            found.append(int(slow.decide(frames[row][None], task, [*found, 0], None).logprobs[-1].argmax()))
        assert acted.sample["tokens"][row].flatten().tolist() == found


@torch.no_grad()
def test_norms_add_a_millionth_to_the_mean_square() -> None:
    policy: Any = small()
    faint = 1e-3 * torch.randn(5, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_hand = policy.llm.norm.weight.double() * faint / (faint.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    for norm in (policy.llm.norm, policy.llm.layers[0].input_layernorm):
        scale = norm.weight.double() / policy.llm.norm.weight.double()
        torch.testing.assert_close(norm(faint.float()).double(), by_hand * scale, atol=1e-5, rtol=0)
    for norm in (
        policy.vision.dino.encoder.layer[0].norm1,
        policy.vision.siglip.encoder.layers[0].layer_norm1,
    ):
        part = faint[:, : norm.weight.shape[0]]
        part = part - part.mean(-1, keepdim=True)
        expected = part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight + norm.bias
        torch.testing.assert_close(norm(part.float()).double(), expected, atol=1e-5, rtol=0)


def test_the_factory_and_a_saved_folder_give_the_class_that_decodes_so(tmp_path: Path) -> None:
    for variant in ("oft", "openvla with all of it"):
        policy = small(**VARIANTS[variant])
        assert isinstance(policy, OpenVLAPolicy) == (variant != "oft")
        policy.save(tmp_path / variant)
        again = load_policy(tmp_path / variant)
        assert type(again) is type(policy)
        assert again.config == policy.config
        inputs = inputs_of(policy, [SHORT, LONG])
        ours, theirs = (p.act(inputs, AS_IS, [1, 2]) for p in (policy, again))
        assert torch.equal(ours.sample["tokens"], theirs.sample["tokens"])
        assert torch.equal(ours.logprob, theirs.logprob)
        assert dataclasses.asdict(ours).keys() == {"actions", "sample", "logprob", "value", "entropy"}
