"""Layers of EVAC's video diffusion network: residual blocks, attention within a frame and between frames.

Names of the parameters are those of the published checkpoint, with its spelling (``temopral_conv``). Frames
lie in the batch axis, frame by frame of one sample after the other, except where a layer mixes them. Sources:
latent diffusion (arXiv 2112.10752) for the layers within a frame, ModelScope (arXiv 2308.06571) for the
temporal convolutions, DynamiCrafter (arXiv 2310.12190) for the temporal transformers.

Dimension letters:
    B  samples     F  frames     N = B * F     C  channels     h, w  height and width     D  inner width
    P = h * w      L  tokens of a context      K  width of a context     E  width of the time embedding
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.worlds.layers import attend_few

_EPS: Final = 1e-6
"""Of the group norms in front of transformers; those of residual blocks have PyTorch's 1e-5."""
MOST_ROWS: Final = 65_535
"""Of one fused attention on a GPU, whose grid has no more."""
FEW: Final = 16
"""Tokens: of so many at most, products are faster than a fused attention. Between frames every pixel of every
sample is a row of a dozen."""


class CausalConv(nn.Conv3d):
    """Convolution over three frames: the present one and the two before it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, (3, 1, 1))

    def forward(self, input: Tensor) -> Tensor:
        """Mix ``[B, C, F, h, w]`` along F; in front of the first frame it is repeated twice."""
        before = input[:, :, :1].expand(-1, -1, 2, -1, -1)
        # Computed in two dimensions, frames and pixels: what a GPU has for three is slow.
        frames = torch.cat([before, input], dim=2).flatten(3)
        return functional.conv2d(frames, self.weight[..., 0], self.bias).unflatten(3, input.shape[3:])


class TemporalConv(nn.Module):
    """Four causal convolutions over the frames, added to what comes in."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.GroupNorm(groups, channels), nn.SiLU(), CausalConv(channels))
        self.conv2 = _stage(channels, groups)
        self.conv3 = _stage(channels, groups)
        self.conv4 = _stage(channels, groups)

    def forward(self, x_BCFhw: Tensor) -> Tensor:
        """Mix ``[B, C, F, h, w]`` of the dtype of the weights along F; the norms see all frames."""
        y = x_BCFhw
        for stage in self.children():
            y = stage(y)
        return x_BCFhw + y


def _stage(channels: int, groups: int) -> nn.Sequential:
    """Make a further stage; where the published network has a dropout, which is off, nothing is done."""
    return nn.Sequential(nn.GroupNorm(groups, channels), nn.SiLU(), nn.Identity(), CausalConv(channels))


class ResBlock(nn.Module):
    """Two convolutions within a frame, told the time, then the temporal convolutions."""

    def __init__(self, channels: int, out: int, embedding: int, groups: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(groups, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(embedding, out))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(groups, out), nn.SiLU(), nn.Identity(), nn.Conv2d(out, out, 3, padding=1)
        )
        self.skip_connection = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)
        self.temopral_conv = TemporalConv(out, groups)

    def forward(self, x_NChw: Tensor, embedding_NE: Tensor, frames: int) -> Tensor:
        """Transform frames.

        Args:
            x_NChw: ``[N, C, h, w]`` in the dtype of the weights.
            embedding_NE: ``[N, E]`` time embedding of each frame, in the same.
            frames: ``F``.

        Returns:
            ``[N, out, h, w]`` in the same dtype.
        """
        y = self.in_layers(x_NChw) + self.emb_layers(embedding_NE)[:, :, None, None]
        y = self.skip_connection(x_NChw) + self.out_layers(y)
        return frames_to_batch(self.temopral_conv(frames_to_axis(y, frames)))


def frames_to_axis(x_NChw: Tensor, frames: int) -> Tensor:
    """Turn ``[B * F, C, h, w]`` into ``[B, C, F, h, w]``."""
    return x_NChw.unflatten(0, (-1, frames)).transpose(1, 2)


def frames_to_batch(x_BCFhw: Tensor) -> Tensor:
    """Turn ``[B, C, F, h, w]`` into ``[B * F, C, h, w]``."""
    return x_BCFhw.transpose(1, 2).flatten(0, 1)


