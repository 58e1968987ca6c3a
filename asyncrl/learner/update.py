"""Makes the optimizer steps on one batch.

    prepare_batch      old log-probs and values of the whole batch if they are needed; advantages, targets
    build_minibatch    whole episodes, and the weight of each unit of their decisions
    evaluate           a micro-batch by the current weights
    update_loss        sum over units of weight * (w * objective - entropy_coef * entropy + kl_coef * KL)
                       + 0.5 * sum over values of weight * value loss
    step               one clipped AdamW step per minibatch, or none if the gradient is not finite
    KL to old policy   in the last step's passes, or in a small pass after the only step

All ranks make the same calls in the same order. M decisions of the micro-batch, C steps per decision,
A numbers per step, U, V units of a decision (`losses`), K values of a decision: 1, or C.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.config.sections import OptimizerSettings
from asyncrl.devices.tensors import moved
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import beyond_trust_region, k3, staleness_metrics, truncated_weights
from asyncrl.learner.forward import PADDING_ROW, PolicyForward, Reference
from asyncrl.learner.fsdp import summed_gradient
from asyncrl.learner.losses import has_advantage, kl_penalty, log_ratio, valid_units, value_loss
from asyncrl.learner.metrics import MetricAccumulator, effective_sample_size, variance
from asyncrl.learner.optimizer import ClippedOptimizer
from asyncrl.learner.prepare import (
    LossInputs,
    PreparedBatch,
    build_minibatch,
    episodes_before,
    prepare_batch,
    split_minibatches,
)
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.recipe import Recipe, build_recipe
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status
from asyncrl.observability.metrics import LAG_RANGES, Metric
from asyncrl.policies.interface import EvaluateResult, Policy

KL_ROWS_SHARE: Final = 32  # Of so many decisions one is evaluated again for the KL to the old policy
KL_ROWS_MIN: Final = 4  # Fewest decisions of that pass
VALUE_LOSS_WEIGHT: Final = 0.5
LossAndMetrics = tuple[Tensor, MetricAccumulator]


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

        Decisions that can have no gradient are not evaluated, but stay in the denominator.
        """
        if isinstance(self.policy, nn.Module):
            self.policy.eval()  # Dropout would make current and behaviour log-probs differ without any lag.
        recipe, settings, self.decisions = self.recipe, self.recipe.algorithm, 0
        steps, episodes = settings.epochs * settings.minibatches, len(batch.returns)
        recipe.check_batch(batch)
        self.stepper.set_version(version)
        prepared, metrics = prepare_batch(batch, recipe, self.forward)
        lengths = self.forward.prompt_lengths(batch.tasks)
        before = episodes_before(episodes, self.ranks)
        read_kl = reads_kl_in_passes(recipe)
        for epoch in range(settings.epochs):
            seed = (self.seed, version, epoch)
            shares = split_minibatches(episodes, settings.minibatches, seed, before=before)
            for number, share in enumerate(shares, start=epoch * settings.minibatches + 1):
                minibatch = build_minibatch(
                    batch,
                    prepared,
                    share,
                    recipe,
                    self.ranks,
                    max_decisions=self.max_decisions,
                    prompt_lengths=lengths,
                )
                self.decisions += minibatch.decisions
                self.optimizer.zero_grad()
                metrics_of_passes = self._add_gradient(
                    batch, prepared, minibatch, read_kl=read_kl and number == steps
                )
                for metrics_of_pass in metrics_of_passes:
                    metrics.fold(metrics_of_pass)
                self.stepper.step()
            if prepared.old_logprob is None:
                prepared.old_logprob = prepared.first_logprob
        metrics.fold(advantage_metrics(batch, prepared, self.device))
        if not read_kl:
            metrics.fold(kl_after_step(batch, prepared, self.forward))
        return finish_metrics(metrics.reduce(self.ranks, steps)) | self.stepper.end_update()

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
        self, batch: Batch, prepared: PreparedBatch, minibatch: LossInputs, *, read_kl: bool
    ) -> list[MetricAccumulator]:
        recipe, learns = self.recipe, self.stepper.policy_learns
        metrics: list[MetricAccumulator] = []
        # The bound is of probabilities: a difference of densities means nothing.
        bound = self.trust_region if "tokens" in batch.sample else 0.0
        parts = self.forward.split(minibatch.decisions)
        with summed_gradient(self.policy) as pass_is_last:
            for number, rows in enumerate(parts, start=1):
                micro = minibatch.part(rows)
                current = self.forward.evaluate(batch, micro.rows)
                if self.reference is not None:
                    reference = self.forward.reference(self.reference, batch, micro.rows)
                    micro = replace(micro, reference=reference)
                loss, loss_metrics = update_loss(recipe, current, micro, policy=learns, trust_region=bound)
                if number == len(parts):
                    pass_is_last()
                (loss * self.ranks.size).backward()  # Sharded gradients are averaged over the ranks.
                metrics.append(loss_metrics)
                if read_kl:
                    first, evaluated = prepared.first_evaluation(micro.rows)
                    metrics.append(kl_to_old(first, current.logprob.detach(), micro.mask & evaluated))
                if rows is not None:
                    prepared.record_first_logprob(micro.rows, current.logprob)
                process_status.progress()
        return metrics


