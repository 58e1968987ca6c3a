"""EVAC's resamplers against the equations, query by query."""

import math

import torch
from torch import Tensor

from asyncrl.worlds.evac.conditions import Resampler, ResamplerConfig
from support.evac import randomised
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
