"""Carry one group from its last episode to its end: its file, its event in the ledger, and its receipts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from asyncrl.errors import DiskFull, OutOfFiles
from asyncrl.records import Episode
from asyncrl.replay.counters import SuccessWindow, has_no_signal
from asyncrl.replay.disk_full import DiskWait
from asyncrl.replay.events import Dropped, Filtered
from asyncrl.replay.files.format import GroupFile, GroupFileParts
from asyncrl.replay.groups import ready_group
from asyncrl.replay.interface import GroupFailure, Receipt, ReceiptStatus
from asyncrl.replay.state import ReplayState
from asyncrl.replay.store import EpisodeStore

NOTICES: Final = 20
"""Lines that the replay says on the learner's console, at most."""


class BackgroundWriter:
    """Writes groups in a thread of its own, one after another."""

    def __init__(self, store: EpisodeStore) -> None:
        """Write nothing yet."""
        self._store, self._pool = store, ThreadPoolExecutor(1, "seal")
        self._futures: dict[int, Future[GroupFileParts]] = {}
        """Group -> its file, in the order of writing."""

    @property
    def numbers(self) -> Collection[int]:
        """The groups that are being written, or wait for that, or to be finished."""
        return self._futures.keys()

    @property
    def done(self) -> bool:
        """Whether `finish` has something to say and would not wait."""
        return bool(self._futures) and next(iter(self._futures.values())).done()

    def begin(self, number: int, episodes: Sequence[Episode]) -> None:
        """Have a group written. See `EpisodeStore.write`."""
        self._futures[number] = self._pool.submit(self._store.write, number, episodes)

    def next(self) -> int:
        """Return the group that `finish` is about; there is one."""
        return next(iter(self._futures))

    def finish(self) -> GroupFileParts:
        """Wait for the group that was begun first; the disk ends that, well or with an error.

        Raises:
            DiskFull: See `EpisodeStore.write`.
            OutOfFiles: See `EpisodeStore.write`.
            ReplayError: See `EpisodeStore.write`.
        """
        return self._futures.pop(self.next()).result()

    def close(self) -> None:
        """Wait for the thread's end."""
        self._pool.shutdown()


