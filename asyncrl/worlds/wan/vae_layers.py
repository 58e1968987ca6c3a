"""Run the layers of Wan's video autoencoder over the next frames, with an explicit cache of earlier ones.

diffusers owns the modules and their weights; this is the arithmetic of a step in a form that compilers
understand: the cache is a tuple of tensors of fixed shapes, and nothing depends on what it holds. A causal
convolution needs the last two frames of its input; before the first frame these are zeros, which is what
its padding would be. Only the temporal resampling treats the first frame of a video differently.

Dimension letters: B videos, C channels, T frames, h/w height and width at the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

CACHED_FRAMES: Final = 2
"""Frames of its input that a causal convolution needs."""
FRAMES_PER_LATENT: Final = 4
"""Video frames that one latent frame stands for; the first of a video stands for one."""
FrameCache = tuple[Tensor, ...]
"""One ``[B, C, 2, h, w]`` tensor per layer that needs earlier frames, in the order in which they run."""
Layers = Callable[[Any, Tensor, Sequence[Tensor] | None], tuple[Tensor, FrameCache]]
"""`encode_layers` or `decode_layers`, or one of them compiled."""


class _Step:
    """The caches of one step: what its layers read, and what they store for the next one."""

    def __init__(self, cache: Sequence[Tensor] | None) -> None:
        self.first = cache is None
        self._cache: Iterator[Tensor] | None = None if cache is None else iter(cache)
        self.stored: list[Tensor] = []

    def cached_frames(self, x: Tensor) -> Tensor:
        """Return the two frames before `x`: zeros at the beginning of a video."""
        if self._cache is None:
            shape = (x.shape[0], x.shape[1], CACHED_FRAMES, x.shape[3], x.shape[4])
            return channels_last(torch.zeros(shape, dtype=x.dtype, device=x.device))
        return next(self._cache)

    def store_frames(self, frames: Tensor) -> None:
        """Store the last two of `frames` ``[B, C, T >= 2, h, w]`` for the next step."""
        self.stored.append(channels_last(frames[:, :, -CACHED_FRAMES:].clone()))


def channels_last(frames: Tensor) -> Tensor:
    """Lay ``[B, C, T, h, w]`` of any dtype out with the channels last, as convolutions want them."""
    return frames.contiguous(memory_format=torch.channels_last_3d)


def _causal(conv: Any, x: Tensor, step: _Step) -> Tensor:
    """Convolve over the last two frames and `x`; a kernel of one frame needs no cache."""
    space = conv.kernel_size[1] // 2
    if conv.kernel_size[0] == 1:
        return functional.conv3d(x, conv.weight, conv.bias, padding=(0, space, space))
    frames = torch.cat([step.cached_frames(x), x], dim=2)
    step.store_frames(frames)
    return functional.conv3d(frames, conv.weight, conv.bias, padding=(0, space, space))


def _norm(norm: Any, x: Tensor) -> Tensor:
    """Normalise by the RMS over the channels, in float32, rounded before the scale as in diffusers."""
    length = torch.linalg.vector_norm(x.float(), dim=1, keepdim=True).clamp(min=1e-12)
    gamma = norm.gamma.view(1, -1, *[1] * (x.ndim - 2))
    return (x.float() / length).to(x.dtype) * norm.scale * gamma


def _norm_silu(norm: Any, x: Tensor) -> Tensor:
    return functional.silu(_norm(norm, x))


def _residual_block(block: Any, x: Tensor, step: _Step) -> Tensor:
    shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else _causal(block.conv_shortcut, x, step)
    x = _causal(block.conv1, _norm_silu(block.norm1, x), step)
    return _causal(block.conv2, _norm_silu(block.norm2, x), step) + shortcut


def _attention_block(block: Any, x: Tensor) -> Tensor:
    """Attend within each frame, with one head."""
    batch, channels, frames, height, width = x.shape
    images = _norm(block.norm, x.transpose(1, 2).flatten(0, 1))
    qkv = functional.conv2d(images, block.to_qkv.weight, block.to_qkv.bias)
    q, k, v = qkv.flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
    mixed = functional.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
    mixed = mixed.reshape(batch * frames, channels, height, width)
    drawn = functional.conv2d(mixed, block.proj.weight, block.proj.bias)
    return x + drawn.unflatten(0, (batch, frames)).transpose(1, 2)


def _middle_block(block: Any, x: Tensor, step: _Step) -> Tensor:
    x = _residual_block(block.resnets[0], x, step)
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        x = _residual_block(resnet, _attention_block(attention, x), step)
    return x


# --- decoder --------------------------------------------------------------------


def _upsample(sampler: Any, x: Tensor, step: _Step) -> Tensor:
    """Double height and width, and the frames where the level does; the first frame of all stays alone."""
    if sampler.mode == "upsample3d":
        if step.first:
            step.stored.append(step.cached_frames(x))
        else:
            pairs = _causal(sampler.time_conv, x, step).unflatten(1, (2, x.shape[1]))
            x = pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
    conv = sampler.resample[1]
    images = x.transpose(1, 2).flatten(0, 1)
    images = images.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    drawn = functional.conv2d(images, conv.weight, conv.bias, padding=1)
    return drawn.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


def _repeat_shortcut(shortcut: Any, x: Tensor, step: _Step) -> Tensor:
    """Spread the channels over new pixels and frames; the first frame of all keeps its last copy only."""
    t, s, out = shortcut.factor_t, shortcut.factor_s, shortcut.out_channels
    x = x.repeat_interleave(shortcut.repeats, dim=1).unflatten(1, (out, t, s, s))
    # [B, out, t, s, s, T, h, w] -> [B, out, T t, h s, w s]
    x = x.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)
    return x[:, :, t - 1 :] if step.first else x


def _up_block(block: Any, x: Tensor, step: _Step) -> Tensor:
    start = x
    for resnet in block.resnets:
        x = _residual_block(resnet, x, step)
    if block.upsampler is None:
        return x
    return _upsample(block.upsampler, x, step) + _repeat_shortcut(block.avg_shortcut, start, step)


def decode_layers(decoder: Any, x: Tensor, cache: Sequence[Tensor] | None) -> tuple[Tensor, FrameCache]:
    """Run the decoder over the next latents.

    Args:
        decoder: `WanDecoder3d` of Wan 2.2 (residual).
        x: ``[B, C, T, h, w]`` in the weights' dtype, after the autoencoder's `post_quant_conv`; T is 1 at
            the beginning.
        cache: ``[B, C, 2, h, w]`` per layer, of the last call; None at the beginning of a video.

    Returns:
        ``[B, 12, 1 or 4 T, 8 h, 8 w]``, in the dtype of `x`, and the cache after them.
    """
    step = _Step(cache)
    x = _middle_block(decoder.mid_block, _causal(decoder.conv_in, x, step), step)
    for block in decoder.up_blocks:
        x = _up_block(block, x, step)
    x = _causal(decoder.conv_out, _norm_silu(decoder.norm_out, x), step)
    return x, tuple(step.stored)


# --- encoder --------------------------------------------------------------------


def _downsample(sampler: Any, x: Tensor, step: _Step) -> Tensor:
    """Halve height and width, and the frames where the level does; the first frame of all stays alone."""
    conv = sampler.resample[1]
    images = functional.pad(x.transpose(1, 2).flatten(0, 1), (0, 1, 0, 1))
    images = functional.conv2d(images, conv.weight, conv.bias, stride=2)
    x = images.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
    if sampler.mode != "downsample3d":
        return x
    frames = torch.cat([step.cached_frames(x), x], dim=2)
    step.store_frames(frames)
    if step.first:
        return x
    time = sampler.time_conv
    return functional.conv3d(frames[:, :, CACHED_FRAMES - 1 :], time.weight, time.bias, stride=(2, 1, 1))


def _average_shortcut(shortcut: Any, x: Tensor) -> Tensor:
    """Fold frames and pixels into channels and average groups of those; an odd frame follows a black one."""
    t, s = shortcut.factor_t, shortcut.factor_s
    x = functional.pad(x, (0, 0, 0, 0, -x.shape[2] % t, 0))
    x = x.unflatten(4, (-1, s)).unflatten(3, (-1, s)).unflatten(2, (-1, t))
    # [B, C, T/t, t, h/s, s, w/s, s] -> [B, C t s s, T/t, h/s, w/s]
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)
    return x.unflatten(1, (shortcut.out_channels, shortcut.group_size)).mean(dim=2)


def _down_block(block: Any, x: Tensor, step: _Step) -> Tensor:
    start = x
    for resnet in block.resnets:
        x = _residual_block(resnet, x, step)
    if block.downsampler is not None:
        x = _downsample(block.downsampler, x, step)
    return x + _average_shortcut(block.avg_shortcut, start)


def encode_layers(encoder: Any, x: Tensor, cache: Sequence[Tensor] | None) -> tuple[Tensor, FrameCache]:
    """Run the encoder over the next frames.

    Args:
        encoder: `WanEncoder3d` of Wan 2.2 (residual).
        x: ``[B, 12, T, h, w]`` patches of pixels in the weights' dtype; T is 1 at the beginning, then a
            multiple of 4.
        cache: ``[B, C, 2, h, w]`` per layer, of the last call; None at the beginning of a video.

    Returns:
        Moments ``[B, 2 Z, 1 or T / 4, h / 8, w / 8]``, in the dtype of `x`, and the cache after them.
    """
    step = _Step(cache)
    x = _causal(encoder.conv_in, x, step)
    for block in encoder.down_blocks:
        x = _down_block(block, x, step)
    x = _middle_block(encoder.mid_block, x, step)
    x = _causal(encoder.conv_out, _norm_silu(encoder.norm_out, x), step)
    return x, tuple(step.stored)
