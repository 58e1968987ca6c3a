"""EVAC's video diffusion network, which predicts the velocity of noisy latents from actions and maps.

Every frame has 19 channels: noisy latent 4, condition image 4, mask 1, trajectory map 4, ray directions 3,
ray origins 3. History frames come first and have time 0. Spatial transformers attend to action and image
tokens by turns, beginning with actions (EnerVerse-AC, arXiv 2505.09723). Parameters have the published names,
with their spelling (``temopral_conv``). Layers: latent diffusion (arXiv 2112.10752), ModelScope (arXiv
2308.06571) for temporal convolutions, DynamiCrafter (arXiv 2310.12190) for temporal transformers.

Dimension letters:
    B  samples     F  frames (history and chunk)     N = B * F     C  channels     h, w  latent size
    I  image tokens     T  action tokens of a frame     K  width of the tokens     E  width of embeddings
    D  inner width     P = h * w     L  tokens of a context
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.storage.untrusted import Typed
from asyncrl.worlds.layers import attend_few

_EPS: Final = 1e-6  # of the group norms in front of transformers; those of residual blocks have 1e-5
MOST_ROWS: Final = 65_535  # Of one fused attention on a GPU, whose grid has no more.
FEW: Final = 16  # tokens up to which products are faster than a fused attention


@dataclass(frozen=True, kw_only=True)
class UNetConfig(Typed):
    """Size of EVAC's network."""

    channels: int  # Of the first level; a multiple of `groups` and of `head_dim`.
    multipliers: tuple[int, ...]  # Channels of each level, in those of the first.
    res_blocks: int  # Residual blocks of a level on the way down; one more on the way up.
    attention_levels: tuple[int, ...]  # Levels, from 0, that have transformers.
    head_dim: int  # Channels of an attention head.
    context_dim: int  # K: width of image and action tokens.
    initial_inner: int  # Inner width of the temporal transformer behind the first convolution.
    groups: int = 32
    in_channels: int = 19
    out_channels: int = 4
    domains: int = 30  # Kinds of robots.

    @classmethod
    def published(cls) -> UNetConfig:
        """Return the published size: 1549 tensors, 1,464,484,100 parameters."""
        return cls(
            channels=320,
            multipliers=(1, 2, 4, 4),
            res_blocks=2,
            attention_levels=(0, 1, 2),
            head_dim=64,
            context_dim=1024,
            initial_inner=512,
        )


class CausalConv(nn.Conv3d):
    """Convolution over three frames: the present one and the two before it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, (3, 1, 1))

    def forward(self, input: Tensor) -> Tensor:
        """Mix ``[B, C, F, h, w]`` along F, with two copies of the first frame in front."""
        before = input[:, :, :1].expand(-1, -1, 2, -1, -1)
        # Computed in two dimensions, frames and pixels: what a GPU has for three is slow.
        frames = torch.cat([before, input], dim=2).flatten(3)
        return functional.conv2d(frames, self.weight[..., 0], self.bias).unflatten(3, input.shape[3:])


class TemporalConv(nn.Module):
    """Four causal convolutions over the frames, added to the input."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        for name in ("conv1", "conv2", "conv3", "conv4"):
            # Where the published network has a dropout, which is off, stands the identity.
            dropout = [] if name == "conv1" else [nn.Identity()]
            norm = nn.GroupNorm(groups, channels)
            self.add_module(name, nn.Sequential(norm, nn.SiLU(), *dropout, CausalConv(channels)))

    def forward(self, x_BCFhw: Tensor) -> Tensor:
        """Mix ``[B, C, F, h, w]`` of the dtype of the weights along F; the norms see all frames."""
        y = x_BCFhw
        for stage in self.children():
            y = stage(y)
        return x_BCFhw + y


class ResBlock(nn.Module):
    """Two convolutions within a frame, with the time embedding, then the temporal convolutions."""

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
        """Map ``[N, C, h, w]`` and embeddings ``[N, E]`` to ``[N, out, h, w]``, in the weights' dtype."""
        y = self.in_layers(x_NChw) + self.emb_layers(embedding_NE)[:, :, None, None]
        y = self.skip_connection(x_NChw) + self.out_layers(y)
        return frames_to_batch(self.temopral_conv(frames_to_axis(y, frames)))


def frames_to_axis(x_NChw: Tensor, frames: int) -> Tensor:
    """Turn ``[B * F, C, h, w]`` into ``[B, C, F, h, w]``."""
    return x_NChw.unflatten(0, (-1, frames)).transpose(1, 2)


