"""What the tests of EVAC's world share: published names, and small networks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

DATA = Path(__file__).parents[1] / "data"


def published_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published network, from tests/data, in the order of its file."""
    rows = (row.split() for row in (DATA / f"{name}.txt").read_text().splitlines())
    return {key: tuple(int(size) for size in shape.split("x")) for key, shape in rows}


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def randomised(module: nn.Module, seed: int, spread: float = 0.3) -> nn.Module:
    """Give every parameter random values, so that none is zero or one by default."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            fan = max(parameter[0].numel(), 1) if parameter.ndim > 1 else 1
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator) / fan**0.5)
            if parameter.ndim == 1:
                parameter.add_(0.5)
    return module.eval()
