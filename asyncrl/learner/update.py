"""A batch in, one optimizer step (or a few) on the policy's parameters out.

Each epoch: loss and gradient of the whole batch in micro-batches, then one clipped AdamW step. The proximal
policy is the one before the first step, so the first epoch's own log-probs are the proximal ones.

Dimension letters used in this file:
    K  decisions with a signal     M  decisions of a micro-batch
    C  steps per decision (8)      A  action dimensions (7)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncrl import metrics as m
from asyncrl.config import AlgorithmSettings
from asyncrl.errors import RunError
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import importance_stats, importance_weights, k3, log_ratio, masked_mean
from asyncrl.learner.losses import clipped_policy_loss
from asyncrl.metrics import Metric
from asyncrl.policies.protocol import Policy, SamplingParams

_log = logging.getLogger(__name__)


class _Gradient(NamedTuple):
    """What one pass over the batch left besides the gradient."""

    proximal_KCA: Tensor
    """Log-probs of the proximal policy, detached."""
    sums: dict[Metric, Tensor]
    """Readings, summed over micro-batches."""


def _finite(readings: Mapping[Metric, Tensor | float]) -> dict[Metric, float]:
    """Readings that can be logged; a skipped update has others."""
    return {name: float(value) for name, value in readings.items() if math.isfinite(value)}


class Update:
    """Learns from one batch at a time. Owns the optimizer; the policy is updated in place."""

    def __init__(self, policy: Policy, settings: AlgorithmSettings) -> None:
        """Build AdamW over the policy's parameter groups."""
        self.policy = policy
        self.settings = settings
        self.optimizer = torch.optim.AdamW(
            policy.param_groups(settings.learning_rate, settings.learning_rate),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        self.parameters: list[Tensor] = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        self.bad_updates = 0
        """Steps skipped so far because their gradient was not finite."""
        self.bad_in_a_row = 0

    def __call__(self, batch: Batch) -> dict[Metric, float]:
        """Make `epochs` optimizer steps on the batch.

        Decisions whose tokens are all masked, or whose group scored all the same, have an exactly zero
        gradient. They are not evaluated, but stay in the denominator: the result is that of the whole batch.

        Raises:
            RunError: The gradient was not finite `max_bad_updates` times in a row.
        """
        if isinstance(self.policy, nn.Module):
            self.policy.eval()  # Dropout would make current and behaviour log-probs differ without any lag.
        rows_K = batch.with_signal
        # No step was made before the end of the first epoch, so a separate pass for the proximal log-probs
        # would repeat the same numbers. In that epoch the ratio is exactly 1 and never clipped, and the
        # gradient of the decoupled objective is the importance-weighted policy gradient: w A grad log pi.
        proximal_KCA: Tensor | None = None
        readings = []
        for _ in range(self.settings.epochs):
            proximal_KCA, sums = self._accumulate(batch, rows_K, proximal_KCA)
            readings.append(_finite(sums) | self._step())
        result = m.reduce(readings)
        if len(rows_K):
            assert proximal_KCA is not None  # There is at least one epoch.
            result |= self._staleness(batch, rows_K, proximal_KCA)
            result[m.APPROX_KL] = self._moved(batch, rows_K, proximal_KCA)
        result |= {m.LEARNING_RATE: self.settings.learning_rate, m.BAD_UPDATES: float(self.bad_updates)}
        return _finite(result)

    def _accumulate(self, batch: Batch, rows_K: Tensor, proximal_KCA: Tensor | None) -> _Gradient:
        """Leave the batch's gradient in ``.grad``; absent proximal log-probs are the current ones."""
        for parameter in self.parameters:
            # Never None: AdamW steps over None, and a batch without signal must still decay the momentum.
            parameter.grad = torch.zeros_like(parameter)
        denominator = batch.valid_tokens
        evaluated = batch.mask[rows_K].sum().clamp(min=1).to(self.device)
        sums = dict.fromkeys((m.LOSS, m.POLICY_LOSS, m.CLIP_FRACTION), torch.zeros((), device=self.device))
        collected = [torch.empty(0, *batch.mask.shape[1:], device=self.device)]
        for place, rows_M in self._micro_batches(rows_K):
            mask = batch.mask[rows_M].to(self.device)
            logprob, entropy = self._evaluate(batch, rows_M)
            proximal = logprob.detach() if proximal_KCA is None else proximal_KCA[place]
            loss = clipped_policy_loss(
                logprob,
                proximal,
                batch.advantages[rows_M].to(self.device)[:, None, None],
                self._weights(batch, rows_M, proximal),
                mask,
                clip_low=self.settings.clip_low,
                clip_high=self.settings.clip_high,
                denominator=denominator,
            )
            loss.loss.backward()
            collected.append(proximal)
            reading = {
                m.LOSS: loss.loss.detach(),
                m.POLICY_LOSS: loss.loss.detach(),
                m.CLIP_FRACTION: loss.clip_fraction,
                m.CLIPPED_RATIO: loss.clipped_ratio * denominator / evaluated,
                m.ENTROPY_LOSS: torch.where(mask, entropy.detach(), 0.0).sum() / evaluated,
            }
            sums = {name: sums.get(name, 0.0) + value for name, value in reading.items()}
        return _Gradient(torch.cat(collected), sums)

    def _step(self) -> dict[Metric, float]:
        """Clip the gradient and step, or skip and count a gradient that is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_grad))
        if math.isfinite(norm):
            self.optimizer.step()
            self.bad_in_a_row = 0
            return {m.GRAD_NORM: norm}
        self.bad_updates += 1
        self.bad_in_a_row += 1
        _log.warning("update skipped: the gradient is not finite (%d in a row)", self.bad_in_a_row)
        if self.bad_in_a_row >= self.settings.max_bad_updates:
            raise RunError(
                f"The gradient was not finite in {self.bad_in_a_row} updates in a row "
                "(--algorithm.max-bad-updates): the run cannot recover by itself. Continue from the newest "
                "checkpoint with --resume and a lower --algorithm.learning-rate (it is "
                f"{self.settings.learning_rate}) or --algorithm.clip-grad (it is {self.settings.clip_grad})."
            )
        return {}

    def _weights(self, batch: Batch, rows_M: Tensor, proximal: Tensor) -> Tensor:
        behaviour = batch.logprob_behaviour[rows_M].to(self.device)
        return importance_weights(self.settings.correction, proximal, behaviour, self.settings.correction_cap)

    def _staleness(self, batch: Batch, rows_K: Tensor, proximal_KCA: Tensor) -> dict[Metric, float]:
        """Compare behaviour and proximal policy over the evaluated decisions."""
        stats = importance_stats(
            self._weights(batch, rows_K, proximal_KCA),
            proximal_KCA,
            batch.logprob_behaviour[rows_K].to(self.device),
            batch.mask[rows_K].to(self.device),
            self.settings.correction_cap if self.settings.correction == "tis" else math.inf,
        )
        return {
            m.IMPORTANCE_MEAN: float(stats.mean),
            m.IMPORTANCE_MAX: float(stats.largest),
            m.IMPORTANCE_CAPPED: float(stats.capped),
            m.ESS: float(stats.effective_sample_size),
            m.MISMATCH_KL: float(stats.mismatch_kl),
        }

    def _moved(self, batch: Batch, rows_K: Tensor, proximal_KCA: Tensor) -> float:
        """KL(proximal || new) per valid token after the last step, from at most one micro-batch of decisions.

        Measured afterwards because before the first step it is zero by definition. The decisions are spread
        evenly over the batch. They were sampled by the behaviour policy, so the estimate has its lag's bias.
        """
        stride = -(-len(rows_K) // self.settings.micro_batch)
        rows_M = rows_K[::stride]
        with torch.no_grad():
            new, _ = self._evaluate(batch, rows_M)
        moved = k3(log_ratio(new, proximal_KCA[::stride]))
        drawable = torch.isfinite(proximal_KCA[::stride])
        return float(masked_mean(moved, batch.mask[rows_M].to(self.device) & drawable))

    def _micro_batches(self, rows_K: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Cut the rows into micro-batches; gives each one's place in `rows_K` and its rows of the batch."""
        size = self.settings.micro_batch
        for start in range(0, len(rows_K), size):
            place = slice(start, start + size)
            yield place, rows_K[place]

    def _evaluate(self, batch: Batch, rows_M: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies ``[M, C, A]`` float32 under the distribution that was sampled."""
        inputs = self.policy.preprocess(
            batch.frames[rows_M.numpy()], [batch.tasks[row] for row in rows_M.tolist()]
        )
        sampling = SamplingParams(temperature=batch.temperature, top_k=batch.top_k)
        result = self.policy.evaluate(inputs, batch.tokens[rows_M].to(self.device), sampling)
        return result.logprob.float(), result.entropy.float()
