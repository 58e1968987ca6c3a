"""Returns of episodes in, advantages out. Pure functions of tensors.

Dimension letters used in this file:
    B  episodes in the batch     G  episodes per group     N  groups, N = B / G
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_relative_advantages(
    returns: Tensor, group_size: int, *, normalize_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Score each episode against its siblings: ``A = (R - mean(group)) / (std(group) + eps)``.

    Siblings share a start state, so the group's mean is a baseline that needs no critic. The standard
    deviation is the unbiased one (divided by G - 1), as in ``torch.std``. Source: GRPO, arXiv 2402.03300,
    section 4.1.2; without the division: Dr. GRPO, arXiv 2503.20783.

    Args:
        returns: ``[B]`` float32, sum of rewards of each episode. Siblings are adjacent.
        group_size: ``G``, at least 2; must divide ``B``.
        normalize_by_std: Divide by the group's standard deviation.
        eps: Keeps the division finite. Same unit as the returns.

    Returns:
        ``[B]`` float32, detached, in the order of `returns`. A group whose episodes all scored the same
        carries no signal and gets exactly zero.

    Raises:
        ValueError: `returns` is not a whole number of groups.

    Example:
        >>> group_relative_advantages(torch.tensor([1.0, 0.0, 0.5, 0.5]), group_size=2)
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    if returns.ndim != 1 or group_size < 2 or returns.shape[0] % group_size:
        raise ValueError(
            f"returns must be [B] with B a multiple of group_size={group_size} >= 2, got shape "
            f"{tuple(returns.shape)}"
        )
    returns_NG = returns.detach().unflatten(0, (-1, group_size))
    advantages_NG = returns_NG - returns_NG.mean(dim=1, keepdim=True)
    if normalize_by_std:
        advantages_NG = advantages_NG / (returns_NG.std(dim=1, keepdim=True) + eps)
    # The mean of equal numbers can be off by a rounding error, which the tiny divisor would blow up.
    constant_N1 = returns_NG.amax(dim=1, keepdim=True) == returns_NG.amin(dim=1, keepdim=True)
    return torch.where(constant_N1, 0.0, advantages_NG).flatten()
