"""Let a Wan transformer learn from actions of any unit: scaled while it is fitted, raw when it imagines.

The published network takes actions as they are, for they lie between -1 and 1. Pixels, degrees or radians
do not: a network with fresh weights would learn little from them. So it is fitted on actions that are scaled
by what was recorded, and the scale is then worked into the two layers that actions enter through, which is
exact.

Letters: A numbers per action, D inputs of a layer (A, or A of each of the four frames of a latent).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from asyncrl.fitting.fresh_models import executed
from asyncrl.fitting.recordings import Recordings
from asyncrl.records import ACTION_DIM
from asyncrl.worlds.wan.transformer import ActionWanTransformer

LEAST_RANGE: Final = 1e-3
"""Width, in its own unit, that a number has at least which (nearly) never changed: never divide by zero."""


@dataclass(frozen=True, kw_only=True)
class ActionScale:
    """What makes an action a number around [-1, 1]: ``gain * a + offset``."""

    gain: NDArray[np.float64]
    """``[A]``."""
    offset: NDArray[np.float64]
    """``[A]``."""

    def apply(self, actions: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale actions ``[..., A]``."""
        return (self.gain * actions + self.offset).astype(np.float32)


def measured_scale(recordings: Recordings) -> ActionScale | None:
    """Measure what recorded actions are scaled by; None: they are as the published network takes them.

    Those are 7 numbers whose first and 99th percentiles lie between -1 and 1.
    """
    actions = executed(recordings)
    low, high = np.quantile(actions.astype(np.float64), [0.01, 0.99], axis=0)
    if actions.shape[1] == ACTION_DIM and low.min() >= -1.0 and high.max() <= 1.0:
        return None
    gain = 2 / np.maximum(high - low, LEAST_RANGE)
    return ActionScale(gain=gain, offset=-gain * (low + high) / 2)


@torch.no_grad()
def take_raw(transformer: ActionWanTransformer, scale: ActionScale) -> None:
    """Make a network that takes scaled actions take raw ones instead, with the same outputs."""
    for layer, gain, offset in _entrances(transformer, scale):
        layer.bias.add_((layer.weight.double() @ offset).to(layer.bias.dtype))
        layer.weight.mul_(gain.to(layer.weight.dtype))


@torch.no_grad()
def take_scaled(transformer: ActionWanTransformer, scale: ActionScale) -> None:
    """Do the opposite of `take_raw`."""
    for layer, gain, offset in _entrances(transformer, scale):
        layer.weight.div_(gain.to(layer.weight.dtype))
        layer.bias.sub_((layer.weight.double() @ offset).to(layer.bias.dtype))


def entrances(transformer: ActionWanTransformer) -> tuple[nn.Linear, nn.Linear]:
    """Return the two layers that actions enter through: of each action, and of the four of a latent."""
    first, second = transformer.action_mlp1[0], transformer.action_mlp2[0]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    return first, second


def _entrances(
    transformer: ActionWanTransformer, scale: ActionScale
) -> Iterator[tuple[nn.Linear, torch.Tensor, torch.Tensor]]:
    """Yield the layers with what belongs to each of their inputs, ``[D]`` float64."""
    for layer in entrances(transformer):
        times = layer.in_features // len(scale.gain)
        device = layer.weight.device
        gain, offset = (
            torch.from_numpy(np.tile(part, times)).to(device) for part in (scale.gain, scale.offset)
        )
        yield layer, gain, offset