class GroupLifecycle:
    """Stores, filters, drops and deletes one group: file, event and receipts in step."""

    def __init__(self, store: EpisodeStore, state: ReplayState, warn: Callable[[str], None] = print) -> None:
        """Begin with nothing to write.

        Args:
            store: The files.
            state: What the ledger says of them.
            warn: Receives a line when the disk is full.
        """
        self.store, self.state = store, state
        self.success = SuccessWindow()
        self.disk = DiskWait(store.folder, state.limiter.clock, warn)
        self.receipts: list[tuple[str, Receipt]] = []
        """Receipts that are due, each with its actor."""
        self.notices: list[str] = []
        """Lines for the learner's console."""
        self._warn, self._told = warn, 0
        self._writer: BackgroundWriter | None = None

    def write_in_background(self) -> None:
        """Let a thread write the files from now on."""
        self._writer = BackgroundWriter(self.store)

    @property
    def unwritten(self) -> Collection[int]:
        """Complete groups that the thread writes, or will. Nothing gives them up before they are written."""
        return () if self._writer is None else self._writer.numbers

    def take(self, number: int, newest: str) -> bool:
        """Store a complete group, or hand it to the thread; returns whether it is stored already."""
        if self._writer is None:
            return self.store_group(number, newest)
        self._writer.begin(number, self._members(number))
        return False

    def store_group(self, number: int, newest: str = "") -> bool:
        """Store a complete group; False when the disk is full. The episode `newest` gets no receipt here."""
        self.finish()
        try:
            group_file = self.store.store_group(number, self._members(number))
        except (DiskFull, OutOfFiles) as error:
            self.disk.failed(number, error)
            return False
        self._stored_group(number, group_file, newest)
        return True

    def finish(self, *, wait: bool = True) -> None:
        """Note the groups that the thread wrote, if there are some.

        Args:
            wait: Until all are written; False: only those that are.
        """
        while self._writer is not None and self.unwritten and (wait or self._writer.done):
            number = self._writer.next()
            try:
                written = self._writer.finish()
            except (DiskFull, OutOfFiles) as error:
                self.disk.failed(number, error)
            else:
                self._stored_group(number, self.store.enter(written))

    def retry(self) -> None:
        """Try again to store what the disk did not take, when it is time to."""
        if self.disk.due:
            for number in sorted(self.disk.groups):
                if not self.store_group(number):
                    break

    def close(self) -> None:
        """Let go of the folder, once the thread has written what it was given."""
        try:
            self.finish()
        finally:
            if self._writer is not None:
                self._writer.close()
            self.store.close()

    def _members(self, number: int) -> list[Episode]:
        return list(self.state.limiter.open[number].members.values())

    def _stored_group(self, number: int, group_file: GroupFile, newest: str = "") -> None:
        """Note that a complete group is durable."""
        actor, members = self.state.limiter.open[number].actor, self._members(number)
        if self.disk.groups:
            self.disk.over(number)
            self.store.ledger.keep_spare()
        for sibling in members:
            if sibling.episode_id != newest:
                self.receipts.append((actor, Receipt(episode_id=sibling.episode_id, status="stored")))
        self.state.make_ready(number, ready_group(group_file))
        self.success.add(group_file.attributes["successes"], len(members))
        if self.state.limiter.filter_groups and has_no_signal(members):
            self.filter(number)
        self.trim()

    def filter(self, number: int) -> None:
        """Close a stored group that teaches nothing."""
        group_file = self.store.group_files[number]
        successes = int(group_file.attributes["successes"])
        self.state.commit(
            Filtered(number=number, newest_version=group_file.newest_version, successes=successes)
        )

    def tell(self, line: str) -> None:
        """Say something once, in the log and on the learner's console; there `NOTICES` lines at most."""
        line = "".join(letter if letter.isprintable() else "?" for letter in line)[:2000]  # It is sent.
        self._warn(f"replay: {line}")
        self._told += 1
        if self._told <= NOTICES:
            self.notices.append(line)
        elif self._told == NOTICES + 1:
            self.notices.append("the replay has more to say: see its log")

    def set_aside(self, number: int, why: str) -> None:
        """Close a ready group that the learner cannot use, for ever, and keep its file in a folder apart."""
        self.drop(number, "dropped_unusable", stored=True, reason=why[:1000])
        kept = self.store.set_aside(number)
        self.tell(
            f"group {number} is set aside, the learner cannot use it: {why[:300]}. Its file is kept: "
            f"{kept.parent.name}/{kept.name} of the replay folder"
        )

    def drop(
        self,
        number: int,
        status: ReceiptStatus,
        *,
        stored: bool = False,
        failure: GroupFailure | None = None,
        reason: str = "",
    ) -> None:
        """Give a group up. If its number is granted again, its file is deleted before the ledger says so.

        Args:
            number: Of the group.
            status: Why.
            stored: It has or had a file, also when it is not ready (any more).
            failure: Why it could not be imagined, if that is so.
            reason: What is wrong with a stored group, if something is.
        """
        limiter = self.state.limiter
        stored = stored or number in limiter.ready
        group = limiter.open.get(number)
        episodes = list(group.members.values()) if group else []
        count, decisions = len(episodes), sum(len(episode.policy_versions) for episode in episodes)
        task = episodes[0].task if episodes else ""
        if stored:
            group_file = self.store.group_files.get(number)
            count, decisions = limiter.group_size, 0
            if group_file is not None:
                count, decisions = group_file.attributes["group_size"], group_file.decisions
            task = group_file.attributes["task"] if group_file else ""
        self.disk.over(number)
        if limiter.grants_again(number, status):
            self.store.remove(number)
        self.state.commit(
            Dropped(
                number=number,
                status=status,
                episodes=count,
                stored=stored,
                decisions=decisions,
                task=task,
                version=limiter.version,
                failure=failure,
                reason=reason,
            )
        )
        for episode in episodes:
            receipt = Receipt(episode_id=episode.episode_id, status=status, reason="its group was given up")
            self.receipts.append((group.actor if group else episode.actor, receipt))

    def trim(self) -> None:
        """Delete closed groups that are too old or too much; what a repeated request may get again stays."""
        limiter, max_age = self.state.limiter, self.state.limiter.settings.max_age_versions
        if not max_age and self.store.total_bytes <= self.store.max_bytes:
            return
        again = set(self.state.session.batch)
        expendable = {
            number: group_file
            for number, group_file in self.store.group_files.items()
            if limiter.is_closed(number) and number not in again
        }
        oldest = limiter.version - max_age
        self.store.trim(
            expendable, aged=[n for n, s in expendable.items() if max_age and s.newest_version < oldest]
        )
