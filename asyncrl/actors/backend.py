"""Actor backends: a world model (`Imagination`) or a simulator (`SimulatorBackend`); and rows that fail.

A row fails by a number that is not finite, or by an error of a model, found by retrying the rows alone after
all together failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.actors.slots import EpisodeEnd, EpisodeInProgress, EpisodeStart, Slots, Stage
from asyncrl.errors import first_line
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import SamplingParams
from asyncrl.replay.interface import Cause

Result = TypeVar("Result")
Check = tuple[Cause, str, NDArray[np.generic]]
"""Cause, name, and ``[B, ...]`` floats, or ``[B]`` bool that is False where they are not finite."""
_REASON: Final = 300
_log = logging.getLogger(__name__)


class StartStream(Protocol):
    """Starts of all groups: element n of an endless stream, a pure function of its settings and n."""

    def __getitem__(self, n: int) -> EpisodeStart:
        """Return the start of the episodes of grant `n`."""
        ...

    def left(self, quarantined: Collection[str]) -> int:
        """Count the starts that are not quarantined; `replay.interface.ENDLESS` if they never run out."""
        ...


class ActorPolicy(Protocol):
    """A policy whose weights an actor receives."""

    def acting_tensors(self) -> Mapping[str, Tensor]:
        """Return the weights that an update changes, by name."""
        ...


class Backend(Protocol):
    """Decides for the slots of a stage and imagines or simulates the results.

    The actor calls `begin` for new episodes of an idle stage, `launch`, `collect`, then `episode_end`. The
    first three return the slots that failed.
    """

    sampling: SamplingParams

    @property
    def policy(self) -> ActorPolicy:
        """Return the policy that decides."""
        ...

    @property
    def world_version(self) -> int:
        """Return `Episode.world_version`."""
        ...

    @property
    def devices(self) -> Collection[torch.device]:
        """Return the devices of the models."""
        ...

    @property
    def counts(self) -> Mapping[Metric, int]:
        """Return counters since the actor began: `ACTOR_DECISIONS` and others."""
        ...

    def is_cheapest(self, index: int, start: EpisodeStart) -> bool:
        """Return True if no slot is a cheaper place for `start` than slot `index`."""
        ...

    def begin(self, slots: Slots, stage: Stage[Any], indices: list[int]) -> list[RowFailure]:
        """Begin the episodes just put into slots of an idle stage."""
        ...

    def launch(
        self, slots: Slots, stage: Stage[Any], indices: list[int], policy_version: int
    ) -> list[RowFailure]:
        """Begin one decision in `indices`, the stage's slots with an episode."""
        ...

    def collect(self, slots: Slots, stage: Stage[Any], deadline: float) -> tuple[list[RowFailure], float]:
        """Wait for decisions of the stage and append them to their episodes; RunError at the deadline.

        Returns also the seconds waited outside `pop_device_seconds`.
        """
        ...

    def release(self, slots: Slots, stage: Stage[Any]) -> None:
        """Free the state of a stage without episodes."""
        ...

    def episode_end(self, episode: EpisodeInProgress) -> EpisodeEnd | None:
        """Return how an episode ended with its last decision; None while it goes on."""
        ...

    def close(self) -> None:
        """End the processes it has started. May be called again."""
        ...

    def pop_device_seconds(self) -> dict[Metric, float]:
        """Return the busy seconds of policy, world and others since the last call."""
        ...


@dataclass(frozen=True, kw_only=True)
class RowFailure:
    """Why the episode in one slot cannot go on."""

    index: int
    """The slot; -1: none."""
    cause: Cause
    reason: str
    """One line of printable characters."""
    error: Exception | None = None


def find_failure(checks: Sequence[Check], row: int, index: int) -> RowFailure | None:
    """Return the failure of slot `index` by the first array whose `row` is not finite, or None."""
    for cause, name, values_B in checks:
        finite = values_B[row] if values_B.dtype == np.bool_ else np.isfinite(values_B[row]).all()
        if not finite:
            return RowFailure(index=index, cause=cause, reason=f"the {name} not finite")
    return None


def retry_rows_singly(
    indices: Sequence[int], attempt: Callable[[list[int]], Result]
) -> tuple[list[tuple[list[int], Result]], list[RowFailure]]:
    """Attempt all slots together; if that raises, each alone, so that only the culprits fail.

    Returns:
        Results, each with its slots; and the failures of slots that raise alone.
    """
    together = _caught(list(indices), attempt)
    if not isinstance(together, RowFailure):
        return [(list(indices), together)], []
    if len(indices) == 1:
        return [], [together]
    alone = [(index, _caught([index], attempt)) for index in indices]
    failed = [result for _, result in alone if isinstance(result, RowFailure)]
    if not failed:
        _log.warning("%d rows raised together, but none alone: %s", len(indices), together.reason)
    return [([index], result) for index, result in alone if not isinstance(result, RowFailure)], failed


def _caught(indices: list[int], attempt: Callable[[list[int]], Result]) -> Result | RowFailure:
    try:
        return attempt(indices)
    except Exception as error:
        if _breaks_device(error):
            raise
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # Raises again if the error was the device's and shows only now.
        text = f"{type(error).__name__}: {first_line(error)}"[:_REASON]
        reason = "".join(letter if letter.isprintable() else "?" for letter in text)
        return RowFailure(index=indices[0], cause="raised", reason=reason, error=error)


def _breaks_device(error: Exception) -> bool:
    """Return True if the device computes nothing more in this process, unlike after running out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
