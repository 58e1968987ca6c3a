"""Say what a world computes for a decision, counted on tensors without numbers (torch's device meta)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode


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
    float32: bool = False
    """Whether all products but those of 8-bit numbers are of float32 ones; else they are of bfloat16 ones."""


@torch.no_grad()
def count_flops(call: Callable[[], object]) -> float:
    """Count the FLOPs of a call; on meta tensors nothing is computed."""
    with FlopCounterMode(display=False) as counter:
        call()
    return float(counter.get_total_flops())
