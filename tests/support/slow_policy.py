"""OpenVLA(-OFT) once more, from its weights by name and the published equations, row by row, head by head.

Shares no code with `asyncrl.policies` but the tokenizer: numbers in float64, plain torch operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy

Weights = Mapping[str, Tensor]


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    bias = w.get(f"{name}.bias")
    return x @ w[f"{name}.weight"].T + (0 if bias is None else bias)


def layer_norm(x: Tensor, w: Weights, name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return centred / spread * w[f"{name}.weight"] + w[f"{name}.bias"]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


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
        """One row.

        Args:
            pictures: ``[N, S, S, 3]`` of the right size.
            task: Instruction.
            tokens: K bins. Causal policies read those before the one they speak for.
            proprio: ``[Q]`` in [-1, 1].
        """
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
