"""Actions as tokens: values in [-1, 1] in, bins 0..255 out, and back to the environment's units.

One convention everywhere (records, wire, replay, losses): a token is the *bin* ``j``, 0..255, counted from
the first of the 256 action rows of the vocabulary: id = first_action_id + j (31744 + j for Llama 2).
OpenVLA counts bins from the end of the vocabulary, so the order is reversed: j = 255 is -1, j = 0 is +1.
256 edges make 255 cells, and j = 0 (only ever the value +1 exactly) decodes like j = 1.

Dimension letters:
    A  action dimensions
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BINS: Final = 256
"""Action tokens in the vocabulary."""

_EDGES = np.linspace(-1.0, 1.0, BINS)
_CENTERS = (_EDGES[:-1] + _EDGES[1:]) / 2
_DECODED = _CENTERS[np.minimum(BINS - 1 - np.arange(BINS), BINS - 2)].astype(np.float32)
_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class NormStats:
    """Range of each action dimension in the data a policy was fine-tuned on."""

    q01: tuple[float, ...]
    """``[A]`` first percentile, in the environment's units."""
    q99: tuple[float, ...]
    """``[A]`` 99th percentile, in the environment's units."""
    mask: tuple[bool, ...]
    """``[A]`` False: the dimension is not scaled (the gripper)."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> NormStats:
        """Read one `action` entry of a `dataset_statistics.json`; without a mask, everything is scaled."""
        q01, q99 = fields["q01"], fields["q99"]
        mask = fields.get("mask", [True] * len(q01))
        return cls(q01=tuple(map(float, q01)), q99=tuple(map(float, q99)), mask=tuple(map(bool, mask)))


def encode(actions: NDArray[np.floating]) -> NDArray[np.int32]:
    """Bins of normalised actions; values outside [-1, 1] are clipped.

    Args:
        actions: Any shape, normalised to [-1, 1].

    Returns:
        int32 of the same shape, 0..255.
    """
    return (BINS - np.digitize(np.clip(actions, -1.0, 1.0), _EDGES)).astype(np.int32)


def decode(tokens: Tensor) -> Tensor:
    """Centers of the cells of `tokens`: the inverse of `encode` up to half a cell (1/255).

    Args:
        tokens: Any shape and integer type, 0..255.

    Returns:
        float32 of the same shape, in [-0.99608, 0.99608], on the device of `tokens`.
    """
    return torch.tensor(_DECODED, device=tokens.device)[tokens.long()]


def unnormalise(actions: Tensor, stats: NormStats) -> Tensor:
    """Scale [-1, 1] back to the range of the data: ``(a + 1) / 2 * (q99 - q01 + 1e-8) + q01`` where masked.

    Args:
        actions: ``[..., A]`` float32 in [-1, 1].
        stats: Percentiles (OpenVLA calls this BOUNDS_Q99).

    Returns:
        ``[..., A]`` float32 in the environment's units.
    """
    low = actions.new_tensor(stats.q01)
    width = actions.new_tensor(stats.q99) - low + _EPSILON
    mask = torch.tensor(stats.mask, device=actions.device)
    return torch.where(mask, 0.5 * (actions + 1) * width + low, actions)
