"""Finds the rows of a decision that failed, so that one row does not end the others.

A row fails by a number that is not finite, from the policy, the world or the reward model, or by an error
that one of them raises for it. The latter is found by trying the rows alone, and only after all together
failed. Errors of models are caught in this module only; those that break the device are not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.errors import first_line
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
