"""Non-blocking copies to a device, pixel conversions, memory peaks, and a check of matrix products."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import ConfigError


def to_signed(pictures: Tensor) -> Tensor:
    """Map ``[...]`` uint8 to ``[...]`` float32 in [-1, 1]."""
    return pictures.float() / 127.5 - 1


def to_uint8(pictures: Tensor) -> Tensor:
    """Map ``[...]`` floats in [-1, 1] (clamped) to the nearest ``[...]`` uint8."""
    return ((pictures.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device through page-locked memory, without blocking or sharing memory."""
    if device.type != "cuda":
        return torch.tensor(array, device=device)
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    locked = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    np.copyto(locked.numpy(), array)
    return locked.to(device, non_blocking=True)


def constant_to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array as `to_device`; in inference mode too, the result can take part in a gradient later."""
    with torch.inference_mode(False):
        return to_device(array, device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device as `to_device`; a tensor that is there is returned itself."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def host_peak() -> float:
    """Return the peak resident memory of this process, in bytes."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_memory(devices: Iterable[torch.device]) -> float:
    """Return the peak bytes of this process's tensors on one GPU; without a GPU, `host_peak`."""
    gpus = [device for device in devices if device.type == "cuda"]
    return float(max(map(torch.cuda.max_memory_allocated, gpus))) if gpus else host_peak()


# --- matrix products ---

# cuBLAS of CUDA 13.0 is wrong on an H100, in a process that may use 84 to 104 of its 132 multiprocessors
# (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE 65 to 80): products of 8192 rows by 1152 x 1152 and 4304 x 1152 bfloat16
# numbers, layers of the policy's vision tower, are off by as much as the numbers are large, and gradients are
# soon not finite (docs/measurements/run_speed.md).
SHARE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""Environment variable: share of the multiprocessors that a client of MPS may use."""
SIZES: Final = ((8192, 1152, 1152), (8192, 4304, 1152), (8192, 1024, 4096), (2048, 4096, 4096))
"""Rows, width and columns: linear layers of the vision towers and of the language model."""
TOLERANCE: Final = 0.03  # Largest error / largest number; rounding makes 0.002 to 0.004
Multiply = Callable[[Tensor, Tensor], Tensor]


def check_matrix_products(
    device: torch.device, multiply: Multiply = torch.matmul, sizes: Sequence[tuple[int, int, int]] = SIZES
) -> float:
    """Return the largest error of bfloat16 products of the policies' sizes, or raise ConfigError."""
    errors = [0.0]
    for rows, width, columns in sizes:
        generator = torch.Generator(device).manual_seed(0)  # Leaves the global one alone.
        a_MK, b_NK = (
            torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            for shape in ((rows, width), (columns, width))
        )
        exact_MN = a_MK.float() @ b_NK.float().T
        error = float((multiply(a_MK, b_NK.T).float() - exact_MN).abs().max() / exact_MN.abs().max())
        if not error < TOLERANCE:  # NaN is not.
            raise ConfigError(_wrong_product(device, (rows, width, columns), error))
        errors.append(error)
    return max(errors)


def _wrong_product(device: torch.device, size: tuple[int, int, int], error: float) -> str:
    rows, width, columns = size
    cuda = device.type == "cuda"
    name = f"{device} ({torch.cuda.get_device_name(device)})" if cuda else str(device)
    advice = (
        "Nothing that it computes can be trusted. Leave it out (CUDA_VISIBLE_DEVICES), or try another "
        "build of PyTorch."
    )
    if share := os.environ.get(SHARE, ""):
        advice = (
            f"{SHARE} is {share}, and cuBLAS is known to do that where a process may use only some of the "
            "multiprocessors. Unset it: MPS shares a GPU without it."
        )
    return (
        f"{name} multiplies matrices wrongly: the product of {rows} x {width} and {width} x {columns} "
        f"bfloat16 numbers is off by {error:.3g} of its largest number, where rounding makes 0.004. {advice}"
    )
