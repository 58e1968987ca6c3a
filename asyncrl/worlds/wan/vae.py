"""Encode frames into latents and decode them: Wan 2.2's causal video autoencoder, step by step.

The autoencoder sees a video as one frame, then groups of four. diffusers owns the modules and their weights;
the arithmetic of a step is written here, because a cache that is a list of tensors of fixed shapes lets a
slot be refilled without the others and compiles into one graph, and because norms are computed in float32.

Dimension letters:
    B  videos      T  frames = 1 + 4 (F - 1)    H, W  pixels      F  latent frames    Z  latent channels
    C  channels    h, w  height and width at a layer; of latents H / 16, W / 16
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, patchify, unpatchify
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.storage.untrusted import Typed

SPATIAL: Final = 16  # Pixels per latent pixel.
FRAMES_PER_LATENT: Final = 4  # Video frames of a latent frame; the first latent frame of a video has one.
CACHED_FRAMES: Final = 2  # Frames of its input that a causal convolution needs from before.
Cache = list[Tensor]  # One [B, C, 2, ., .] tensor per causal convolution, in the order of the network.
FrameCache = tuple[Tensor, ...]  # The same inside of a compiled graph.
Layers = Callable[[Any, Tensor, Sequence[Tensor] | None], tuple[Tensor, FrameCache]]
"""`encode_layers` or `decode_layers`, or one of them compiled."""

# fmt: off
_FULL_MEAN: Final = (
    -.2289, -.0052, -.1323, -.2339, -.2799, .0174, .1838, .1557, -.1382, .0542, .2813, .0891,
    .1570, -.0098, .0375, -.1825, -.2246, -.1207, -.0698, .5109, .2665, -.2108, -.2158, .2502,
    -.2055, -.0322, .1109, .1567, -.0729, .0899, -.2799, -.1230, -.0313, -.1649, .0117, .0723,
    -.2839, -.2083, -.0520, .3748, .0152, .1957, .1433, -.2944, .3573, -.0548, -.1681, -.0667,
)
_FULL_STD: Final = (
    .4765, 1.0364, .4514, 1.1677, .5313, .4990, .4818, .5013, .8158, 1.0344, .5894, 1.0901,
    .6885, .6165, .8454, .4978, .5759, .3523, .7135, .6804, .5833, 1.4146, .8986, .5659,
    .7069, .5338, .4889, .4917, .4069, .4999, .6866, .4093, .5709, .6065, .6415, .4944,
    .5726, 1.2042, .5458, 1.6887, .3971, 1.0600, .3943, .5537, .5444, .4089, .7468, .7744,
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class VaeConfig(Typed):
    """Size and latent statistics of a Wan 2.2 autoencoder."""

    base_dim: int
    decoder_base_dim: int
    z_dim: int
    res_blocks: int  # Residual blocks per level of the encoder; the decoder has one more.
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    @classmethod
    def tiny(cls) -> VaeConfig:
        """Return the shipped size; its statistics are the identity until they are measured."""
        mean, std = (0.0,) * 32, (1.0,) * 32
        return cls(
            base_dim=8, decoder_base_dim=16, z_dim=32, res_blocks=1, latents_mean=mean, latents_std=std
        )

    @classmethod
    def small(cls) -> VaeConfig:
        """Return a size 1.5 times as wide as `tiny`, with latents of the same shape: decoding costs twice."""
        return replace(cls.tiny(), base_dim=12, decoder_base_dim=24)

    @classmethod
    def full(cls) -> VaeConfig:
        """Return the published size: 196 tensors, 704,688,668 parameters."""
        return cls(
            base_dim=160,
            decoder_base_dim=256,
            z_dim=48,
            res_blocks=2,
            latents_mean=_FULL_MEAN,
            latents_std=_FULL_STD,
        )


class WanVae(AutoencoderKLWan):
    """diffusers' Wan autoencoder with its `VaeConfig`. Use the functions of this file, not its methods."""

    def __init__(self, size: VaeConfig) -> None:
        super().__init__(
            base_dim=size.base_dim,
            decoder_base_dim=size.decoder_base_dim,
            z_dim=size.z_dim,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=size.res_blocks,
            temperal_downsample=[False, True, True],
            latents_mean=list(size.latents_mean),
            latents_std=list(size.latents_std),
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_temporal=4,
            scale_factor_spatial=SPATIAL,
        )
        self.size = size
        use_channels_last(self)

    def set_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Set mean and standard deviation of the raw latents, ``[Z]`` each."""
        self.size = replace(self.size, latents_mean=tuple(mean), latents_std=tuple(std))
        self.register_to_config(latents_mean=list(mean), latents_std=list(std))


def use_channels_last(network: nn.Module) -> None:
    """Store convolution weights channels last: the decoder takes a third less time, the result is equal."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            layout = torch.channels_last if isinstance(module, nn.Conv2d) else torch.channels_last_3d
            module.weight.data = module.weight.data.contiguous(memory_format=layout)


