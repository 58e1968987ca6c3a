"""Encode frames into latents and decode them, each frame by itself: Stable Diffusion's autoencoder.

A latent is the mean of what the encoder returns, times the scale: published training took a random sample
instead, which would make a start state depend on more than its frame.

Dimension letters: N frames, H, W pixels, Z latent channels, h, w latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

FRAMES_AT_ONCE: Final = 16
"""Frames that are encoded or decoded together: memory does not grow with the number of slots."""


@dataclass(frozen=True, kw_only=True)
class VaeConfig:
    """Size of a frame autoencoder, and the scale of its latents."""

    widths: tuple[int, ...]
    """Channels per level, from the finest; each level but the last halves height and width."""
    layers_per_block: int
    """Residual blocks per level of the encoder; the decoder has one more."""
    channels: int = 4
    """Latent channels."""
    norm_groups: int = 32
    """Groups of the group norms; divides every width."""
    scale: float = 0.13025
    """Latents are the encoder's means times this."""

    def __post_init__(self) -> None:
        levels, groups = len(self.widths), self.norm_groups
        if not 1 <= levels <= 8 or not 1 <= self.layers_per_block <= 16 or min(self.channels, groups) < 1:
            raise ValueError(f"{self} has a size that is no size")
        if any(
            type(width) is not int or width < 1 or width % groups for width in self.widths
        ) or not 0 < self.scale < float("inf"):
            raise ValueError(
                f"widths {list(self.widths)} with {groups} groups and scale {self.scale}: groups must divide "
                "every width, and the scale must be positive"
            )

    @property
    def spatial(self) -> int:
        """Pixels per latent pixel in height and width."""
        return 2 ** (len(self.widths) - 1)

    @classmethod
    def tiny(cls) -> VaeConfig:
        """Return a size of 1.0 million parameters, whose fitted latents need no scale."""
        return cls(widths=(16, 32, 64, 64), layers_per_block=1, norm_groups=8, scale=1.0)

    @classmethod
    def small(cls) -> VaeConfig:
        """Return a size of 2.4 million parameters with equal latents: decoding costs three times."""
        return cls(widths=(32, 64, 96, 96), layers_per_block=1, norm_groups=8, scale=1.0)

    @classmethod
    def published(cls) -> VaeConfig:
        """Return the published size (SDXL's): 248 tensors, 83,653,863 parameters."""
        return cls(widths=(128, 256, 512, 512), layers_per_block=2)

    def options(self) -> dict[str, Any]:
        """Return the size as diffusers' AutoencoderKL takes it."""
        return {
            "down_block_types": ("DownEncoderBlock2D",) * len(self.widths),
            "up_block_types": ("UpDecoderBlock2D",) * len(self.widths),
            "block_out_channels": self.widths,
            "layers_per_block": self.layers_per_block,
            "latent_channels": self.channels,
            "norm_num_groups": self.norm_groups,
            "in_channels": 3,
            "out_channels": 3,
        }


class FrameVae(nn.Module):
    """diffusers' AutoencoderKL with its names of tensors, and nothing that a setting of it could change."""

    def __init__(self, size: VaeConfig) -> None:
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        super().__init__()
        made: Any = AutoencoderKL(**size.options())
        self.size = size
        self.encoder, self.decoder = made.encoder, made.decoder
        self.quant_conv, self.post_quant_conv = made.quant_conv, made.post_quant_conv
        self._draw: Callable[[Tensor], Tensor] = self._decode
        self.use_channels_last()

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.encoder.conv_in.weight.dtype

    def use_channels_last(self) -> None:
        """Store the weights channels last; to be called again after they were replaced."""
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def compile_decoder(self) -> None:
        """Compile the decoder, for pieces of few sizes; the first frames take longer."""
        self._draw = torch.compile(self._decode, fullgraph=True, dynamic=False)

    def encode(self, frames_N3HW: Tensor) -> Tensor:
        """Encode ``[N, 3, H, W]`` of any float dtype, in [-1, 1], to ``[N, Z, h, w]`` float32, scaled."""
        return _in_pieces(self._encode, frames_N3HW)

    def decode(self, latents_NZhw: Tensor) -> Tensor:
        """Decode scaled ``[N, Z, h, w]`` to ``[N, 3, H, W]`` in the weights' dtype, not clamped."""
        return _in_pieces(self._draw, latents_NZhw)

    def _encode(self, frames_N3HW: Tensor) -> Tensor:
        frames = frames_N3HW.to(self.dtype).contiguous(memory_format=torch.channels_last)
        moments = self.quant_conv(self.encoder(frames))  # means, then log-variances, which are not used
        return moments[:, : self.size.channels].float().contiguous() * self.size.scale

    def _decode(self, latents_NZhw: Tensor) -> Tensor:
        raw = (latents_NZhw / self.size.scale).to(self.dtype).contiguous(memory_format=torch.channels_last)
        return self.decoder(self.post_quant_conv(raw))


def _in_pieces(layers: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return torch.cat([layers(piece) for piece in rows.split(FRAMES_AT_ONCE)])
