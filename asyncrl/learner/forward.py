"""Rows of a batch in, what the policy says about them out. Knows nothing of losses.

Dimension letters used in this file:
    D  decisions of the batch      B  its episodes      M  rows of a micro-batch
    C  steps per decision (8)      A  action dimensions (7)      V  values of a decision
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from asyncrl.learner.batches import Batch
from asyncrl.learner.minibatches import micro_batches
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.reference import Reference
from asyncrl.policies.interface import EvaluateResult, HasCritic, Policy, SamplingParams


class PolicyForward:
    """Forward passes of the policy, in micro-batches and in step with the other ranks."""

    def __init__(
        self, policy: Policy, group: LearnerRanks, device: torch.device, *, micro_batch: int
    ) -> None:
        self.policy, self.group, self.device, self.micro_batch = policy, group, device, micro_batch

    def evaluate(self, batch: Batch, rows_M: Tensor, *, through: bool = False) -> EvaluateResult:
        """Log-probs, entropies and values in float32 under the distribution that was sampled.

        Args:
            batch: Where the decisions are.
            rows_M: Which.
            through: Let the gradient of the values reach the policy's trunk.
        """
        result = self.policy.evaluate(*self._arguments(batch, rows_M), critic_through_policy=through)
        value = None if result.value is None else result.value.float()
        return EvaluateResult(logprob=result.logprob.float(), entropy=result.entropy.float(), value=value)

    def reference(self, reference: Reference, batch: Batch, rows_M: Tensor) -> Tensor:
        """``[M, C, A]`` log-probs of the reference policy."""
        return reference.logprob(*self._arguments(batch, rows_M)).float()

    @torch.no_grad()
    def evaluate_all(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Log-probs ``[D, C, A]`` and, with a critic, values ``[D, V]`` of every decision."""
        logprobs, values = [], []
        for place in micro_batches(len(batch.tasks), self.micro_batch, self.group):
            result = self.evaluate(batch, rows_of(place))
            if place is not None:
                logprobs.append(result.logprob)
                values += [] if result.value is None else [result.value]
        return torch.cat(logprobs), torch.cat(values) if values else None

    @torch.no_grad()
    def final_values(self, batch: Batch) -> Tensor:
        """``[B]`` value of every final observation: what the episode could still have got."""
        tasks = dict(zip(batch.episode.tolist(), batch.tasks, strict=True))
        values = []
        for place in micro_batches(len(batch.returns), self.micro_batch, self.group):
            rows_M = rows_of(place)
            frames = batch.final_frames[rows_M.numpy()]
            inputs = self.policy.preprocess(frames, [tasks[row] for row in rows_M.tolist()])
            value = cast("HasCritic", self.policy).values(inputs)[:, 0].float()
            values += [] if place is None else [value]
        return torch.cat(values)

    def _arguments(self, batch: Batch, rows_M: Tensor) -> tuple[Any, dict[str, Tensor], SamplingParams]:
        inputs = self.policy.preprocess(
            batch.frames[rows_M.numpy()], [batch.tasks[row] for row in rows_M.tolist()]
        )
        sampling = SamplingParams(temperature=batch.temperature, top_k=batch.top_k)
        return (
            inputs,
            {name: values[rows_M].to(self.device) for name, values in batch.sample.items()},
            sampling,
        )


def rows_of(place: slice | None) -> Tensor:
    """Row numbers of a micro-batch; of the first row when this rank only keeps in step."""
    return torch.zeros(1, dtype=torch.int64) if place is None else torch.arange(place.start, place.stop)
