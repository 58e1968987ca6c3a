"""What the learner's loop is told besides its parts: its numbers, and where a row of metrics goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from asyncrl.observability.metrics import Metric


class Log(Protocol):
    """Where the metrics of an update go."""

    def write(self, step: int, values: Mapping[Metric, float]) -> None:
        """Record one row; `step` is the policy version."""
        ...


class NullLog:
    """A `Log` that nobody reads."""

    def write(self, step: int, values: Mapping[Metric, float]) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Numbers of the learner's loop that belong to no section of the configuration."""

    updates: int
    """Policy version at which the run is over."""
    checkpoint_every: int
    """Updates between two checkpoints."""
    batch_timeout: float
    """Seconds to wait for a batch without a sign of progress before the run ends with an error."""
    first_weights_deadline: float
    """Seconds the actors have to take the first version."""
    evaluate_every: int = 0
    """Updates between two versions that are measured in a simulator, thus checkpoints too; 0: none."""
    hang_timeout: float = 900.0
    """Seconds that an update may take without a sign of progress."""
    batches_ahead: int = 1
    """Batches that may be imagined together, the one that is waited for included."""
    config_hash: str = ""
    """Identifies the settings of the run in its checkpoints."""

    def saves(self, version: int) -> bool:
        """Tell whether there shall be a checkpoint of `version`."""
        return any(
            every > 0 and version % every == 0 for every in (self.checkpoint_every, self.evaluate_every)
        )
