"""EVAC's network against the equations, one frame, pixel and head at a time."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.worlds.evac.unet import EvacUNet, UNetConfig, attend
from support.evac import TINY_UNET, randomised
from support.formulas import gelu, silu, standardised

TINY = TINY_UNET
Weights = dict[str, Tensor]


def below(weights: Weights, prefix: str) -> Weights:
    return {name[len(prefix) + 1 :]: t for name, t in weights.items() if name.startswith(prefix + ".")}


def group_norm(x: Tensor, w: Weights, groups: int, eps: float) -> Tensor:
    """Of ``[C, ...]``: each group of channels has mean 0 and variance 1."""
    parts = [(p - p.mean()) / (p.var(unbiased=False) + eps).sqrt() for p in x.chunk(groups)]
    shape = (-1, *[1] * (x.ndim - 1))
    return torch.cat(parts) * w["weight"].view(shape) + w["bias"].view(shape)


def layer_norm(x: Tensor, w: Weights) -> Tensor:
    return standardised(x, 1e-5) * w["weight"] + w["bias"]


def linear(x: Tensor, w: Weights) -> Tensor:
    y = x @ w["weight"].flatten(1).T
    return y + w["bias"] if "bias" in w else y


def conv2d(x: Tensor, w: Weights, stride: int = 1) -> Tensor:
    """Of ``[C, h, w]``: a window of 3 x 3 around every pixel (or the pixel alone), zeros outside."""
    kernel = w["weight"]
    pad = kernel.shape[-1] // 2
    padded = functional.pad(x, (pad, pad, pad, pad))
    rows = []
    for i in range(0, x.shape[1], stride):
        row = []
        for j in range(0, x.shape[2], stride):
            window = padded[:, i : i + 2 * pad + 1, j : j + 2 * pad + 1]
            row.append((kernel * window).flatten(1).sum(1) + w["bias"])
        rows.append(torch.stack(row, 1))
    return torch.stack(rows, 1)


def attention(x: Tensor, source: Tensor, w: Weights, names: tuple[str, str], head_dim: int) -> Tensor:
    """Of ``[S, width]`` over ``[L, width]``, head by head."""
    q, k, v = x @ w["to_q.weight"].T, source @ w[names[0] + ".weight"].T, source @ w[names[1] + ".weight"].T
    heads = []
    for at in range(0, q.shape[1], head_dim):
        part = slice(at, at + head_dim)
        scores = q[:, part] @ k[:, part].T / math.sqrt(head_dim)
        heads.append(scores.softmax(-1) @ v[:, part])
    return linear(torch.cat(heads, 1), below(w, "to_out.0"))


def block(x: Tensor, w: Weights, head_dim: int, context: Tensor | None, names: tuple[str, str]) -> Tensor:
    own = ("to_k", "to_v")
    y = layer_norm(x, below(w, "norm1"))
    x = x + attention(y, y, below(w, "attn1"), own, head_dim)
    y = layer_norm(x, below(w, "norm2"))
    x = x + attention(y, y if context is None else context, below(w, "attn2"), names, head_dim)
    y = linear(layer_norm(x, below(w, "norm3")), below(w, "ff.net.0.proj"))
    value, gate = y.chunk(2, -1)
    return x + linear(value * gelu(gate), below(w, "ff.net.2"))


def spatial(x: Tensor, w: Weights, size: UNetConfig, context: list[Tensor], names: tuple[str, str]) -> Tensor:
    """Of ``[F, C, h, w]``."""
    frames = []
    for frame, tokens in zip(x, context, strict=True):
        y = group_norm(frame, below(w, "norm"), size.groups, 1e-6).flatten(1).T
        y = block(
            linear(y, below(w, "proj_in")), below(w, "transformer_blocks.0"), size.head_dim, tokens, names
        )
        frames.append(frame + linear(y, below(w, "proj_out")).T.view(frame.shape))
    return torch.stack(frames)


def temporal(x: Tensor, w: Weights, size: UNetConfig) -> Tensor:
    normed = group_norm(x.transpose(0, 1), below(w, "norm"), size.groups, 1e-6).transpose(0, 1)
    out = torch.empty_like(x)
    for i in range(x.shape[2]):
        for j in range(x.shape[3]):
            y = linear(normed[:, :, i, j], below(w, "proj_in"))
            y = block(y, below(w, "transformer_blocks.0"), size.head_dim, None, ("to_k", "to_v"))
            out[:, :, i, j] = x[:, :, i, j] + linear(y, below(w, "proj_out"))
    return out


def temporal_conv(x: Tensor, w: Weights, groups: int) -> Tensor:
    y = x
    for stage in (1, 2, 3, 4):
        kernel = below(w, f"conv{stage}.{2 if stage == 1 else 3}")
        y = silu(group_norm(y.transpose(0, 1), below(w, f"conv{stage}.0"), groups, 1e-5).transpose(0, 1))
        mixed = []
        for f in range(len(y)):
            seen = [y[max(f + k - 2, 0)] for k in range(3)]  # the present frame and the two before it
            taps = [torch.einsum("oc,chw->ohw", kernel["weight"][:, :, k, 0, 0], seen[k]) for k in range(3)]
            mixed.append(sum(taps) + kernel["bias"][:, None, None])
        y = torch.stack(mixed)
    return x + y


def res_block(x: Tensor, w: Weights, embedding: Tensor, groups: int) -> Tensor:
    frames = []
    for frame, told in zip(x, embedding, strict=True):
        y = conv2d(silu(group_norm(frame, below(w, "in_layers.0"), groups, 1e-5)), below(w, "in_layers.2"))
        y = y + linear(silu(told), below(w, "emb_layers.1"))[:, None, None]
        y = conv2d(silu(group_norm(y, below(w, "out_layers.0"), groups, 1e-5)), below(w, "out_layers.3"))
        skip = conv2d(frame, below(w, "skip_connection")) if "skip_connection.weight" in w else frame
        frames.append(skip + y)
    return temporal_conv(torch.stack(frames), below(w, "temopral_conv"), groups)


def waves(time: float, channels: int) -> Tensor:
    half = channels // 2
    rates = [10000 ** (-i / half) for i in range(half)]
    return torch.tensor([math.cos(time * r) for r in rates] + [math.sin(time * r) for r in rates])


def embedder(time: float, w: Weights, channels: int) -> Tensor:
    return linear(silu(linear(waves(time, channels), below(w, "0"))), below(w, "2"))


def slow_unet(
    w: Weights,
    size: UNetConfig,
    x: Tensor,
    times: list[float],
    image: Tensor,
    actions: Tensor,
    fps: float,
    domain: int,
) -> Tensor:
    """Of one sample: x ``[F, 19, h, w]``, image ``[I, K]``, actions ``[F, T, K]``."""
    told = embedder(fps, below(w, "fps_embedding"), size.channels) + w["domain_embedding.weight"][domain]
    embedding = torch.stack([embedder(t, below(w, "time_embed"), size.channels) + told for t in times])
    crossing = 0

    def through(x: Tensor, prefix: str) -> Tensor:
        nonlocal crossing
        for number in range(4):
            v = below(w, f"{prefix}.{number}")
            if "in_layers.0.weight" in v:
                x = res_block(x, v, embedding, size.groups)
            elif "transformer_blocks.0.attn2.to_k_ip.weight" in v:
                even = crossing % 2 == 0
                context = list(actions) if even else [image] * len(x)
                x = spatial(x, v, size, context, ("to_k_tp", "to_v_tp") if even else ("to_k_ip", "to_v_ip"))
                crossing += 1
            elif "transformer_blocks.0.attn2.to_k.weight" in v:
                x = temporal(x, v, size)
            elif "op.weight" in v:
                x = torch.stack([conv2d(frame, below(v, "op"), stride=2) for frame in x])
            elif "conv.weight" in v:
                wide = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
                x = torch.stack([conv2d(frame, below(v, "conv")) for frame in wide])
        return x

    x = torch.stack([conv2d(frame, below(w, "input_blocks.0.0")) for frame in x])
    x = temporal(x, below(w, "init_attn.0"), size)
    skips = [x]
    levels = len(size.multipliers)
    for number in range(1, levels * size.res_blocks + levels):
        x = through(x, f"input_blocks.{number}")
        skips.append(x)
    x = through(x, "middle_block")
    for number in range(levels * (size.res_blocks + 1)):
        x = through(torch.cat([x, skips.pop()], 1), f"output_blocks.{number}")
    out = [silu(group_norm(frame, below(w, "out.0"), size.groups, 1e-5)) for frame in x]
    return torch.stack([conv2d(frame, below(w, "out.2")) for frame in out])


def inputs(batch: int, frames: int, seed: int = 0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, 19, frames, 4, 4, generator=g),
        torch.tensor([[0.0, 0.0, *[500.0 + 100 * b] * (frames - 2)] for b in range(batch)]),
        torch.randn(batch, 5, TINY.context_dim, generator=g),
        torch.randn(batch, frames, 3, TINY.context_dim, generator=g),
        torch.full((batch,), 2.0),
        torch.arange(batch) + 3,
    )


@pytest.mark.parametrize(
    "size", [TINY, replace(TINY, res_blocks=2, multipliers=(1, 2, 2), attention_levels=(0, 1))]
)
def test_numbers_and_gradients_follow_the_equations(size: UNetConfig) -> None:
    unet = randomised(EvacUNet(size), 1)
    x, times, image, actions, fps, domain = inputs(2, 3)
    x, image, actions = (t.requires_grad_() for t in (x, image, actions))
    got = unet(x, times, image, actions, fps, domain)
    direction = torch.randn(got.shape, generator=torch.Generator().manual_seed(5))
    leaves = [x, image, actions, *unet.parameters()]
    grads = torch.autograd.grad((got * direction).sum(), leaves, allow_unused=True)
    weights = dict(unet.named_parameters())
    slow = torch.stack(
        [
            slow_unet(
                weights, size, x[b].transpose(0, 1), times[b].tolist(), image[b], actions[b], 2.0, 3 + b
            ).transpose(0, 1)
            for b in range(2)
        ]
    )
    torch.testing.assert_close(got, slow, atol=1e-5, rtol=1e-4)
    expected = torch.autograd.grad((slow * direction).sum(), leaves, allow_unused=True)
    unused = {n for n, g in zip(["x", "image", "actions", *weights], grads, strict=True) if g is None}
    assert all(
        n.endswith(("attn2.to_k.weight", "attn2.to_v.weight", "_ip.weight", "_tp.weight")) for n in unused
    )
    for mine, theirs in zip(grads, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("most", [1, 3, 7, 100])
def test_attention_in_parts_is_the_attention(most: int) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, 2, length, 4, generator=g) for length in (3, 5, 5))
    expected = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v
    torch.testing.assert_close(attend(q, k, v, most), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_weights_take_float32_inputs() -> None:
    unet = randomised(EvacUNet(TINY), 4)
    exact = unet(*inputs(1, 3))
    rounded = unet.to(torch.bfloat16)(*inputs(1, 3))
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() < 0.1 * exact.norm()
