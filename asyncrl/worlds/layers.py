"""Networks that several kinds of worlds share: a frame autoencoder, attention between few frames, waves.

The autoencoder is Stable Diffusion's, by diffusers, and takes each frame by itself. A latent is the mean of
what the encoder returns, times the scale: published training took a random sample instead, which would make a
start state depend on more than its frame.

Dimension letters: N pictures or places, H, W pixels, Z latent channels, h, w latent height and width; in
attention H heads, F frames that see, K frames that are seen, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.storage.untrusted import Typed


@dataclass(frozen=True, kw_only=True)
class FrameVaeConfig(Typed):
    """Size of a frame autoencoder, and the scale of its latents."""

    widths: tuple[int, ...]
    """Channels per level, from the finest; each level but the last halves height and width."""
    layers_per_block: int
    """Residual blocks per level of the encoder; the decoder has one more."""
    channels: int = 4
    """Latent channels."""
    groups: int = 32
    """Groups of the group norms; divides every width."""
    scale: float = 0.13025
    """Latents are the encoder's means times this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        levels, groups = len(self.widths), self.groups
        if not 1 <= levels <= 8 or not 1 <= self.layers_per_block <= 16 or min(self.channels, groups) < 1:
            raise ValueError(f"{self} has a size that is no size")
        if any(width < 1 or width % groups for width in self.widths) or not 0 < self.scale < float("inf"):
            raise ValueError(f"{self}: groups must divide every width, and the scale must be positive")

    @property
    def spatial(self) -> int:
        """Pixels per latent pixel in height and width."""
        return 2 ** (len(self.widths) - 1)

    @classmethod
    def tiny(cls) -> FrameVaeConfig:
        """Return a size of 1.0 million parameters, whose fitted latents need no scale."""
        return cls(widths=(16, 32, 64, 64), layers_per_block=1, groups=8, scale=1.0)

    @classmethod
    def small(cls) -> FrameVaeConfig:
        """Return a size of 2.4 million parameters with equal latents: decoding costs three times."""
        return cls(widths=(32, 64, 96, 96), layers_per_block=1, groups=8, scale=1.0)

    @classmethod
    def published(cls) -> FrameVaeConfig:
        """Return the published size of OpenSora's (SDXL's): 248 tensors, 83,653,863 parameters."""
        return cls(widths=(128, 256, 512, 512), layers_per_block=2)

    def options(self) -> dict[str, Any]:
        """Return the size as diffusers' AutoencoderKL takes it."""
        return {
            "down_block_types": ("DownEncoderBlock2D",) * len(self.widths),
            "up_block_types": ("UpDecoderBlock2D",) * len(self.widths),
            "block_out_channels": self.widths,
            "layers_per_block": self.layers_per_block,
            "latent_channels": self.channels,
            "norm_num_groups": self.groups,
            "in_channels": 3,
            "out_channels": 3,
        }


class FrameVae(nn.Module):
    """diffusers' AutoencoderKL with its names of tensors, and nothing that a setting of it could change."""

    def __init__(self, size: FrameVaeConfig, *, at_once: int = 16, channels_last: bool = True) -> None:
        """Build with random weights; `at_once` frames are coded together, which bounds the memory."""
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        super().__init__()
        made: Any = AutoencoderKL(**size.options())
        self.size, self.at_once, self.channels_last = size, at_once, channels_last
        self.encoder, self.decoder = made.encoder, made.decoder
        self.quant_conv, self.post_quant_conv = made.quant_conv, made.post_quant_conv
        self._encode_compiled: Callable[[Tensor], Tensor] = self._encode
        self._draw: Callable[[Tensor], Tensor] = self._decode
        self.use_channels_last()

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.encoder.conv_in.weight.dtype

    def use_channels_last(self) -> None:
        """Store the weights channels last; to be called again after they were replaced."""
        if self.channels_last:
            self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def compile_pieces(self, *, encoder: bool = False) -> None:
        """Compile the decoder, and perhaps the encoder, for pieces of few sizes."""
        self._draw = torch.compile(self._decode, fullgraph=True, dynamic=False)
        if encoder:
            self._encode_compiled = torch.compile(self._encode, fullgraph=True, dynamic=False)

    def encode(self, frames_N3HW: Tensor, *, compiled: bool = False) -> Tensor:
        """Encode ``[N, 3, H, W]`` in [-1, 1] to scaled ``[N, Z, h, w]`` float32; compiled: for few sizes."""
        return self._in_pieces(self._encode_compiled if compiled else self._encode, frames_N3HW)

    def decode(self, latents_NZhw: Tensor) -> Tensor:
        """Decode scaled ``[N, Z, h, w]`` to ``[N, 3, H, W]`` in the weights' dtype, not clamped."""
        return self._in_pieces(self._draw, latents_NZhw)

    def _in_pieces(self, layers: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        return torch.cat([layers(piece) for piece in rows.split(self.at_once)])

    def _encode(self, frames_N3HW: Tensor) -> Tensor:
        moments = self.quant_conv(self.encoder(self._placed(frames_N3HW)))
        # Means, then log-variances, which are not used.
        return moments[:, : self.size.channels].float().contiguous() * self.size.scale

    def _decode(self, latents_NZhw: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(self._placed(latents_NZhw / self.size.scale)))

    def _placed(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.dtype)
        return rows.contiguous(memory_format=torch.channels_last) if self.channels_last else rows


def attend_few(
    query_NHFE: Tensor, key_NHKE: Tensor, value_NHKE: Tensor, visible_FK: Tensor | None = None
) -> Tensor:
    """Compute attention between a window's few frames, at every place; `visible_FK` None: all are seen."""
    # On an H200 the fused kernels take eight times as long as two products for tens of thousands of sequences
    # of a dozen frames: they compute a whole tile each.
    if query_NHFE.is_cuda:
        return attend_by_products(query_NHFE, key_NHKE, value_NHKE, visible_FK)
    return functional.scaled_dot_product_attention(query_NHFE, key_NHKE, value_NHKE, attn_mask=visible_FK)


def attend_by_products(
    query_NHFE: Tensor, key_NHKE: Tensor, value_NHKE: Tensor, visible_FK: Tensor | None = None
) -> Tensor:
    """Compute the same by two batched products; the softmax is in float32 at least."""
    exact = torch.promote_types(query_NHFE.dtype, torch.float32)
    scores_NHFK = (query_NHFE @ key_NHKE.transpose(2, 3)).to(exact) * query_NHFE.shape[-1] ** -0.5
    if visible_FK is not None:
        scores_NHFK = scores_NHFK.masked_fill(~visible_FK, float("-inf"))
    return scores_NHFK.softmax(-1).type_as(value_NHKE) @ value_NHKE


def sinusoid(times: Tensor, channels: int) -> Tensor:
    """Encode times ``[...]`` of 0..1000 as ``[..., channels]`` float64 waves; sin(1000) needs the digits."""
    half = channels // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=times.device) / half)
    angles = times.double().unsqueeze(-1) * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
