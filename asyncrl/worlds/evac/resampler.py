"""Turn a few vectors, or many, into a fixed number of tokens: the two resamplers of EVAC.

One makes 16 tokens of the action of each frame, the other makes 16 tokens for each frame of a chunk of what
the image encoder saw. A learned query per token attends over the inputs and over all queries (the perceiver
resampler of Flamingo, arXiv 2204.14198).

Dimension letters: M rows, S vectors of a row, A their numbers, Q queries, D inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class ResamplerConfig:
    """Size of a resampler."""

    inputs: int
    """Numbers of each vector that comes in."""
    queries: int
    """Tokens that come out."""
    width: int
    """Of the tokens, and within."""
    depth: int
    """Layers."""
    heads: int
    """Attention heads."""
    head_dim: int
    """Channels of a head."""

    @classmethod
    def published_actions(cls) -> ResamplerConfig:
        """For the 14 numbers of an action: 51 tensors, 47,245,312 parameters."""
        return cls(inputs=14, queries=16, width=1024, depth=4, heads=12, head_dim=64)

    @classmethod
    def published_image(cls, chunk: int = 8) -> ResamplerConfig:
        """For the tokens of OpenCLIP's ViT-H: 48,656,384 parameters for chunks of 8, 48,787,456 for 16."""
        return cls(inputs=1280, queries=16 * chunk, width=1024, depth=4, heads=12, head_dim=64)


class QueryAttention(nn.Module):
    """Attention of the queries over the inputs and over the queries themselves."""

    def __init__(self, size: ResamplerConfig) -> None:
        super().__init__()
        inner = size.heads * size.head_dim
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.to_q = nn.Linear(size.width, inner, bias=False)
        self.to_kv = nn.Linear(size.width, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, size.width, bias=False)

    def forward(self, x_MSD: Tensor, queries_MQD: Tensor) -> Tensor:
        """Return ``[M, Q, D]``, to be added to the queries."""
        queries_MQD = self.norm2(queries_MQD)
        query = self.to_q(queries_MQD)
        key, value = self.to_kv(torch.cat([self.norm1(x_MSD), queries_MQD], dim=1)).chunk(2, dim=2)
        heads = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (query, key, value))
        return self.to_out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Resampler(nn.Module):
    """A resampler with the parameters' published names."""

    def __init__(self, size: ResamplerConfig) -> None:
        super().__init__()
        self.size = size
        width = size.width
        self.latents = nn.Parameter(torch.randn(1, size.queries, width) / width**0.5)
        self.proj_in = nn.Linear(size.inputs, width)
        self.proj_out = nn.Linear(width, width)
        self.norm_out = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.ModuleList([QueryAttention(size), _feed_forward(width)]) for _ in range(size.depth)
        )

    def forward(self, x_MSA: Tensor) -> Tensor:
        """Make tokens.

        Args:
            x_MSA: ``[M, S, A]`` of any float dtype.

        Returns:
            ``[M, Q, D]`` in the dtype of the weights.
        """
        x_MSD = self.proj_in(x_MSA.to(self.latents.dtype))
        queries = self.latents.expand(len(x_MSD), -1, -1)
        for attention, feed_forward in self.layers:  # type: ignore[misc]
            queries = queries + attention(x_MSD, queries)
            queries = queries + feed_forward(queries)
        return self.norm_out(self.proj_out(queries))


def _feed_forward(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width, bias=False),
        nn.GELU(),
        nn.Linear(4 * width, width, bias=False),
    )
