"""Encode frames into latents and decode them: Wan 2.2's causal video autoencoder, step by step.

The autoencoder sees a video as one frame, then groups of four. Every causal convolution needs its last two
inputs from the frames before; here these are a list of tensors, batch first, so that a slot can be refilled
without touching the others.

Dimension letters:
    B  videos      T  frames = 1 + 4 (F - 1)    H, W  pixels      F  latent frames    Z  latent channels
    h, w  latent height and width (H / 16, W / 16)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, patchify, unpatchify
from torch import Tensor, nn

from asyncrl.worlds.wan.vae_layers import Layers, channels_last, decode_layers, encode_layers

SPATIAL: Final = 16
"""Pixels per latent pixel."""
Cache = list[Tensor]
"""One ``[B, C, 2, ., .]`` tensor per causal convolution, in the order the network meets them."""

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
class VaeConfig:
    """Size and latent statistics of a Wan 2.2 autoencoder."""

    base_dim: int
    """Channels of the encoder's first layer."""
    decoder_base_dim: int
    """Channels of the decoder's last layer."""
    z_dim: int
    """Latent channels."""
    res_blocks: int
    """Residual blocks per level of the encoder; the decoder has one more."""
    latents_mean: tuple[float, ...]
    """``[Z]`` mean of the raw latents; normalised latents have it subtracted."""
    latents_std: tuple[float, ...]
    """``[Z]`` standard deviation of the raw latents; normalised latents are divided by it."""

    @classmethod
    def tiny(cls) -> VaeConfig:
        """The embedded size, with statistics that leave latents as they are until they are measured."""
        mean, std = (0.0,) * 32, (1.0,) * 32
        return cls(
            base_dim=8, decoder_base_dim=16, z_dim=32, res_blocks=1, latents_mean=mean, latents_std=std
        )

    @classmethod
    def small(cls) -> VaeConfig:
        """One and a half times as wide as `tiny`, with latents of the same shape: decoding costs twice."""
        return replace(cls.tiny(), base_dim=12, decoder_base_dim=24)

    @classmethod
    def full(cls) -> VaeConfig:
        """The published size: 196 tensors, 704,688,668 parameters."""
        return cls(
            base_dim=160,
            decoder_base_dim=256,
            z_dim=48,
            res_blocks=2,
            latents_mean=_FULL_MEAN,
            latents_std=_FULL_STD,
        )

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> VaeConfig:
        """Build the config that ``asdict`` and JSON turned into `content`."""
        fields: dict[str, Any] = {**content}
        for name in ("latents_mean", "latents_std"):
            fields[name] = tuple(content[name])
        return cls(**fields)


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
        """Use another mean and standard deviation of the raw latents, ``[Z]`` each."""
        self.size = replace(self.size, latents_mean=tuple(mean), latents_std=tuple(std))
        self.register_to_config(latents_mean=list(mean), latents_std=list(std))


def use_channels_last(vae: WanVae) -> None:
    """Store convolution weights channels last: the decoder takes a third less time and computes the same."""
    for module in vae.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            layout = torch.channels_last if isinstance(module, nn.Conv2d) else torch.channels_last_3d
            module.weight.data = module.weight.data.contiguous(memory_format=layout)


