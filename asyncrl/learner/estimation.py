"""A batch and what the critic says about it in, advantages and value targets of its decisions out.

grpo   one advantage per episode, from its siblings
ppo    one per decision or per step (--critic.level), from the critic: GAE, or V-trace for stale samples

Dimension letters used in this file:
    D  decisions of all episodes     B  episodes     N  decisions of the longest episode
    V  values of a decision: 1 (chunk level) or 8 (action level)     T = N * V  places of an episode
    C  steps per decision (8)        A  action dimensions (7)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.run import TrainConfig
from asyncrl.learner.advantages import (
    Estimates,
    generalized_advantages,
    group_relative_advantages,
    vtrace,
    whitened,
)
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import log_ratio
from asyncrl.learner.group import LearnerGroup
from asyncrl.learner.levels import summed


class Teaching(NamedTuple):
    """What every decision teaches."""

    advantages: Tensor
    """``[D, 1, 1]`` or, on action level, ``[D, 8, 1]`` float32."""
    targets: Tensor | None
    """``[D, V]`` float32 for the critic; None without one."""


class Opinion(NamedTuple):
    """The critic's values before the update."""

    values: Tensor
    """``[D, V]`` float32."""
    final_values: Tensor
    """``[B]`` float32, value of the final observation; anything where the task ended."""


def relative_teaching(batch: Batch, config: TrainConfig, group: LearnerGroup) -> Teaching:
    """Advantages of grpo; the batch's standard deviation is that of all ranks."""
    batch_std = None
    if config.algorithm.spread == "batch_std":
        _, batch_std = moments_of_all(batch.returns, torch.ones_like(batch.returns).bool(), group)
    advantages_B = group_relative_advantages(
        batch.returns,
        batch.group_size,
        baseline=config.algorithm.baseline,
        spread=config.algorithm.spread,
        batch_std=batch_std,
    )
    return Teaching(advantages_B[batch.episode][:, None, None], None)


def critic_teaching(
    batch: Batch, opinion: Opinion, logprob_DCA: Tensor, config: TrainConfig, group: LearnerGroup
) -> Teaching:
    """Advantages and targets of ppo.

    Args:
        batch: On the CPU; everything here is small.
        opinion: On the CPU.
        logprob_DCA: ``[D, C, A]`` float32 of the learner's policy before the update; V-trace needs it.
        config: Discounts, correction.
        group: For the mean and deviation of all ranks' advantages.
    """
    critic, correction = config.critic, config.correction
    width = opinion.values.shape[1]
    mask = batch.mask.any(dim=2)
    mask_DV = mask if width > 1 else mask.any(dim=1, keepdim=True)
    rewards_DV = batch.rewards if width > 1 else batch.rewards.sum(dim=1, keepdim=True)
    rows = [_rows(x, batch) for x in (rewards_DV, opinion.values, mask_DV)]
    terminated = batch.successes | (critic.truncation == "failure")
    common = (rows[0], rows[1], opinion.final_values, rows[2], terminated)
    if correction.kind == "vtrace":
        level = "action" if width > 1 else "chunk"
        ratios_DUV = summed(log_ratio(logprob_DCA, batch.logprob_behaviour), batch.mask, level)
        estimates = vtrace(
            *common,
            _rows(ratios_DUV.flatten(1), batch),
            gamma=critic.gamma,
            lam=critic.lam,
            rho_cap=correction.rho_cap,
            trace_cap=correction.trace_cap,
        )
    else:
        estimates = generalized_advantages(*common, gamma=critic.gamma, lam=critic.lam)
    advantages_DV, targets_DV = (_decisions(x, batch, width) for x in Estimates(*estimates))
    if critic.normalize_advantages:
        mean, std = moments_of_all(advantages_DV, mask_DV, group)
        advantages_DV = whitened(advantages_DV, mask_DV, mean=mean, std=std)
    return Teaching(advantages_DV[:, :, None], targets_DV)


def moments_of_all(values: Tensor, mask: Tensor, group: LearnerGroup) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation over the valid values of all ranks, each ``[]`` float32."""
    valid = values[mask].double()
    number, total = group.sum(torch.stack([torch.tensor(float(valid.numel())).double(), valid.sum()]))
    mean = total / number.clamp(min=1)
    square = group.sum((valid - mean).square().sum()[None])[0]  # From the mean: no cancellation.
    return mean.float(), (square / (number - 1).clamp(min=1)).sqrt().float()


def _rows(values_DV: Tensor, batch: Batch) -> Tensor:
    """``[D, V]`` to ``[B, T]``: one row per episode, padded with zeros."""
    longest = int(batch.place.max()) + 1
    rows = values_DV.new_zeros(len(batch.returns), longest, values_DV.shape[1])
    rows[batch.episode, batch.place] = values_DV
    return rows.flatten(1)


def _decisions(values_BT: Tensor, batch: Batch, width: int) -> Tensor:
    """``[B, T]`` back to ``[D, V]``."""
    return values_BT.unflatten(1, (-1, width))[batch.episode, batch.place]
