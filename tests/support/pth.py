"""State dicts of `torch.save`, as others publish them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def write_pth(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors without the storages that they are views of."""
    torch.save({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, path)
