"""Carry one group from its last episode to its end: its file, its event in the ledger, and its receipts.

While the disk is full, or no file can be opened, complete groups stay in memory and no new group is granted:
the credit bounds the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from asyncrl.errors import DiskFull, OutOfFiles
from asyncrl.records import Episode
from asyncrl.replay.events import Dropped, Filtered
from asyncrl.replay.group_file import GroupFile
from asyncrl.replay.groups import SuccessWindow, has_no_signal
from asyncrl.replay.interface import GroupFailure, Receipt, ReceiptStatus
from asyncrl.replay.state import ReplayState
from asyncrl.replay.store import EpisodeStore

NOTICES: Final = 20  # Most lines of the replay on the learner's console
RETRY_EVERY: Final = 1.0  # Seconds between two attempts to write a group that waits
T = TypeVar("T")


class GroupLifecycle:
    """Stores, filters, drops and deletes one group: file, event and receipts in step."""

    def __init__(self, store: EpisodeStore, state: ReplayState, warn: Callable[[str], None] = print) -> None:
        self.store, self.state = store, state
        self.success = SuccessWindow()
        self.disk = DiskWait(state.limiter.clock, warn)
        self.receipts: list[tuple[str, Receipt]] = []
        self.notices: list[str] = []
        self._warn, self._notified = warn, 0
        self._writer: Executor = AtOnce()
        self._unwritten: dict[int, Future[GroupFile]] = {}

    def write_in_background(self) -> None:
        """Let a thread write the files from now on, one after another."""
        self._writer = ThreadPoolExecutor(1, "seal")

    @property
    def unwritten(self) -> Collection[int]:
        """Complete groups in the thread's queue. Nothing gives them up before they are written."""
        return self._unwritten.keys()

    def store_soon(self, number: int) -> None:
        """Store a complete group, in the thread if there is one; the receipts of its episodes follow."""
        self._unwritten[number] = self._writer.submit(self.store.write, number, self._members(number))
        self.finish(wait=False)

    def finish(self, *, wait: bool = True) -> None:
        """Enter the groups that the thread wrote; with `wait`, all of them."""
        while self._unwritten and (wait or next(iter(self._unwritten.values())).done()):
            number = next(iter(self._unwritten))
            try:
                self._enter(self._unwritten.pop(number).result())
            except (DiskFull, OutOfFiles) as error:
                self.disk.failed(number, error)

    def retry(self) -> None:
        """Store the waiting groups again once that is due."""
        while self.disk.due and not self._unwritten:
            self.store_soon(min(self.disk.groups))

    def close(self) -> None:
        """Wait for the thread, then close the folder."""
        try:
            self.finish()
        finally:
            self._writer.shutdown()
            self.store.close()

    def _members(self, number: int) -> list[Episode]:
        return list(self.state.limiter.open[number].members.values())

    def _enter(self, group_file: GroupFile) -> None:
        number = self.store.enter(group_file).number
        actor, members = self.state.limiter.open[number].actor, self._members(number)
        if self.disk.groups:
            self.disk.over(number)
            self.store.ledger.keep_spare()
        self.receipts += [(actor, Receipt(episode_id=x.episode_id, status="stored")) for x in members]
        self.state.make_ready(number, group_file)
        self.success.add(group_file.attributes["successes"], len(members))
        if self.state.limiter.filter_groups and has_no_signal(members):
            self.filter(number)
        self.trim()

    def filter(self, number: int) -> None:
        """Close a stored group without a learning signal."""
        group_file = self.store.group_files[number]
        successes = int(group_file.attributes["successes"])
        self.state.commit(
            Filtered(filtered=number, newest_version=group_file.newest_version, successes=successes)
        )

    def notify(self, line: str) -> None:
        """Write a line to the log and to the learner's console, there `NOTICES` lines at most."""
        line = "".join(letter if letter.isprintable() else "?" for letter in line)[:2000]  # It is sent.
        self._warn(f"replay: {line}")
        self._notified += 1
        if self._notified <= NOTICES:
            self.notices.append(line)
        elif self._notified == NOTICES + 1:
            self.notices.append("the replay has more to say: see its log")

    def set_aside(self, number: int, why: str) -> None:
        """Close a ready group that the learner cannot use; keep its file in another folder."""
        self.drop(number, "dropped_unusable", reason=why[:1000])
        kept = self.store.set_aside(number)
        self.notify(
            f"group {number} is set aside, the learner cannot use it: {why[:300]}. Its file is kept: "
            f"{kept.parent.name}/{kept.name} of the replay folder"
        )

    def drop(
        self, number: int, status: ReceiptStatus, *, failure: GroupFailure | None = None, reason: str = ""
    ) -> None:
        """Give a group up. A number that is granted again loses its file before the event is written."""
        limiter = self.state.limiter
        group, group_file = limiter.open.get(number), self.store.group_files.get(number)
        episodes = list(group.members.values()) if group else []
        if group is not None:
            count, decisions = len(episodes), sum(len(episode.policy_versions) for episode in episodes)
            task = episodes[0].task if episodes else ""
        elif group_file is not None:
            count, decisions = group_file.attributes["group_size"], group_file.decisions
            task = group_file.attributes["task"]
        else:
            count, decisions, task = limiter.group_size, 0, ""
        self.disk.over(number)
        if limiter.grants_again(number, status):
            self.store.remove(number)
        self.state.commit(
            Dropped(
                dropped=number,
                status=status,
                episodes=count,
                stored=group is None,
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
        """Delete the oldest closed groups beyond --replay.max-gigabytes, except those of the last batch."""
        if self.store.total_bytes > self.store.max_bytes:
            again, closed = set(self.state.session.batch), self.state.limiter.is_closed
            self.store.trim([n for n in self.store.group_files if closed(n) and n not in again])


class AtOnce(Executor):
    """Runs everything in the thread that submits it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Return the result as a pool of threads would."""
        future = Future[T]()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class DiskWait:
    """Complete groups that wait for disk space or for file descriptors."""

    def __init__(self, clock: Callable[[], float], warn: Callable[[str], None]) -> None:
        """Start without groups; `warn` receives one line when waiting begins and one when it ends."""
        self._clock, self._warn = clock, warn
        self.groups: set[int] = set()
        self._since, self._failed_at, self._before = 0.0, 0.0, 0.0
        self.wanted = "disk space"

    @property
    def seconds(self) -> float:
        """Time waited since the replay was opened."""
        return self._before + (self._clock() - self._since if self.groups else 0.0)

    @property
    def due(self) -> bool:
        """True if it is time to try again."""
        return bool(self.groups) and self._clock() - self._failed_at >= RETRY_EVERY

    def failed(self, number: int, error: DiskFull | OutOfFiles) -> None:
        """Record that a group could not be written."""
        if not self.groups:
            self._since = self._clock()
            self.wanted = "disk space" if isinstance(error, DiskFull) else "files to open"
            self._warn(f"replay: waiting for {self.wanted}, actors get no new groups: {error}")
        self.groups.add(number)
        self._failed_at = self._clock()

    def over(self, number: int) -> None:
        """Record that a group was written or given up."""
        if number in self.groups:
            waited = self.seconds
            self.groups.discard(number)
            if not self.groups:
                self._before = waited
                self._warn(f"replay: goes on after {self._clock() - self._since:.1f} s without {self.wanted}")
