"""A batch and the policy before the update in, all that the update must know of that moment out.

Dimension letters used in this file:
    D  decisions of the batch      C  steps per decision (8)      A  action dimensions (7)
    U, V  units of a decision (`levels`)      K  values of a decision: 1 or 8
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.run import TrainConfig
from asyncrl.learner.accumulator import MetricAccumulator
from asyncrl.learner.advantages import (
    Estimates,
    generalized_advantages,
    group_relative_advantages,
    vtrace,
    whitened,
)
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import WEIGHTED, log_ratio, whole_episodes
from asyncrl.learner.forward import PolicyForward
from asyncrl.learner.levels import summed
from asyncrl.learner.objective import Objective
from asyncrl.learner.ranks import LearnerRanks


class AdvantagesAndTargets(NamedTuple):
    """What every decision teaches."""

    advantages: Tensor
    """``[D, 1, 1]`` or, on action level, ``[D, 8, 1]`` float32."""
    targets: Tensor | None
    """``[D, V]`` float32 for the critic; None without one."""


class CriticValues(NamedTuple):
    """The critic's values before the update."""

    values: Tensor
    """``[D, V]`` float32."""
    final_values: Tensor
    """``[B]`` float32, value of the final observation; anything where the task ended."""


def group_relative_targets(batch: Batch, config: TrainConfig, group: LearnerRanks) -> AdvantagesAndTargets:
    """Advantages of grpo; the batch's standard deviation is that of all ranks."""
    batch_std = None
    if config.algorithm.advantage_scale == "batch_std":
        _, batch_std = moments_of_all(batch.returns, torch.ones_like(batch.returns).bool(), group)
    advantages_B = group_relative_advantages(
        batch.returns,
        batch.group_size,
        baseline=config.algorithm.baseline,
        spread=config.algorithm.advantage_scale,
        batch_std=batch_std,
    )
    return AdvantagesAndTargets(advantages_B[batch.episode][:, None, None], None)


def critic_targets(
    batch: Batch, critic_values: CriticValues, logprob_DCA: Tensor, config: TrainConfig, group: LearnerRanks
) -> AdvantagesAndTargets:
    """Advantages and targets of ppo.

    Args:
        batch: On the CPU; everything here is small.
        critic_values: On the CPU.
        logprob_DCA: ``[D, C, A]`` float32 of the learner's policy before the update; V-trace needs it.
        config: Discounts, correction.
        group: For the mean and deviation of all ranks' advantages.
    """
    critic, correction = config.critic, config.correction
    width = critic_values.values.shape[1]
    mask = batch.mask.any(dim=2)
    mask_DV = mask if width > 1 else mask.any(dim=1, keepdim=True)
    rewards_DV = batch.rewards if width > 1 else batch.rewards.sum(dim=1, keepdim=True)
    rows = [_rows(x, batch) for x in (rewards_DV, critic_values.values, mask_DV)]
    terminated = batch.successes | (critic.truncation == "failure")
    common = (rows[0], rows[1], critic_values.final_values, rows[2], terminated)
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
    return AdvantagesAndTargets(advantages_DV[:, :, None], targets_DV)


