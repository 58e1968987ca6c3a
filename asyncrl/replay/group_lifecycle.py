"""What becomes of a group: members in; its file, its line in the ledger, its count and its receipts out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from asyncrl.errors import DiskFull
from asyncrl.records import Episode
from asyncrl.replay.counters import SuccessWindow, Tally, constant
from asyncrl.replay.disk_full import DiskWait
from asyncrl.replay.events import Session
from asyncrl.replay.files.format import Shard, Written
from asyncrl.replay.groups import ready_group
from asyncrl.replay.interface import Receipt, ReceiptStatus
from asyncrl.replay.limiter import Limiter
from asyncrl.replay.quarantine import Quarantine
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


class Keeper:
    """The store and the limiter, kept in step for one group at a time."""

    def __init__(
        self,
        store: EpisodeStore,
        limiter: Limiter,
        *,
        max_age: int,
        quarantine_after: int,
        warn: Callable[[str], None],
    ) -> None:
        """Start with what they hold; for the rest see `ReplayCore`."""
        self.store, self.limiter, self.max_age = store, limiter, max_age
        self.tally, self.session, self.success = Tally(), Session(), SuccessWindow()
        self.disk = DiskWait(store.folder, limiter.clock, warn)
        self.quarantine = Quarantine(quarantine_after)
        self.receipts: list[tuple[str, Receipt]] = []
        """Receipts that are due, each with its actor."""
        self._sealer: Sealer | None = None

    def seal_beside(self) -> None:
        """Let a thread write the files from now on."""
        self._sealer = Sealer(self.store)

    @property
    def sealing(self) -> int:
        """The group that the thread writes; -1: none."""
        return -1 if self._sealer is None else self._sealer.number

    def take(self, number: int, newest: str) -> bool:
        """Store a complete group, or have the thread begin with it; returns whether it is stored already."""
        if self._sealer is None:
            return self.seal(number, newest)
        self.finish()
        self._sealer.begin(number, list(self.limiter.open[number].members.values()))
        return False

    def seal(self, number: int, newest: str = "") -> bool:
        """Store a complete group; False when the disk is full. The episode `newest` gets no receipt here."""
        self.finish()
        try:
            shard = self.store.seal(number, list(self.limiter.open[number].members.values()))
        except DiskFull as error:
            self.disk.failed(number, error)
            return False
        self._sealed(number, shard, newest)
        return True

    def finish(self, *, wait: bool = True) -> None:
        """Enter the group that the thread wrote into the books, if there is one.

        Whatever may give an open group up does this first: so the books are as if no thread existed.

        Args:
            wait: Until it is written; False: only when it is.
        """
        if self._sealer is None or self._sealer.number < 0 or not (wait or self._sealer.done):
            return
        number = self._sealer.number
        try:
            written = self._sealer.finish()
        except DiskFull as error:
            self.disk.failed(number, error)
        else:
            self._sealed(number, self.store.enter(written))

    def close(self) -> None:
        """Let go of the folder, once the thread has written what it was given."""
        try:
            self.finish()
        finally:
            if self._sealer is not None:
                self._sealer.close()
            self.store.close()

    def _sealed(self, number: int, shard: Shard, newest: str = "") -> None:
        """Note that a complete group is durable."""
        group = self.limiter.open[number]
        members = list(group.members.values())
        if self.disk.groups:
            self.disk.over(number)
            self.store.ledger.keep_spare()
        for sibling in members:
            self.tally.add("stored")
            if sibling.episode_id != newest:
                self.receipts.append((group.actor, Receipt(episode_id=sibling.episode_id, status="stored")))
        self.limiter.make_ready(number, ready_group(shard))
        self.success.add(shard.attributes["successes"], len(members))
        if self.limiter.filter_groups and constant(members):
            self.filter(number)
        self.trim()

    def filter(self, number: int) -> None:
        """Close a stored group that teaches nothing."""
        shard = self.store.shards[number]
        successes = int(shard.attributes["successes"])
        self.store.ledger.append(filtered=number, newest_version=shard.newest_version, successes=successes)
        self.limiter.filter(number, shard.newest_version, successes)

    def drop(
        self,
        number: int,
        status: ReceiptStatus,
        *,
        stored: bool = False,
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Give a group up.

        Args:
            number: Of the group.
            status: Why.
            stored: It has or had a file, also when the books do not say so (any more).
            about: More that the ledger says.
        """
        stored = stored or number in self.limiter.ready
        shard = self.store.shards.get(number)
        group = self.limiter.drop(number, status, stored=stored)
        self.disk.over(number)
        episodes = list(group.members.values()) if group else []
        count = self.limiter.group_size if stored else len(episodes)
        decisions = sum(len(episode.policy_versions) for episode in episodes)
        if stored:
            decisions = shard.decisions if shard else 0
        self.tally.add(status, count, decisions)
        self.store.ledger.append(
            dropped=number, status=status, episodes=count, stored=stored, decisions=decisions, **about
        )
        for episode in episodes:
            receipt = Receipt(episode_id=episode.episode_id, status=status, reason="its group was given up")
            self.receipts.append((group.actor if group else episode.actor, receipt))

    def trim(self) -> None:
        """Delete closed groups that are too old or too much; what a repeated request may get again stays."""
        if not self.max_age and self.store.total_bytes <= self.store.max_bytes:
            return
        closed, again = self.limiter.closed, set(self.session.batch)
        expendable = {n: shard for n, shard in self.store.shards.items() if n in closed and n not in again}
        oldest = self.limiter.version - self.max_age
        self.store.trim(
            expendable, aged=[n for n, s in expendable.items() if self.max_age and s.newest_version < oldest]
        )
