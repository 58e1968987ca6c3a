"""Encode and decode single frames: Stable Diffusion's autoencoder, and its names in published files.

The network is diffusers' `AutoencoderKL`; published files have the names of latent diffusion (arXiv
2112.10752). The two differ in names, in the direction in which the decoder's levels are counted, and in the
attention's projections, which are stored as convolutions of one pixel.

Dimension letters: N frames, H, W pixels, Z latent channels, h, w latent size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig:
    """Size of an autoencoder."""

    channels: int
    """Of the first level; a multiple of `groups`."""
    multipliers: tuple[int, ...]
    """Channels of each level, in those of the first; each level but the last halves height and width."""
    res_blocks: int
    """Residual blocks of a level of the encoder; the decoder has one more."""
    latent: int = 4
    """``Z``."""
    groups: int = 32
    """Of the group norms."""
    scale: float = 0.18215
    """What latents are multiplied by, so that their variance is about 1."""

    @property
    def reduction(self) -> int:
        """Pixels per latent pixel in height and width."""
        return 2 ** (len(self.multipliers) - 1)

    @classmethod
    def tiny(cls) -> AutoencoderConfig:
        """A size for tests and small pictures: 8 pixels per latent pixel."""
        return cls(channels=8, multipliers=(1, 1, 2, 2), res_blocks=1, groups=4)

    @classmethod
    def published(cls) -> AutoencoderConfig:
        """The published size: 248 tensors, 83.65 million parameters."""
        return cls(channels=128, multipliers=(1, 2, 4, 4), res_blocks=2)


def build_autoencoder(size: AutoencoderConfig) -> Any:
    """Make diffusers' `AutoencoderKL` of a size."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    levels = len(size.multipliers)
    per_level: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "block_out_channels": tuple(size.channels * multiplier for multiplier in size.multipliers),
    }
    return AutoencoderKL(
        **per_level,
        layers_per_block=size.res_blocks,
        latent_channels=size.latent,
        norm_num_groups=size.groups,
        scaling_factor=size.scale,
    )


def encode_frames(autoencoder: nn.Module, pictures_N3HW: Tensor, scale: float) -> Tensor:
    """Encode frames, without chance: the mean of the posterior.

    Args:
        autoencoder: Of `build_autoencoder`.
        pictures_N3HW: ``[N, 3, H, W]`` of any float dtype in [-1, 1].
        scale: Of the latents.

    Returns:
        ``[N, Z, h, w]`` float32.
    """
    network: Any = autoencoder
    moments = network.quant_conv(network.encoder(pictures_N3HW.to(network.quant_conv.weight.dtype)))
    return moments.chunk(2, dim=1)[0].float() * scale


def decode_frames(autoencoder: nn.Module, latents_NZhw: Tensor, scale: float) -> Tensor:
    """Decode latents ``[N, Z, h, w]`` of any float dtype: ``[N, 3, H, W]`` in the dtype of the weights."""
    network: Any = autoencoder
    latents = (latents_NZhw / scale).to(network.post_quant_conv.weight.dtype)
    return network.decoder(network.post_quant_conv(latents))


_ATTENTION: Final = {
    "norm": "group_norm",
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "proj_out": "to_out.0",
}
_MIDDLE: Final = {"block_1": "resnets.0", "attn_1": "attentions.0", "block_2": "resnets.1"}
_PROJECTION: Final = re.compile(r"\.attentions\.0\.to_(q|k|v|out\.0)\.weight$")


def autoencoder_from_published(name: str, levels: int) -> str:
    """Map a tensor's name in a published file to diffusers'.

    Args:
        name: Without prefix.
        levels: Of the autoencoder.

    Example:
        >>> autoencoder_from_published("decoder.up.3.block.0.nin_shortcut.weight", 4)
        'decoder.up_blocks.0.resnets.0.conv_shortcut.weight'
    """
    name = name.replace(".nin_shortcut.", ".conv_shortcut.").replace(".norm_out.", ".conv_norm_out.")
    if match := re.fullmatch(r"(encoder|decoder)\.mid\.(block_1|attn_1|block_2)\.(.+)\.(weight|bias)", name):
        side, part, layer, kind = match.groups()
        layer = _ATTENTION.get(layer, layer) if part == "attn_1" else layer
        return f"{side}.mid_block.{_MIDDLE[part]}.{layer}.{kind}"
    if match := re.fullmatch(r"encoder\.down\.(\d+)\.(block\.(\d+)|downsample)\.(.+)", name):
        level, _, number, rest = match.groups()
        part = "downsamplers.0" if number is None else f"resnets.{number}"
        return f"encoder.down_blocks.{level}.{part}.{rest}"
    if match := re.fullmatch(r"decoder\.up\.(\d+)\.(block\.(\d+)|upsample)\.(.+)", name):
        level, _, number, rest = match.groups()
        part = "upsamplers.0" if number is None else f"resnets.{number}"
        return f"decoder.up_blocks.{levels - 1 - int(level)}.{part}.{rest}"
    return name


def autoencoder_to_published(name: str, levels: int) -> str:
    """Map one of diffusers' names to the published one; the inverse of `autoencoder_from_published`."""
    name = name.replace(".conv_shortcut.", ".nin_shortcut.").replace(".conv_norm_out.", ".norm_out.")
    if match := re.fullmatch(r"(encoder|decoder)\.mid_block\.(\w+\.\d)\.(.+)\.(weight|bias)", name):
        side, part, layer, kind = match.groups()
        published = {new: old for old, new in _MIDDLE.items()}[part]
        if published == "attn_1":
            layer = {new: old for old, new in _ATTENTION.items()}[layer]
        return f"{side}.mid.{published}.{layer}.{kind}"
    if match := re.fullmatch(r"encoder\.down_blocks\.(\d+)\.(resnets|downsamplers)\.(\d+)\.(.+)", name):
        level, part, number, rest = match.groups()
        return f"encoder.down.{level}.{f'block.{number}' if part == 'resnets' else 'downsample'}.{rest}"
    if match := re.fullmatch(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)", name):
        level, part, number, rest = match.groups()
        part = f"block.{number}" if part == "resnets" else "upsample"
        return f"decoder.up.{levels - 1 - int(level)}.{part}.{rest}"
    return name


def autoencoder_tensor_from_published(name: str, tensor: Tensor, levels: int) -> dict[str, Tensor]:
    """Turn a published tensor, also one on the meta device, into diffusers' by its name there."""
    ours = autoencoder_from_published(name, levels)
    square = _PROJECTION.search(ours) and tensor.ndim == 4 and tensor.shape[2:] == (1, 1)
    return {ours: tensor.flatten(1) if square else tensor}


def published_autoencoder(autoencoder: nn.Module, levels: int) -> dict[str, Tensor]:
    """Return the tensors of an autoencoder by their published names, in their published shapes."""
    return {
        autoencoder_to_published(name, levels): tensor[:, :, None, None]
        if _PROJECTION.search(name)
        else tensor
        for name, tensor in autoencoder.state_dict().items()
    }
