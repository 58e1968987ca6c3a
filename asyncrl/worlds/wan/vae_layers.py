"""The layers of Wan's video autoencoder as pure streams: frames and what is remembered in, both out.

diffusers owns the modules and their weights; this is the arithmetic of a step in a form that compilers
understand: memory is a tuple of tensors of fixed shapes, and nothing depends on what it holds. A causal
convolution remembers the last two frames of its input; before the first frame these are zeros, which is what
its padding would be. Only the temporal resampling treats the first frame of a video differently.

Dimension letters: B videos, C channels, T frames, h/w height and width at the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

MEMORY_FRAMES: Final = 2
"""Frames of its input that a causal convolution remembers."""
Memory = tuple[Tensor, ...]
"""One ``[B, C, 2, h, w]`` tensor per layer that remembers, in the order in which they run."""
Layers = Callable[[Any, Tensor, Sequence[Tensor] | None], tuple[Tensor, Memory]]
"""`encode_layers` or `decode_layers`, or one of them compiled."""


class _Step:
    """What is remembered, on its way through the layers of one step."""

    def __init__(self, before: Sequence[Tensor] | None) -> None:
        self.first = before is None
        self._before: Iterator[Tensor] | None = None if before is None else iter(before)
        self.after: list[Tensor] = []

    def recall(self, x: Tensor) -> Tensor:
        """Return what this layer remembers: zeros like two frames of `x` at the beginning of a video."""
        if self._before is None:
            shape = (x.shape[0], x.shape[1], MEMORY_FRAMES, x.shape[3], x.shape[4])
            return channels_last(torch.zeros(shape, dtype=x.dtype, device=x.device))
        return next(self._before)

    def remember(self, frames: Tensor) -> None:
        """Keep the last two of `frames` ``[B, C, T >= 2, h, w]`` for the next step."""
        self.after.append(channels_last(frames[:, :, -MEMORY_FRAMES:].clone()))


def channels_last(frames: Tensor) -> Tensor:
    """``[B, C, T, h, w]`` with the channels last in memory, as the convolutions want them."""
    return frames.contiguous(memory_format=torch.channels_last_3d)


def _causal(conv: Any, x: Tensor, step: _Step) -> Tensor:
    """Convolve over the last two frames and `x`; a kernel of one frame needs no memory."""
    space = conv.kernel_size[1] // 2
    if conv.kernel_size[0] == 1:
        return functional.conv3d(x, conv.weight, conv.bias, padding=(0, space, space))
    frames = torch.cat([step.recall(x), x], dim=2)
    step.remember(frames)
    return functional.conv3d(frames, conv.weight, conv.bias, padding=(0, space, space))


def _norm(norm: Any, x: Tensor) -> Tensor:
    """RMS norm over the channels, in float32, rounded before the scale as in diffusers."""
    length = torch.linalg.vector_norm(x.float(), dim=1, keepdim=True).clamp(min=1e-12)
    gamma = norm.gamma.view(1, -1, *[1] * (x.ndim - 2))
    return (x.float() / length).to(x.dtype) * norm.scale * gamma


def _activated(norm: Any, x: Tensor) -> Tensor:
    return functional.silu(_norm(norm, x))


def _residual(block: Any, x: Tensor, step: _Step) -> Tensor:
    shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else _causal(block.conv_shortcut, x, step)
    x = _causal(block.conv1, _activated(block.norm1, x), step)
    return _causal(block.conv2, _activated(block.norm2, x), step) + shortcut


def _attention(block: Any, x: Tensor) -> Tensor:
    """Self-attention of one head within each frame."""
    batch, channels, frames, height, width = x.shape
    images = _norm(block.norm, x.transpose(1, 2).flatten(0, 1))
    qkv = functional.conv2d(images, block.to_qkv.weight, block.to_qkv.bias)
    q, k, v = qkv.flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
    mixed = functional.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
    mixed = mixed.reshape(batch * frames, channels, height, width)
    drawn = functional.conv2d(mixed, block.proj.weight, block.proj.bias)
    return x + drawn.unflatten(0, (batch, frames)).transpose(1, 2)


def _middle(block: Any, x: Tensor, step: _Step) -> Tensor:
    x = _residual(block.resnets[0], x, step)
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        x = _residual(resnet, _attention(attention, x), step)
    return x


# --- decoder --------------------------------------------------------------------


def _larger(sampler: Any, x: Tensor, step: _Step) -> Tensor:
    """Double height and width, and the frames where the level does; the first frame of all stays alone."""
    if sampler.mode == "upsample3d":
        if step.first:
            step.after.append(step.recall(x))
        else:
            pairs = _causal(sampler.time_conv, x, step).unflatten(1, (2, x.shape[1]))
            x = pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
    conv = sampler.resample[1]
    images = x.transpose(1, 2).flatten(0, 1)
    images = images.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    drawn = functional.conv2d(images, conv.weight, conv.bias, padding=1)
    return drawn.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


def _repeated(shortcut: Any, x: Tensor, step: _Step) -> Tensor:
    """Spread the channels over new pixels and frames; the first frame of all keeps its last copy only."""
    t, s, out = shortcut.factor_t, shortcut.factor_s, shortcut.out_channels
    x = x.repeat_interleave(shortcut.repeats, dim=1).unflatten(1, (out, t, s, s))
    # [B, out, t, s, s, T, h, w] -> [B, out, T t, h s, w s]
    x = x.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)
    return x[:, :, t - 1 :] if step.first else x


def _up(block: Any, x: Tensor, step: _Step) -> Tensor:
    start = x
    for resnet in block.resnets:
        x = _residual(resnet, x, step)
    if block.upsampler is None:
        return x
    return _larger(block.upsampler, x, step) + _repeated(block.avg_shortcut, start, step)


def decode_layers(decoder: Any, x: Tensor, before: Sequence[Tensor] | None) -> tuple[Tensor, Memory]:
    """Run the decoder over the next latents.

    Args:
        decoder: `WanDecoder3d` of Wan 2.2 (residual).
        x: ``[B, C, T, h, w]`` after the autoencoder's `post_quant_conv`; T is 1 at the beginning.
        before: What is remembered; None at the beginning of a video.

    Returns:
        ``[B, 12, 1 or 4 T, 8 h, 8 w]``, and what is remembered now.
    """
    step = _Step(before)
    x = _middle(decoder.mid_block, _causal(decoder.conv_in, x, step), step)
    for block in decoder.up_blocks:
        x = _up(block, x, step)
    x = _causal(decoder.conv_out, _activated(decoder.norm_out, x), step)
    return x, tuple(step.after)


# --- encoder --------------------------------------------------------------------


def _smaller(sampler: Any, x: Tensor, step: _Step) -> Tensor:
    """Halve height and width, and the frames where the level does; the first frame of all stays alone."""
    conv = sampler.resample[1]
    images = functional.pad(x.transpose(1, 2).flatten(0, 1), (0, 1, 0, 1))
    images = functional.conv2d(images, conv.weight, conv.bias, stride=2)
    x = images.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
    if sampler.mode != "downsample3d":
        return x
    frames = torch.cat([step.recall(x), x], dim=2)
    step.remember(frames)
    if step.first:
        return x
    time = sampler.time_conv
    return functional.conv3d(frames[:, :, MEMORY_FRAMES - 1 :], time.weight, time.bias, stride=(2, 1, 1))


def _averaged(shortcut: Any, x: Tensor) -> Tensor:
    """Fold frames and pixels into channels and average groups of those; an odd frame follows a black one."""
    t, s = shortcut.factor_t, shortcut.factor_s
    x = functional.pad(x, (0, 0, 0, 0, -x.shape[2] % t, 0))
    x = x.unflatten(4, (-1, s)).unflatten(3, (-1, s)).unflatten(2, (-1, t))
    # [B, C, T/t, t, h/s, s, w/s, s] -> [B, C t s s, T/t, h/s, w/s]
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)
    return x.unflatten(1, (shortcut.out_channels, shortcut.group_size)).mean(dim=2)


def _down(block: Any, x: Tensor, step: _Step) -> Tensor:
    start = x
    for resnet in block.resnets:
        x = _residual(resnet, x, step)
    if block.downsampler is not None:
        x = _smaller(block.downsampler, x, step)
    return x + _averaged(block.avg_shortcut, start)


def encode_layers(encoder: Any, x: Tensor, before: Sequence[Tensor] | None) -> tuple[Tensor, Memory]:
    """Run the encoder over the next frames.

    Args:
        encoder: `WanEncoder3d` of Wan 2.2 (residual).
        x: ``[B, 12, T, h, w]`` patches of pixels; T is 1 at the beginning, then a multiple of 4.
        before: What is remembered; None at the beginning of a video.

    Returns:
        Moments ``[B, 2 Z, 1 or T / 4, h / 8, w / 8]``, and what is remembered now.
    """
    step = _Step(before)
    x = _causal(encoder.conv_in, x, step)
    for block in encoder.down_blocks:
        x = _down(block, x, step)
    x = _middle(encoder.mid_block, x, step)
    x = _causal(encoder.conv_out, _activated(encoder.norm_out, x), step)
    return x, tuple(step.after)