class Downsample(nn.Module):
    """Halves height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x_NChw: Tensor) -> Tensor:
        """Return ``[N, C, h / 2, w / 2]`` of ``[N, C, h, w]``."""
        return self.op(x_NChw)


class Upsample(nn.Module):
    """Doubles height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_NChw: Tensor) -> Tensor:
        """Return ``[N, C, 2 h, 2 w]`` of ``[N, C, h, w]``: nearest neighbours, then a convolution."""
        # Not by `interpolate`, whose backward pass is slow.
        height, width = x_NChw.shape[2:]
        wide = x_NChw[..., :, None, :, None].expand(-1, -1, -1, 2, -1, 2)
        return self.conv(wide.reshape(*x_NChw.shape[:2], 2 * height, 2 * width))


class Attention(nn.Module):
    """Multi-head attention over the tokens themselves, or over one of two kinds of context tokens."""

    def __init__(self, width: int, inner: int, head_dim: int, context: int = 0) -> None:
        """Make the projections.

        Args:
            width: Of the tokens.
            inner: Heads times `head_dim`.
            head_dim: Channels of a head.
            context: Width of the context tokens; 0: it attends over the tokens themselves.
        """
        super().__init__()
        self.head_dim = head_dim
        source = context or width
        self.to_q = nn.Linear(width, inner, bias=False)
        self.to_k = nn.Linear(source, inner, bias=False)
        self.to_v = nn.Linear(source, inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, width))
        if context:  # With a context, to_k and to_v are in the published file and never used.
            self.to_k_ip = nn.Linear(context, inner, bias=False)
            self.to_v_ip = nn.Linear(context, inner, bias=False)
            self.to_k_tp = nn.Linear(context, inner, bias=False)
            self.to_v_tp = nn.Linear(context, inner, bias=False)

    def forward(self, x: Tensor, context: Tensor | None = None, *, of_actions: bool = False) -> Tensor:
        """Attend.

        Args:
            x: ``[M, S, width]`` tokens in the dtype of the weights.
            context: ``[M / R, L, K]`` tokens in the same, each for R rows of `x` that follow each other;
                None: `x` itself.
            of_actions: Whether the context's tokens are those of actions; else they are those of an image.

        Returns:
            ``[M, S, width]`` in the same dtype.
        """
        if context is None:
            key, value = self.to_k(x), self.to_v(x)
        elif of_actions:
            key, value = self.to_k_tp(context), self.to_v_tp(context)
        else:
            key, value = self.to_k_ip(context), self.to_v_ip(context)
        # Rows with the same context are one row with more tokens: its keys and values are made once.
        query = self.to_q(x).unflatten(0, (len(key), -1)).flatten(1, 2)
        heads = (y.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for y in (query, key, value))
        mixed = attend(*heads).transpose(1, 2).flatten(2)
        return self.to_out(mixed.unflatten(1, (-1, x.shape[1])).flatten(0, 1))


def attend(query: Tensor, key: Tensor, value: Tensor, most: int = MOST_ROWS) -> Tensor:
    """Attend, of more than `FEW` tokens at most so many rows at a time.

    Args:
        query: ``[M, heads, S, E]``.
        key: ``[M, heads, L, E]``.
        value: Like `key`.
        most: Rows of a call.

    Returns:
        ``[M, heads, S, E]``.
    """
    if max(query.shape[2], key.shape[2]) <= FEW:
        return attend_few(query, key, value)
    parts = zip(query.split(most), key.split(most), value.split(most), strict=True)
    mixed = [functional.scaled_dot_product_attention(*part) for part in parts]
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


class GatedProjection(nn.Module):
    """Linear layer of twice the width, one half gated by the GELU of the other (arXiv 2002.05202)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * inner)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to ``[..., inner]``."""
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * functional.gelu(gate)


class FeedForward(nn.Module):
    """Gated MLP of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            GatedProjection(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to ``[..., width]``."""
        return self.net(x)


