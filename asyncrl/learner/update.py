"""Makes the optimizer steps on one batch.

    prepare_batch      old log-probs and values of the whole batch if they are needed; advantages, targets
    build_minibatch    whole episodes, and what each unit of their decisions counts
    evaluate           a micro-batch by the current weights
    update_loss        objective, correction, critic's loss; its gradient is added up over micro-batches
    step               one clipped AdamW step per minibatch, or none if the gradient is not finite
    movement           how far the policy moved: read in the last step's passes, or after the only step

All learner ranks make the same calls in the same order; denominators are those of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from asyncrl.config.algorithm import (
    AlgorithmSettings,
    CorrectionSettings,
    CriticSettings,
    OptimizerSettings,
)
from asyncrl.learner.accumulator import MetricAccumulator
from asyncrl.learner.batches import Batch
from asyncrl.learner.forward import PolicyForward
from asyncrl.learner.fsdp import summed_gradient
from asyncrl.learner.minibatches import MicroBatch, build_minibatch, episodes_before, split_minibatches
from asyncrl.learner.objective import update_loss
from asyncrl.learner.optimizer import ClippedOptimizer
from asyncrl.learner.prepare import PreparedBatch, prepare_batch
from asyncrl.learner.ranks import LearnerRanks, SingleRank
from asyncrl.learner.recipe import build_recipe
from asyncrl.learner.reference import Reference
from asyncrl.learner.update_metrics import (
    advantage_metrics,
    finish_metrics,
    movement,
    movement_afterwards,
    reads_movement_in_passes,
)
from asyncrl.observability import process_status
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import Policy


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
