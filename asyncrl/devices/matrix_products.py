"""Finds out whether a GPU multiplies matrices right, before anything is learned from what it computes.

A library can be wrong without saying so. cuBLAS of CUDA 13.0 is, on an H100, in a process that may use 84 to
104 of its 132 multiprocessors (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE 65 to 80): products of 8192 rows by
1152 x 1152 and 4304 x 1152 bfloat16 numbers, layers of the policy's vision tower, are off by as much as the
numbers are large, and gradients are soon not finite (docs/measurements/run_speed.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from asyncrl.errors import ConfigError

SHARE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""Environment variable: how many of the multiprocessors a client of MPS may use."""
SIZES: Final = ((8192, 1152, 1152), (8192, 4304, 1152), (8192, 1024, 4096), (2048, 4096, 4096))
"""Rows, width and columns: linear layers of the vision towers and of the language model."""
TOLERANCE: Final = 0.03
"""Largest difference, in the largest number of the product. Rounding to bfloat16 makes 0.002 to 0.004."""
Multiply = Callable[[Tensor, Tensor], Tensor]


def product_error(device: torch.device, size: tuple[int, int, int], multiply: Multiply) -> float:
    """Compare a product of bfloat16 numbers with that of the same numbers in float32.

    Args:
        device: Where.
        size: M, K and N.
        multiply: Multiplies ``[M, K]`` with a ``[K, N]`` that is stored by columns, as weights are.

    Returns:
        The largest difference over the largest number of the product; not finite where the product is not.
    """
    rows, width, columns = size
    generator = torch.Generator(device).manual_seed(0)  # Nobody else's numbers change.
    a_MK, b_NK = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for shape in ((rows, width), (columns, width))
    )
    exact_MN = a_MK.float() @ b_NK.float().T
    return float((multiply(a_MK, b_NK.T).float() - exact_MN).abs().max() / exact_MN.abs().max())


def check_matrix_products(
    device: torch.device,
    multiply: Multiply = torch.matmul,
    sizes: Sequence[tuple[int, int, int]] = SIZES,
) -> float:
    """Multiply matrices of the sizes that policies have.

    Args:
        device: Where.
        multiply: See `product_error`.
        sizes: M, K and N of each product.

    Returns:
        The largest error.

    Raises:
        ConfigError: A product is wrong.
    """
    largest = 0.0
    for size in sizes:
        error = product_error(device, size, multiply)
        if not error < TOLERANCE:  # NaN is not.
            raise ConfigError(_refusal(device, size, error))
        largest = max(largest, error)
    return largest


def _refusal(device: torch.device, size: tuple[int, int, int], error: float) -> str:
    cuda = device.type == "cuda"
    name = f"{device} ({torch.cuda.get_device_name(device)})" if cuda else str(device)
    rows, width, columns = size
    wrong = (
        f"{name} multiplies matrices wrongly: the product of {rows} x {width} and {width} x {columns} "
        f"bfloat16 numbers is off by {error:.3g} of its largest number, where rounding makes 0.004."
    )
    if share := os.environ.get(SHARE, ""):
        return (
            f"{wrong} {SHARE} is {share}, and cuBLAS is known to do that where a process may use only some "
            "of the multiprocessors. Unset it: MPS shares a GPU without it."
        )
    return (
        f"{wrong} Nothing that it computes can be trusted. Leave it out (CUDA_VISIBLE_DEVICES), or try "
        "another build of PyTorch."
    )
