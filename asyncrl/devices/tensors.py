"""Copy arrays to a device without ever waiting for it, and turn pictures into numbers and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_signed(pictures: Tensor) -> Tensor:
    """Map ``[...]`` uint8 to ``[...]`` float32 in [-1, 1]."""
    return pictures.float() / 127.5 - 1


def to_uint8(pictures: Tensor) -> Tensor:
    """Map ``[...]`` floats in [-1, 1] (clamped) to the nearest ``[...]`` uint8."""
    return ((pictures.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device.

    On CUDA through page-locked memory: the copy is queued like a kernel and the host goes on. A copy from
    ordinary memory would wait until all kernels before it are done.

    Args:
        array: ``[...]`` of any numeric dtype; may be read-only.
        device: Where to.

    Returns:
        ``[...]`` of the same dtype; shares no memory with `array`.
    """
    if device.type != "cuda":
        return torch.tensor(array, device=device)
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    locked = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    np.copyto(locked.numpy(), array)
    return locked.to(device, non_blocking=True)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device, through page-locked memory as `to_device` does.

    Args:
        tensor: ``[...]`` of any dtype.
        device: Where to.

    Returns:
        ``[...]`` of the same dtype; `tensor` itself where it is there already.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def constant_to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array that is kept: a tensor made in inference mode could not take part in a gradient later.

    ``[...]`` of any numeric dtype, as `to_device`.
    """
    with torch.inference_mode(False):
        return to_device(array, device)