def frames_to_batch(x_BCFhw: Tensor) -> Tensor:
    """Turn ``[B, C, F, h, w]`` into ``[B * F, C, h, w]``."""
    return x_BCFhw.transpose(1, 2).flatten(0, 1)


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
        super().__init__()  # `context` is the width of the context tokens; 0: attends over its own tokens
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
        """Attend ``[M, S, width]`` to a context ``[M / R, L, K]``, a row per R rows, or to themselves."""
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
    """Attend ``[M, heads, S, E]`` to ``[M, heads, L, E]``, at most `most` rows per fused call."""
    if max(query.shape[2], key.shape[2]) <= FEW:
        return attend_few(query, key, value)
    parts = zip(query.split(most), key.split(most), value.split(most), strict=True)
    mixed = [functional.scaled_dot_product_attention(*part) for part in parts]
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


class TransformerBlock(nn.Module):
    """Attention, attention over the context (or once more over itself), MLP, each residual."""

    def __init__(self, width: int, head_dim: int, context: int = 0) -> None:
        from diffusers.models.attention import FeedForward

        super().__init__()
        self.attn1 = Attention(width, width, head_dim)
        self.ff = FeedForward(width, activation_fn="geglu")
        self.attn2 = Attention(width, width, head_dim, context)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width)

    def forward(self, x: Tensor, context: Tensor | None = None, *, of_actions: bool = False) -> Tensor:
        """Map tokens ``[M, S, width]``; see `Attention.forward` for the arguments."""
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), context, of_actions=of_actions)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(nn.Module):
    """Mixes the pixels of a frame, which attend to either the action tokens or the image tokens."""

    def __init__(self, channels: int, head_dim: int, context: int, groups: int, *, of_actions: bool) -> None:
        super().__init__()
        self.of_actions = of_actions
        self.norm = nn.GroupNorm(groups, channels, eps=_EPS)
        self.proj_in = nn.Linear(channels, channels)
        self.transformer_blocks = nn.ModuleList([TransformerBlock(channels, head_dim, context)])
        self.proj_out = nn.Linear(channels, channels)

    def forward(self, x_NChw: Tensor, image_BLK: Tensor, actions_NLK: Tensor) -> Tensor:
        """Map ``[N, C, h, w]`` with image tokens of each sample and action tokens of each frame."""
        size = x_NChw.shape[2:]
        y = self.proj_in(self.norm(x_NChw).flatten(2).transpose(1, 2))
        context = actions_NLK if self.of_actions else image_BLK
        for block in self.transformer_blocks:
            y = block(y, context, of_actions=self.of_actions)
        return x_NChw + self.proj_out(y).transpose(1, 2).unflatten(2, size)


class TemporalTransformer(nn.Module):
    """Mixes the frames at every pixel by attention, twice; it has no context and knows no positions."""

    def __init__(self, channels: int, inner: int, head_dim: int, groups: int, *, conv: bool = False) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, eps=_EPS)
        # With `conv` the projections are stored as convolutions of one pixel.
        self.proj_in = nn.Conv1d(channels, inner, 1) if conv else nn.Linear(channels, inner)
        self.transformer_blocks = nn.ModuleList([TransformerBlock(inner, head_dim)])
        self.proj_out = nn.Conv1d(inner, channels, 1) if conv else nn.Linear(inner, channels)

    def forward(self, x_NChw: Tensor, frames: int) -> Tensor:
        """Mix ``[N, C, h, w]`` along the `frames` of each sample."""
        x_BCFhw = frames_to_axis(x_NChw, frames)
        batch, _, _, *size = x_BCFhw.shape
        y = self.norm(x_BCFhw).permute(0, 3, 4, 2, 1).flatten(0, 2)  # [B * P, F, C]
        y = _project(self.proj_in, y)
        for block in self.transformer_blocks:
            y = block(y)
        y = _project(self.proj_out, y).unflatten(0, (batch, *size))
        return x_NChw + frames_to_batch(y.permute(0, 4, 3, 1, 2))


def _project(layer: nn.Linear | nn.Conv1d, x: Tensor) -> Tensor:
    return functional.linear(x, layer.weight.flatten(1), layer.bias)


