"""Rectified flow of OpenSora's worlds: noise levels, sampling, the training loss, and the range of actions.

Data and noise mix as ``x(t) = (1 - t / 1000) clean + (t / 1000) noise`` (arXiv 2209.03003). The network
predicts ``clean - noise``, the opposite sign of Wan's. The published shift of the times is the identity at
256 pixels. diffusers' flow schedulers have float32 tables, so that a step of 0.1 becomes 0.10000002 and
frames differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.devices.tensors import constant_to_device
from asyncrl.errors import CheckpointError
from asyncrl.records import ACTION_DIM
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.untrusted import shortened
from asyncrl.worlds.opensora.stdit3 import CONDITION, CONDITION_TIME

NOISE_TIME: Final = 1000.0
"""Time of pure noise."""
STEPS: Final = 10
"""Network calls per decision, as published."""
STATISTICS: Final = "dataset_statistics.json"
_PUBLISHED: Final = "Copy the one that was published beside the weights."


@lru_cache(maxsize=32)
def sampling_times(steps: int) -> tuple[float, ...]:
    """Return the times of `steps` network calls, from pure noise downwards, and the final 0.

    Example:
        >>> sampling_times(4)
        (1000.0, 750.0, 500.0, 250.0, 0.0)
    """
    if steps < 1:
        raise ValueError(f"a schedule needs at least one step, got {steps}")
    return tuple(NOISE_TIME * (steps - k) / steps for k in range(steps + 1))


def mix(clean: Tensor, noise: Tensor, times_B: Tensor) -> Tensor:
    """Mix ``[B, ...]`` data and noise at times ``[B]``, 0 (data) to 1000 (noise)."""
    share = (times_B / NOISE_TIME).reshape(-1, *[1] * (clean.ndim - 1))
    return (1 - share) * clean + share * noise


def sample(velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, *, steps: int) -> Tensor:
    """Follow the velocity from noise ``[B, ...]`` to data with Euler steps of equal length; float32."""
    x = noise
    for time, following in pairwise(sampling_times(steps)):
        times_B = torch.full(x.shape[:1], time, device=x.device)
        x = x + velocity(x, times_B).float() * ((time - following) / NOISE_TIME)
    return x


class WindowLoss(NamedTuple):
    """Error of the predicted velocity."""

    loss: Tensor
    """``[]`` float32, mean of `per_sample`, with gradient."""
    per_sample: Tensor
    """``[B]`` float32, mean squared error over the new frames, detached."""


def training_times(count: int, generator: torch.Generator) -> Tensor:
    """Draw ``[count]`` float32 times in 0..1000 whose logit is standard normal, on the CPU."""
    return NOISE_TIME * torch.randn(count, generator=generator).sigmoid()


def window_loss(
    transformer: Callable[[Tensor, Tensor, Tensor], Tensor],
    latents_BZFhw: Tensor,
    actions_BCA: Tensor,
    generator: torch.Generator,
    *,
    condition_noise: bool = True,
) -> WindowLoss:
    """Compute the squared error of ``clean - noise`` of the new frames, given the four before; all clean."""
    clean = latents_BZFhw.float()
    device = clean.device
    times_B = training_times(clean.shape[0], generator).to(device)
    noise = torch.randn(clean.shape, generator=generator).to(device)
    given, new = clean[:, :, :CONDITION], clean[:, :, CONDITION:]
    if condition_noise:
        given = mix(given, noise[:, :, :CONDITION], torch.full_like(times_B, CONDITION_TIME))
    window = torch.cat([given, mix(new, noise[:, :, CONDITION:], times_B)], dim=2)
    velocity = transformer(window, times_B, actions_BCA).float()
    error_B = (velocity - (new - noise[:, :, CONDITION:])).square().flatten(1).mean(1)
    return WindowLoss(loss=error_B.mean(), per_sample=error_B.detach())


@dataclass(frozen=True, kw_only=True)
class ActionRange:
    """The numbers of an action that become -1 and 1: 1st and 99th percentile; nothing is clipped."""

    low: tuple[float, ...]
    """``A`` numbers in the policy's units: ``q01``."""
    high: tuple[float, ...]
    """``A`` numbers, each above that of `low`: ``q99``."""

    @classmethod
    def symmetric(cls) -> ActionRange:
        """Return -1 to 1: actions stay as they are."""
        return cls(low=(-1.0,) * ACTION_DIM, high=(1.0,) * ACTION_DIM)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `low` and `high` ``[A]`` float32 on `device`."""
        low, high = (constant_to_device(np.array(ends, np.float32), device) for ends in (self.low, self.high))
        return low, high

    def write(self, folder: Path) -> None:
        """Write ``dataset_statistics.json`` into an existing folder."""
        write_json(folder / STATISTICS, {"action": {"q01": list(self.low), "q99": list(self.high)}})


def normalise(actions_BCA: Tensor, low_A: Tensor, high_A: Tensor) -> Tensor:
    """Return ``2 (a - low) / (high - low) - 1`` of actions in the policy's units; float32.

    Example:
        >>> normalise(torch.tensor([0.5, 4.0]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 2.0])).tolist()
        [0.0, 3.0]
    """
    return 2 * (actions_BCA - low_A) / (high_A - low_A) - 1


def read_action_range(folder: Path, numbers: int = ACTION_DIM) -> ActionRange:
    """Read ``dataset_statistics.json``: ``action`` at its top, or in its only data set."""
    path = folder / STATISTICS
    action = _action_entry(path, read_json(path, _PUBLISHED))
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