class TransformerBlock(nn.Module):
    """Attention, attention over the context (or once more over itself), MLP, each added to what came in."""

    def __init__(self, width: int, head_dim: int, context: int = 0) -> None:
        super().__init__()
        self.attn1 = Attention(width, width, head_dim)
        self.ff = FeedForward(width)
        self.attn2 = Attention(width, width, head_dim, context)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width)

    def forward(self, x: Tensor, context: Tensor | None = None, *, of_actions: bool = False) -> Tensor:
        """Transform tokens ``[M, S, width]``; see `Attention.forward` for the arguments."""
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), context, of_actions=of_actions)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(nn.Module):
    """Mixes the pixels of a frame, and lets them look at either the action tokens or the image tokens."""

    def __init__(self, channels: int, head_dim: int, context: int, groups: int, *, of_actions: bool) -> None:
        super().__init__()
        self.of_actions = of_actions
        self.norm = nn.GroupNorm(groups, channels, eps=_EPS)
        self.proj_in = nn.Linear(channels, channels)
        self.transformer_blocks = nn.ModuleList([TransformerBlock(channels, head_dim, context)])
        self.proj_out = nn.Linear(channels, channels)

    def forward(self, x_NChw: Tensor, image_BLK: Tensor, actions_NLK: Tensor) -> Tensor:
        """Transform frames.

        Args:
            x_NChw: ``[N, C, h, w]`` in the dtype of the weights.
            image_BLK: ``[B, L, K]`` image tokens of each sample, in the same.
            actions_NLK: ``[N, L, K]`` action tokens of each frame, in the same.

        Returns:
            ``[N, C, h, w]`` in the same dtype.
        """
        size = x_NChw.shape[2:]
        y = self.proj_in(self.norm(x_NChw).flatten(2).transpose(1, 2))
        context = actions_NLK if self.of_actions else image_BLK
        for block in self.transformer_blocks:
            y = block(y, context, of_actions=self.of_actions)
        return x_NChw + self.proj_out(y).transpose(1, 2).unflatten(2, size)


class TemporalTransformer(nn.Module):
    """Mixes the frames at every pixel by attention, twice; it has no context and knows no positions."""

    def __init__(self, channels: int, inner: int, head_dim: int, groups: int, *, conv: bool = False) -> None:
        """Make the layers.

        Args:
            channels: ``C``.
            inner: ``D``: width of the tokens within.
            head_dim: Channels of a head.
            groups: Of the norm in front.
            conv: Whether the projections are stored as convolutions of one pixel.
        """
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, eps=_EPS)
        self.proj_in = nn.Conv1d(channels, inner, 1) if conv else nn.Linear(channels, inner)
        self.transformer_blocks = nn.ModuleList([TransformerBlock(inner, head_dim)])
        self.proj_out = nn.Conv1d(inner, channels, 1) if conv else nn.Linear(inner, channels)

    def forward(self, x_NChw: Tensor, frames: int) -> Tensor:
        """Mix ``[N, C, h, w]`` of the dtype of the weights along the `frames` of each sample."""
        x_BCFhw = frames_to_axis(x_NChw, frames)
        batch, _, _, *size = x_BCFhw.shape
        y = self.norm(x_BCFhw).permute(0, 3, 4, 2, 1).flatten(0, 2)  # [B * P, F, C]
        y = _project(self.proj_in, y)
        for block in self.transformer_blocks:
            y = block(y)
        y = _project(self.proj_out, y).unflatten(0, (batch, *size))
        return x_NChw + frames_to_batch(y.permute(0, 4, 3, 1, 2))


def _project(layer: nn.Linear | nn.Conv1d, x: Tensor) -> Tensor:
    """Apply a linear layer to ``[..., channels]``, which may be stored as a convolution of one pixel."""
    return functional.linear(x, layer.weight.flatten(1), layer.bias)


def sinusoid(times: Tensor, channels: int) -> Tensor:
    """Encode times as ``[cos, sin]`` waves of periods from 2 pi to 20000 pi.

    Args:
        times: ``[...]`` of any dtype, in 0..1000.
        channels: Even number of output channels.

    Returns:
        ``[..., channels]`` float32.
    """
    half = channels // 2
    steps = torch.arange(half, dtype=torch.float32, device=times.device)
    angles = times.float().unsqueeze(-1) * torch.exp(-math.log(10000.0) / half * steps)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
