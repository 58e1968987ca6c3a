"""Linear layers with 8-bit products, for weights that are not trained.

Weights are rounded once, per output channel; the input at every call, per row, so slots are independent. The
largest magnitude of each becomes that of ``e4m3`` (arXiv 2209.05433).

K, N: features into and out of the layer.
"""

from __future__ import annotations

from typing import Final, TypeGuard

import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError

DTYPE: Final = torch.float8_e4m3fn
LARGEST: Final = torch.finfo(DTYPE).max
SMALLEST: Final = 1e-30  # Least magnitude of a row: below any gradient, and its scale is not flushed to 0
ALIGNMENT: Final = 16  # Divides the widths that GPUs can multiply
CAPABILITY: Final = (8, 9)  # Least compute capability with 8-bit products: Ada and Hopper


def check_device(device: torch.device) -> None:
    """Raise ConfigError if a GPU has no 8-bit products; CPUs have slow ones."""
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        raise ConfigError(
            f"--imagination.precision is float8, but {torch.cuda.get_device_name(device)} has compute "
            f"capability {found[0]}.{found[1]} and no 8-bit products: these begin with "
            f"{CAPABILITY[0]}.{CAPABILITY[1]} (L40, H100). Use --imagination.precision stored."
        )


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows ``[N, K]`` to e4m3, with their scales ``[N, 1]`` float32. A row with a NaN is all NaN."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=SMALLEST) / LARGEST
    return (x.float() / scale).to(DTYPE), scale


def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Round rows ``[..., K]``, multiply with e4m3 weights ``[N, K]`` (contiguous) and `scale` ``[1, N]``."""
    rows, of_rows = quantise(x.flatten(0, -2))
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
        weight, scale = quantise(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.T.contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., K]`` to ``[..., N]``, in the dtype of `x`, rounded to bfloat16."""
        y = product(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias


def fits(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True if a layer is linear, with widths that GPUs multiply."""
    return type(layer) is nn.Linear and not (layer.in_features % ALIGNMENT or layer.out_features % ALIGNMENT)


def use_float8(network: nn.Module) -> None:
    """Replace the fitting linear layers of a network by rounded ones."""
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if fits(layer):
                setattr(parent, name, Float8Linear(layer))


def saved_bytes(network: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes that `use_float8` saves in a network with weights of `dtype`."""
    layers = [layer for layer in network.modules() if fits(layer)]
    return sum(x.weight.numel() * (dtype.itemsize - 1) - 4 * x.out_features for x in layers)
