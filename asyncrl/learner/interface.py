"""What the learner's loop needs besides its parts: numbers, and somewhere to write its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from asyncrl.observability.metrics import Metric


class Log(Protocol):
    """Where the readings of an update go."""

    def write(self, step: int, values: Mapping[Metric, float]) -> None:
        """Record one row; `step` is the policy version."""
        ...


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """Numbers of the learner's loop."""

    updates: int
    """Policy version at which the run is over."""
    groups_per_update: int
    checkpoint_every: int
    """Updates between two checkpoints."""
    max_wait: float
    """Seconds to wait for one batch before the run ends with an error."""
    first_weights_deadline: float
    """Seconds the actors have to take the first version."""
    hang_after: float = 900.0
    """Seconds that one update may take."""
    config_hash: str = ""
    """Identifies the settings of the run in its checkpoints."""
