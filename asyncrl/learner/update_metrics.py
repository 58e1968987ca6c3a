"""What an update says about itself: the batch, the values and the log-probs in, readings out."""

from __future__ import annotations

import math

import torch

from asyncrl.learner.accumulator import Tally, effective_sample_size, variance
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import k3, log_ratio
from asyncrl.learner.forward import Passes, rows_of
from asyncrl.learner.prepare import Before
from asyncrl.observability import metrics as m
from asyncrl.observability.metrics import Metric


def read_teaching(batch: Batch, before: Before, tally: Tally, device: torch.device) -> None:
    """Advantages over valid tokens; values and targets over valid places."""
    advantages, mask = before.teaching.advantages.to(device), batch.mask.to(device)
    tally.mean(m.ADVANTAGES_MEAN, advantages, mask)
    tally.largest(m.ADVANTAGES_MAX, advantages, mask)
    tally.largest(m.ADVANTAGES_MIN, -advantages, mask)
    if before.values is None or before.teaching.targets is None:
        return
    valid = before.value_mask(batch).to(device)
    values, targets = before.values.to(device), before.teaching.targets.to(device)
    tally.moments("target", targets, valid)
    tally.moments("error", targets - values, valid)
    tally.mean(m.VALUES_MEAN, values, valid)


def read_move(batch: Batch, before: Before, passes: Passes, tally: Tally) -> None:
    """KL(before || after) per valid token, from at most one micro-batch of decisions.

    Measured afterwards because before the first step it is zero by definition. The decisions are spread
    evenly over the batch. They were sampled by the behaviour policy, so the estimate has its lag's bias.
    """
    seen_K = torch.nonzero(before.seen).flatten()
    if not float(passes.group.sum(torch.tensor([float(len(seen_K))]))):
        return
    stride = max(1, -(-len(seen_K) // passes.micro_batch))
    rows_M = seen_K[::stride] if len(seen_K) else rows_of(None)
    with torch.no_grad():
        after = passes.evaluate(batch, rows_M).logprob
    first = before.first[rows_M.to(after.device)]
    drawable = batch.mask[rows_M].to(after.device) & torch.isfinite(first) & torch.isfinite(after)
    moved = log_ratio(torch.where(drawable, after, 0.0), torch.where(drawable, first, 0.0))
    tally.mean(m.APPROX_KL, k3(moved), drawable & bool(len(seen_K)))


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
