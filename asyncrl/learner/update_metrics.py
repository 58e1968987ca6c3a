"""Metrics of micro-batches, optimizer steps and ranks, and the speed of updates.

    MFU = passes * FLOPs of a decision's forward pass * decisions / (seconds * peak of all ranks' GPUs)

    passes 3   all weights learn: forward, gradient of the activations, gradient of the weights
           2   only adapters learn: no gradient of the frozen weights; the adapters' own is neglected
           1   only the critic learns, on a trunk that it does not reach (its warm-up)

Recomputation, passes without gradient and the optimizer step count as time only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from asyncrl.learner.batches import Batch
from asyncrl.learner.fsdp import Precision
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import LAG_RANGES, Metric
from asyncrl.policies.interface import Policy


class MetricAccumulator:
    """Sums, totals and maxima by metric, in float64 on the device of their values."""

    def __init__(self) -> None:
        self._sums: dict[Metric | str, tuple[Tensor, Tensor]] = {}
        self._totals: dict[Metric, Tensor] = {}
        self._maxima: dict[Metric, Tensor] = {}

    def mean(self, metric: Metric | str, values: Tensor, mask: Tensor) -> None:
        """Add valid values to a mean."""
        values, mask = torch.broadcast_tensors(values.detach(), mask)
        self._add(metric, torch.where(mask, values, 0).sum(dtype=torch.float64), mask.sum().double())

    def mean_by_lag(self, metrics: Sequence[Metric], values: Tensor, mask: Tensor, lag_D: Tensor) -> None:
        """Add valid values ``[D, ...]`` to the mean of their lag's metric, one for each of `LAG_RANGES`."""
        for metric, lags in zip(metrics, LAG_RANGES, strict=True):
            self.mean(metric, values, mask & ((lag_D >= lags.low) & (lag_D <= lags.high))[:, None, None])

    def total(self, metric: Metric, part: Tensor) -> None:
        """Add ``[]`` to a sum over micro-batches and ranks, averaged over optimizer steps."""
        total, part = self._totals.get(metric), part.detach().double()
        self._totals[metric] = part if total is None else total + part

    def largest(self, metric: Metric, values: Tensor, mask: Tensor) -> None:
        """Keep the largest valid value."""
        values, mask = torch.broadcast_tensors(values.detach(), mask)
        lowest = values.new_full((), -math.inf, dtype=torch.float64)
        top = torch.where(mask, values, -math.inf).amax().double() if values.numel() else lowest
        self._maxima[metric] = torch.maximum(self._maxima.get(metric, top), top)

    def moments(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add valid values and their squares to means, for `effective_sample_size` and `variance`."""
        values, mask = torch.broadcast_tensors(values.detach().double(), mask)
        self.mean(name, values, mask)
        self.mean(f"{name}^2", values.square(), mask)

    def reduce(self, ranks: LearnerRanks, steps: int = 1) -> dict[Metric | str, float]:
        """Reduce over the ranks: means by name (also of squares), totals per optimizer step, maxima."""
        for metric, value in self._totals.items():
            self._sums[metric] = value, torch.full_like(value, steps / ranks.size)
        names = sorted(self._sums, key=str)
        result: dict[Metric | str, float] = {}
        if names:
            flat = torch.stack([value for name in names for value in self._sums[name]])
            totals = ranks.sum(flat).view(-1, 2).tolist()
            result |= {
                name: total / number for name, (total, number) in zip(names, totals, strict=True) if number
            }
        tops = sorted(self._maxima, key=str)
        if tops:
            values = ranks.max(torch.stack([self._maxima[name] for name in tops])).tolist()
            result |= dict(zip(tops, values, strict=True))
        return result

    def _add(self, metric: Metric | str, total: Tensor, number: Tensor) -> None:
        previous = self._sums.get(metric)
        self._sums[metric] = (
            (total, number) if previous is None else (previous[0] + total, previous[1] + number)
        )


def effective_sample_size(means: dict[Metric | str, float], name: str) -> float:
    """Compute ``(sum w)^2 / (n sum w^2)`` of `MetricAccumulator.moments`; NaN without values."""
    square = means.get(f"{name}^2", 0.0)
    return means[name] ** 2 / square if square > 0 else math.nan


def variance(means: dict[Metric | str, float], name: str) -> float:
    """Compute the variance of `MetricAccumulator.moments`; NaN without values."""
    if name not in means:
        return math.nan
    return max(0.0, means[f"{name}^2"] - means[name] ** 2)


PEAK_FLOPS: Final[Mapping[str, Mapping[Precision, float]]] = {
    "NVIDIA A100-PCIE-40GB": {"bf16": 312e12, "fp32": 19.5e12},
    "NVIDIA A100-SXM4-40GB": {"bf16": 312e12, "fp32": 19.5e12},
    "NVIDIA A100 80GB PCIe": {"bf16": 312e12, "fp32": 19.5e12},
    "NVIDIA A100-SXM4-80GB": {"bf16": 312e12, "fp32": 19.5e12},
    "NVIDIA H100 80GB HBM3": {"bf16": 989e12, "fp32": 67e12},
    "NVIDIA H200": {"bf16": 989e12, "fp32": 67e12},
    "NVIDIA L40S": {"bf16": 362e12, "fp32": 91.6e12},
    "NVIDIA GeForce RTX 4090": {"bf16": 165e12, "fp32": 82.6e12},
}  # bf16 and fp32 (no TF32) by the vendor's data sheet


def peak_flops(device: torch.device, precision: Precision) -> float:
    """Return the device's peak in FLOPs per second; 0 if unknown, as on a CPU or with TF32."""
    if device.type != "cuda" or (precision == "fp32" and torch.get_float32_matmul_precision() != "highest"):
        return 0.0
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device), {}).get(precision, 0.0)


