"""Fetch a rank's part of a batch, with all ranks: an update begins when each of them has its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from asyncrl.errors import RunError
from asyncrl.learner.ranks import Groups, LearnerRanks, PartState
from asyncrl.observability import waits
from asyncrl.replay.interface import BatchDescription, GroupLost, LearnerPort

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
