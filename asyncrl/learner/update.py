"""A batch in, optimizer steps on the policy's parameters out.

    before the steps   log-probs and values of the whole batch, where the recipe needs them    `_look`
                       advantages and targets                                                  `estimation`
    per epoch          episodes dealt out to minibatches; per minibatch the gradient in
                       micro-batches, then one clipped AdamW step, or none if it is not finite

All learner ranks make the same calls in the same order; denominators are those of all ranks.

Dimension letters used in this file:
    D  decisions of the batch      K  decisions of a minibatch      M  decisions of a micro-batch
    C  steps per decision (8)      A  action dimensions (7)         V  values of a decision
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asyncrl import metrics as m
from asyncrl.config import TrainConfig
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import WEIGHTED, check_needs, k3, log_ratio, whole_episodes
from asyncrl.learner.estimation import Opinion, Teaching, critic_teaching, relative_teaching
from asyncrl.learner.group import Alone, LearnerGroup
from asyncrl.learner.levels import valid_units
from asyncrl.learner.losses import aggregation_weights
from asyncrl.learner.minibatches import Share, deal_episodes, micro_batches
from asyncrl.learner.objective import MicroBatch, Objective
from asyncrl.learner.reference import Reference
from asyncrl.learner.steps import Steps
from asyncrl.learner.tally import Tally, effective_sample_size, variance
from asyncrl.metrics import Metric
from asyncrl.policies.protocol import EvaluateResult, Policy, PolicyInputs, SamplingParams
from asyncrl.records import ACTION_DIM, CHUNK


@dataclass(kw_only=True)
class _Before:
    """What was known before the first step."""

    teaching: Teaching
    start: Tensor | None
    """``[D, C, A]`` float32 log-probs on the policy's device; None: the first pass finds them."""
    weights: Tensor | None = None
    """``[D, U, V]`` importance weights; None: computed per micro-batch."""
    values: Tensor | None
    """``[D, V]`` float32, on the CPU; None without a critic."""
    first: Tensor
    """``[D, C, A]`` float32 log-probs when a decision was first evaluated in this update."""
    seen: Tensor
    """``[D]`` bool, on the CPU: which decisions were evaluated."""


