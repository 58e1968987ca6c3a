"""Adds up the numbers of an action into units: what has one probability ratio of its own.

    token      ``[D, C, A]``   every number of an action
    action     ``[D, C, 1]``   the A numbers of a step: its log-prob is their sum
    decision   ``[D, 1, 1]``   the C * A numbers of a decision

What is masked is left out of every sum. The log-probs are the same on every level, the ratios are not: a
decision's is the product of up to C * A of them, so the same clip cuts far more of them.

Dimension letters used in this file:
    D  decisions     C  steps per decision     A  numbers per step     U, V  units of a decision
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.config.algorithm import CorrectionLevel, Level

_SUMMED: dict[str, tuple[int, ...]] = {"token": (), "action": (2,), "decision": (1, 2)}


def summed(values_DCA: Tensor, mask_DCA: Tensor, level: Level, *, mean: bool = False) -> Tensor:
    """Add up valid numbers: ``[D, C, A]`` to ``[D, U, V]``.

    Args:
        values_DCA: ``[D, C, A]``, any float type. What is masked may be NaN.
        mask_DCA: ``[D, C, A]`` bool.

    Example:
        >>> ones = torch.ones(2, 8, 7)
        >>> summed(ones, ones.bool(), "action").shape, summed(ones, ones.bool(), "decision")[0, 0, 0]
        (torch.Size([2, 8, 1]), tensor(56.))
    """
    values_DCA = torch.where(mask_DCA, values_DCA, 0.0)
    if level == "token":
        return values_DCA
    total = values_DCA.sum(dim=_SUMMED[level], keepdim=True)
    return total / mask_DCA.sum(dim=_SUMMED[level], keepdim=True).clamp(min=1) if mean else total


def valid_units(mask_DCA: Tensor, level: Level) -> Tensor:
    """Say which units have a valid number: ``[D, C, A]`` bool to ``[D, U, V]`` bool."""
    if level == "token":
        return mask_DCA
    actions_DC1 = mask_DCA.any(dim=2, keepdim=True)
    return actions_DC1 if level == "action" else actions_DC1.any(dim=1, keepdim=True)


def units_per_decision(level: Level, steps: int, dim: int) -> int:
    """Count the units of a decision of ``C`` steps and ``A`` numbers per step."""
    return {"token": steps * dim, "action": steps, "decision": 1}[level]


def taught(advantages: Tensor) -> Tensor:
    """Say which decisions are taught something: those with an advantage that is not 0.

    Args:
        advantages: ``[D, 1, 1]`` or ``[D, C, 1]``, any float type.

    Returns:
        ``[D]`` bool.
    """
    return (advantages != 0).flatten(1).any(dim=1)


def sum_per_episode(values_D: Tensor, episode: Tensor) -> Tensor:
    """Add up over the decisions of each episode and hand every decision its episode's sum.

    Args:
        values_D: ``[D]``, any float type.
        episode: ``[D]`` int64, index of each decision's episode.

    Returns:
        ``[D]`` of the same type.
    """
    total = values_D.new_zeros(int(episode.max()) + 1 if len(episode) else 0)
    return total.index_add_(0, episode, values_D)[episode]


def reduce_to_level(
    values_DCA: Tensor, mask_DCA: Tensor, level: CorrectionLevel, episode: Tensor, *, mean: bool = False
) -> Tensor:
    """Do the same as `summed`, with a fourth level: ``episode`` adds up a whole episode, ``[D, 1, 1]``.

    Args:
        values_DCA: ``[D, C, A]``, any float type.
        mask_DCA: ``[D, C, A]`` bool.
        episode: ``[D]`` int64, index of each decision's episode; all of its decisions must be there.
    """
    if level != "episode":
        return summed(values_DCA, mask_DCA, level, mean=mean)
    total = sum_per_episode(torch.where(mask_DCA, values_DCA, 0.0).flatten(1).sum(dim=1), episode)
    if mean:
        total = total / sum_per_episode(mask_DCA.flatten(1).sum(dim=1).to(total.dtype), episode).clamp(min=1)
    return total[:, None, None]
