"""Predict the velocity of noisy latents: EVAC's video diffusion network, steered by actions and maps.

Every frame has 19 channels: noisy latent 4, latent of the condition image 4, mask 1, latent of the trajectory
map 4, ray directions 3, ray origins 3. Frames of the history come first and are told the time 0. Spatial
transformers look at the action tokens and at the image tokens by turns, beginning with the actions
(EnerVerse-AC, arXiv 2505.09723).

Dimension letters:
    B  samples     F  frames (history and chunk)     h, w  latent height and width
    I  image tokens     T  action tokens of a frame     K  width of the tokens     E  width of embeddings
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asyncrl.worlds.evac.unet_layers import (
    Downsample,
    ResBlock,
    SpatialTransformer,
    TemporalTransformer,
    Upsample,
    frames_to_axis,
    frames_to_batch,
    sinusoid,
)


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """Size of EVAC's network."""

    channels: int
    """Of the first level; a multiple of `groups` and of `head_dim`."""
    multipliers: tuple[int, ...]
    """Channels of each level, in those of the first."""
    res_blocks: int
    """Residual blocks of a level on the way down; one more on the way up."""
    attention_levels: tuple[int, ...]
    """Levels, from 0, that have transformers."""
    head_dim: int
    """Channels of an attention head."""
    context_dim: int
    """``K``: width of image and action tokens."""
    initial_inner: int
    """Inner width of the temporal transformer behind the first convolution."""
    groups: int = 32
    """Of the group norms."""
    in_channels: int = 19
    out_channels: int = 4
    domains: int = 30
    """Kinds of robots that it can be told of."""

    @classmethod
    def tiny(cls) -> UNetConfig:
        """A size for tests and small pictures."""
        return cls(
            channels=16,
            multipliers=(1, 2),
            res_blocks=1,
            attention_levels=(0, 1),
            head_dim=8,
            context_dim=24,
            initial_inner=16,
            groups=4,
            domains=12,
        )

    @classmethod
    def published(cls) -> UNetConfig:
        """The published size: 1549 tensors, 1,464,484,100 parameters."""
        return cls(
            channels=320,
            multipliers=(1, 2, 4, 4),
            res_blocks=2,
            attention_levels=(0, 1, 2),
            head_dim=64,
            context_dim=1024,
            initial_inner=512,
        )


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
        """Make a spatial and a temporal transformer; even ones look at actions, odd ones at the image."""
        size = self.size
        of_actions = self._crossings % 2 == 0
        self._crossings += 1
        return [
            SpatialTransformer(channels, size.head_dim, size.context_dim, size.groups, of_actions=of_actions),
            TemporalTransformer(channels, channels, size.head_dim, size.groups),
        ]

    def _down(self) -> tuple[nn.ModuleList, list[int]]:
        """Make the way down, and say how many channels each of its blocks gives."""
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
                blocks.append(nn.ModuleList([Downsample(channels)]))
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
        """Predict the velocity of every frame.

        Args:
            x_BCFhw: ``[B, 19, F, h, w]`` of any float dtype; h and w are multiples of 2 for each level but
                the first.
            times_BF: ``[B, F]`` of any dtype: noise level 0..999 of each frame; 0 for the history.
            image_BIK: ``[B, I, K]`` of any float dtype: image tokens, which all frames look at.
            actions_BFTK: ``[B, F, T, K]`` of any float dtype: tokens of the action that made the frame.
            fps_B: ``[B]`` of any dtype: frames per second, as the network was told in training.
            domain_B: ``[B]`` int64: which robot.

        Returns:
            ``[B, 4, F, h, w]`` in the dtype of the weights.
        """
        dtype, frames = self.domain_embedding.weight.dtype, x_BCFhw.shape[2]
        embedding_NE = self._embed(times_BF, fps_B, domain_B).flatten(0, 1)
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

    def _embed(self, times_BF: Tensor, fps_B: Tensor, domain_B: Tensor) -> Tensor:
        """Return ``[B, F, E]``: what is told of time, speed and robot."""
        dtype, width = self.domain_embedding.weight.dtype, self.size.channels
        time_BFE = self.time_embed(sinusoid(times_BF, width).to(dtype))
        told_BE = self.fps_embedding(sinusoid(fps_B, width).to(dtype)) + self.domain_embedding(domain_B)
        return time_BFE + told_BE.unsqueeze(1)


def _embedder(width: int, embedding: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))


def _through(
    layers: nn.Module, x: Tensor, embedding_NE: Tensor, context: tuple[Tensor, Tensor], frames: int
) -> Tensor:
    """Apply the layers of a block in turn, each with what it wants to know."""
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