def moments_of_all(values: Tensor, mask: Tensor, group: LearnerRanks) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation over the valid values of all ranks, each ``[]`` float32."""
    valid = values[mask].double()
    number, total = group.sum(torch.stack([torch.tensor(float(valid.numel())).double(), valid.sum()]))
    mean = total / number.clamp(min=1)
    square = group.sum((valid - mean).square().sum()[None])[0]  # From the mean: no cancellation.
    return mean.float(), (square / (number - 1).clamp(min=1)).sqrt().float()


def _rows(values_DV: Tensor, batch: Batch) -> Tensor:
    """``[D, V]`` to ``[B, T]``: one row per episode, padded with zeros."""
    longest = int(batch.decision_index.max()) + 1
    rows = values_DV.new_zeros(len(batch.returns), longest, values_DV.shape[1])
    rows[batch.episode, batch.decision_index] = values_DV
    return rows.flatten(1)


def _decisions(values_BT: Tensor, batch: Batch, width: int) -> Tensor:
    """``[B, T]`` back to ``[D, V]``."""
    return values_BT.unflatten(1, (-1, width))[batch.episode, batch.decision_index]


@dataclass(kw_only=True)
class PreparedBatch:
    """What was known before the first step."""

    estimates: AdvantagesAndTargets
    old_logprob: Tensor | None = None
    """``[D, C, A]`` float32 log-probs on the policy's device; None: the first epoch finds them."""
    weights: Tensor | None = None
    """``[D, U, V]`` importance weights; None: computed per micro-batch."""
    values: Tensor | None = None
    """``[D, K]`` float32, on the CPU; None without a critic."""
    first_logprob: Tensor
    """``[D, C, A]`` float32 log-probs when a decision was first evaluated in this update."""
    evaluated: Tensor
    """``[D]`` bool, on the CPU: which decisions were evaluated."""

    def record_old_logprob(self, rows: Tensor, logprob: Tensor) -> None:
        """Remember the log-probs ``[M, C, A]`` of decisions that are evaluated for the first time."""
        if not self.evaluated[rows].all():
            self.first_logprob[rows.to(self.first_logprob.device)] = logprob.detach()
            self.evaluated[rows] = True

    def value_mask(self, batch: Batch) -> Tensor:
        """``[D, K]`` bool: which values are of a valid decision_index; ``[D, 1]`` without a critic."""
        steps_DC = batch.mask.any(dim=2)
        wide = self.values is not None and self.values.shape[1] > 1
        return steps_DC if wide else steps_DC.any(dim=1, keepdim=True)


def needs_old_policy_pass(config: TrainConfig) -> bool:
    """Whether the whole batch must be evaluated before the first step.

    In the first pass over a whole minibatch the policy is still the one before that step. With one minibatch
    this is the policy before the update, and what the pass found serves the later epochs.
    """
    chosen, correction = config.algorithm, config.correction
    several = chosen.minibatches > 1
    anchored = correction.kind in ("none", "vtrace") or (
        correction.kind in WEIGHTED and correction.proximal == "recomputed"
    )
    return chosen.kind == "ppo" or whole_episodes(correction) or (several and anchored)


def prepare_batch(
    batch: Batch,
    config: TrainConfig,
    forward: PolicyForward,
    objective: Objective,
    accumulator: MetricAccumulator,
) -> PreparedBatch:
    """Evaluate the batch where later stages need it as it was, and decide what it teaches."""
    decisions = len(batch.tasks)
    if not needs_old_policy_pass(config):
        return PreparedBatch(
            estimates=group_relative_targets(batch, config, forward.group),
            first_logprob=torch.zeros(batch.mask.shape, device=forward.device),
            evaluated=torch.zeros(decisions, dtype=torch.bool),
        )
    old_logprob, values = forward.evaluate_all(batch)
    if config.algorithm.kind == "ppo":
        assert values is not None, "ppo needs a policy with a value head"
        values, ends = values.cpu(), torch.zeros(len(batch.returns))
        if config.critic.truncation == "bootstrap":
            ends = forward.final_values(batch).cpu()
        estimates = critic_targets(
            batch, CriticValues(values, ends), old_logprob.cpu(), config, forward.group
        )
    else:
        estimates, values = group_relative_targets(batch, config, forward.group), None
    evaluated = torch.ones(decisions, dtype=torch.bool)
    weights = _weights(batch, old_logprob, objective, accumulator)
    if config.correction.proximal == "log_linear":
        weights = None  # The proximal policy moves with the current one.
    return PreparedBatch(
        estimates=estimates,
        old_logprob=old_logprob,
        weights=weights,
        values=values,
        first_logprob=old_logprob.clone(),
        evaluated=evaluated,
    )


def _weights(
    batch: Batch, old_logprob: Tensor, objective: Objective, accumulator: MetricAccumulator
) -> Tensor:
    """Importance weights ``[D, U, V]`` of the whole batch; also reads how stale it is."""
    device = old_logprob.device
    behaviour, episode = batch.logprob_behaviour.to(device), batch.episode.to(device)
    mask = batch.mask.to(device) & ~torch.isneginf(old_logprob)
    old_logprob, behaviour = (torch.where(mask, x, 0.0) for x in (old_logprob, behaviour))
    proximal = objective.proximal(old_logprob, old_logprob, behaviour, batch.lag.to(device))
    weights = objective.weights(proximal, behaviour, mask, episode)
    objective.read_staleness(old_logprob, behaviour, mask, weights, episode, accumulator)
    return weights
