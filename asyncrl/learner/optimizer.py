"""Optimizer steps: learning rates, clipped gradients, and skipped steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.config.sections import OptimizerSettings
from asyncrl.learner.ranks import local_tensors
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import Policy

MOST_BAD_UPDATES: Final = 3  # A run ends after so many updates in a row whose gradient is not finite
_log = logging.getLogger(__name__)


def learning_rate_share(settings: OptimizerSettings, version: int, updates: int) -> float:
    """Return the share of the full learning rate for the update from `version` to `version + 1`."""
    if version < settings.warmup_updates:
        return (version + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return 1.0
    end = settings.decay_updates or updates
    done = (version - settings.warmup_updates) / max(1, end - settings.warmup_updates)
    share = 1.0 - min(1.0, done)
    if settings.schedule == "cosine":
        return (1.0 - math.cos(math.pi * share)) / 2
    return share


class ClippedOptimizer:
    """AdamW over the policy and, at its own learning rate, the critic; gradients are clipped separately."""

    def __init__(
        self,
        policy: Policy,
        settings: OptimizerSettings,
        *,
        updates: int,
        critic_learning_rate: float,
        critic_warmup: int = 0,
        fused: bool | None = None,
    ) -> None:
        self.settings, self.updates, self.critic_warmup = settings, updates, critic_warmup
        self.device = next(iter(policy.trainable_parameters().values())).device
        self._fused = self.device.type == "cuda" if fused is None else fused
        groups = policy.parameter_groups(settings.learning_rate, critic_learning_rate)
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=self.settings.learning_rate,
            betas=(self.settings.beta1, self.settings.beta2),
            eps=self.settings.eps,
            weight_decay=self.settings.weight_decay,
            fused=self._fused,
        )
        self._full_rates = [float(group["lr"]) for group in groups]
        self.policy_learns = True  # False during the critic's warm-up
        self.bad_updates = self.bad_in_a_row = 0  # Updates with skipped steps: in all, and the last in a row
        self._steps: list[Tensor] = []  # [groups], norms of each step; not finite: it was skipped

    @property
    def stepped(self) -> bool:
        """True if weights may have changed since `set_version`."""
        return bool(self._steps)

    def set_version(self, version: int) -> None:
        """Set the learning rates of the update from `version` to the next one."""
        share = learning_rate_share(self.settings, version, self.updates)
        for group, full in zip(self.optimizer.param_groups, self._full_rates, strict=True):
            group["lr"] = full * share
        self.policy_learns = version >= self.critic_warmup
        self._steps = []

    def step(self) -> None:
        """Clip the gradient and step; skip one that is not finite."""
        if not self.policy_learns:  # A gradient that passed the policy on the way to the critic.
            for group in self.optimizer.param_groups:
                for parameter in [] if _is_critic(group) else group["params"]:
                    parameter.grad = None
        for parameter in (p for group in self._learning_groups for p in group["params"] if p.grad is None):
            # AdamW steps over None, and a batch without signal must still decay the momentum.
            parameter.grad = torch.zeros_like(parameter)
        norms = torch.stack(
            [clip([p.grad for p in g["params"]], self.settings.max_grad_norm) for g in self._learning_groups]
        )
        finite = torch.isfinite(norms).all()
        self._steps.append(norms)
        if self._fused:
            skip = (~finite).float()
            self.optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]  As GradScaler does.
            self.optimizer.step()
        elif bool(finite):
            self.optimizer.step()

    def end_update(self) -> dict[Metric, float]:
        """Wait for the steps since `set_version`; return norms, rates and the count of bad updates."""
        groups = self._learning_groups
        norms = torch.stack(self._steps).cpu() if self._steps else torch.zeros(0, len(groups))
        finite = torch.isfinite(norms).all(dim=1)
        if len(finite) and finite[0]:  # A good step before the skipped ones ends the row.
            self.bad_in_a_row = 0
        if skipped := int((~finite).sum()):  # A bad batch spoils all of its minibatches: that is one fault.
            self.bad_updates += 1
            self.bad_in_a_row += 1
            _log.warning(
                "%d of %d steps skipped: the gradient is not finite (%d updates in a row)",
                *(skipped, len(finite), self.bad_in_a_row),
            )
        metrics: dict[Metric, float] = {}
        if finite.any():
            for group, largest in zip(groups, norms[finite].amax(dim=0).tolist(), strict=True):
                metrics[m.CRITIC_GRAD_NORM if _is_critic(group) else m.GRAD_NORM] = largest
        for group in self.optimizer.param_groups:
            metrics[m.CRITIC_LEARNING_RATE if _is_critic(group) else m.LEARNING_RATE] = float(group["lr"])
        return metrics | {m.BAD_UPDATES: float(self.bad_updates)}

    @property
    def failure_reason(self) -> str:
        """Return why the run cannot go on: too many bad updates in a row; empty while it can."""
        if self.bad_in_a_row < MOST_BAD_UPDATES:
            return ""
        return (
            f"The gradient was not finite in {self.bad_in_a_row} updates in a row: the run cannot recover by "
            "itself. Their steps were skipped. "
            "Continue with --resume and a lower --optimizer.learning-rate (it is "
            f"{self.settings.learning_rate}) or --optimizer.max-grad-norm (it is "
            f"{self.settings.max_grad_norm})."
        )

    @property
    def _learning_groups(self) -> list[dict[str, Any]]:
        return [g for g in self.optimizer.param_groups if self.policy_learns or _is_critic(g)]


def _is_critic(group: dict[str, Any]) -> bool:
    return group.get("name") == "value"


@torch.no_grad()
def clip(gradients: Sequence[Tensor], largest: float) -> Tensor:
    """Scale gradients to a norm of at most `largest`; return the norm before; collective if sharded."""
    parts = local_tensors(gradients)
    norm = torch.nn.utils.get_total_norm([part for part in parts if part.numel()]).to(parts[0].device)
    if isinstance(first := gradients[0], DTensor):
        squared = norm.square()
        for dimension, placement in enumerate(first.placements):
            if placement.is_shard() and first.device_mesh.size(dimension) > 1:
                torch.distributed.all_reduce(squared, group=first.device_mesh.get_group(dimension))
        norm = squared.sqrt()
    scale = torch.clamp(largest / (norm + 1e-6), max=1.0)
    multiply: Any = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
    multiply(parts, scale)
    return norm
