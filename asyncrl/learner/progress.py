"""Progress of a batch, and the fetch of a rank's shard.

A batch progresses when an episode of it is admitted, or when the actors have made decisions for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from asyncrl.errors import RunError, SampleTimeout
from asyncrl.learner.ranks import Groups, LearnerRanks, ShardState
from asyncrl.observability import waits
from asyncrl.replay.interface import BatchDescription, GroupLost, LearnerPort

_log = logging.getLogger(__name__)


class BatchWait:
    """One wait for a batch. It times out `timeout` seconds after the last sign of progress."""

    def __init__(self, timeout: float, clock: Callable[[], float], *, most_decisions: int) -> None:
        """Begin to wait.

        Args:
            most_decisions: Of the batches that may be imagined together. More decisions, without a single
                episode, are no progress.
        """
        self._timeout, self._clock = timeout, clock
        self._allowed = self._allowed_left = most_decisions
        self._began = self._progressed_at = clock()
        self._most_episodes, self._decisions = 0, -1

    @property
    def remaining(self) -> float:
        """Seconds until the timeout, unless the batch progresses; never negative."""
        return max(0.0, self._progressed_at + self._timeout - self._clock())

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    def update(self, status: SampleTimeout) -> bool:
        """Return True if the batch progressed since the last call.

        Only the maximum of episodes counts: a group imagined again is no progress twice.
        """
        # A new replay counts from 0.
        made = 0 if self._decisions < 0 else max(0, status.decisions - self._decisions)
        self._decisions = status.decisions
        more_episodes = status.episodes > self._most_episodes
        if more_episodes:
            self._most_episodes, self._allowed_left = status.episodes, self._allowed
        progressed = more_episodes or (made > 0 and self._allowed_left > 0)
        self._allowed_left -= made
        if progressed:
            self._progressed_at = self._clock()
        return progressed

    def timeout_error(self, awaited: str, status: SampleTimeout) -> RunError:
        """Return the error of a run whose batch made no progress."""
        return RunError(
            f"The learner waited {self._timeout:g} s (--batch-timeout) for {awaited} and nothing moved on: "
            f"no episode was admitted and no actor reported decisions ({self.seconds:.0f} s in all). "
            f"{status} Look into the actors' logs; raise --batch-timeout if one decision takes longer."
        )


def fetch_shard(
    replay: LearnerPort,
    ranks: LearnerRanks,
    shard: BatchDescription,
    timeout: float,
    while_waiting: Callable[[], object],
) -> Groups | Exception | None:
    """Fetch this rank's shard and wait until the others have theirs.

    Returns:
        The shard; an exception if the run ends, here or on another rank; None if some rank's shard cannot be
        read any more, so that another batch has to be chosen.
    """
    state, groups, failure = ShardState.FAILED, None, None
    try:
        with waits.waiting(waits.FETCH, timeout):
            groups = replay.fetch(shard, timeout=timeout, while_waiting=while_waiting)
        state = ShardState.HELD
    except GroupLost as lost:
        _log.warning("%s Another batch is chosen.", lost)
        state = ShardState.LOST
    except Exception as error:  # Kept until the other ranks know; the learner raises it.
        failure = error
    states = ranks.gather_states(state)
    if ShardState.FAILED in states:
        elsewhere = RunError(
            f"Learner rank {states.index(ShardState.FAILED)} of {ranks.size} did not get its part of a "
            "batch. Its output says why."
        )
        return failure or elsewhere
    return None if ShardState.LOST in states else groups