# --- the loss of a micro-batch ---


def update_loss(
    recipe: Recipe,
    current: EvaluateResult,
    micro: LossInputs,
    *,
    policy: bool = True,
    trust_region: float = 0.0,
) -> LossAndMetrics:
    """Return the loss ``[]``, and its metrics; `policy` is False while only the critic learns."""
    # A token that top-k would not draw any more has a number all the same: `action_distribution` keeps it.
    old_logprob, mask = current.logprob.detach(), micro.mask
    if micro.old_logprob is not None:  # It may be unknown of decisions without an advantage.
        with_advantage = has_advantage(micro.advantages)[:, None, None]
        old_logprob = torch.where(with_advantage, micro.old_logprob, old_logprob)
    logprob, old_logprob = (torch.where(mask, x, 0.0) for x in (current.logprob, old_logprob))
    terms: list[LossAndMetrics] = []
    if policy:
        terms.append(_policy_loss(recipe, logprob, old_logprob, micro, trust_region))
        terms.append(_regularisers(recipe, current, logprob, micro))
    if micro.targets is not None:
        terms.append(_value_loss(recipe, current, micro))
    loss = torch.stack([term for term, _ in terms]).sum()
    metrics = MetricAccumulator()
    for _, term_metrics in terms:
        metrics.fold(term_metrics)
    metrics.total(m.LOSS, loss)
    return loss, metrics


def _policy_loss(
    recipe: Recipe, logprob: Tensor, old_logprob: Tensor, micro: LossInputs, trust_region: float
) -> LossAndMetrics:
    metrics, level, mask = MetricAccumulator(), recipe.algorithm.level, micro.mask
    behaviour = torch.where(mask, micro.behaviour, 0.0)
    proximal = recipe.proximal(logprob, old_logprob, behaviour, micro.lag)
    importance_weights = micro.importance_weights
    if importance_weights is None:
        ratios = torch.where(mask, log_ratio(proximal, behaviour), 0.0)
        importance_weights = recipe.importance_weights(ratios, mask, micro.episode)
    settings, with_advantage_M = recipe.correction_settings, has_advantage(micro.advantages)
    if micro.old_logprob is None:
        policies = (old_logprob, proximal, behaviour)
        metrics.fold(
            staleness_metrics(
                *(settings, level, *policies, mask, importance_weights, micro.episode, micro.lag),
                with_advantage=with_advantage_M,
            )
        )
    terms = recipe.unit_loss(logprob, proximal, mask, micro.advantages)
    units = valid_units(mask, level)
    unit_weights = micro.unit_weights
    if importance_weights is not None:
        unit_weights = unit_weights * importance_weights
    beyond = torch.zeros_like(units)
    if trust_region:
        beyond = beyond_trust_region(logprob, behaviour, mask, micro.advantages, level, trust_region)
    loss = torch.where(units & ~beyond, unit_weights * terms.loss, 0.0).sum()
    metrics.total(m.POLICY_LOSS, loss)
    with_advantage = units & with_advantage_M[:, None, None]
    metrics.mean(m.CLIP_FRACTION, terms.clipped.float(), with_advantage)
    metrics.mean(m.DUAL_CLIPPED, terms.dual_clipped.float(), with_advantage)
    metrics.mean(m.CLIPPED_RATIO, terms.clipped_ratio, with_advantage)
    metrics.mean(m.OUTSIDE_TRUST_REGION, beyond.float(), with_advantage)
    metrics.mean(m.RATIO, log_ratio(logprob, proximal).exp(), mask & with_advantage_M[:, None, None])
    without_gradient = (beyond | terms.clipped | terms.dual_clipped).float()
    for lags, metric in zip(LAG_RANGES, m.CLIPPED_AT_LAG, strict=True):
        metrics.mean(metric, without_gradient, with_advantage & lags.holds(micro.lag)[:, None, None])
    return loss, metrics


