"""Advantages and value targets, one row per episode: group-relative, GAE, V-trace.

B episodes, G of a group, T time steps of the longest episode (decisions, or steps with a critic of level
action), D decisions, C steps of one, A numbers of a step, K values of a decision: 1, or C.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings, CriticSettings
from asyncrl.learner import interface
from asyncrl.learner.batches import Batch
from asyncrl.learner.interface import AdvantagesAndTargets, Correction, Estimates, OldPolicy
from asyncrl.learner.losses import log_ratio, summed
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.records import returns_differ


class GroupRelative:
    """Compares each episode with its siblings, without a critic; see `group_relative_advantages`."""

    def __init__(self, algorithm: AlgorithmSettings, critic: CriticSettings) -> None:
        self.settings = algorithm
        self.needs: frozenset[str] = frozenset()

    def estimate(
        self, batch: Batch, old: OldPolicy | None, correction: Correction, ranks: LearnerRanks
    ) -> AdvantagesAndTargets:
        """Compute advantages ``[D, 1, 1]``."""
        batch_std = None
        if self.settings.advantage_scale == "batch_std":
            _, batch_std = moments_of_all(batch.returns, ranks)
        sizes_D, scale = batch.rewards.abs().sum(dim=1), self.settings.advantage_scale
        sizes_B = torch.zeros_like(batch.returns).index_add_(0, batch.episode, sizes_D)
        advantages_B = group_relative_advantages(
            batch.returns, batch.group_size, scale=scale, batch_std=batch_std, sizes=sizes_B
        )
        return AdvantagesAndTargets(advantages_B[batch.episode][:, None, None], None)


class GeneralizedAdvantage:
    """Generalised advantage estimates, or a correction's own (`CorrectsAdvantages`)."""

    def __init__(self, algorithm: AlgorithmSettings, critic: CriticSettings) -> None:
        self.critic = critic
        self.needs: frozenset[str] = frozenset({"critic"})

    def estimate(
        self, batch: Batch, old: OldPolicy | None, correction: Correction, ranks: LearnerRanks
    ) -> AdvantagesAndTargets:
        """Compute advantages ``[D, K, 1]`` and targets ``[D, K]``."""
        assert old is not None
        assert old.values is not None
        critic, width = self.critic, old.values.shape[1]
        mask = batch.mask.any(dim=2)
        mask_DK = mask if width > 1 else mask.any(dim=1, keepdim=True)
        rewards_DK = batch.rewards if width > 1 else batch.rewards.sum(dim=1, keepdim=True)
        rewards, values, valid = (_by_episode(x, batch) for x in (rewards_DK, old.values, mask_DK))
        terminated = batch.terminated | (critic.truncation == "failure")
        common = (rewards, values, old.final_values, valid, terminated)
        if isinstance(correction, interface.CorrectsAdvantages):
            level = "action" if width > 1 else "decision"
            ratios_DUV = summed(log_ratio(old.logprob, batch.behaviour_logprob), batch.mask, level)
            ratios = _by_episode(ratios_DUV.flatten(1), batch)
            estimates = correction.estimates(*common, ratios, gamma=critic.gamma, lam=critic.lam)
        else:
            estimates = generalized_advantages(*common, gamma=critic.gamma, lam=critic.lam)
        advantages_DK, targets_DK = (
            x.unflatten(1, (-1, width))[batch.episode, batch.decision_index] for x in Estimates(*estimates)
        )
        if critic.normalize_advantages:
            mean, std = moments_of_all(advantages_DK[mask_DK], ranks)
            differ = returns_differ(-std, std, mean.abs())
            advantages_DK = torch.where(mask_DK & differ, (advantages_DK - mean) / (std + 1e-5), 0.0)
        return AdvantagesAndTargets(advantages_DK[:, :, None], torch.where(mask_DK, targets_DK, 0.0))


