"""A batch in, optimizer steps on the policy's parameters out.

    before the steps   log-probs and values of the whole batch, where the recipe needs them    `prepared`
                       advantages and targets                                                  `estimation`
    per epoch          episodes dealt out to minibatches; per minibatch the gradient in
                       micro-batches, then one clipped AdamW step, or none if it is not finite

All learner ranks make the same calls in the same order; denominators are those of all ranks.

Dimension letters used in this file:
    K  decisions of a minibatch      M  decisions of a micro-batch
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asyncrl.config.run import TrainConfig
from asyncrl.learner.accumulator import MetricAccumulator
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import check_needs
from asyncrl.learner.forward import PolicyForward
from asyncrl.learner.levels import valid_units
from asyncrl.learner.losses import aggregation_weights
from asyncrl.learner.minibatches import Minibatch, micro_batches, split_minibatches
from asyncrl.learner.objective import MicroBatch, Objective
from asyncrl.learner.optimizer import ClippedOptimizer
from asyncrl.learner.prepare import PreparedBatch, prepare_batch
from asyncrl.learner.ranks import LearnerRanks, SingleRank
from asyncrl.learner.reference import Reference
from asyncrl.learner.update_metrics import advantage_metrics, approx_kl_metric, readings
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import Policy
from asyncrl.records import ACTION_DIM, CHUNK

UNITS = {"token": CHUNK * ACTION_DIM, "action": CHUNK, "chunk": 1}
"""Units of a decision."""


class Update:
    """Learns from one batch at a time. Owns the optimizer; the policy is updated in place."""

    def __init__(
        self,
        policy: Policy,
        config: TrainConfig,
        *,
        group: LearnerRanks | None = None,
        reference: Reference | None = None,
    ) -> None:
        """Build the optimizer over the policy's (already sharded) parameters.

        Args:
            policy: With a value head when the algorithm is ppo.
            config: Algorithm, correction, critic, optimizer.
            group: The learner ranks; None: this one alone.
            reference: Policy that the KL penalty is about; needed when its coefficient is not 0.

        Raises:
            ConfigError: The correction needs a critic that the policy does not have.
        """
        self.policy, self.config, self.group = policy, config, group or SingleRank()
        self.reference = reference if config.algorithm.kl_coef else None
        assert self.reference is not None or not config.algorithm.kl_coef, "a KL penalty needs a reference"
        self.critic = config.algorithm.kind == "ppo"
        check_needs(config.correction, critic=self.critic, behaviour=True)
        self.objective = Objective(config)
        self.steps = ClippedOptimizer(policy, config)
        self.optimizer = self.steps.optimizer
        self.device = self.steps.device
        self.forward = PolicyForward(
            policy, self.group, self.device, micro_batch=config.algorithm.micro_batch
        )

    def __call__(self, batch: Batch, version: int = 0) -> dict[Metric, float]:
        """Make ``epochs * minibatches`` optimizer steps on the batch.

        Decisions that can have no gradient (all tokens masked, or with grpo a group that scored all the same)
        are not evaluated, but stay in the denominator: the result is that of the whole batch.

        Args:
            batch: This rank's part.
            version: Learner's policy version: decides learning rates, warm-up and how minibatches are dealt.

        Raises:
            ConfigError: The batch lacks behaviour log-probs that the correction needs.
        """
        if isinstance(self.policy, nn.Module):
            self.policy.eval()  # Dropout would make current and behaviour log-probs differ without any lag.
        known = bool(batch.logprob_behaviour.isfinite().all())
        check_needs(self.config.correction, critic=self.critic, behaviour=known)
        self.steps.set_version(version)
        accumulator, chosen = MetricAccumulator(self.device), self.config.algorithm
        prepared = prepare_batch(batch, self.config, self.forward, self.objective, accumulator)
        for epoch in range(chosen.epochs):
            seed = (self.config.seed, version, epoch)
            for episodes in split_minibatches(len(batch.returns), chosen.minibatches, seed):
                self._accumulate(batch, prepared, self._share(batch, prepared, episodes), accumulator)
                self.steps.step(accumulator)
            prepared.old_logprob = (
                prepared.first_logprob if prepared.old_logprob is None else prepared.old_logprob
            )
        advantage_metrics(batch, prepared, accumulator, self.device)
        approx_kl_metric(batch, prepared, self.forward, accumulator)
        return readings(accumulator.readings(self.group)) | self.steps.readings()

    def _share(self, batch: Batch, prepared: PreparedBatch, episodes: Tensor) -> Minibatch:
        """Rows and counts of a minibatch; the counts' denominators are those of all ranks."""
        chosen = self.config.algorithm
        rows_K = torch.nonzero(torch.isin(batch.episode, episodes)).flatten()
        mask, episode = batch.mask[rows_K], batch.episode[rows_K]
        units, values = valid_units(mask, chosen.level), prepared.value_mask(batch)[rows_K]
        sums = torch.tensor([units.sum(), mask.sum(), len(episodes), values.sum()], dtype=torch.float64)
        n_units, n_tokens, n_episodes, n_values = self.group.sum(sums).tolist()
        longest = self.config.actor.max_decisions

        def counts(of: Tensor, number: float, each: int) -> Tensor:
            return aggregation_weights(
                of, episode, chosen.aggregation, units=number, episodes=n_episodes, longest=longest * each
            )

        teaches = mask.flatten(1).any(dim=1)
        if not (self.critic or chosen.entropy_coef or chosen.kl_coef):
            teaches &= (prepared.estimates.advantages[rows_K] != 0).flatten(1).any(dim=1)
        return Minibatch(
            rows=rows_K[teaches],
            counts=counts(units, n_units, UNITS[chosen.level])[teaches],
            token_counts=counts(mask, n_tokens, UNITS["token"])[teaches],
            value_counts=(values.float() / max(n_values, 1.0))[teaches],
        )

    def _accumulate(
        self, batch: Batch, prepared: PreparedBatch, share: Minibatch, accumulator: MetricAccumulator
    ) -> None:
        """Leave the gradient of a minibatch in ``.grad``."""
        self.steps.clear_gradient()
        through = self.critic and self.config.critic.through_policy and self.steps.policy_learns
        for decision_index in micro_batches(len(share.rows), self.config.algorithm.micro_batch, self.group):
            part = share.part(decision_index)
            result = self.forward.evaluate(batch, part.rows, through=through)
            micro = self._micro_batch(batch, prepared, part)
            loss = self.objective(result, micro, accumulator, policy=self.steps.policy_learns)
            (loss * self.group.size).backward()  # Sharded gradients are averaged over the ranks.
            if part.real:
                prepared.record_old_logprob(part.rows, result.logprob)

    def _micro_batch(self, batch: Batch, prepared: PreparedBatch, part: Minibatch) -> MicroBatch:
        def of(values: Tensor) -> Tensor:
            return values[part.rows.to(values.device)].to(self.device)

        def if_any(values: Tensor | None) -> Tensor | None:
            return None if values is None else of(values)

        reference = self.reference
        return MicroBatch(
            mask=of(batch.mask) & part.real,
            behaviour=of(batch.logprob_behaviour),
            old_logprob=if_any(prepared.old_logprob),
            weights=if_any(prepared.weights),
            lag=of(batch.lag),
            episode=of(batch.episode),
            advantages=of(prepared.estimates.advantages),
            counts=part.counts.to(self.device),
            token_counts=part.token_counts.to(self.device),
            reference=self.forward.reference(reference, batch, part.rows) if reference else None,
            values=if_any(prepared.values),
            targets=if_any(prepared.estimates.targets),
            value_counts=part.value_counts.to(self.device),
        )
