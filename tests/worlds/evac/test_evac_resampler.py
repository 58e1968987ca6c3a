"""EVAC's resamplers and image tokens against the equations."""

import math

import torch
from torch import Tensor

from asyncrl.worlds.evac.conditions import ImageEncoder, ImageEncoderConfig, Resampler, ResamplerConfig
from asyncrl.worlds.evac.files import published_state
from support.evac import TINY_IMAGE_ENCODER, randomised
from support.formulas import gelu, layer_norm

EPS = 1e-5
TINY = ResamplerConfig(inputs=5, queries=4, width=12, depth=2, heads=2, head_dim=3)


def slow(w: dict[str, Tensor], size: ResamplerConfig, vectors: Tensor) -> Tensor:
    """Of one row: vectors ``[S, A]`` to ``[Q, D]``."""
    x = vectors @ w["proj_in.weight"].T + w["proj_in.bias"]
    queries, inner = w["latents"][0], size.heads * size.head_dim
    for layer in range(size.depth):
        at, mlp = f"layers.{layer}.0.", f"layers.{layer}.1."
        seen = layer_norm(queries, w, at + "norm2", EPS)
        source = torch.cat([layer_norm(x, w, at + "norm1", EPS), seen])
        both = source @ w[at + "to_kv.weight"].T
        rows = []
        for query in seen @ w[at + "to_q.weight"].T:
            heads = []
            for head in range(size.heads):
                part = slice(head * size.head_dim, (head + 1) * size.head_dim)
                keys, values = both[:, :inner][:, part], both[:, inner:][:, part]
                scores = torch.stack([(query[part] * key).sum() for key in keys]) / math.sqrt(size.head_dim)
                share = torch.exp(scores - scores.max())
                heads.append((share / share.sum()) @ values)
            rows.append(torch.cat(heads) @ w[at + "to_out.weight"].T)
        queries = queries + torch.stack(rows)
        y = layer_norm(queries, w, mlp + "0", EPS) @ w[mlp + "1.weight"].T
        queries = queries + gelu(y) @ w[mlp + "3.weight"].T
    return layer_norm(queries @ w["proj_out.weight"].T + w["proj_out.bias"], w, "norm_out", EPS)


def test_numbers_and_gradients_follow_the_equations() -> None:
    module = randomised(Resampler(TINY), 1)
    vectors = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = dict(module.named_parameters())
    got, expected = module(vectors), torch.stack([slow(weights, TINY, row) for row in vectors])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    leaves = [vectors, *weights.values()]
    mine = torch.autograd.grad((got * direction).sum(), leaves)
    theirs = torch.autograd.grad((expected * direction).sum(), leaves)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def published(encoder: ImageEncoder) -> dict[str, Tensor]:
    return published_state("image_encoder", encoder.state_dict(), 0)


def cubic(x: float) -> float:
    """Keys' kernel with a = -0.75, as PyTorch's."""
    a, x = -0.75, abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


def resize_matrix(new: int, old: int) -> Tensor:
    """Bicubic with aligned corners; beyond the border the border is repeated."""
    matrix = torch.zeros(new, old, dtype=torch.float64)
    for row in range(new):
        at = row * (old - 1) / (new - 1)
        for tap in range(math.floor(at) - 1, math.floor(at) + 3):
            matrix[row, min(max(tap, 0), old - 1)] += cubic(at - tap)
    return matrix


def slow_tokens(w: dict[str, Tensor], size: ImageEncoderConfig, picture: Tensor) -> Tensor:
    """Of one picture ``[3, H, W]`` float64 in [-1, 1]."""
    rows, columns = resize_matrix(size.size, picture.shape[1]), resize_matrix(size.size, picture.shape[2])
    resized = rows @ picture @ columns.T
    seen = [((resized[c] + 1) / 2 - MEAN[c]) / STD[c] for c in range(3)]
    tokens = [w["class_embedding"]]
    for i in range(0, size.size, size.patch):
        for j in range(0, size.size, size.patch):
            patch = torch.stack([channel[i : i + size.patch, j : j + size.patch] for channel in seen])
            tokens.append((w["conv1.weight"] * patch).flatten(1).sum(1))
    x = layer_norm(torch.stack(tokens) + w["positional_embedding"], w, "ln_pre", EPS)
    head = size.width // size.heads
    for layer in range(size.layers):
        at = f"transformer.resblocks.{layer}."
        y = layer_norm(x, w, at + "ln_1", EPS) @ w[at + "attn.in_proj_weight"].T + w[at + "attn.in_proj_bias"]
        q, k, v = y.split(size.width, dim=1)
        mixed = []
        for first in range(0, size.width, head):
            part = slice(first, first + head)
            mixed.append((q[:, part] @ k[:, part].T / math.sqrt(head)).softmax(-1) @ v[:, part])
        x = x + torch.cat(mixed, 1) @ w[at + "attn.out_proj.weight"].T + w[at + "attn.out_proj.bias"]
        y = layer_norm(x, w, at + "ln_2", EPS) @ w[at + "mlp.c_fc.weight"].T + w[at + "mlp.c_fc.bias"]
        x = x + gelu(y) @ w[at + "mlp.c_proj.weight"].T + w[at + "mlp.c_proj.bias"]
    return x  # without ln_post


def test_tokens_follow_the_equations() -> None:
    encoder = randomised(ImageEncoder(TINY_IMAGE_ENCODER), 1)
    assert isinstance(encoder, ImageEncoder)
    w = {name: tensor.double() for name, tensor in published(encoder).items()}
    pictures = torch.rand(2, 3, 40, 36, generator=torch.Generator().manual_seed(0)) * 2 - 1
    got = encoder(pictures)
    assert got.shape == (2, TINY_IMAGE_ENCODER.tokens, TINY_IMAGE_ENCODER.width)
    expected = torch.stack([slow_tokens(w, TINY_IMAGE_ENCODER, picture.double()) for picture in pictures])
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def open_clip_shapes(size: ImageEncoderConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of OpenCLIP's visual tower, written out."""
    d = size.width
    shapes: dict[str, tuple[int, ...]] = {
        "class_embedding": (d,),
        "positional_embedding": (size.tokens, d),
        "conv1.weight": (d, 3, size.patch, size.patch),
    }
    norms = ["ln_pre", "ln_post"]
    for i in range(size.layers):
        at = f"transformer.resblocks.{i}"
        norms += [f"{at}.ln_1", f"{at}.ln_2"]
        shapes |= {f"{at}.attn.in_proj_weight": (3 * d, d), f"{at}.attn.in_proj_bias": (3 * d,)}
        for name, out, into in (
            ("attn.out_proj", d, d),
            ("mlp.c_fc", size.mlp, d),
            ("mlp.c_proj", d, size.mlp),
        ):
            shapes |= {f"{at}.{name}.weight": (out, into), f"{at}.{name}.bias": (out,)}
    return shapes | {f"{name}.{kind}": (d,) for name in norms for kind in ("weight", "bias")}


def test_the_published_size_has_the_published_names_and_shapes() -> None:
    size = ImageEncoderConfig.published()
    assert size.tokens == 257
    with torch.device("meta"):
        encoder = ImageEncoder(size)
    shapes = open_clip_shapes(size)
    assert {n: tuple(t.shape) for n, t in published(encoder).items()} == shapes
    assert sum(t.numel() for t in published(encoder).values()) == 630_766_080  # without its last projection