def group_relative_advantages(
    returns: Tensor,
    group_size: int,
    *,
    scale: Literal["group_std", "batch_std", "none"] = "group_std",
    batch_std: Tensor | None = None,
    sizes: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Score each episode against its siblings: ``A = (R - mean) / (scale + eps)``, detached.

    Sources: mean and the group's unbiased standard deviation, GRPO, arXiv 2402.03300, section 4.1.2; no
    division, Dr. GRPO, arXiv 2503.20783 (times ``G / (G - 1)`` it is RLOO, arXiv 2402.14740); deviation of
    all returns of the batch, TRL's ``scale_rewards="batch"`` (`batch_std` ``[]`` over all ranks).

    Siblings are adjacent in ``[B]`` float32 arrays; the result is exactly 0 in a group of equal returns, by
    `returns_differ` and `sizes`, the sums of absolute rewards (None: one reward each).
    """
    if returns.ndim != 1 or group_size < 2 or returns.shape[0] % group_size:
        raise ValueError(
            f"returns must be [B] with B a multiple of group_size={group_size} >= 2, got shape "
            f"{tuple(returns.shape)}"
        )
    returns_NG = returns.detach().unflatten(0, (-1, group_size))
    advantages_NG = returns_NG - returns_NG.mean(dim=1, keepdim=True)
    if scale == "group_std":
        advantages_NG = advantages_NG / (returns_NG.std(dim=1, keepdim=True) + eps)
    elif scale == "batch_std":
        advantages_NG = advantages_NG / ((returns.detach().std() if batch_std is None else batch_std) + eps)
    # Rounding errors, of sums and of the mean, would be blown up by the tiny divisor.
    lowest_N1, highest_N1 = returns_NG.aminmax(dim=1, keepdim=True)
    sizes_NG = (returns if sizes is None else sizes).detach().abs().unflatten(0, (-1, group_size))
    differ_N1 = returns_differ(lowest_N1, highest_N1, sizes_NG.amax(dim=1, keepdim=True))
    return torch.where(differ_N1, advantages_NG, 0.0).flatten()


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    final_values: Tensor,
    mask: Tensor,
    terminated: Tensor,
    *,
    gamma: float,
    lam: float,
    rho: Tensor | None = None,
) -> Estimates:
    """Compute generalised advantage estimates (GAE), arXiv 1506.02438, equation 16, and targets ``A + V``.

    ``delta_t = rho_t (r_t + gamma V_{t+1} - V_t)`` and ``A_t = delta_t + gamma lambda rho_t A_{t+1}``, for
    GAE with ``rho = 1``; the value after the last one is 0 where the task ended (`terminated` ``[B]`` bool),
    else `final_values` ``[B]``. All others are ``[B, T]`` float32.

    Args:
        mask: bool, True from the first time step to the last; every row has one.
        rho: Ratios of V-trace; None: 1.
    """
    values = values.detach()
    rho = torch.ones_like(values) if rho is None else rho
    following = _following(values, final_values, mask, terminated)
    deltas = torch.where(mask, rho * (rewards + gamma * following - values), 0.0)
    errors = torch.zeros_like(values)
    later = torch.zeros_like(final_values)
    for t in reversed(range(values.shape[1])):
        later = deltas[:, t] + gamma * lam * rho[:, t] * later
        later = torch.where(mask[:, t], later, 0.0)
        errors[:, t] = later
    return Estimates(errors, torch.where(mask, values + errors, 0.0))


def vtrace(
    rewards: Tensor,
    values: Tensor,
    final_values: Tensor,
    mask: Tensor,
    terminated: Tensor,
    log_ratios: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Estimates:
    """Compute value targets ``v_t`` and advantages from samples of another policy: V-trace.

    ``delta_t = rho_t (r_t + gamma V_{t+1} - V_t)`` with ``rho_t = min(1, pi / mu)``,
    ``v_t = V_t + delta_t + gamma lambda rho_t (v_{t+1} - V_{t+1})``, and
    ``A_t = rho_t (r_t + gamma q_{t+1} - V_t)`` with ``q = lambda v + (1 - lambda) V``, which equals GAE at
    ratio 1. Source: IMPALA, arXiv 1802.01561, equation 1 and section 4.2, where ``q = v``; `q` as in rlax.

    `log_ratios`: ``[B, T]`` float32, ``log pi - log mu``: pi is learned, mu sampled.
    """
    rho = log_ratios.detach().clamp(-20.0, 20.0).exp().clamp(max=1.0)
    targets = generalized_advantages(
        rewards, values, final_values, mask, terminated, gamma=gamma, lam=lam, rho=rho
    ).targets
    after = _following(values, final_values, mask, terminated)
    targets_after = _following(targets, final_values, mask, terminated)
    later = lam * targets_after + (1 - lam) * after
    advantages = rho * (rewards + gamma * later - values.detach())
    return Estimates(torch.where(mask, advantages, 0.0), targets)


def _following(values: Tensor, final_values: Tensor, mask: Tensor, terminated: Tensor) -> Tensor:
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1).detach()
    last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    end = torch.where(terminated, 0.0, final_values.detach())
    return torch.where(last, end[:, None], following)


def moments_of_all(values: Tensor, ranks: LearnerRanks) -> tuple[Tensor, Tensor]:
    """Compute mean and unbiased standard deviation of all ranks' values, each ``[]``; 0 without values."""
    values = values.double()
    number, total = ranks.sum(torch.stack([values.new_tensor(values.numel()), values.sum()]))
    mean = total / number.clamp(min=1)
    square = ranks.sum((values - mean).square().sum()[None])[0]  # From the mean: no cancellation.
    return mean.float(), (square / (number - 1).clamp(min=1)).sqrt().float()


def _by_episode(values_DK: Tensor, batch: Batch) -> Tensor:
    rows = values_DK.new_zeros(len(batch.returns), int(batch.decision_index.max()) + 1, values_DK.shape[1])
    rows[batch.episode, batch.decision_index] = values_DK
    return rows.flatten(1)
