"""Networks that several kinds of worlds share: frame autoencoder, attention of few frames, waves, 8 bits.

The autoencoder is Stable Diffusion's, by diffusers, and processes frames one by one. A latent is the mean of
what the encoder returns, times the scale: published training took a random sample instead, which would make a
start state depend on more than its frame.

Dimension letters: N pictures or places, H, W pixels, Z latent channels, h, w latent height and width; in
attention H heads, F frames that attend, K frames attended to, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.errors import ConfigError
from asyncrl.storage.untrusted import Typed


@dataclass(frozen=True, kw_only=True)
class FrameVaeConfig(Typed):
    """Size of a frame autoencoder, and the scale of its latents."""

    widths: tuple[int, ...]  # Channels per level, the finest first; all but the last halve height and width
    layers_per_block: int  # Residual blocks per level of the encoder; the decoder has one more
    channels: int = 4  # Latent channels
    groups: int = 32  # Groups of the group norms; divides every width
    scale: float = 0.13025  # Latents are the encoder's means times this

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
        """Return a size of 2.4 million parameters, with `tiny`'s latents; decoding costs 3 times as much."""
        return cls(widths=(32, 64, 96, 96), layers_per_block=1, groups=8, scale=1.0)

    @classmethod
    def published(cls) -> FrameVaeConfig:
        """Return the published size, OpenSora's (and SDXL's): 248 tensors, 83,653,863 parameters."""
        return cls(widths=(128, 256, 512, 512), layers_per_block=2)

    def options(self) -> dict[str, Any]:
        """Return the arguments of diffusers' AutoencoderKL."""
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
    """diffusers' AutoencoderKL with its tensor names and one fixed configuration."""

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
        """Store the weights channels last; call it again after replacing them."""
        if self.channels_last:
            self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def compile_pieces(self, *, encoder: bool = False) -> None:
        """Compile the decoder, and perhaps the encoder, for pieces of few sizes."""
        self._draw = torch.compile(self._decode, fullgraph=True, dynamic=False)
        if encoder:
            self._encode_compiled = torch.compile(self._encode, fullgraph=True, dynamic=False)

    def encode(self, frames_N3HW: Tensor, *, compiled: bool = False) -> Tensor:
        """Encode ``[N, 3, H, W]`` in [-1, 1] to scaled ``[N, Z, h, w]`` float32; `compiled`: for few N."""
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
    """Compute `attend_few` by two batched products; the softmax is in float32 at least."""
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


# ---- 8-bit products ------------------------------------------------------------------------------
# Linear layers that are not trained. Weights are rounded once, per output channel; the input at every call,
# per row, so slots are independent. The largest magnitude of each becomes that of e4m3 (arXiv 2209.05433).
# K, N: features into and out of the layer.

FLOAT8: Final = torch.float8_e4m3fn
FLOAT8_LARGEST: Final = torch.finfo(FLOAT8).max
FLOAT8_SMALLEST: Final = 1e-30  # Least magnitude of a row: below any gradient; its scale is not flushed to 0
FLOAT8_ALIGNMENT: Final = 16  # Divides the widths that GPUs can multiply
FLOAT8_CAPABILITY: Final = (8, 9)  # Least compute capability with 8-bit products: Ada and Hopper


def check_float8(device: torch.device) -> None:
    """Raise ConfigError if a GPU has no 8-bit products; CPUs have slow ones."""
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < FLOAT8_CAPABILITY:
        raise ConfigError(
            f"--imagination.precision is float8, but {torch.cuda.get_device_name(device)} has compute "
            f"capability {found[0]}.{found[1]} and no 8-bit products: these begin with "
            f"{FLOAT8_CAPABILITY[0]}.{FLOAT8_CAPABILITY[1]} (L40, H100). Use --imagination.precision stored."
        )


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows ``[N, K]`` to e4m3, with their scales ``[N, 1]`` float32. A row with a NaN is all NaN."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=FLOAT8_SMALLEST) / FLOAT8_LARGEST
    return (x.float() / scale).to(FLOAT8), scale


def float8_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Round rows ``[..., K]``, multiply with e4m3 weights ``[N, K]`` (contiguous) and `scale` ``[1, N]``."""
    rows, of_rows = to_float8(x.flatten(0, -2))
    if rows.device.type == "cpu":  # 8 bits are no faster there.
        y = (rows.float() @ weight.float().T * of_rows * scale).bfloat16()
    else:  # `torch.nn.functional.scaled_mm` cannot be compiled with every supported torch.
        y = torch.ops.aten._scaled_mm(rows, weight.T, of_rows, scale, out_dtype=torch.bfloat16)
    return y.to(x.dtype).unflatten(0, x.shape[:-1])


class Float8Linear(nn.Module):
    """A linear layer with rounded weights."""

    weight: Tensor  # [N, K] e4m3
    scale: Tensor  # [1, N] float32

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = to_float8(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.T.contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., K]`` to ``[..., N]``, in the dtype of `x`, rounded to bfloat16."""
        y = float8_product(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias


def fits_float8(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True if a layer is linear, with widths that GPUs multiply."""
    return type(layer) is nn.Linear and not any(n % FLOAT8_ALIGNMENT for n in layer.weight.shape)


def use_float8(network: nn.Module) -> None:
    """Replace a network's linear layers by rounded ones if `fits_float8`."""
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if fits_float8(layer):
                setattr(parent, name, Float8Linear(layer))


def saved_by_float8(network: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes that `use_float8` saves in a network with weights of `dtype`."""
    layers = [layer for layer in network.modules() if fits_float8(layer)]
    return sum(x.weight.numel() * (dtype.itemsize - 1) - 4 * x.out_features for x in layers)
