"""Groups on their way to the disk in a thread of their own: members in, a durable file out.

One group at a time, so that at most one complete group more is in memory than without the thread. Everything
but the writing of the file stays in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from asyncrl.records import Episode
from asyncrl.replay.schema import Written
from asyncrl.replay.store import EpisodeStore


class Sealer:
    """Writes one group beside its caller."""

    def __init__(self, store: EpisodeStore) -> None:
        """Write nothing yet."""
        self._store, self._pool = store, ThreadPoolExecutor(1, "seal")
        self._future: Future[Written] | None = None
        self.number = -1
        """The group that is being written, or waits to be finished; -1: none."""

    @property
    def done(self) -> bool:
        """Whether `finish` has something to say and would not wait."""
        return self._future is not None and self._future.done()

    def begin(self, number: int, episodes: Sequence[Episode]) -> None:
        """Begin to write a group; the one before has to be finished. See `EpisodeStore.write`."""
        assert self._future is None
        self.number, self._future = number, self._pool.submit(self._store.write, number, episodes)

    def finish(self) -> Written:
        """Wait for the group that is being written; the disk ends that, well or with an error.

        Raises:
            DiskFull: See `EpisodeStore.write`.
            ReplayError: See `EpisodeStore.write`.
        """
        assert self._future is not None
        future, self._future, self.number = self._future, None, -1
        return future.result()

    def close(self) -> None:
        """Wait for the thread's end."""
        self._pool.shutdown()
