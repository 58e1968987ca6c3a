"""The parts of an actor's batch that decide in turns: the host works on one while a device does on the other.

A stage holds slots, the world's state of their episodes, and the decision that is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic

from torch import Tensor

from asyncrl.actors.slots import EpisodeInProgress
from asyncrl.devices.events import DeviceEvent
from asyncrl.observability.metrics import Metric
from asyncrl.worlds.interface import State

TimedWork = tuple[Metric, DeviceEvent, DeviceEvent]
"""What a device was busy with, from when to when."""


@dataclass(frozen=True, kw_only=True)
class InFlightDecision:
    """One decision of B slots that the devices may still be working on; no episode has any of it yet.

    The tensors are in host memory, and whole once all of `done_events` have passed.
    """

    indices: list[int]
    """The slots."""
    episodes: list[EpisodeInProgress]
    """What was in the slots; one that has something else by now gets nothing of this."""
    arrays: dict[str, Tensor]
    """Name -> ``[B, ...]``, or more rows that mean nothing: what becomes of `EpisodeInProgress.decisions`."""
    finite: Tensor
    """``[B]`` bool, or more rows that mean nothing: `WorldState.finite` after the decision."""
    timed_work: list[TimedWork]
    done_events: tuple[DeviceEvent, ...]


@dataclass(kw_only=True)
class Stage(Generic[State]):
    """Slots that decide together, and what the world remembers about each."""

    indices: range
    """The slots."""
    in_flight: list[Any] = field(default_factory=list)
    """The decision under way: parts (`InFlightDecision`), several only where all slots together raised an
    error; of a simulator the slots that are asked something."""
    timed_work: list[TimedWork] = field(default_factory=list)
    """Work besides `in_flight` that has not been counted."""
    _rows: list[int] = field(default_factory=list, init=False)
    """The slot that each row of the state belongs to, ascending."""
    _state: State | None = field(default=None, init=False)

    def open(self, indices: Sequence[int], fresh: State) -> None:
        """Take over the rows of `fresh` for episodes that begin in the slots `indices`, ascending."""
        if self._state is None or set(self._rows) <= set(indices):
            self._state, self._rows = fresh, list(indices)
            return
        self._arrange(sorted({*self._rows, *indices}))
        self._state = self._state.write_rows([self._rows.index(index) for index in indices], fresh)

    def keep(self, indices: Sequence[int]) -> None:
        """Forget all rows but those of the slots `indices`, ascending: from now on these are the rows."""
        if not indices:
            self._state, self._rows = None, []
        else:
            self._arrange(list(indices))

    def state_of(self, indices: Sequence[int]) -> State:
        """The rows of the slots `indices`: the state itself where these are all, else copies."""
        assert self._state is not None
        if self._rows == list(indices):
            return self._state
        return self._state.select([self._rows.index(index) for index in indices])

    def replace(self, indices: Sequence[int], after: State) -> None:
        """Take over what a decision made of the rows of the slots `indices`.

        A decision of all rows, which is the rule, swaps the states: at full size a row has hundreds of MB.
        """
        if self._rows == list(indices):
            self._state = after
        else:
            assert self._state is not None
            self._state = self._state.write_rows([self._rows.index(index) for index in indices], after)

    def _arrange(self, rows: list[int]) -> None:
        if rows != self._rows:
            assert self._state is not None
            known = {index: row for row, index in enumerate(self._rows)}
            # A new slot gets a copy of some row, which is written over before it is used.
            self._state = self._state.select([known.get(index, 0) for index in rows])
            self._rows = rows


def split_slots(slots: int, stages: int) -> list[range]:
    """Cut the slots of a batch into parts that differ by one at most.

    >>> split_slots(5, 2)
    [range(0, 2), range(2, 5)]
    """
    ends = [slots * n // stages for n in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(ends)]
