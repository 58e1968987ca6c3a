"""Linear layers whose products are computed with 8-bit numbers, for networks that are not trained.

Weights are rounded once, per output channel; what they multiply is rounded at every call, per row. Both are
scaled so that the largest magnitude becomes the largest that ``e4m3`` has (arXiv 2209.05433), and the product
is scaled back. A row's result depends on nothing but that row, so slots do not feel each other.

`frozen_float8` has such layers with a gradient for what they multiply.
"""

from __future__ import annotations

from typing import Final, TypeGuard

import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError

DTYPE: Final = torch.float8_e4m3fn
LARGEST: Final = torch.finfo(DTYPE).max
"""448."""
SMALLEST: Final = 1e-30
"""Largest magnitude of a row below which it is rounded as if it had this one: no gradient is that small, and
a scale is still a number that GPUs do not take for 0."""
ALIGNMENT: Final = 16
"""Widths that GPUs multiply are multiples of this."""
CAPABILITY: Final = (8, 9)
"""Least compute capability of a GPU that multiplies such numbers: Ada and Hopper have it."""


def check_device(device: torch.device, flag: str = "--imagination.precision") -> None:
    """Refuse a GPU that has no 8-bit products. CPUs have slow ones.

    Args:
        device: Where they are to be computed.
        flag: That asks for them; the other choice is called stored.

    Raises:
        ConfigError: It has none.
    """
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        raise ConfigError(
            f"{flag} is float8, but {torch.cuda.get_device_name(device)} has compute "
            f"capability {found[0]}.{found[1]} and no 8-bit products: these begin with "
            f"{CAPABILITY[0]}.{CAPABILITY[1]} (L40, H100). Use {flag} stored."
        )


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to 8 bits.

    Args:
        x: ``[N, K]`` of any float dtype.

    Returns:
        ``[N, K]`` e4m3, and ``[N, 1]`` float32: times this, it is about `x`. A row with a NaN is all NaN.
    """
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=SMALLEST) / LARGEST
    return (x.float() / scale).to(DTYPE), scale


def scaled_product(rows: Tensor, weight: Tensor, of_rows: Tensor, scale: Tensor) -> Tensor:
    """Multiply rounded rows with rounded weights.

    On a GPU with the operator below `torch.nn.functional.scaled_mm`, because that one cannot be compiled with
    every torch that is supported. A CPU computes in float32: it gains nothing from 8 bits.

    Args:
        rows: ``[M, K]`` e4m3.
        weight: ``[N, K]`` e4m3.
        of_rows: ``[M, 1]`` float32.
        scale: ``[1, N]`` float32.

    Returns:
        ``[M, N]`` bfloat16.
    """
    if rows.device.type == "cpu":
        return (rows.float() @ weight.float().T * of_rows * scale).bfloat16()
    return torch.ops.aten._scaled_mm(rows, weight.T, of_rows, scale, out_dtype=torch.bfloat16)


def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply rows, which are rounded here, with weights that are rounded already.

    Args:
        x: ``[..., K]`` of any float dtype.
        weight: ``[N, K]`` e4m3, row after row: the layout that GPUs multiply.
        scale: ``[1, N]`` float32.

    Returns:
        ``[..., N]`` in the dtype of `x`; the product itself is bfloat16, which is what GPUs give.
    """
    rows, of_rows = quantise(x.flatten(0, -2))
    return scaled_product(rows, weight, of_rows, scale).to(x.dtype).unflatten(0, x.shape[:-1])


class Float8Linear(nn.Module):
    """A linear layer's weights, rounded."""

    weight: Tensor
    """``[N, K]`` e4m3."""
    scale: Tensor
    """``[1, N]`` float32."""

    def __init__(self, linear: nn.Linear) -> None:
        """Round the weights of a layer, on its device."""
        super().__init__()
        weight, scale = quantise(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.T.contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., K]`` to ``[..., N]``, in the dtype of `x`; the product itself is bfloat16."""
        y = product(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias


def fits(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is linear and of widths that GPUs multiply."""
    return type(layer) is nn.Linear and not (layer.in_features % ALIGNMENT or layer.out_features % ALIGNMENT)


def use_float8(network: nn.Module) -> None:
    """Replace the linear layers of a network by rounded ones; a layer that does not fit stays."""
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if fits(layer):
                setattr(parent, name, Float8Linear(layer))


def saved_bytes(network: nn.Module, dtype: torch.dtype) -> int:
    """Return by how many bytes `use_float8` makes a network smaller whose weights are of `dtype`."""
    layers = [layer for layer in network.modules() if fits(layer)]
    narrower = dtype.itemsize - DTYPE.itemsize
    return sum(layer.weight.numel() * narrower - 4 * layer.out_features for layer in layers)