class Update:
    """Learns from one batch at a time. Owns the optimizer; the policy is updated in place."""

    def __init__(
        self,
        policy: Policy,
        config: TrainConfig,
        *,
        group: LearnerGroup | None = None,
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
        self.policy, self.config, self.group = policy, config, group or Alone()
        self.reference = reference if config.algorithm.kl_coef else None
        assert self.reference is not None or not config.algorithm.kl_coef, "a KL penalty needs a reference"
        self.critic = config.algorithm.kind == "ppo"
        check_needs(config.correction, critic=self.critic, behaviour=True)
        self.objective = Objective(config)
        self.steps = Steps(policy, config)
        self.optimizer = self.steps.optimizer
        self.device = self.steps.device

    def __call__(self, batch: Batch, version: int = 0) -> dict[Metric, float]:
        """Make ``epochs * minibatches`` optimizer steps on the batch.

        Decisions that can have no gradient (all tokens masked, or with grpo a group that scored all the same)
        are not evaluated, but stay in the denominator: the result is that of the whole batch.

        Args:
            batch: This rank's part.
            version: Learner's policy version: decides learning rates, warm-up and how minibatches are dealt.

        Raises:
            RunError: The gradient was not finite `max_bad_updates` times in a row.
        """
        if isinstance(self.policy, nn.Module):
            self.policy.eval()  # Dropout would make current and behaviour log-probs differ without any lag.
        known = bool(batch.logprob_behaviour.isfinite().all())
        check_needs(self.config.correction, critic=self.critic, behaviour=known)
        tally = Tally(self.device)
        self.steps.set_version(version)
        before = self._look(batch, tally)
        chosen = self.config.algorithm
        seed = (self.config.seed, version)
        for epoch in range(chosen.epochs):
            for episodes in deal_episodes(len(batch.returns), chosen.minibatches, (*seed, epoch)):
                self._accumulate(batch, before, self._share(batch, before, episodes), tally)
                self.steps.step(tally)
        self._read_teaching(batch, before, tally)
        self._read_move(batch, before, tally)
        return self._readings(tally)

    # --- before the first step ---

    def _look(self, batch: Batch, tally: Tally) -> _Before:
        """Evaluate the batch where later stages need it as it was, then decide what it teaches."""
        chosen, correction = self.config.algorithm, self.config.correction
        several = chosen.epochs * chosen.minibatches > 1
        anchored = correction.kind in ("none", "vtrace") or (
            correction.kind in WEIGHTED and correction.proximal == "recomputed"
        )
        # With a single step the policy of the first pass is the one before the update: no pass of its own.
        if not (self.critic or whole_episodes(correction) or (several and anchored)):
            return _Before(
                teaching=relative_teaching(batch, self.config, self.group),
                start=None,
                values=None,
                first=torch.zeros(batch.mask.shape, device=self.device),
                seen=torch.zeros(len(batch.tasks), dtype=torch.bool),
            )
        start, values = self._evaluate_all(batch)
        if self.critic:
            assert values is not None
            opinion = Opinion(values, self._final_values(batch))
            teaching = critic_teaching(batch, opinion, start.cpu(), self.config, self.group)
        else:
            teaching = relative_teaching(batch, self.config, self.group)
        seen = torch.ones(len(batch.tasks), dtype=torch.bool)
        before = _Before(teaching=teaching, start=start, values=values, first=start, seen=seen)
        return self._with_weights(batch, before, tally)

    def _with_weights(self, batch: Batch, before: _Before, tally: Tally) -> _Before:
        """Importance weights of the whole batch, and how stale it is."""
        assert before.start is not None
        behaviour, episode = batch.logprob_behaviour.to(self.device), batch.episode.to(self.device)
        mask = batch.mask.to(self.device) & ~torch.isneginf(before.start)
        start, behaviour = (torch.where(mask, x, 0.0) for x in (before.start, behaviour))
        proximal = self.objective.proximal(start, start, behaviour, batch.lag.to(self.device))
        weights = self.objective.weights(proximal, behaviour, mask, episode)
        self.objective.read_staleness(start, behaviour, mask, weights, episode, tally)
        if self.config.correction.proximal == "recomputed":
            before.weights = weights
        return before

    def _evaluate_all(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Log-probs ``[D, C, A]`` and values ``[D, V]`` of every decision, without gradient."""
        logprobs, values = [], []
        with torch.no_grad():
            for place in micro_batches(len(batch.tasks), self.config.algorithm.micro_batch, self.group):
                result = self._evaluate(batch, _rows(place))
                if place is not None:
                    logprobs.append(result.logprob)
                    values.append(result.value)
        return torch.cat(logprobs), torch.cat(values).cpu() if self.critic else None

    def _final_values(self, batch: Batch) -> Tensor:
        """Value ``[B]`` of every final observation: what the episode could still have got."""
        tasks = dict(zip(batch.episode.tolist(), batch.tasks, strict=True))
        values = []
        with torch.no_grad():
            for place in micro_batches(len(batch.returns), self.config.algorithm.micro_batch, self.group):
                rows_M = _rows(place)
                frames = batch.final_frames[rows_M.numpy()]
                value = self.policy.values(
                    self.policy.preprocess(frames, [tasks[row] for row in rows_M.tolist()])
                )
                if place is not None:
                    values.append(value[:, 0].float().cpu())
        return torch.cat(values)

    # --- one optimizer step ---

    def _share(self, batch: Batch, before: _Before, episodes: Tensor) -> Share:
        """Rows and counts of a minibatch; the counts' denominators are those of all ranks."""
        chosen = self.config.algorithm
        rows_K = torch.nonzero(torch.isin(batch.episode, episodes)).flatten()
        mask, episode = batch.mask[rows_K], batch.episode[rows_K]
        units, values = valid_units(mask, chosen.level), self._value_mask(batch, before)[rows_K]
        sums = torch.tensor([units.sum(), mask.sum(), len(episodes), values.sum()], dtype=torch.float64)
        n_units, n_tokens, n_episodes, n_values = self.group.sum(sums).tolist()
        per_decision = {"token": CHUNK * ACTION_DIM, "action": CHUNK, "chunk": 1}
        longest = self.config.actor.max_decisions

        def counts(of: Tensor, number: float, each: int) -> Tensor:
            return aggregation_weights(
                of, episode, chosen.aggregation, units=number, episodes=n_episodes, longest=longest * each
            )

        teaches = mask.flatten(1).any(dim=1)
        if not (self.critic or chosen.entropy_coef or chosen.kl_coef):
            teaches &= (before.teaching.advantages[rows_K] != 0).flatten(1).any(dim=1)
        return Share(
            rows=rows_K[teaches],
            counts=counts(units, n_units, per_decision[chosen.level])[teaches],
            token_counts=counts(mask, n_tokens, CHUNK * ACTION_DIM)[teaches],
            value_counts=(values.float() / max(n_values, 1.0))[teaches],
        )

    def _accumulate(self, batch: Batch, before: _Before, share: Share, tally: Tally) -> None:
        """Leave the gradient of a minibatch in ``.grad``."""
        self.steps.clear_gradient()
        for place in micro_batches(len(share.rows), self.config.algorithm.micro_batch, self.group):
            part = share.part(place)
            result = self._evaluate(batch, part.rows)
            micro = self._micro_batch(batch, before, part)
            loss = self.objective(result, micro, tally, policy=self.steps.policy_learns)
            (loss * self.group.size).backward()  # Sharded gradients are averaged over the ranks.
            if part.real and not before.seen[part.rows].all():
                before.first[part.rows.to(self.device)] = result.logprob.detach()
                before.seen[part.rows] = True

    def _micro_batch(self, batch: Batch, before: _Before, part: Share) -> MicroBatch:
        rows_M = part.rows

        def of(values: Tensor) -> Tensor:
            return values[rows_M.to(values.device)].to(self.device)

        def if_any(values: Tensor | None) -> Tensor | None:
            return None if values is None else of(values)

        return MicroBatch(
            mask=of(batch.mask) & part.real,
            behaviour=of(batch.logprob_behaviour),
            start=if_any(before.start),
            weights=if_any(before.weights),
            lag=of(batch.lag),
            episode=of(batch.episode),
            advantages=of(before.teaching.advantages),
            counts=part.counts.to(self.device),
            token_counts=part.token_counts.to(self.device),
            reference=self._reference_logprob(batch, rows_M),
            values=if_any(before.values),
            targets=if_any(before.teaching.targets),
            value_counts=part.value_counts.to(self.device),
        )

    def _reference_logprob(self, batch: Batch, rows_M: Tensor) -> Tensor | None:
        if self.reference is None:
            return None
        return self.reference.logprob(*self._arguments(batch, rows_M))

    def _value_mask(self, batch: Batch, before: _Before) -> Tensor:
        """``[D, V]`` bool: which values are of a valid place; ``[D, 1]`` without a critic."""
        steps_DC = batch.mask.any(dim=2)
        wide = before.values is not None and before.values.shape[1] > 1
        return steps_DC if wide else steps_DC.any(dim=1, keepdim=True)

    # --- evaluation and readings ---

    def _arguments(self, batch: Batch, rows_M: Tensor) -> tuple[PolicyInputs, Tensor, SamplingParams]:
        inputs = self.policy.preprocess(
            batch.frames[rows_M.numpy()], [batch.tasks[row] for row in rows_M.tolist()]
        )
        sampling = SamplingParams(temperature=batch.temperature, top_k=batch.top_k)
        return inputs, batch.tokens[rows_M].to(self.device), sampling

    def _evaluate(self, batch: Batch, rows_M: Tensor) -> EvaluateResult:
        """Log-probs, entropies and values in float32 under the distribution that was sampled."""
        through = self.critic and self.config.critic.through_policy and self.steps.policy_learns
        result = self.policy.evaluate(*self._arguments(batch, rows_M), critic_through_policy=through)
        value = None if result.value is None else result.value.float()
        return EvaluateResult(logprob=result.logprob.float(), entropy=result.entropy.float(), value=value)

    def _read_teaching(self, batch: Batch, before: _Before, tally: Tally) -> None:
        """Advantages over valid tokens; values and targets over valid places."""
        advantages, mask = before.teaching.advantages.to(self.device), batch.mask.to(self.device)
        tally.mean(m.ADVANTAGES_MEAN, advantages, mask)
        tally.largest(m.ADVANTAGES_MAX, advantages, mask)
        tally.largest(m.ADVANTAGES_MIN, -advantages, mask)
        if before.values is None or before.teaching.targets is None:
            return
        valid = self._value_mask(batch, before).to(self.device)
        values, targets = before.values.to(self.device), before.teaching.targets.to(self.device)
        tally.moments("target", targets, valid)
        tally.moments("error", targets - values, valid)
        tally.mean(m.VALUES_MEAN, values, valid)

    def _read_move(self, batch: Batch, before: _Before, tally: Tally) -> None:
        """KL(before || after) per valid token, from at most one micro-batch of decisions.

        Measured afterwards because before the first step it is zero by definition. The decisions are spread
        evenly over the batch. They were sampled by the behaviour policy, so the estimate has its lag's bias.
        """
        seen_K = torch.nonzero(before.seen).flatten()
        if not float(self.group.sum(torch.tensor([float(len(seen_K))]))):
            return
        stride = max(1, -(-len(seen_K) // self.config.algorithm.micro_batch))
        rows_M = seen_K[::stride] if len(seen_K) else _rows(None)
        with torch.no_grad():
            after = self._evaluate(batch, rows_M).logprob
        first = before.first[rows_M.to(self.device)]
        drawable = batch.mask[rows_M].to(self.device) & torch.isfinite(first) & torch.isfinite(after)
        moved = log_ratio(torch.where(drawable, after, 0.0), torch.where(drawable, first, 0.0))
        tally.mean(m.APPROX_KL, k3(moved), drawable & bool(len(seen_K)))

    def _readings(self, tally: Tally) -> dict[Metric, float]:
        """Fold micro-batches and ranks; what is not finite is left out."""
        found = tally.readings(self.group)
        result = {name: value for name, value in found.items() if isinstance(name, Metric)}
        if m.ADVANTAGES_MIN in result:
            result[m.ADVANTAGES_MIN] = -result[m.ADVANTAGES_MIN]
        if "ratio" in found:
            result[m.ESS] = effective_sample_size(found, "ratio")
        if "weight" in found:
            result[m.IMPORTANCE_ESS] = effective_sample_size(found, "weight")
        if "target" in found:
            spread = variance(found, "target")
            result[m.RETURNS_MEAN] = found["target"]
            result[m.EXPLAINED_VARIANCE] = 1 - variance(found, "error") / spread if spread > 0 else math.nan
        result |= self.steps.readings()
        return {name: value for name, value in result.items() if math.isfinite(value)}


def _rows(place: slice | None) -> Tensor:
    """Row numbers of a micro-batch; of the first row when this rank only keeps in step."""
    return torch.zeros(1, dtype=torch.int64) if place is None else torch.arange(place.start, place.stop)