def sinusoid(times: Tensor, channels: int) -> Tensor:
    """Encode times ``[...]`` of 0..1000 as ``[..., channels]`` float32 ``[cos, sin]`` waves."""
    half = channels // 2
    steps = torch.arange(half, dtype=torch.float32, device=times.device)
    angles = times.float().unsqueeze(-1) * torch.exp(-math.log(10000.0) / half * steps)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class EvacUNet(nn.Module):
    """EVAC's network with the parameters' published names."""

    def __init__(self, size: UNetConfig) -> None:
        super().__init__()
        self.size = size
        width, embedding = size.channels, 4 * size.channels
        self._crossings = 0
        self.domain_embedding = nn.Embedding(size.domains, embedding)
        self.time_embed = _embedder(width, embedding)
        self.fps_embedding = _embedder(width, embedding)
        self.input_blocks, skips = self._down()
        first = TemporalTransformer(width, size.initial_inner, size.head_dim, size.groups, conv=True)
        self.init_attn = nn.ModuleList([first])
        deepest = width * size.multipliers[-1]
        self.middle_block = nn.ModuleList(
            [self._res(deepest, deepest), *self._transformers(deepest), self._res(deepest, deepest)]
        )
        self.output_blocks = self._up(skips)
        self.out = nn.Sequential(
            nn.GroupNorm(size.groups, width), nn.SiLU(), nn.Conv2d(width, size.out_channels, 3, padding=1)
        )

    def _res(self, channels: int, out: int) -> ResBlock:
        return ResBlock(channels, out, 4 * self.size.channels, self.size.groups)

    def _transformers(self, channels: int) -> list[nn.Module]:
        # Even ones attend to actions, odd ones to the image.
        size = self.size
        of_actions = self._crossings % 2 == 0
        self._crossings += 1
        return [
            SpatialTransformer(channels, size.head_dim, size.context_dim, size.groups, of_actions=of_actions),
            TemporalTransformer(channels, channels, size.head_dim, size.groups),
        ]

    def _down(self) -> tuple[nn.ModuleList, list[int]]:
        size = self.size
        channels, skips = size.channels, [size.channels]
        first = nn.Conv2d(size.in_channels, channels, 3, padding=1)
        blocks = [nn.ModuleList([first])]
        for level, multiplier in enumerate(size.multipliers):
            for _ in range(size.res_blocks):
                layers: list[nn.Module] = [self._res(channels, multiplier * size.channels)]
                channels = multiplier * size.channels
                layers += self._transformers(channels) if level in size.attention_levels else []
                blocks.append(nn.ModuleList(layers))
                skips.append(channels)
            if level + 1 < len(size.multipliers):
                halved = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
                blocks.append(nn.ModuleList([nn.Sequential(OrderedDict(op=halved))]))
                skips.append(channels)
        return nn.ModuleList(blocks), skips

    def _up(self, skips: list[int]) -> nn.ModuleList:
        size = self.size
        channels, left = skips[-1], list(skips)
        blocks = []
        for level, multiplier in reversed(list(enumerate(size.multipliers))):
            for number in range(size.res_blocks + 1):
                layers: list[nn.Module] = [self._res(channels + left.pop(), multiplier * size.channels)]
                channels = multiplier * size.channels
                layers += self._transformers(channels) if level in size.attention_levels else []
                if level and number == size.res_blocks:
                    layers.append(Upsample(channels))
                blocks.append(nn.ModuleList(layers))
        return nn.ModuleList(blocks)

    def forward(
        self,
        x_BCFhw: Tensor,
        times_BF: Tensor,
        image_BIK: Tensor,
        actions_BFTK: Tensor,
        fps_B: Tensor,
        domain_B: Tensor,
    ) -> Tensor:
        """Predict the velocity of every frame: ``[B, 4, F, h, w]`` in the dtype of the weights."""
        dtype, frames = self.domain_embedding.weight.dtype, x_BCFhw.shape[2]
        times, fps = (sinusoid(numbers, self.size.channels).to(dtype) for numbers in (times_BF, fps_B))
        told_BE = self.fps_embedding(fps) + self.domain_embedding(domain_B)
        time_BFE = self.time_embed(times)
        embedding_NE = (time_BFE + told_BE.unsqueeze(1)).flatten(0, 1)
        context = (image_BIK.to(dtype), actions_BFTK.to(dtype).flatten(0, 1))
        y = self.input_blocks[0][0](frames_to_batch(x_BCFhw.to(dtype)))  # type: ignore[index]
        y = self.init_attn[0](y, frames)
        skips = [y]
        for block in list(self.input_blocks)[1:]:
            y = _through(block, y, embedding_NE, context, frames)
            skips.append(y)
        y = _through(self.middle_block, y, embedding_NE, context, frames)
        for block in self.output_blocks:
            y = _through(block, torch.cat([y, skips.pop()], dim=1), embedding_NE, context, frames)
        return frames_to_axis(self.out(y), frames)


def _embedder(width: int, embedding: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))


def _through(
    layers: nn.Module, x: Tensor, embedding_NE: Tensor, context: tuple[Tensor, Tensor], frames: int
) -> Tensor:
    for layer in layers.children():
        if isinstance(layer, ResBlock):
            x = layer(x, embedding_NE, frames)
        elif isinstance(layer, SpatialTransformer):
            x = layer(x, *context)
        elif isinstance(layer, TemporalTransformer):
            x = layer(x, frames)
        else:
            x = layer(x)
    return x