def forward_flops(policy: Policy, batch: Batch, rows: int, device: torch.device) -> float:
    """Count the FLOPs of a decision's forward pass on the first `rows`; collective on a sharded policy."""
    rows = min(rows, len(batch.tasks))
    inputs = policy.preprocess(batch.frames[:rows], batch.tasks[:rows])
    sample = {name: values[:rows].to(device) for name, values in batch.sample.items()}
    counting = FlopCounterMode(display=False)
    # A compiler that meets the counter marks every block as not to be compiled, for good.
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, torch.no_grad(), counting as counter:
        policy.evaluate(inputs, sample, batch.sampling)
    return counter.get_total_flops() / rows


class Throughput:
    """Speed of updates, measured on every learner rank after each update."""

    def __init__(
        self,
        policy: Policy,
        ranks: LearnerRanks,
        *,
        micro_batch: int,
        precision: Precision = "fp32",
        adapters: bool = False,
    ) -> None:
        self.policy, self.ranks, self.micro_batch, self.adapters = policy, ranks, micro_batch, adapters
        self.device = next(iter(policy.trainable_parameters().values())).device
        self.own_peak = peak_flops(self.device, precision)
        self._flops: float | None = None
        self._peak = 0.0

    def measure(
        self, batch: Batch, decisions: int, seconds: float, *, policy_learned: bool = True
    ) -> dict[Metric, float]:
        """Return the metrics of an update that took this rank `seconds`; collective."""
        if self._flops is None:
            self._count_flops(batch)
        total = float(self.ranks.sum(torch.tensor([float(decisions)], dtype=torch.float64))[0])
        speed = total / max(seconds, 1e-9)
        metrics = {m.DECISIONS_PER_SECOND: speed}
        if self._peak and self._flops:
            passes = (2 if self.adapters else 3) if policy_learned else 1
            metrics[m.MFU] = passes * self._flops * speed / self._peak
        return metrics

    def _count_flops(self, batch: Batch) -> None:
        """Count a pass's FLOPs; a sharded one is collective, so all ranks count, or none."""
        own = torch.tensor([self.own_peak, float(self.own_peak > 0)], dtype=torch.float64)
        peak, known = self.ranks.sum(own).tolist()
        self._flops = 0.0
        if known == self.ranks.size:
            self._peak = peak
            self._flops = forward_flops(self.policy, batch, self.micro_batch, self.device)
