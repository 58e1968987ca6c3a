"""Tokens in, units out: what has one probability ratio of its own. Pure functions of tensors.

token   ``[D, 8, 7]``   every token
action  ``[D, 8, 1]``   the 7 tokens of an action: its log-prob is their sum
chunk   ``[D, 1, 1]``   the 56 tokens of a decision

Masked tokens are left out of every sum. The log-probs are the same on every level, the ratios are not: a
chunk's is the product of up to 56 of them, so the same clip cuts far more of them.

Dimension letters used in this file:
    D  decisions     C  steps per decision (8)     A  action dimensions (7)     U, V  units of a decision
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.config.algorithm import CorrectionLevel, Level

_SUMMED: dict[str, tuple[int, ...]] = {"token": (), "action": (2,), "chunk": (1, 2)}


def summed(values_DCA: Tensor, mask_DCA: Tensor, level: Level, *, mean: bool = False) -> Tensor:
    """Add up valid tokens: ``[D, C, A]`` to ``[D, U, V]``.

    Args:
        values_DCA: Per token, any float type. What is masked may be NaN.
        mask_DCA: bool.
        level: What a unit is.
        mean: Divide by the number of valid tokens (log-probs: the geometric mean).

    Example:
        >>> ones = torch.ones(2, 8, 7)
        >>> summed(ones, ones.bool(), "action").shape, summed(ones, ones.bool(), "chunk")[0, 0, 0]
        (torch.Size([2, 8, 1]), tensor(56.))
    """
    values_DCA = torch.where(mask_DCA, values_DCA, 0.0)
    if level == "token":
        return values_DCA
    total = values_DCA.sum(dim=_SUMMED[level], keepdim=True)
    return total / mask_DCA.sum(dim=_SUMMED[level], keepdim=True).clamp(min=1) if mean else total


def valid_units(mask_DCA: Tensor, level: Level) -> Tensor:
    """``[D, U, V]`` bool: which units have a valid token."""
    if level == "token":
        return mask_DCA
    actions_DC1 = mask_DCA.any(dim=2, keepdim=True)
    return actions_DC1 if level == "action" else actions_DC1.any(dim=1, keepdim=True)


def sum_per_episode(values_D: Tensor, episode: Tensor) -> Tensor:
    """Add up over the decisions of each episode and hand every decision its episode's sum: ``[D]``."""
    total = values_D.new_zeros(int(episode.max()) + 1 if len(episode) else 0)
    return total.index_add_(0, episode, values_D)[episode]


def reduce_to_level(
    values_DCA: Tensor, mask_DCA: Tensor, level: CorrectionLevel, episode: Tensor, *, mean: bool = False
) -> Tensor:
    """Same as `summed`, with a fourth level: ``episode`` adds up all tokens of an episode, ``[D, 1, 1]``.

    Args:
        values_DCA: Per token.
        mask_DCA: bool.
        level: What a unit is.
        episode: ``[D]`` int64, index of each decision's episode; all of its decisions must be there.
        mean: Divide by the number of valid tokens.
    """
    if level != "episode":
        return summed(values_DCA, mask_DCA, level, mean=mean)
    total = sum_per_episode(torch.where(mask_DCA, values_DCA, 0.0).flatten(1).sum(dim=1), episode)
    if mean:
        total = total / sum_per_episode(mask_DCA.flatten(1).sum(dim=1).to(total.dtype), episode).clamp(min=1)
    return total[:, None, None]
