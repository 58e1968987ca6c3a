"""Returns and rewards of episodes in, advantages and value targets out. Pure functions of tensors.

An episode is one row, so nothing can leak from the next one. After its last valid place a row is padding.

Dimension letters used in this file:
    B  episodes in the batch     G  episodes per group     N  groups, N = B / G
    T  places of the longest episode: decisions (chunk level) or steps (action level)
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Baseline = Literal["mean", "leave_one_out"]
Spread = Literal["group_std", "batch_std", "none"]


class Estimates(NamedTuple):
    """What a critic's rollout teaches. Both are detached, and 0 where the mask is False."""

    advantages: Tensor
    """``[B, T]`` float32, for the policy."""
    targets: Tensor
    """``[B, T]`` float32, what the critic should have said."""


def group_relative_advantages(
    returns: Tensor,
    group_size: int,
    *,
    baseline: Baseline = "mean",
    spread: Spread = "group_std",
    batch_std: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Score each episode against its siblings: ``A = (R - baseline) / (spread + eps)``.

    Siblings share a start state, so they are a baseline that needs no critic. Sources: mean and group's
    standard deviation, GRPO, arXiv 2402.03300, section 4.1.2; no division, Dr. GRPO, arXiv 2503.20783;
    leave-one-out, ``(R - mean) G / (G - 1)``, RLOO, arXiv 2402.14740; the batch's deviation, REINFORCE++,
    arXiv 2501.03262. Standard deviations are the unbiased ones (divided by n - 1), as in ``torch.std``.

    Args:
        returns: ``[B]`` float32, sum of rewards of each episode. Siblings are adjacent.
        group_size: ``G``, at least 2; must divide ``B``.
        baseline: The mean of all siblings, or of the others.
        spread: What the difference is divided by.
        batch_std: [] standard deviation of all returns of the batch when these are only a part of it.
        eps: Keeps the division finite. Same unit as the returns.

    Returns:
        ``[B]`` float32, detached, in the order of `returns`. A group whose episodes all scored the same
        carries no signal and gets exactly zero.

    Raises:
        ValueError: `returns` is not a whole number of groups.

    Example:
        >>> returns = torch.tensor([1.0, 0.0, 0.5, 0.5])
        >>> group_relative_advantages(returns, group_size=2)
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
        >>> group_relative_advantages(returns, group_size=2, baseline="leave_one_out", spread="none")
        tensor([ 1., -1.,  0.,  0.])
    """
    if returns.ndim != 1 or group_size < 2 or returns.shape[0] % group_size:
        raise ValueError(
            f"returns must be [B] with B a multiple of group_size={group_size} >= 2, got shape "
            f"{tuple(returns.shape)}"
        )
    returns_NG = returns.detach().unflatten(0, (-1, group_size))
    advantages_NG = returns_NG - returns_NG.mean(dim=1, keepdim=True)
    if baseline == "leave_one_out":
        advantages_NG = advantages_NG * group_size / (group_size - 1)
    if spread == "group_std":
        advantages_NG = advantages_NG / (returns_NG.std(dim=1, keepdim=True) + eps)
    elif spread == "batch_std":
        advantages_NG = advantages_NG / ((returns_NG.std() if batch_std is None else batch_std) + eps)
    # The mean of equal numbers can be off by a rounding error, which the tiny divisor would blow up.
    constant_N1 = returns_NG.amax(dim=1, keepdim=True) == returns_NG.amin(dim=1, keepdim=True)
    return torch.where(constant_N1, 0.0, advantages_NG).flatten()


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    final_values: Tensor,
    mask: Tensor,
    terminated: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Estimates:
    """Generalised advantage estimation (GAE), arXiv 1506.02438, equation 16.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lambda A_{t+1}``; the value after the
    last place is 0 where the task ended (termination) and `final_values` where time ran out (truncation):
    an episode that was cut could have gone on from its final observation.

    Args:
        rewards: ``[B, T]`` float32.
        values: ``[B, T]`` float32, critic's value of the observation before each place.
        final_values: ``[B]`` float32, value of the observation after the last one; ignored after termination.
        mask: ``[B, T]`` bool, True from the first place to the last; every row has one.
        terminated: ``[B]`` bool, True: the task ended (success). False: time ran out.
        gamma: Discount per place, in [0, 1].
        lam: 0: one-step temporal differences; 1: Monte Carlo returns minus values.

    Returns:
        Advantages, and targets ``A + V``.

    Example:
        >>> one = torch.ones(1, 2)
        >>> out = generalized_advantages(
        ...     torch.tensor([[0.0, 1.0]]), one * 0.5, torch.tensor([9.0]), one.bool(),
        ...     torch.tensor([True]), gamma=0.5, lam=1.0
        ... )
        >>> out.advantages, out.targets
        (tensor([[0.0000, 0.5000]]), tensor([[0.5000, 1.0000]]))
    """
    ones = torch.ones_like(values)
    return _backwards(
        rewards, values, final_values, mask, terminated, rho=ones, trace=ones, gamma=gamma, lam=lam
    )


def vtrace(
    rewards: Tensor,
    values: Tensor,
    final_values: Tensor,
    mask: Tensor,
    terminated: Tensor,
    log_ratios: Tensor,
    *,
    gamma: float,
    lam: float = 1.0,
    rho_cap: float = 1.0,
    trace_cap: float = 1.0,
    bootstrap: Literal["target", "mixture"] = "mixture",
) -> Estimates:
    """V-trace: value targets and policy-gradient advantages from samples of another policy.

    ``delta_t = rho_t (r_t + gamma V_{t+1} - V_t)`` with ``rho_t = min(rho_cap, pi / mu)``,
    ``v_t = V_t + delta_t + gamma lambda c_t (v_{t+1} - V_{t+1})`` with ``c_t = min(trace_cap, pi / mu)``, and
    ``A_t = rho_t (r_t + gamma q_{t+1} - V_t)``. Source: IMPALA, arXiv 1802.01561, equation 1 and section 4.2.

    With lambda below 1 two conventions for ``q`` are in use: ``v_{t+1}`` (`target`; the paper, seed_rl) and
    ``lambda v_{t+1} + (1 - lambda) V_{t+1}`` (`mixture`; rlax), of which the second equals GAE at ratio 1.
    After the last place both are 0 after termination and `final_values` after truncation.

    Args:
        rewards: ``[B, T]`` float32.
        values: ``[B, T]`` float32.
        final_values: ``[B]`` float32.
        mask: ``[B, T]`` bool.
        terminated: ``[B]`` bool.
        log_ratios: ``[B, T]`` float32, ``log pi - log mu`` of each place: pi is learned, mu has sampled.
        gamma: Discount per place.
        lam: Extra discount of the traces.
        rho_cap: Decides which policy's values are learned (infinite: pi's); at least `trace_cap`.
        trace_cap: Decides how far corrections reach back: variance, not the result.
        bootstrap: See above.

    Returns:
        Advantages, which contain ``rho_t`` (do not weigh them again), and targets ``v_t``.
    """
    ratios = log_ratios.detach().clamp(-20.0, 20.0).exp()
    rho, trace = ratios.clamp(max=rho_cap), ratios.clamp(max=trace_cap)
    estimates = _backwards(
        rewards, values, final_values, mask, terminated, rho=rho, trace=trace, gamma=gamma, lam=lam
    )
    after = _following(values, final_values, mask, terminated)
    targets_after = _following(estimates.targets, final_values, mask, terminated)
    if bootstrap == "mixture":
        targets_after = lam * targets_after + (1 - lam) * after
    advantages = rho * (rewards + gamma * targets_after - values.detach())
    return Estimates(torch.where(mask, advantages, 0.0), estimates.targets)


def _backwards(
    rewards: Tensor,
    values: Tensor,
    final_values: Tensor,
    mask: Tensor,
    terminated: Tensor,
    *,
    rho: Tensor,
    trace: Tensor,
    gamma: float,
    lam: float,
) -> Estimates:
    """Run ``x_t = rho_t delta_t + gamma lambda c_t x_{t+1}`` from each row's end; targets are ``V + x``."""
    values = values.detach()
    after = _following(values, final_values, mask, terminated)
    deltas = torch.where(mask, rho * (rewards + gamma * after - values), 0.0)
    errors = torch.zeros_like(values)
    later = torch.zeros_like(final_values)
    for t in reversed(range(values.shape[1])):
        later = deltas[:, t] + gamma * lam * trace[:, t] * later
        later = torch.where(mask[:, t], later, 0.0)
        errors[:, t] = later
    return Estimates(errors, torch.where(mask, values + errors, 0.0))


def _following(values: Tensor, final_values: Tensor, mask: Tensor, terminated: Tensor) -> Tensor:
    """``[B, T]`` what comes after each place: the next one's value, at the end 0 or the final value."""
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1).detach()
    last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    end = torch.where(terminated, 0.0, final_values.detach())
    return torch.where(last, end[:, None], following)


def whitened(advantages: Tensor, mask: Tensor, *, mean: Tensor, std: Tensor, eps: float = 1e-5) -> Tensor:
    """Shift and scale by the mean and (unbiased) standard deviation of the whole batch; 0 where masked.

    >>> values, one = torch.tensor([1.0, 3.0]), torch.tensor(1.0)
    >>> whitened(values, values > 0, mean=one * 2, std=one)
    tensor([-1.0000,  1.0000])
    """
    return torch.where(mask, (advantages - mean) / (std + eps), 0.0)
