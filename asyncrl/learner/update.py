"""Makes the optimizer steps on one batch.

    prepare_batch      old log-probs and values of the whole batch if they are needed; advantages, targets
    build_minibatch    whole episodes, and the weight of each unit of their decisions
    evaluate           a micro-batch by the current weights
    update_loss        sum over units   unit_weight * importance weight * objective
                       - sum over tokens  token_weight * entropy_coef * entropy
                       + sum over tokens  token_weight * truncated weight * kl_coef * KL to the reference
                       + sum over values  value_weight * 0.5 * value loss
    step               one clipped AdamW step per minibatch, or none if the gradient is not finite
    KL to old policy   in the last step's passes, or in a small pass after it

All ranks make the same calls in the same order. M decisions of the micro-batch, C steps per decision,
A numbers per step, U, V units of a decision (`losses`), K values of a decision: 1, or C.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.config.sections import OptimizerSettings
from asyncrl.devices.tensors import moved
from asyncrl.learner import prepare
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import beyond_trust_region, k3, staleness_metrics, truncated_weights
from asyncrl.learner.forward import PADDING_ROW, PolicyForward, Reference
from asyncrl.learner.fsdp import summed_gradient
from asyncrl.learner.losses import has_advantage, kl_penalty, log_ratio, valid_units, value_loss
from asyncrl.learner.optimizer import ClippedOptimizer
from asyncrl.learner.prepare import LossInputs, PreparedBatch
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.recipe import Recipe, build_recipe
from asyncrl.learner.update_metrics import MetricAccumulator, effective_sample_size, variance
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import EvaluateResult, Policy

KL_ROWS_SHARE: Final = 32  # Of so many decisions one is evaluated again for the KL to the old policy
KL_ROWS_MIN: Final = 4  # Fewest decisions of that pass
VALUE_LOSS_WEIGHT: Final = 0.5


class Update:
    """Learns from one batch at a time. Owns the optimizer; the policy is updated in place."""

    def __init__(
        self,
        policy: Policy,
        algorithm: AlgorithmSettings,
        correction: CorrectionSettings,
        critic: CriticSettings,
        optimizer: OptimizerSettings,
        *,
        updates: int,
        max_decisions: int,
        trust_region: float = 0.0,
        seed: int = 0,
        ranks: LearnerRanks | None = None,
        reference: Reference | None = None,
    ) -> None:
        self.policy, self.seed, self.ranks = policy, seed, ranks or LearnerRanks()
        self.max_decisions, self.trust_region = max_decisions, trust_region
        self.recipe = build_recipe(algorithm, correction, critic)
        self.reference = reference if algorithm.kl_coef else None
        assert self.reference is not None or not algorithm.kl_coef, "a KL penalty needs a reference"
        self.stepper = ClippedOptimizer(
            policy,
            optimizer,
            updates=updates,
            critic_learning_rate=critic.learning_rate,
            critic_warmup=critic.warmup_updates if self.recipe.trains_critic else 0,
        )
        self.optimizer, self.device = self.stepper.optimizer, self.stepper.device
        self.forward = PolicyForward(policy, self.ranks, self.device, micro_batch=algorithm.micro_batch)
        self.decisions = 0  # Decisions of this rank with a gradient in the last update, each once per epoch

    def __call__(self, batch: Batch, version: int = 0) -> dict[Metric, float]:
        """Make ``epochs * minibatches`` optimizer steps on the batch; collective.

        Decisions that cannot have a gradient are not evaluated, but stay in the denominator.
        """
        if isinstance(self.policy, nn.Module):
            self.policy.eval()  # Dropout would make current and behaviour log-probs differ without any lag.
        recipe, ranks, self.decisions = self.recipe, self.ranks, 0
        settings, metrics = recipe.algorithm, MetricAccumulator()
        recipe.check_batch(batch)
        self.stepper.set_version(version)
        prepared = prepare.prepare_batch(batch, recipe, self.forward, metrics)
        episodes_of_ranks = torch.zeros(ranks.size, dtype=torch.int64)
        episodes_of_ranks[ranks.rank] = episodes = len(batch.returns)
        before = int(ranks.sum(episodes_of_ranks)[: ranks.rank].sum())
        # The last step's passes meet decisions that were evaluated before the first step.
        kl_in_passes = settings.epochs > 1 or (settings.minibatches > 1 and recipe.needs_old_policy_pass)
        for epoch in range(settings.epochs):
            seed = (self.seed, version, epoch)
            dealt = prepare.split_minibatches(episodes, settings.minibatches, seed, before=before)
            for number, members in enumerate(dealt, start=1):
                minibatch = prepare.build_minibatch(
                    batch, prepared, members, recipe, self.forward, self.max_decisions
                )
                self.decisions += len(minibatch.rows) - 1
                last = (epoch + 1, number) == (settings.epochs, settings.minibatches)
                self.optimizer.zero_grad()
                self._add_gradient(batch, prepared, minibatch, metrics, read_kl=kl_in_passes and last)
                self.stepper.step()
            prepared.old_known = True
        add_advantage_metrics(metrics, batch, prepared, self.device)
        if not kl_in_passes:
            add_kl_after_step(metrics, batch, prepared, self.forward)
        steps = settings.epochs * settings.minibatches
        return finish_metrics(metrics.reduce(ranks, steps)) | self.stepper.end_update()

    def fix_sizes(self) -> None:
        """Pad all passes to one size; the KL's small pass to another if that is less than half as large."""
        settings = self.recipe.algorithm
        episodes = settings.groups_per_update // self.ranks.size * settings.group_size
        per_minibatch = max(1, -(-episodes // settings.minibatches))
        size = min(settings.micro_batch, per_minibatch * self.max_decisions)
        small = rows_for_kl(episodes * self.max_decisions, size)
        self.forward.micro_batch = size
        self.forward.small_size = size if 2 * small >= size else KL_ROWS_MIN

    def _add_gradient(
        self,
        batch: Batch,
        prepared: PreparedBatch,
        minibatch: LossInputs,
        metrics: MetricAccumulator,
        *,
        read_kl: bool,
    ) -> None:
        # The bound is of probabilities: a difference of densities means nothing.
        bound = self.trust_region if "tokens" in batch.sample else 0.0
        learns, reference = self.stepper.policy_learns, None
        parts = self.forward.split(len(minibatch.rows) - 1)
        with summed_gradient(self.policy) as pass_is_last:
            for number, rows in enumerate(parts, start=1):
                micro = minibatch.part(rows)
                current = self.forward.evaluate(batch, micro.rows)
                if self.reference is not None:
                    reference = self.forward.reference(self.reference, batch, micro.rows)
                loss = update_loss(
                    self.recipe, current, micro, metrics, reference, policy=learns, trust_region=bound
                )
                if number == len(parts):
                    pass_is_last()
                (loss * self.ranks.size).backward()  # Sharded gradients are averaged over the ranks.
                if read_kl:
                    add_kl_to_old(metrics, prepared, micro.rows, current.logprob.detach(), micro.mask)
                if rows is not None:
                    prepared.record_first_logprob(micro.rows, current.logprob)
                process_status.progress()


# --- the loss of a micro-batch ---


def update_loss(
    recipe: Recipe,
    current: EvaluateResult,
    micro: LossInputs,
    metrics: MetricAccumulator,
    reference: Tensor | None = None,
    *,
    policy: bool = True,
    trust_region: float = 0.0,
) -> Tensor:
    """Return the loss ``[]``; `reference` is ``[M, C, A]``, `policy` False while only the critic learns."""
    # A token that top-k would not draw any more still has a finite log-prob (`action_distribution`).
    old_logprob, mask = current.logprob.detach(), micro.mask
    if micro.old_logprob is not None:  # It may be unknown of decisions without an advantage.
        with_advantage = has_advantage(micro.advantages)[:, None, None]
        old_logprob = torch.where(with_advantage, micro.old_logprob, old_logprob)
    logprob, old_logprob = (torch.where(mask, x, 0.0) for x in (current.logprob, old_logprob))
    terms: list[Tensor] = []
    if policy:
        terms.append(_policy_loss(recipe, logprob, old_logprob, micro, metrics, trust_region))
        terms.append(_regularisers(recipe, current, logprob, micro, metrics, reference))
    if micro.targets is not None:
        terms.append(_value_loss(recipe, current, micro, metrics))
    loss = torch.stack(terms).sum()
    metrics.total(m.LOSS, loss)
    return loss


def _policy_loss(
    recipe: Recipe,
    logprob: Tensor,
    old_logprob: Tensor,
    micro: LossInputs,
    metrics: MetricAccumulator,
    trust_region: float,
) -> Tensor:
    mask, level, settings = micro.mask, recipe.algorithm.level, recipe.correction_settings
    advantage_M = has_advantage(micro.advantages)
    behaviour = torch.where(mask, micro.behaviour, 0.0)
    proximal = recipe.proximal(logprob, old_logprob, behaviour, micro.lag)
    weights = micro.importance_weights
    if weights is None:
        log_ratios = torch.where(mask, log_ratio(proximal, behaviour), 0.0)
        weights = recipe.importance_weights(log_ratios, mask, micro.episode)
    if micro.old_logprob is None:
        policies, decisions = (old_logprob, proximal, behaviour), (micro.episode, micro.lag, advantage_M)
        staleness_metrics(metrics, settings, level, *policies, mask, weights, *decisions)
    terms = recipe.unit_loss(logprob, proximal, mask, micro.advantages)
    units = valid_units(mask, level)
    unit_weights = micro.unit_weights if weights is None else micro.unit_weights * weights
    beyond = torch.zeros_like(units)
    if trust_region:
        beyond = beyond_trust_region(logprob, behaviour, mask, micro.advantages, level, trust_region)
    loss = torch.where(units & ~beyond, unit_weights * terms.loss, 0.0).sum()
    metrics.total(m.POLICY_LOSS, loss)
    with_advantage = units & advantage_M[:, None, None]
    metrics.mean(m.CLIP_FRACTION, terms.clipped.float(), with_advantage)
    metrics.mean(m.DUAL_CLIPPED, terms.dual_clipped.float(), with_advantage)
    metrics.mean(m.CLIPPED_RATIO, terms.clipped_ratio, with_advantage)
    metrics.mean(m.OUTSIDE_TRUST_REGION, beyond.float(), with_advantage)
    metrics.mean(m.RATIO, log_ratio(logprob, proximal).exp(), mask & advantage_M[:, None, None])
    limited = (beyond | terms.clipped | terms.dual_clipped).float()
    metrics.mean_by_lag(m.CLIPPED_AT_LAG, limited, with_advantage, micro.lag)
    return loss


def _regularisers(
    recipe: Recipe,
    current: EvaluateResult,
    logprob: Tensor,
    micro: LossInputs,
    metrics: MetricAccumulator,
    reference: Tensor | None,
) -> Tensor:
    settings, mask = recipe.algorithm, micro.mask
    with_advantage = mask & has_advantage(micro.advantages)[:, None, None]
    metrics.mean(m.ENTROPY_LOSS, current.entropy, with_advantage)
    loss = torch.zeros((), device=logprob.device)
    if settings.entropy_coef:
        entropy = torch.where(mask, micro.token_weights * current.entropy, 0.0).sum()
        loss = loss - settings.entropy_coef * entropy
    if reference is not None:
        reachable = mask & (reference != -math.inf)  # NaN is not hidden.
        reference = torch.where(reachable, reference, logprob.detach())
        penalty = torch.where(reachable, kl_penalty(logprob, reference), 0.0)
        weights = torch.ones_like(penalty)
        if "behaviour" in recipe.needs:
            log_ratios = torch.where(mask, log_ratio(logprob, micro.behaviour), 0.0)
            weights = truncated_weights(log_ratios, cap=recipe.correction_settings.max_weight)
        metrics.mean(m.KL_REFERENCE, weights * penalty, reachable & with_advantage)
        loss = loss + settings.kl_coef * (micro.token_weights * weights * penalty).sum()
    return loss


def _value_loss(
    recipe: Recipe, current: EvaluateResult, micro: LossInputs, metrics: MetricAccumulator
) -> Tensor:
    assert current.value is not None
    assert micro.values is not None
    assert micro.targets is not None
    clip, huber = recipe.critic.value_clip, recipe.critic.huber
    losses, clipped = value_loss(current.value, micro.values, micro.targets, clip=clip, huber=huber)
    loss = (micro.value_weights * losses).sum()
    metrics.total(m.VALUE_LOSS, loss)
    metrics.mean(m.VALUE_CLIP_RATIO, clipped.float(), micro.value_weights > 0)
    return VALUE_LOSS_WEIGHT * loss


# --- metrics of the whole update ---


def add_advantage_metrics(
    metrics: MetricAccumulator, batch: Batch, prepared: PreparedBatch, device: torch.device
) -> None:
    """Add advantages over valid tokens, values and targets over valid decisions or steps."""
    advantages, mask = moved(prepared.estimates.advantages, device), moved(batch.mask, device)
    metrics.mean(m.ADVANTAGES_MEAN, advantages, mask)
    metrics.largest(m.ADVANTAGES_MAX, advantages, mask)
    metrics.largest(m.ADVANTAGES_MIN, -advantages, mask)
    if prepared.values is not None and prepared.estimates.targets is not None:
        valid = moved(prepared.value_mask(batch), device)
        values, targets = moved(prepared.values, device), moved(prepared.estimates.targets, device)
        metrics.moments("target", targets, valid)
        metrics.moments("error", targets - values, valid)
        metrics.mean(m.VALUES_MEAN, values, valid)


def add_kl_to_old(
    metrics: MetricAccumulator, prepared: PreparedBatch, rows: Tensor, logprob: Tensor, mask: Tensor
) -> None:
    """Estimate KL(old || current) per valid token of ``[M, C, A]``, biased by the behaviour policy's lag.

    Old is the policy that first evaluated a decision in this update: with `naive` perhaps after a step.
    """
    old_logprob = prepared.first_logprob[moved(rows, logprob.device)]
    mask = mask & moved(prepared.evaluated[rows], logprob.device)[:, None, None]
    finite = mask & torch.isfinite(old_logprob) & torch.isfinite(logprob)
    log_ratios = log_ratio(torch.where(finite, logprob, 0.0), torch.where(finite, old_logprob, 0.0))
    metrics.mean(m.APPROX_KL, k3(log_ratios), finite)


def add_kl_after_step(
    metrics: MetricAccumulator, batch: Batch, prepared: PreparedBatch, forward: PolicyForward
) -> None:
    """Add the KL of a small pass after the last step, on evenly spread decisions; collective."""
    evaluated = torch.nonzero(prepared.evaluated).flatten()
    if not float(forward.ranks.sum(torch.tensor([float(len(evaluated))]))):
        return
    rows = forward.small_size or rows_for_kl(len(evaluated), forward.micro_batch)
    stride = max(1, -(-len(evaluated) // rows))
    rows_M = evaluated[::stride] if len(evaluated) else PADDING_ROW  # Which counts nothing.
    with torch.no_grad():
        logprob = forward.evaluate(batch, rows_M, small=True).logprob
    add_kl_to_old(metrics, prepared, rows_M, logprob, moved(batch.mask[rows_M], logprob.device))


def rows_for_kl(evaluated: int, micro_batch: int) -> int:
    """Return the number of decisions that are evaluated again after the last step."""
    return min(micro_batch, max(KL_ROWS_MIN, evaluated // KL_ROWS_SHARE))


def finish_metrics(means: dict[Metric | str, float]) -> dict[Metric, float]:
    """Derive the metrics that are not means, and drop the non-finite ones of a skipped step."""
    result = {name: value for name, value in means.items() if isinstance(name, Metric)}
    if m.ADVANTAGES_MIN in result:
        result[m.ADVANTAGES_MIN] = -result[m.ADVANTAGES_MIN]
    if "ratio" in means:
        result[m.ESS] = effective_sample_size(means, "ratio")
    if "weight" in means:
        result[m.IMPORTANCE_ESS] = effective_sample_size(means, "weight")
    if "target" in means:
        spread = variance(means, "target")
        result[m.RETURNS_MEAN] = means["target"]
        result[m.EXPLAINED_VARIANCE] = 1 - variance(means, "error") / spread if spread > 0 else math.nan
    return {name: value for name, value in result.items() if math.isfinite(value)}
