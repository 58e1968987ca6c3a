"""Makes the optimizer steps on one batch.

    prepare_batch      old log-probs and values of the whole batch if they are needed; advantages, targets
    build_minibatch    whole episodes, and the weight of each unit of their decisions
    evaluate           a micro-batch by the current weights
    update_loss        objective, correction, critic's loss; its gradient is added up over micro-batches
    step               one clipped AdamW step per minibatch, or none if the gradient is not finite
    movement           KL to the policy before: read in the last step's passes, or after the only step

All learner ranks make the same calls in the same order; denominators are those of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.config.sections import OptimizerSettings
from asyncrl.devices.tensors import moved
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import k3
from asyncrl.learner.forward import ROW_IN_STEP, PolicyForward, Reference
from asyncrl.learner.fsdp import summed_gradient
from asyncrl.learner.losses import log_ratio
from asyncrl.learner.metrics import MetricAccumulator, effective_sample_size, variance
from asyncrl.learner.minibatches import MicroBatch, build_minibatch, episodes_before, split_minibatches
from asyncrl.learner.objective import update_loss
from asyncrl.learner.optimizer import ClippedOptimizer
from asyncrl.learner.prepare import PreparedBatch, prepare_batch
from asyncrl.learner.ranks import LearnerRanks, SingleRank
from asyncrl.learner.recipe import Recipe, build_recipe
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import Policy

MOVEMENT_SHARE: Final = 32
"""Of so many decisions one is evaluated again to see how far the policy moved: a pass costs about a third of
what learning from a decision does, so that the reading takes a hundredth of the update."""
FEWEST_ROWS: Final = 4
"""Decisions of that reading where a batch is small."""


def advantage_metrics(batch: Batch, prepared: PreparedBatch, device: torch.device) -> MetricAccumulator:
    """Collect advantages over valid tokens, values and targets over valid decisions or steps."""
    found = MetricAccumulator()
    advantages, mask = moved(prepared.estimates.advantages, device), moved(batch.mask, device)
    found.mean(m.ADVANTAGES_MEAN, advantages, mask)
    found.largest(m.ADVANTAGES_MAX, advantages, mask)
    found.largest(m.ADVANTAGES_MIN, -advantages, mask)
    if prepared.values is None or prepared.estimates.targets is None:
        return found
    valid = moved(prepared.value_mask(batch), device)
    values, targets = moved(prepared.values, device), moved(prepared.estimates.targets, device)
    found.moments("target", targets, valid)
    found.moments("error", targets - values, valid)
    found.mean(m.VALUES_MEAN, values, valid)
    return found


def reads_movement_in_passes(recipe: Recipe) -> bool:
    """Tell whether the last step's passes meet decisions that were evaluated before the first step.

    They do where there are several steps, unless the one epoch meets every decision for the first time.
    """
    chosen = recipe.algorithm
    return chosen.epochs > 1 or (chosen.minibatches > 1 and recipe.needs_old_policy_pass)


def movement(before: Tensor, after: Tensor, mask: Tensor) -> MetricAccumulator:
    """Measure KL(before || after) per valid token.

    The decisions were sampled by the behaviour policy, so the estimate has its lag's bias.

    Args:
        before: ``[M, C, A]`` float32 log-probs when the decisions were first evaluated, nats.
        mask: ``[M, C, A]`` bool.
    """
    found = MetricAccumulator()
    possible = mask & torch.isfinite(before) & torch.isfinite(after)
    moved = log_ratio(torch.where(possible, after, 0.0), torch.where(possible, before, 0.0))
    found.mean(m.APPROX_KL, k3(moved), possible)
    return found


def movement_afterwards(batch: Batch, prepared: PreparedBatch, forward: PolicyForward) -> MetricAccumulator:
    """Measure `movement` in a small pass of its own, after the last step; collective.

    For updates of one step: before it the movement is zero by definition, and no other pass comes after it.
    The decisions are spread evenly over those that were evaluated, as many as `rows_of_movement` says or,
    where passes are of fixed sizes, as fill a small one.
    """
    evaluated = torch.nonzero(prepared.evaluated).flatten()
    if not float(forward.ranks.sum(torch.tensor([float(len(evaluated))]))):
        return MetricAccumulator()
    most = forward.few or rows_of_movement(len(evaluated), forward.micro_batch)
    stride = max(1, -(-len(evaluated) // most))
    rows_M = evaluated[::stride] if len(evaluated) else ROW_IN_STEP
    with torch.no_grad():
        after = forward.evaluate(batch, rows_M, small=True).logprob
    before = prepared.first_logprob[moved(rows_M, after.device)]
    return movement(before, after, moved(batch.mask[rows_M], after.device) & bool(len(evaluated)))


def rows_of_movement(evaluated: int, most: int) -> int:
    """Say how many of so many decisions are evaluated again after the only step, `most` at most."""
    return min(most, max(FEWEST_ROWS, evaluated // MOVEMENT_SHARE))


def finish_metrics(means: dict[Metric | str, float]) -> dict[Metric, float]:
    """Derive what is no mean, and leave out what is not finite: a skipped step has metrics that are not."""
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
        """Build the optimizer over the policy's (already sharded) parameters.

        Args:
            trust_region: Bound of `corrections.beyond_trust_region`; 0: none.
            ranks: The learner ranks; None: this one alone.

        Raises:
            ConfigError: What the settings name is not there, or needs a critic that the policy does not have.
        """
        self.policy, self.seed, self.ranks = policy, seed, ranks or SingleRank()
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
        self.optimizer = self.stepper.optimizer
        self.device = self.stepper.device
        self.forward = PolicyForward(policy, self.ranks, self.device, micro_batch=algorithm.micro_batch)
        self.on_pass: Callable[[int, int], object] = lambda number, passes: None
        """Called after each micro-batch with a gradient: which one it is, from 1, and of about how many."""
        self._passes = 0
        self.decisions = 0
        """Decisions of this rank with a gradient in the last update, each once per epoch."""

    def __call__(self, batch: Batch, version: int = 0) -> dict[Metric, float]:
        """Make ``epochs * minibatches`` optimizer steps on the batch; collective.

        Decisions that can have no gradient (all tokens masked, or with grpo a group that scored all the same)
        are not evaluated, but stay in the denominator: the result is that of the whole batch.

        Raises:
            ConfigError: The batch lacks behaviour log-probs that the correction needs, or a class of the
                user's returned something else than its protocol says.
        """
        if isinstance(self.policy, nn.Module):
            self.policy.eval()  # Dropout would make current and behaviour log-probs differ without any lag.
        recipe, chosen, self.decisions, self._passes = self.recipe, self.recipe.algorithm, 0, 0
        recipe.check_batch(batch)
        self.stepper.set_version(version)
        prepared, metrics = prepare_batch(batch, recipe, self.forward)
        lengths = self.forward.prompt_lengths(batch.tasks)
        before, in_passes = episodes_before(len(batch.returns), self.ranks), reads_movement_in_passes(recipe)
        for epoch in range(chosen.epochs):
            seed = (self.seed, version, epoch)
            shares = split_minibatches(len(batch.returns), chosen.minibatches, seed, before=before)
            for number, episodes in enumerate(shares, start=epoch * chosen.minibatches + 1):
                minibatch = build_minibatch(
                    batch,
                    prepared,
                    episodes,
                    recipe,
                    self.ranks,
                    max_decisions=self.max_decisions,
                    prompt_lengths=lengths,
                )
                self.decisions += minibatch.decisions
                self.stepper.clear_gradient()
                last = number == chosen.epochs * chosen.minibatches
                for found in self._add_gradient(batch, prepared, minibatch, movement_read=last and in_passes):
                    metrics.fold(found)
                self.stepper.step()
            prepared.end_epoch()
        metrics.fold(advantage_metrics(batch, prepared, self.device))
        if not in_passes:
            metrics.fold(movement_afterwards(batch, prepared, self.forward))
        means = metrics.reduce(self.ranks, chosen.epochs * chosen.minibatches)
        return finish_metrics(means) | self.stepper.end_update()

    def _add_gradient(
        self, batch: Batch, prepared: PreparedBatch, minibatch: MicroBatch, *, movement_read: bool
    ) -> list[MetricAccumulator]:
        """Evaluate a minibatch in micro-batches; leave its gradient in ``.grad``, return their metrics."""
        recipe, learns = self.recipe, self.stepper.policy_learns
        steps = recipe.algorithm.epochs * recipe.algorithm.minibatches
        metrics: list[MetricAccumulator] = []
        # A difference of densities would say nothing.
        bound = self.trust_region if "tokens" in batch.sample else 0.0
        through = recipe.trains_critic and recipe.critic.through_policy and learns
        parts = self.forward.cut(minibatch.decisions)
        with summed_gradient(self.policy) as pass_is_last:
            for number, rows in enumerate(parts, start=1):
                micro = minibatch.part(rows)
                now = self.forward.evaluate(batch, micro.rows, through=through)
                if self.reference is not None:
                    reference = self.forward.reference(self.reference, batch, micro.rows)
                    micro = replace(micro, reference=reference)
                loss, found = update_loss(recipe, now, micro, policy=learns, trust_region=bound)
                if number == len(parts):
                    pass_is_last()
                (loss * self.ranks.size).backward()  # Sharded gradients are averaged over the ranks.
                metrics.append(found)
                self._passes += 1
                self.on_pass(self._passes, max(self._passes, steps * len(parts)))
                if movement_read:
                    first, known = prepared.first_seen(micro.rows)
                    metrics.append(movement(first, now.logprob.detach(), micro.mask & known))
                if rows is not None:
                    prepared.record_first_logprob(micro.rows, now.logprob)
                process_status.progress()
        return metrics