def _regularisers(
    recipe: Recipe, current: EvaluateResult, logprob: Tensor, micro: LossInputs
) -> LossAndMetrics:
    metrics, settings, mask = MetricAccumulator(), recipe.algorithm, micro.mask
    with_advantage = mask & has_advantage(micro.advantages)[:, None, None]
    metrics.mean(m.ENTROPY_LOSS, current.entropy, with_advantage)
    loss = torch.zeros((), device=logprob.device)
    if settings.entropy_coef:
        entropy = torch.where(mask, micro.token_weights * current.entropy, 0.0).sum()
        loss = loss - settings.entropy_coef * entropy
    if micro.reference is not None:
        reachable = mask & torch.isfinite(micro.reference)
        reference = torch.where(reachable, micro.reference, logprob.detach())
        penalty = torch.where(reachable, kl_penalty(logprob, reference), 0.0)
        weights = torch.ones_like(penalty)
        if "behaviour" in recipe.needs:
            ratios = torch.where(mask, log_ratio(logprob, micro.behaviour), 0.0)
            weights = truncated_weights(ratios, cap=recipe.correction_settings.max_weight)
        metrics.mean(m.KL_REFERENCE, weights * penalty, reachable & with_advantage)
        loss = loss + settings.kl_coef * (micro.token_weights * weights * penalty).sum()
    return loss, metrics


def _value_loss(recipe: Recipe, current: EvaluateResult, micro: LossInputs) -> LossAndMetrics:
    assert current.value is not None
    assert micro.values is not None
    assert micro.targets is not None
    metrics, critic = MetricAccumulator(), recipe.critic
    losses, clipped = value_loss(
        current.value, micro.values, micro.targets, clip=critic.value_clip, huber=critic.huber
    )
    loss = (micro.value_weights * losses).sum()
    metrics.total(m.VALUE_LOSS, loss)
    metrics.mean(m.VALUE_CLIP_RATIO, clipped.float(), micro.value_weights > 0)
    return VALUE_LOSS_WEIGHT * loss, metrics


# --- metrics of the whole update ---


def advantage_metrics(batch: Batch, prepared: PreparedBatch, device: torch.device) -> MetricAccumulator:
    """Collect advantages over valid tokens, values and targets over valid decisions or steps."""
    metrics = MetricAccumulator()
    advantages, mask = moved(prepared.estimates.advantages, device), moved(batch.mask, device)
    metrics.mean(m.ADVANTAGES_MEAN, advantages, mask)
    metrics.largest(m.ADVANTAGES_MAX, advantages, mask)
    metrics.largest(m.ADVANTAGES_MIN, -advantages, mask)
    if prepared.values is None or prepared.estimates.targets is None:
        return metrics
    valid = moved(prepared.value_mask(batch), device)
    values, targets = moved(prepared.values, device), moved(prepared.estimates.targets, device)
    metrics.moments("target", targets, valid)
    metrics.moments("error", targets - values, valid)
    metrics.mean(m.VALUES_MEAN, values, valid)
    return metrics


def reads_kl_in_passes(recipe: Recipe) -> bool:
    """Return True if the last step's passes meet decisions that were evaluated before the first step."""
    settings = recipe.algorithm
    return settings.epochs > 1 or (settings.minibatches > 1 and recipe.needs_old_policy_pass)


def kl_to_old(old_logprob: Tensor, logprob: Tensor, mask: Tensor) -> MetricAccumulator:
    """Estimate KL(old || current) per valid token of ``[M, C, A]``, biased by the behaviour policy's lag."""
    metrics = MetricAccumulator()
    finite = mask & torch.isfinite(old_logprob) & torch.isfinite(logprob)
    ratio = log_ratio(torch.where(finite, logprob, 0.0), torch.where(finite, old_logprob, 0.0))
    metrics.mean(m.APPROX_KL, k3(ratio), finite)
    return metrics


def kl_after_step(batch: Batch, prepared: PreparedBatch, forward: PolicyForward) -> MetricAccumulator:
    """Compute `kl_to_old` in a small pass after the only step, on evenly spread decisions; collective."""
    evaluated = torch.nonzero(prepared.evaluated).flatten()
    if not float(forward.ranks.sum(torch.tensor([float(len(evaluated))]))):
        return MetricAccumulator()
    rows = forward.small_size or rows_for_kl(len(evaluated), forward.micro_batch)
    stride = max(1, -(-len(evaluated) // rows))
    rows_M = evaluated[::stride] if len(evaluated) else PADDING_ROW
    with torch.no_grad():
        logprob = forward.evaluate(batch, rows_M, small=True).logprob
    old_logprob = prepared.first_logprob[moved(rows_M, logprob.device)]
    return kl_to_old(old_logprob, logprob, moved(batch.mask[rows_M], logprob.device) & bool(len(evaluated)))


def rows_for_kl(evaluated: int, micro_batch: int) -> int:
    """Return how many of the evaluated decisions are evaluated again after the only step."""
    return min(micro_batch, max(KL_ROWS_MIN, evaluated // KL_ROWS_SHARE))


def finish_metrics(means: dict[Metric | str, float]) -> dict[Metric, float]:
    """Derive the metrics that are no means, and drop those of a skipped step, which are not finite."""
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
