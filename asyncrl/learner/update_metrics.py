"""What an update says about itself: the batch, the values and the log-probs in, readings out."""

from __future__ import annotations

import math

import torch

from asyncrl.learner.accumulator import MetricAccumulator, effective_sample_size, variance
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import k3, log_ratio
from asyncrl.learner.forward import PolicyForward, rows_of
from asyncrl.learner.prepare import PreparedBatch
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import Metric


def advantage_metrics(
    batch: Batch, prepared: PreparedBatch, accumulator: MetricAccumulator, device: torch.device
) -> None:
    """Advantages over valid tokens; values and targets over valid places."""
    advantages, mask = prepared.estimates.advantages.to(device), batch.mask.to(device)
    accumulator.mean(m.ADVANTAGES_MEAN, advantages, mask)
    accumulator.largest(m.ADVANTAGES_MAX, advantages, mask)
    accumulator.largest(m.ADVANTAGES_MIN, -advantages, mask)
    if prepared.values is None or prepared.estimates.targets is None:
        return
    valid = prepared.value_mask(batch).to(device)
    values, targets = prepared.values.to(device), prepared.estimates.targets.to(device)
    accumulator.moments("target", targets, valid)
    accumulator.moments("error", targets - values, valid)
    accumulator.mean(m.VALUES_MEAN, values, valid)


def approx_kl_metric(
    batch: Batch, prepared: PreparedBatch, forward: PolicyForward, accumulator: MetricAccumulator
) -> None:
    """KL(before || after) per valid token, from at most one micro-batch of decisions.

    Measured afterwards because before the first step it is zero by definition. The decisions are spread
    evenly over the batch. They were sampled by the behaviour policy, so the estimate has its lag's bias.
    """
    seen_K = torch.nonzero(prepared.evaluated).flatten()
    if not float(forward.group.sum(torch.tensor([float(len(seen_K))]))):
        return
    stride = max(1, -(-len(seen_K) // forward.micro_batch))
    rows_M = seen_K[::stride] if len(seen_K) else rows_of(None)
    with torch.no_grad():
        after = forward.evaluate(batch, rows_M).logprob
    first_logprob = prepared.first_logprob[rows_M.to(after.device)]
    drawable = batch.mask[rows_M].to(after.device) & torch.isfinite(first_logprob) & torch.isfinite(after)
    moved = log_ratio(torch.where(drawable, after, 0.0), torch.where(drawable, first_logprob, 0.0))
    accumulator.mean(m.APPROX_KL, k3(moved), drawable & bool(len(seen_K)))


def readings(found: dict[Metric | str, float]) -> dict[Metric, float]:
    """Derive what is no mean, and leave out what is not finite: a skipped step has readings that are not."""
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
    return {name: value for name, value in result.items() if math.isfinite(value)}
