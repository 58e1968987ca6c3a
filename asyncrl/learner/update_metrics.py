"""Measures an update: advantages, values, and how far the policy moved."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from asyncrl.devices.tensors import moved
from asyncrl.learner.accumulator import MetricAccumulator, effective_sample_size, variance
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import k3
from asyncrl.learner.forward import ROW_IN_STEP, PolicyForward
from asyncrl.learner.losses import log_ratio
from asyncrl.learner.prepare import PreparedBatch
from asyncrl.learner.recipe import Recipe
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import Metric

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
