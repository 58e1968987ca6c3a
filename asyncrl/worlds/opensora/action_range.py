"""Scale actions to the range that OpenSora's world was trained on, as ``dataset_statistics.json`` says it.

The 1st and the 99th percentile of each number become -1 and 1; what lies outside goes further, for nothing is
clipped. The gripper is scaled like the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from asyncrl.devices.tensors import constant_to_device
from asyncrl.errors import CheckpointError
from asyncrl.records import ACTION_DIM
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.bounded_json import shortened

STATISTICS: Final = "dataset_statistics.json"
_PUBLISHED: Final = "Copy the one that was published beside the weights."


@dataclass(frozen=True, kw_only=True)
class ActionRange:
    """What becomes -1 and 1 of each number of an action."""

    low: tuple[float, ...]
    """``A`` numbers in the policy's units: ``q01``."""
    high: tuple[float, ...]
    """``A`` numbers, each above that of `low`: ``q99``."""

    @classmethod
    def symmetric(cls) -> ActionRange:
        """From -1 to 1: actions stay as they are."""
        return cls(low=(-1.0,) * ACTION_DIM, high=(1.0,) * ACTION_DIM)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `low` and `high` ``[A]`` float32 on `device`, to be kept."""
        low, high = (constant_to_device(np.array(ends, np.float32), device) for ends in (self.low, self.high))
        return low, high

    def write(self, folder: Path) -> None:
        """Write ``dataset_statistics.json`` into an existing folder."""
        write_json(folder / STATISTICS, {"action": {"q01": list(self.low), "q99": list(self.high)}})


def normalise(actions_BCA: Tensor, low_A: Tensor, high_A: Tensor) -> Tensor:
    """Return ``2 (a - low) / (high - low) - 1``.

    Args:
        actions_BCA: ``[B, C, A]`` float32 in the policy's units.
        low_A: ``[A]`` float32.
        high_A: ``[A]`` float32, greater.

    Returns:
        ``[B, C, A]`` float32; between the percentiles in [-1, 1].

    Example:
        >>> normalise(torch.tensor([0.5, 4.0]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 2.0])).tolist()
        [0.0, 3.0]
    """
    return 2 * (actions_BCA - low_A) / (high_A - low_A) - 1


def read_action_range(folder: Path, numbers: int = ACTION_DIM) -> ActionRange:
    """Read ``dataset_statistics.json``: ``action`` at its top, or in its only data set.

    Args:
        folder: Of the world.
        numbers: Of an action.

    Raises:
        CheckpointError: The file is missing, has several data sets (they are named), or no percentiles of
            that many numbers each, the 99th above the 1st.
    """
    path = folder / STATISTICS
    content = read_json(path, _PUBLISHED)
    action = _action_entry(path, content)
    ends = {key: _percentile(path, action, key, numbers) for key in ("q01", "q99")}
    for number, (low, high) in enumerate(zip(ends["q01"], ends["q99"], strict=True)):
        if not low < high:
            raise CheckpointError(
                f"{path}: number {number} of an action goes from {low} (q01) to {high} (q99), which is no "
                f"range that it could be scaled to. {_PUBLISHED}"
            )
    return ActionRange(low=ends["q01"], high=ends["q99"])


def _action_entry(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(content.get("action"), dict):
        return content["action"]
    data_sets = {
        name: entry["action"]
        for name, entry in content.items()
        if isinstance(entry, dict) and isinstance(entry.get("action"), dict)
    }
    if len(data_sets) == 1:
        return next(iter(data_sets.values()))
    if not data_sets:
        raise CheckpointError(
            f"{path} has no action with q01 and q99, neither at its top nor in a data set. {_PUBLISHED}"
        )
    raise CheckpointError(
        f"{path} holds {len(data_sets)} data sets ({', '.join(sorted(data_sets))}), and nothing says which "
        "of them the world was trained on. Leave in the file the one that it was."
    )


def _percentile(path: Path, action: Mapping[str, Any], key: str, numbers: int) -> tuple[float, ...]:
    found = action.get(key)
    if (
        not isinstance(found, list)
        or len(found) != numbers
        or not all(type(x) in (int, float) and math.isfinite(x) for x in found)
    ):
        raise CheckpointError(
            f"{path}: {key} of action is {shortened(found)}, expected {numbers} numbers. {_PUBLISHED}"
        )
    return tuple(float(x) for x in found)
