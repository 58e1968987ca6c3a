"""Measures an update: advantages, values, and how far the policy moved."""

from __future__ import annotations

import math

import torch

from asyncrl.learner.accumulator import MetricAccumulator, effective_sample_size, variance
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import k3
from asyncrl.learner.forward import PolicyForward, rows_of
from asyncrl.learner.losses import log_ratio
from asyncrl.learner.prepare import PreparedBatch
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import Metric


def advantage_metrics(batch: Batch, prepared: PreparedBatch, device: torch.device) -> MetricAccumulator:
    """Collect advantages over valid tokens, values and targets over valid decisions or steps."""
    found = MetricAccumulator()
    advantages, mask = prepared.estimates.advantages.to(device), batch.mask.to(device)
    found.mean(m.ADVANTAGES_MEAN, advantages, mask)
    found.largest(m.ADVANTAGES_MAX, advantages, mask)
    found.largest(m.ADVANTAGES_MIN, -advantages, mask)
    if prepared.values is None or prepared.estimates.targets is None:
        return found
    valid = prepared.value_mask(batch).to(device)
    values, targets = prepared.values.to(device), prepared.estimates.targets.to(device)
    found.moments("target", targets, valid)
    found.moments("error", targets - values, valid)
    found.mean(m.VALUES_MEAN, values, valid)
    return found


def approx_kl_metric(batch: Batch, prepared: PreparedBatch, forward: PolicyForward) -> MetricAccumulator:
    """Measure KL(before || after) per valid token, from at most one micro-batch of decisions; collective.

    Measured afterwards because before the first step it is zero by definition. The decisions are spread
    evenly over the batch. They were sampled by the behaviour policy, so the estimate has its lag's bias.
    """
    found = MetricAccumulator()
    evaluated = torch.nonzero(prepared.evaluated).flatten()
    if not float(forward.ranks.sum(torch.tensor([float(len(evaluated))]))):
        return found
    stride = max(1, -(-len(evaluated) // forward.micro_batch))
    rows_M = evaluated[::stride] if len(evaluated) else rows_of(None)
    with torch.no_grad():
        after = forward.evaluate(batch, rows_M).logprob
    before = prepared.first_logprob[rows_M.to(after.device)]
    possible = batch.mask[rows_M].to(after.device) & torch.isfinite(before) & torch.isfinite(after)
    moved = log_ratio(torch.where(possible, after, 0.0), torch.where(possible, before, 0.0))
    found.mean(m.APPROX_KL, k3(moved), possible & bool(len(evaluated)))
    return found


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
