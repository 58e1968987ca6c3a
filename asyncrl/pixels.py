"""Pictures as the models see them: bytes 0..255 against floats in [-1, 1]."""

from __future__ import annotations

import torch
from torch import Tensor


def to_signed(pictures: Tensor) -> Tensor:
    """Map uint8 to float32 in [-1, 1], any shape."""
    return pictures.float() / 127.5 - 1


def to_uint8(pictures: Tensor) -> Tensor:
    """Map floats in [-1, 1] (clamped) to the nearest uint8, any shape."""
    return ((pictures.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
