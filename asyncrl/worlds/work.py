"""Say what a world computes for a decision, counted on tensors without numbers (torch's device meta)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from asyncrl.devices.float8 import fits


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One network of a decision, or of the opening of a slot."""

    name: str
    """What `asyncrl doctor` knows the network's speed by, like 'wan decode'."""
    flops: float
    """Of one call for one slot: matrix products, convolutions and attention, two per multiply-add."""
    float8: float = 0.0
    """Of `flops`, those in linear layers that multiply 8-bit numbers."""
    calls: int = 1
    """Per decision."""


@dataclass(frozen=True, kw_only=True)
class WorldWork:
    """What one slot costs."""

    decision: tuple[Stage, ...] = ()
    """In the order in which they run; empty: not known."""
    opening: tuple[Stage, ...] = ()
    """Once for each episode. Siblings that begin together are opened once, so it is an upper bound. Never
    compiled, as the numbers of slots that begin vary."""


@torch.no_grad()
def count_flops(call: Callable[[], object]) -> float:
    """Count the FLOPs of a call; on meta tensors nothing is computed."""
    with FlopCounterMode(display=False) as counter:
        call()
    return float(counter.get_total_flops())


@torch.no_grad()
def float8_flops(call: Callable[[], object], rounded: Iterable[nn.Module]) -> float:
    """Count those FLOPs of a call that `use_float8` makes products of 8-bit numbers.

    Args:
        call: On meta tensors nothing is computed.
        rounded: The modules of which `use_float8` replaces layers, not replaced yet; none: 0.
    """
    found = 0

    def add(layer: nn.Linear, _: object, y: Tensor) -> None:
        nonlocal found
        found += 2 * layer.in_features * y.numel()

    layers = [layer for module in rounded for layer in module.modules() if fits(layer)]
    if not layers:
        return 0.0
    hooks = [layer.register_forward_hook(add) for layer in layers]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return float(found)
