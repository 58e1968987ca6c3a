"""Open slots: what episodes begin with is encoded once, however many slots share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from asyncrl.records import StartState
from asyncrl.worlds.interface import State

AT_ONCE: Final = 2
"""Beginnings that are opened at a time. Always as many, so that no bit of a slot depends on what begins
beside it; and not one at a time, for which kernels add in another order than for the rows of a decision."""


def open_each_once(states: Sequence[StartState], open_slots: Callable[[list[StartState]], State]) -> State:
    """Open one slot per start state; siblings, which begin alike, are opened once and copied.

    Args:
        states: ``B`` start states, at least 1.
        open_slots: Opens one slot for each of a few.

    Returns:
        A state of ``B`` rows with memory of its own.
    """
    numbers: dict[tuple[object, ...], int] = {}
    distinct: list[StartState] = []
    row_of: list[int] = []
    for state in states:
        key = _content(state)
        if key not in numbers:
            numbers[key] = len(distinct)
            distinct.append(state)
        row_of.append(numbers[key])
    width = min(AT_ONCE, len(states))
    opened: State | None = None
    for first in range(0, len(distinct), width):
        some = distinct[first : first + width]
        part = open_slots([*some, *some[:1] * (width - len(some))])
        slots = [slot for slot, row in enumerate(row_of) if first <= row < first + width]
        if opened is None:  # The slots of other parts are written over.
            opened = part.select([row if row < width else 0 for row in row_of])
        else:
            opened.write_rows(slots, part.select([row_of[slot] - first for slot in slots]))
    if opened is None:
        raise ValueError("there are no start states to open slots for")
    return opened


def _content(state: StartState) -> tuple[object, ...]:
    """Return what a world is shown of a start state, to be compared."""
    arrays = (state.frame, state.context_frames, state.context_actions, state.ee_pose)
    shown = [None if array is None else np.asarray(array) for array in arrays]
    return tuple(None if array is None else (array.shape, array.tobytes()) for array in shown)
