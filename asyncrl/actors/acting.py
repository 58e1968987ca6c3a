"""The interface of an actor's backend, a world model (`Imagination`) or a simulator (`Play`); failed rows.

Both decide for the slots of a stage with the policy and find the result of the decision; the actor refills
the slots and pushes the episodes that end, and knows no difference.

A row fails by a number that is not finite, from the policy, the world or the reward model, or by an error
that one of them raises for it. The latter is found by trying the rows alone, and only after all together
failed. Errors of models are caught in this module only; those that break the device are not.
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

from asyncrl.actors.slots import Ending, EpisodeInProgress, Slots, Stage, Start
from asyncrl.errors import first_line
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import SamplingParams
from asyncrl.replay.interface import Cause

Result = TypeVar("Result")
_log = logging.getLogger(__name__)
_REASON: Final = 300
"""Characters of a reason that are sent."""


@dataclass(frozen=True, kw_only=True)
class RowFailure:
    """Why the episode in one slot cannot go on."""

    index: int
    """The slot; -1: none."""
    cause: Cause
    reason: str
    """One line of printable characters."""
    error: Exception | None = None
    """What was raised, when something was."""


def first_failure(
    rows: Sequence[tuple[Cause, str, NDArray[np.generic]]], row: int
) -> tuple[Cause, str] | None:
    """Return cause and reason of the first array whose `row` is not finite, in the order given, or None.

    Args:
        rows: Cause, what it is, ``[B, ...]`` float values; or ``[B]`` bool, False where they are not finite.
    """
    for cause, what, values_B in rows:
        sound = values_B[row] if values_B.dtype == np.bool_ else np.isfinite(values_B[row]).all()
        if not sound:
            return cause, f"the {what} not finite"
    return None


def retry_rows_singly(
    indices: Sequence[int], attempt: Callable[[list[int]], Result]
) -> tuple[list[tuple[list[int], Result]], list[RowFailure]]:
    """Attempt all slots together; if that raises, each alone, so that only the culprits fail.

    Returns:
        What was done, each part with its slots; and the indices that raise alone.
    """
    outcome = _caught(list(indices), attempt)
    if not isinstance(outcome, RowFailure):
        return [(list(indices), outcome)], []
    if len(indices) == 1:
        return [], [outcome]
    alone = [(index, _caught([index], attempt)) for index in indices]
    failed = [outcome for _, outcome in alone if isinstance(outcome, RowFailure)]
    if not failed:
        _log.warning("%d rows raised together, but none alone: %s", len(indices), outcome.reason)
    return [([index], one) for index, one in alone if not isinstance(one, RowFailure)], failed


def _caught(indices: list[int], attempt: Callable[[list[int]], Result]) -> Result | RowFailure:
    try:
        return attempt(indices)
    except Exception as error:
        if breaks_device(error):
            raise
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # Raises again when the error was the device's and shows only now.
        return RowFailure(index=indices[0], cause="raised", reason=reason_of(error), error=error)


def breaks_device(error: Exception) -> bool:
    """Whether nothing can be computed on the device after this error until the process is a new one.

    Being out of memory is none of them: fewer rows may fit.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def reason_of(error: Exception) -> str:
    """Type and first line of an error, printable and not long."""
    text = f"{type(error).__name__}: {first_line(error)}"[:_REASON]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class Starts(Protocol):
    """Where episodes begin: element n of an endless stream, a pure function of its settings and n."""

    def __getitem__(self, n: int) -> Start:
        """Return where the episodes of grant `n` begin."""
        ...

    def left(self, quarantined: Collection[str]) -> int:
        """Count the starts that are not quarantined; `replay.interface.ENDLESS`: there are always others."""
        ...


class ActingPolicy(Protocol):
    """What the actor itself needs of a policy."""

    def acting_tensors(self) -> Mapping[str, Tensor]:
        """Return the weights that an update changes, by name."""
        ...


class Acting(Protocol):
    """Decides with the policy of an actor, and finds out what becomes of it."""

    @property
    def policy(self) -> ActingPolicy:
        """Return what decides."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """Return how decisions are sampled."""
        ...

    @property
    def version(self) -> int:
        """Return `Episode.world_version`."""
        ...

    @property
    def devices(self) -> Collection[torch.device]:
        """Return where the models are."""
        ...

    @property
    def counts(self) -> Mapping[Metric, int]:
        """Return what was counted since the actor began: `ACTOR_DECISIONS`, and others."""
        ...

    def suits(self, index: int, start: Start) -> bool:
        """Tell whether an episode from `start` costs no more in the slot `index` than in any other."""
        ...

    def begin(self, slots: Slots, stage: Stage[Any], indices: list[int]) -> list[RowFailure]:
        """Begin the episodes that were just put into slots of a stage that is not in flight.

        Returns:
            Slots that cannot be begun: they must be cleared.
        """
        ...

    def launch(
        self, slots: Slots, stage: Stage[Any], indices: list[int], policy_version: int
    ) -> list[RowFailure]:
        """Begin one decision in `indices`: the slots of the stage that have an episode.

        Returns:
            Slots that cannot decide: they must be cleared.
        """
        ...

    def collect(self, slots: Slots, stage: Stage[Any], deadline: float) -> tuple[list[RowFailure], float]:
        """Wait for decisions of the stage and append them to their episodes.

        Returns:
            Slots that failed: they made no decision and must be cleared. And the seconds waited that are not
            in `pop_device_seconds`.

        Raises:
            RunError: Nothing came within `deadline` seconds.
        """
        ...

    def release(self, slots: Slots, stage: Stage[Any]) -> None:
        """Forget what is kept for episodes of the stage, which has none."""
        ...

    def ending(self, episode: EpisodeInProgress) -> Ending | None:
        """Say how an episode ended that has just made a decision; None while it goes on."""
        ...

    def close(self) -> None:
        """End the processes it has started. May be called again."""
        ...

    def pop_device_seconds(self) -> dict[Metric, float]:
        """Return the seconds that policy and others were busy, by metric, since this was asked."""
        ...