@lru_cache(maxsize=32)
def _statistics(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return mean and deviation, ``[1, Z, 1, 1, 1]`` each; cached, as a copy to a device would wait."""
    with torch.inference_mode(False):  # A tensor made in inference mode could not take part in a gradient.
        both = torch.tensor([mean, std], device=device, dtype=dtype)[:, None, :, None, None, None]
    return both[0], both[1]


# --- layers ---------------------------------------------------------------------


class _Step:
    """Caches of one step: those read by its layers, and those stored for the next step."""

    def __init__(self, cache: Sequence[Tensor] | None) -> None:
        self.first = cache is None
        self._cache: Iterator[Tensor] | None = None if cache is None else iter(cache)
        self.stored: list[Tensor] = []

    def cached_frames(self, x: Tensor) -> Tensor:
        if self._cache is None:
            shape = (x.shape[0], x.shape[1], CACHED_FRAMES, x.shape[3], x.shape[4])
            return _channels_last(torch.zeros(shape, dtype=x.dtype, device=x.device))
        return next(self._cache)

    def store_frames(self, frames: Tensor) -> None:
        self.stored.append(_channels_last(frames[:, :, -CACHED_FRAMES:].clone()))


def _channels_last(frames: Tensor) -> Tensor:
    return frames.contiguous(memory_format=torch.channels_last_3d)


def _causal(conv: Any, x: Tensor, step: _Step) -> Tensor:
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


def _upsample(sampler: Any, x: Tensor, step: _Step) -> Tensor:
    """Double height and width, and the frames if the level does; a video's first frame stays single."""
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
    t, s, out = shortcut.factor_t, shortcut.factor_s, shortcut.out_channels
    x = x.repeat_interleave(shortcut.repeats, dim=1).unflatten(1, (out, t, s, s))
    # [B, out, t, s, s, T, h, w] -> [B, out, T t, h s, w s]
    x = x.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)
    return x[:, :, t - 1 :] if step.first else x


def decode_layers(decoder: Any, x: Tensor, cache: Sequence[Tensor] | None) -> tuple[Tensor, FrameCache]:
    """Run the decoder over the next T latents, giving 4 T frames; without a cache, over one, giving one."""
    step = _Step(cache)
    x = _middle_block(decoder.mid_block, _causal(decoder.conv_in, x, step), step)
    for block in decoder.up_blocks:
        before = x
        for resnet in block.resnets:
            x = _residual_block(resnet, x, step)
        if block.upsampler is not None:
            x = _upsample(block.upsampler, x, step) + _repeat_shortcut(block.avg_shortcut, before, step)
    x = _causal(decoder.conv_out, _norm_silu(decoder.norm_out, x), step)
    return x, tuple(step.stored)


def _downsample(sampler: Any, x: Tensor, step: _Step) -> Tensor:
    """Halve height and width, and the frames if the level does; a video's first frame stays single."""
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
    """Fold frames and pixels into channels, average groups of these; a black frame precedes an odd one."""
    t, s = shortcut.factor_t, shortcut.factor_s
    x = functional.pad(x, (0, 0, 0, 0, -x.shape[2] % t, 0))
    x = x.unflatten(4, (-1, s)).unflatten(3, (-1, s)).unflatten(2, (-1, t))
    # [B, C, T/t, t, h/s, s, w/s, s] -> [B, C t s s, T/t, h/s, w/s]
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)
    return x.unflatten(1, (shortcut.out_channels, shortcut.group_size)).mean(dim=2)


