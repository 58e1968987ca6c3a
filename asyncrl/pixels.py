"""Pictures as the models see them: bytes 0..255 against floats in [-1, 1]; and how they get to a device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_signed(pictures: Tensor) -> Tensor:
    """Map uint8 to float32 in [-1, 1], any shape."""
    return pictures.float() / 127.5 - 1


def to_uint8(pictures: Tensor) -> Tensor:
    """Map floats in [-1, 1] (clamped) to the nearest uint8, any shape."""
    return ((pictures.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def uploaded(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device; to a GPU through pinned memory, without waiting for the copy."""
    tensor = torch.tensor(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
