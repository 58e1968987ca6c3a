"""What becomes of a group: members in; its file, its line in the ledger, its count and its receipts out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from asyncrl.errors import DiskFull
from asyncrl.records import Episode
from asyncrl.replay.counters import EpisodeCounters, SuccessWindow, has_no_signal
from asyncrl.replay.disk_full import DiskWait
from asyncrl.replay.events import Session
from asyncrl.replay.files.format import GroupFile, GroupFileParts
from asyncrl.replay.groups import ready_group
from asyncrl.replay.interface import Receipt, ReceiptStatus
from asyncrl.replay.limiter import Limiter
from asyncrl.replay.quarantine import Quarantine
from asyncrl.replay.store import EpisodeStore


class BackgroundWriter:
    """Writes one group beside its caller."""

    def __init__(self, store: EpisodeStore) -> None:
        """Write nothing yet."""
        self._store, self._pool = store, ThreadPoolExecutor(1, "seal")
        self._future: Future[GroupFileParts] | None = None
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

    def finish(self) -> GroupFileParts:
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


class GroupLifecycle:
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
        """Start with what they hold; for the rest see `Replay`."""
        self.store, self.limiter, self.max_age = store, limiter, max_age
        self.counters, self.session, self.success = EpisodeCounters(), Session(), SuccessWindow()
        self.disk = DiskWait(store.folder, limiter.clock, warn)
        self.quarantine = Quarantine(quarantine_after)
        self.receipts: list[tuple[str, Receipt]] = []
        """Receipts that are due, each with its actor."""
        self._writer: BackgroundWriter | None = None

    def write_in_background(self) -> None:
        """Let a thread write the files from now on."""
        self._writer = BackgroundWriter(self.store)

    @property
    def writing(self) -> int:
        """The group that the thread writes; -1: none."""
        return -1 if self._writer is None else self._writer.number

    def take(self, number: int, newest: str) -> bool:
        """Store a complete group, or have the thread begin with it; returns whether it is stored already."""
        if self._writer is None:
            return self.store_group(number, newest)
        self.finish()
        self._writer.begin(number, list(self.limiter.open[number].members.values()))
        return False

    def store_group(self, number: int, newest: str = "") -> bool:
        """Store a complete group; False when the disk is full. The episode `newest` gets no receipt here."""
        self.finish()
        try:
            group_file = self.store.store_group(number, list(self.limiter.open[number].members.values()))
        except DiskFull as error:
            self.disk.failed(number, error)
            return False
        self._stored_group(number, group_file, newest)
        return True

    def finish(self, *, wait: bool = True) -> None:
        """Enter the group that the thread wrote into the books, if there is one.

        Whatever may give an open group up does this first: so the books are as if no thread existed.

        Args:
            wait: Until it is written; False: only when it is.
        """
        if self._writer is None or self._writer.number < 0 or not (wait or self._writer.done):
            return
        number = self._writer.number
        try:
            written = self._writer.finish()
        except DiskFull as error:
            self.disk.failed(number, error)
        else:
            self._stored_group(number, self.store.enter(written))

    def close(self) -> None:
        """Let go of the folder, once the thread has written what it was given."""
        try:
            self.finish()
        finally:
            if self._writer is not None:
                self._writer.close()
            self.store.close()

    def _stored_group(self, number: int, group_file: GroupFile, newest: str = "") -> None:
        """Note that a complete group is durable."""
        group = self.limiter.open[number]
        members = list(group.members.values())
        if self.disk.groups:
            self.disk.over(number)
            self.store.ledger.keep_spare()
        for sibling in members:
            self.counters.add("stored")
            if sibling.episode_id != newest:
                self.receipts.append((group.actor, Receipt(episode_id=sibling.episode_id, status="stored")))
        self.limiter.make_ready(number, ready_group(group_file))
        self.success.add(group_file.attributes["successes"], len(members))
        if self.limiter.filter_groups and has_no_signal(members):
            self.filter(number)
        self.trim()

    def filter(self, number: int) -> None:
        """Close a stored group that teaches nothing."""
        group_file = self.store.group_files[number]
        successes = int(group_file.attributes["successes"])
        self.store.ledger.append(
            filtered=number, newest_version=group_file.newest_version, successes=successes
        )
        self.limiter.filter(number, group_file.newest_version, successes)

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
        group_file = self.store.group_files.get(number)
        group = self.limiter.drop(number, status, stored=stored)
        self.disk.over(number)
        episodes = list(group.members.values()) if group else []
        count = self.limiter.group_size if stored else len(episodes)
        decisions = sum(len(episode.policy_versions) for episode in episodes)
        if stored:
            decisions = group_file.decisions if group_file else 0
        self.counters.add(status, count, decisions)
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
        expendable = {
            n: group_file
            for n, group_file in self.store.group_files.items()
            if n in closed and n not in again
        }
        oldest = self.limiter.version - self.max_age
        self.store.trim(
            expendable, aged=[n for n, s in expendable.items() if self.max_age and s.newest_version < oldest]
        )