def encode_layers(encoder: Any, x: Tensor, cache: Sequence[Tensor] | None) -> tuple[Tensor, FrameCache]:
    """Run the encoder over patches of the next frames ``[B, 12, T, h, w]``; T is 1 without a cache, else 4 k.

    Returns moments ``[B, 2 Z, 1 or T / 4, h / 8, w / 8]``, in the dtype of `x`, and the cache after them.
    """
    step = _Step(cache)
    x = _causal(encoder.conv_in, x, step)
    for block in encoder.down_blocks:
        before = x
        for resnet in block.resnets:
            x = _residual_block(resnet, x, step)
        if block.downsampler is not None:
            x = _downsample(block.downsampler, x, step)
        x = x + _average_shortcut(block.avg_shortcut, before)
    x = _middle_block(encoder.mid_block, x, step)
    x = _causal(encoder.conv_out, _norm_silu(encoder.norm_out, x), step)
    return x, tuple(step.stored)


# --- videos ---------------------------------------------------------------------


def encode_step(
    vae: WanVae, frames_B3THW: Tensor, cache: Cache | None, *, layers: Layers = encode_layers
) -> tuple[Tensor, Cache]:
    """Encode the next frames of `B` videos, in [-1, 1]; T is 1 when `cache` is None, else a multiple of 4.

    Returns normalised latents ``[B, Z, 1 or T / 4, h, w]`` in the weights' dtype (mode of the posterior), and
    the cache after them.
    """
    frames = frames_B3THW.shape[2]
    if frames != 1 if cache is None else frames % 4:
        raise ValueError(f"a video is encoded as 1 frame, then groups of 4; got {frames} frames")
    x = patchify(frames_B3THW.to(vae.dtype), 2)
    moments, after = layers(vae.encoder, _channels_last(x), cache)
    mode = vae.quant_conv(moments)[:, : vae.size.z_dim]
    mean, std = _statistics(vae.size.latents_mean, vae.size.latents_std, mode.device, mode.dtype)
    return (mode - mean) / std, list(after)


def decode_step(
    vae: WanVae,
    latents_BZFhw: Tensor,
    cache: Cache | None,
    *,
    clamp: bool = True,
    layers: Layers = decode_layers,
) -> tuple[Tensor, Cache]:
    """Decode the next normalised latents; F is 1 without a cache. Fitting needs `clamp` off for gradients."""
    if cache is None and latents_BZFhw.shape[2] != 1:
        raise ValueError(f"a video starts with a single latent frame, got {latents_BZFhw.shape[2]}")
    raw = latents_BZFhw.to(vae.dtype)
    mean, std = _statistics(vae.size.latents_mean, vae.size.latents_std, raw.device, raw.dtype)
    x, after = layers(vae.decoder, _channels_last(vae.post_quant_conv(raw * std + mean)), cache)
    frames = unpatchify(x, 2)
    return (frames.clamp(-1, 1) if clamp else frames), list(after)


class FullDecoder:
    """The autoencoder's own decoder."""

    def __init__(self, vae: WanVae) -> None:
        self.vae = vae
        self._layers: Layers = decode_layers

    def decode(self, latents_BZFhw: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Draw the next frames of `B` videos in [-1, 1]; arguments and result as in `decode_step`."""
        # Single latents open videos, in batches of many sizes: compiling would begin again for each.
        layers = decode_layers if latents_BZFhw.shape[2] == 1 else self._layers
        return decode_step(self.vae, latents_BZFhw, cache, layers=layers)

    def compile(self) -> None:
        """Compile for one fixed batch size."""
        self._layers = torch.compile(decode_layers, fullgraph=True, dynamic=False)


def encode_stream(vae: WanVae, video_B3THW: Tensor, *, frames_per_step: int = 16) -> Tensor:
    """Encode whole videos of 1 + 4 k frames in [-1, 1] to normalised latents ``[B, Z, 1 + k, h, w]``."""
    if video_B3THW.shape[2] % 4 != 1:
        raise ValueError(f"a video must have 1 + 4 k frames, got {video_B3THW.shape[2]}")
    return _in_steps(partial(encode_step, vae), video_B3THW, frames_per_step)


def decode_stream(
    vae: WanVae, latents_BZFhw: Tensor, *, latents_per_step: int = 4, clamp: bool = True
) -> Tensor:
    """Decode whole videos from normalised latents: ``[B, 3, 1 + 4 (F - 1), H, W]``."""
    return _in_steps(partial(decode_step, vae, clamp=clamp), latents_BZFhw, latents_per_step)


def _in_steps(step: Callable[..., tuple[Tensor, Cache]], x: Tensor, size: int) -> Tensor:
    part, cache = step(x[:, :, :1], None)
    parts = [part]
    for start in range(1, x.shape[2], size):
        part, cache = step(x[:, :, start : start + size], cache)
        parts.append(part)
    return torch.cat(parts, dim=2)
