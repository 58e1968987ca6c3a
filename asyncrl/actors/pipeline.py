"""The parts of an actor's batch that decide in turns: the host works on one while a device does on the other.

A stage holds places, the world's state of their episodes, and the decision that is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.actors.slots import Slot
from asyncrl.devices.device_events import DeviceEvent
from asyncrl.observability.metrics import Metric
from asyncrl.worlds.interface import State

TimedWork = tuple[Metric, DeviceEvent, DeviceEvent]
"""What a device was busy with, from when to when."""


@dataclass(frozen=True, kw_only=True)
class InFlightDecision:
    """One decision of B places that the devices may still be working on; nothing of it is in the slots yet.

    The tensors are in host memory, and whole once all of `done_events` have passed.
    """

    places: list[int]
    episodes: list[Slot]
    """What was in the places; a place that has something else by now gets nothing of this."""
    policy_version: int
    noise_seeds: list[int]
    frames: NDArray[np.uint8]
    """``[B, H, W, 3]`` what the policy saw."""
    sample: dict[str, Tensor]
    """Name -> ``[B, ...]``: what becomes of `Episode.sample`."""
    logprobs: Tensor
    """``[B, C, A]`` float32."""
    actions: Tensor
    """``[B, C, A]`` float32."""
    values: Tensor | None
    """``[B]`` float32 the critic's first value; None without a critic."""
    new_frames: Tensor
    """``[B, C, H, W, 3]`` uint8."""
    finite: Tensor
    """``[B]`` bool: `WorldState.finite` after the decision."""
    scores: Tensor
    """``[B, C]`` float32."""
    timed_work: list[TimedWork]
    done_events: tuple[DeviceEvent, ...]


@dataclass(kw_only=True)
class Stage(Generic[State]):
    """Places that decide together, and what the world remembers about each."""

    places: range
    in_flight: list[InFlightDecision] = field(default_factory=list)
    """The decision under way; several parts only where all places together raised an error."""
    timed_work: list[TimedWork] = field(default_factory=list)
    """Work besides `in_flight` that has not been counted."""
    _rows: list[int] = field(default_factory=list, init=False)
    """The place that each row of the state belongs to, ascending."""
    _state: State | None = field(default=None, init=False)

    def open(self, places: Sequence[int], fresh: State) -> None:
        """Take over the rows of `fresh` for episodes that begin in `places`, ascending."""
        if self._state is None or set(self._rows) <= set(places):
            self._state, self._rows = fresh, list(places)
            return
        self._arrange(sorted({*self._rows, *places}))
        self._state = self._state.write_rows([self._rows.index(place) for place in places], fresh)

    def keep(self, places: Sequence[int]) -> None:
        """Forget all rows but those of `places`, ascending: from now on these are the rows."""
        if not places:
            self._state, self._rows = None, []
        else:
            self._arrange(list(places))

    def state_of(self, places: Sequence[int]) -> State:
        """The rows of `places`: the state itself where these are all, else copies."""
        assert self._state is not None
        if self._rows == list(places):
            return self._state
        return self._state.select([self._rows.index(place) for place in places])

    def replace(self, places: Sequence[int], after: State) -> None:
        """Take over what a decision made of the rows of `places`.

        A decision of all rows, which is the rule, swaps the states: at full size a row has hundreds of MB.
        """
        if self._rows == list(places):
            self._state = after
        else:
            assert self._state is not None
            self._state = self._state.write_rows([self._rows.index(place) for place in places], after)

    def _arrange(self, rows: list[int]) -> None:
        if rows != self._rows:
            assert self._state is not None
            known = {place: row for row, place in enumerate(self._rows)}
            # A new place gets a copy of some row, which is written over before it is used.
            self._state = self._state.select([known.get(place, 0) for place in rows])
            self._rows = rows


def split_slots(slots: int, stages: int) -> list[range]:
    """Cut the places of a batch into parts that differ by one at most.

    >>> split_slots(5, 2)
    [range(0, 2), range(2, 5)]
    """
    ends = [slots * n // stages for n in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(ends)]