@lru_cache(maxsize=32)
def _statistics(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return mean and deviation, ``[1, Z, 1, 1, 1]`` each; kept, for a copy to a device would wait for it.

    A tensor made in inference mode could not take part in a gradient later.
    """
    with torch.inference_mode(False):
        both = torch.tensor([mean, std], device=device, dtype=dtype)[:, None, :, None, None, None]
    return both[0], both[1]


def _statistics_for(vae: WanVae, like: Tensor) -> tuple[Tensor, Tensor]:
    return _statistics(vae.size.latents_mean, vae.size.latents_std, like.device, like.dtype)


def encode_step(
    vae: WanVae, frames_B3THW: Tensor, cache: Cache | None, *, layers: Layers = encode_layers
) -> tuple[Tensor, Cache]:
    """Encode the next frames of `B` videos.

    Args:
        vae: The autoencoder.
        frames_B3THW: ``[B, 3, T, H, W]`` of any float dtype, in [-1, 1]; T is 1 when `cache` is None, else a
            multiple of 4.
        cache: What the last call returned, or None at the first frame. Not changed.
        layers: `vae_layers.encode_layers`, or the same compiled.

    Returns:
        Normalised latents ``[B, Z, 1 or T / 4, h, w]`` in the weights' dtype (mode of the posterior), and the
        cache after them.
    """
    frames = frames_B3THW.shape[2]
    if frames != 1 if cache is None else frames % 4:
        raise ValueError(f"a video is encoded as 1 frame, then groups of 4; got {frames} frames")
    x = patchify(frames_B3THW.to(vae.dtype), 2)
    moments, after = layers(vae.encoder, channels_last(x), cache)
    mode = vae.quant_conv(moments)[:, : vae.size.z_dim]
    mean, std = _statistics_for(vae, mode)
    return (mode - mean) / std, list(after)


def decode_step(
    vae: WanVae,
    latents_BZFhw: Tensor,
    cache: Cache | None,
    *,
    clamp: bool = True,
    layers: Layers = decode_layers,
) -> tuple[Tensor, Cache]:
    """Decode the next latents of `B` videos.

    Args:
        vae: The autoencoder.
        latents_BZFhw: ``[B, Z, F, h, w]`` of any float dtype, normalised; F is 1 when `cache` is None.
        cache: What the last call returned, or None at the first latent. Not changed.
        clamp: Keep pixels in [-1, 1]. Off while fitting, where a clamp would stop the gradient.
        layers: `vae_layers.decode_layers`, or the same compiled.

    Returns:
        Frames ``[B, 3, 1 or 4 F, H, W]`` in the weights' dtype, and the cache after them.
    """
    if cache is None and latents_BZFhw.shape[2] != 1:
        raise ValueError(f"a video starts with a single latent frame, got {latents_BZFhw.shape[2]}")
    raw = latents_BZFhw.to(vae.dtype)
    mean, std = _statistics_for(vae, raw)
    x, after = layers(vae.decoder, channels_last(vae.post_quant_conv(raw * std + mean)), cache)
    frames = unpatchify(x, 2)
    return (frames.clamp(-1, 1) if clamp else frames), list(after)


def encode_stream(vae: WanVae, video_B3THW: Tensor, *, frames_per_step: int = 16) -> Tensor:
    """Encode whole videos.

    Args:
        vae: The autoencoder.
        video_B3THW: ``[B, 3, T, H, W]`` of any float dtype, in [-1, 1]; T = 1 + 4 k.
        frames_per_step: Multiple of 4; more is faster and needs more memory, the result is the same.

    Returns:
        ``[B, Z, 1 + (T - 1) / 4, h, w]`` normalised latents in the weights' dtype.
    """
    if video_B3THW.shape[2] % 4 != 1:
        raise ValueError(f"a video must have 1 + 4 k frames, got {video_B3THW.shape[2]}")
    latents, cache = encode_step(vae, video_B3THW[:, :, :1], None)
    parts = [latents]
    for start in range(1, video_B3THW.shape[2], frames_per_step):
        latents, cache = encode_step(vae, video_B3THW[:, :, start : start + frames_per_step], cache)
        parts.append(latents)
    return torch.cat(parts, dim=2)


def decode_stream(
    vae: WanVae, latents_BZFhw: Tensor, *, latents_per_step: int = 4, clamp: bool = True
) -> Tensor:
    """Decode whole videos.

    Args:
        vae: The autoencoder.
        latents_BZFhw: ``[B, Z, F, h, w]`` of any float dtype, normalised.
        latents_per_step: More is faster and needs more memory, the result is the same.
        clamp: See `decode_step`.

    Returns:
        ``[B, 3, 1 + 4 (F - 1), H, W]`` in the weights' dtype.
    """
    frames, cache = decode_step(vae, latents_BZFhw[:, :, :1], None, clamp=clamp)
    parts = [frames]
    for start in range(1, latents_BZFhw.shape[2], latents_per_step):
        frames, cache = decode_step(
            vae, latents_BZFhw[:, :, start : start + latents_per_step], cache, clamp=clamp
        )
        parts.append(frames)
    return torch.cat(parts, dim=2)
