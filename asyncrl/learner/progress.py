"""Follow how a batch and an update progress, and fetch a rank's part of a batch.

A batch progresses when an episode of it is admitted, or when the actors have made decisions for it; an update
with every micro-batch (`process_status.progress`). An update begins when every rank has its part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import torch

from asyncrl.errors import RunError, SampleTimeout
from asyncrl.learner.ranks import Groups, LearnerRanks, PartState
from asyncrl.observability import waits
from asyncrl.replay.interface import BatchDescription, GroupLost, LearnerPort

ESTIMATED_FROM: Final = 2
"""Micro-batches after which the time of an update is estimated: the first one warms up."""

Told = Callable[[Literal["batch", "update"], float], object]
"""Receives what will take how many seconds in all."""


class BatchWait:
    """One wait for a batch. It is given up `timeout` seconds after the last sign of progress."""

    def __init__(
        self, timeout: float, clock: Callable[[], float], *, episodes: int, decisions: int, ahead: int
    ) -> None:
        """Begin to wait.

        Args:
            ahead: Batches that may be under way together. So many decisions without a single episode are
                progress; more are not: an actor whose episodes never arrive must not keep a run alive.
        """
        self._timeout, self._clock = timeout, clock
        self._episodes_needed, self._length = episodes, decisions
        self._allowed = self._left_over = episodes * decisions * ahead
        self.began = self._moved_at = clock()
        self._first: SampleTimeout | None = None
        self._episodes, self._decisions, self._made = 0, 0, 0
        """Most episodes seen, the decisions seen last, and those made during this wait."""

    @property
    def left(self) -> float:
        """Seconds until it is given up, unless the batch moves on; never negative."""
        return max(0.0, self._moved_at + self._timeout - self._clock())

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return self._clock() - self.began

    def note(self, seen: SampleTimeout) -> bool:
        """Take in how far the batch is; returns whether it moved on since the last time.

        Only the most episodes seen count: a group that is given up and imagined again is no progress twice.
        """
        first, self._first = self._first is None, self._first or seen
        made = 0 if first else max(0, seen.decisions - self._decisions)  # A new replay counts from 0.
        self._decisions = seen.decisions
        self._made += made
        moved = False
        if seen.episodes > self._episodes:
            self._episodes, self._left_over = seen.episodes, self._allowed
            moved = True
        elif made and self._left_over > 0:
            moved = True
        self._left_over -= made
        if moved:
            self._moved_at = self._clock()
        return moved

    def estimate(self, seen: SampleTimeout) -> float | None:
        """Seconds that the whole wait takes, once a group has become ready in it; None before."""
        if self._first is None or seen.groups <= self._first.groups:
            return None
        needed = max(1, self._episodes_needed - self._first.episodes)
        share = max((seen.episodes - self._first.episodes) / needed, self._made / (needed * self._length))
        return self.seconds / min(1.0, share) if share > 0 else None

    def in_vain(self, awaited: str, seen: SampleTimeout) -> RunError:
        """Return the error that ends a run whose batch did not move on."""
        return RunError(
            f"The learner waited {self._timeout:g} s (--batch-timeout) for {awaited} and nothing moved on: "
            f"no episode was admitted and no actor reported decisions ({self.seconds:.0f} s in all). {seen} "
            "Look into the actors' logs; raise --batch-timeout if one decision takes longer."
        )


class UpdateProgress:
    """Estimates once in a run, from its second micro-batch with a gradient, how long an update takes."""

    def __init__(self, told: Told, clock: Callable[[], float], device: torch.device) -> None:
        """Begin."""
        self._told, self._clock, self._device = told, clock, device
        self._began = self._first = 0.0
        self._done = False

    def begin(self) -> None:
        """An update begins."""
        self._began = self._clock()

    def note(self, number: int, passes: int) -> None:
        """Take in that micro-batch `number` (from 1) of about `passes` is done."""
        if self._done or number > ESTIMATED_FROM:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = self._clock()
        if number < ESTIMATED_FROM:
            self._first = now
        else:
            self._done = True
            self._told("update", now - self._began + (passes - number) * (now - self._first))


_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """What came of the fetch, on all ranks alike: groups, or nothing, or a failure."""

    groups: Groups | None = None
    """This rank's; None: on some rank one cannot be read any more, so another batch has to be chosen."""
    failure: Exception | None = None
    """Why the run ends: what failed here, or that it failed on another rank."""


def fetch_part(
    replay: LearnerPort,
    ranks: LearnerRanks,
    mine: BatchDescription,
    timeout: float,
    while_waiting: Callable[[], object],
) -> Part:
    """Fetch this rank's part and wait until the others have theirs.

    Args:
        while_waiting: Called about once a second.
    """
    state, groups, failure = PartState.FAILED, None, None
    try:
        with waits.waiting(waits.FETCH, timeout):
            groups = replay.fetch(mine, timeout=timeout, while_waiting=while_waiting)
        state = PartState.HELD
    except GroupLost as lost:
        _log.warning("%s Another batch is chosen.", lost)
        state = PartState.LOST
    except Exception as error:  # Kept until the other ranks know; the learner raises it.
        failure = error
    states = ranks.gather_states(state)
    if PartState.FAILED in states:
        elsewhere = RunError(
            f"Learner rank {states.index(PartState.FAILED)} of {ranks.size} did not get its part of a batch. "
            "Its output says why."
        )
        return Part(failure=failure or elsewhere)
    return Part() if PartState.LOST in states else Part(groups)
