"""Measures how fast updates are: decisions per second and model FLOPs utilisation (MFU).

    MFU = passes * FLOPs of a decision's forward pass * decisions / (seconds * peak of all ranks' GPUs)

    passes 3   all weights learn: forward, gradient of the activations, gradient of the weights
           2   only adapters learn: no gradient of the frozen weights; the adapters' own is neglected
           1   only the critic learns, on a trunk that it does not reach (its warm-up)

These are the model's FLOPs, not the hardware's: what gradient checkpointing computes again, passes without
gradient (critic, several steps per batch, KL reference) and the optimizer step count as time only. The
peak is that of `--learner.precision`, also where --learner.frozen-precision makes products of 8-bit numbers.
Prompts count with their padding: about 1 % where all are padded to the longest instruction of LIBERO.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from asyncrl.learner.batches import Batch
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import Policy, SamplingParams

Precision = Literal["fp32", "bf16"]

PEAK_FLOPS: Final[Mapping[str, Mapping[Precision, float]]] = {
    "NVIDIA A100-PCIE-40GB": {"bf16": 312e12, "fp32": 19.5e12},
    "NVIDIA A100-SXM4-40GB": {"bf16": 312e12, "fp32": 19.5e12},
    "NVIDIA A100 80GB PCIe": {"bf16": 312e12, "fp32": 19.5e12},
    "NVIDIA A100-SXM4-80GB": {"bf16": 312e12, "fp32": 19.5e12},
    "NVIDIA H100 80GB HBM3": {"bf16": 989e12, "fp32": 67e12},
    "NVIDIA H200": {"bf16": 989e12, "fp32": 67e12},
    "NVIDIA L40S": {"bf16": 362e12, "fp32": 91.6e12},
    "NVIDIA GeForce RTX 4090": {"bf16": 165e12, "fp32": 82.6e12},
}
"""Device name -> FLOPs per second of dense matrix products by the vendor's data sheet; fp32 without TF32."""


def peak_flops(device: torch.device, precision: Precision) -> float:
    """Peak of a device in FLOPs per second; 0 where it is not known, as on a CPU or with TF32."""
    if device.type != "cuda" or (precision == "fp32" and torch.get_float32_matmul_precision() != "highest"):
        return 0.0
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device), {}).get(precision, 0.0)


def forward_flops(policy: Policy, batch: Batch, rows: int, device: torch.device) -> float:
    """Count the FLOPs of one decision's forward pass on the first `rows` decisions, without gradient.

    Matrix products, convolutions and attention count, two FLOPs per multiplication and addition. On a sharded
    policy all ranks must call it together.
    """
    rows = min(rows, len(batch.tasks))
    inputs = policy.preprocess(batch.frames[:rows], batch.tasks[:rows])
    sampling = SamplingParams(temperature=batch.temperature, top_k=batch.top_k)
    # Left alone, a compiler that meets the counter marks every block as not to be compiled, for good.
    counting = FlopCounterMode(display=False)
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, torch.no_grad(), counting as counter:
        policy.evaluate(
            inputs, {name: values[:rows].to(device) for name, values in batch.sample.items()}, sampling
        )
    return counter.get_total_flops() / rows


class Throughput:
    """How fast updates are. Every learner rank has one and asks it after each update."""

    def __init__(
        self,
        policy: Policy,
        ranks: LearnerRanks,
        *,
        micro_batch: int,
        precision: Precision = "fp32",
        adapters: bool = False,
    ) -> None:
        """Look up the device's peak; nothing is counted or exchanged before the first `measure`.

        Args:
            adapters: Whether only adapters learn.
        """
        self.policy, self.ranks, self.micro_batch, self.adapters = policy, ranks, micro_batch, adapters
        self.device = next(iter(policy.trainable_parameters().values())).device
        self.own_peak = peak_flops(self.device, precision)
        self._flops: float | None = None
        self._peak = 0.0

    def measure(
        self, batch: Batch, decisions: int, seconds: float, *, policy_learned: bool = True
    ) -> dict[Metric, float]:
        """Return the metrics of an update; collective.

        Args:
            seconds: Duration of the update on this rank.
        """
        if self._flops is None:
            self._count_flops(batch)
        total = float(self.ranks.sum(torch.tensor([float(decisions)], dtype=torch.float64))[0])
        pace = total / max(seconds, 1e-9)
        found = {m.DECISIONS_PER_SECOND: pace}
        if self._peak and self._flops:
            found[m.MFU] = self._passes(policy_learned) * self._flops * pace / self._peak
        return found

    def _count_flops(self, batch: Batch) -> None:
        """Count a forward pass, on all ranks or on none: on shards it is a computation of all together."""
        mine = torch.tensor([self.own_peak, float(self.own_peak > 0)], dtype=torch.float64)
        peak, known = self.ranks.sum(mine).tolist()
        self._flops = 0.0
        if known == self.ranks.size:
            self._peak = peak
            self._flops = forward_flops(self.policy, batch, self.micro_batch, self.device)

    def _passes(self, policy_learned: bool) -> int:
        if not policy_learned:
            return 1
        return 2 if self.adapters else 3
