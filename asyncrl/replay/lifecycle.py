"""Life of a complete group: its file, its event in the ledger, and its receipts.

While the disk is full, or no file can be opened, complete groups stay in memory and no new group is granted:
the credit bounds the memory. After an interruption, `recover` brings the groups back from ledger and files
when the process starts, `roll_back` when a learner resumes from an earlier version.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, TypeVar

from asyncrl.errors import CodecMissing, DiskFull, OutOfFiles, ReplayError
from asyncrl.records import Episode
from asyncrl.replay.events import Dropped, Filtered, GroupSized, Ready, read_events
from asyncrl.replay.group_file import GroupFile, read_group
from asyncrl.replay.groups import SuccessWindow, has_no_signal
from asyncrl.replay.interface import GroupFailure, Receipt, ReceiptStatus
from asyncrl.replay.state import ReplayState
from asyncrl.replay.store import EpisodeStore

NOTICES: Final = 20  # Most lines of the replay that wait for the learner's console
RETRY_EVERY: Final = 1.0  # Seconds between two attempts to write a group that waits
T = TypeVar("T")


class GroupLifecycle:
    """Stores, filters, drops and deletes one group: file, event and receipts in step."""

    def __init__(self, store: EpisodeStore, state: ReplayState, warn: Callable[[str], None] = print) -> None:
        self.store, self.state, self._warn = store, state, warn
        self.success = SuccessWindow()
        self.disk = DiskWait(state.limiter.clock, warn)
        self.receipts: list[tuple[str, Receipt]] = []
        self.notices: list[str] = []
        self._writer: Executor = AtOnce()
        self.unwritten: dict[int, Future[GroupFile]] = {}
        """Complete groups in the thread's queue. Nothing gives them up before they are written."""

    def recover(self) -> None:
        """Fill the empty state from the ledger and the files."""
        state, limiter, files, aside = self.state, self.state.limiter, self.store.group_files, set[int]()
        for event in read_events(self.store.ledger.read(), self._warn):
            state.apply(event)
            if isinstance(event, Dropped):
                (aside.add if event.status == "dropped_unusable" else aside.discard)(event.dropped)
        for number in aside & files.keys():  # The process ended before it moved the file.
            self.store.set_aside(number)
        for number, group in [(n, group) for n, group in files.items() if not limiter.is_closed(n)]:
            state.make_ready(number, group)
            if limiter.filter_groups and limiter.matches_run(group) and self._lacks_signal(group):
                self.filter(number)  # The process ended before it did that.
        limiter.end_recovery()
        if state.group_size != limiter.group_size:
            state.commit(GroupSized(group_size=limiter.group_size))
        self.count_successes()

    def _lacks_signal(self, group: GroupFile) -> bool:
        try:
            return has_no_signal(read_group(group.path, ("rewards",)))
        except (CodecMissing, OutOfFiles):
            raise
        except ReplayError:  # Who chooses it for a batch finds the damage.
            return False

    def roll_back(self, version: int, *, in_turns: bool) -> None:
        """Carry out `Limiter.plan_resume`."""
        state, stored = self.state, dict(self.store.group_files)
        ready, drop = state.limiter.plan_resume(version, stored, in_turns=in_turns)
        other = [n for n in drop if n in stored and not state.limiter.matches_run(stored[n])]
        if other:
            self.notify(
                f"{len(other)} stored groups were made in another world, or with another "
                "--algorithm.group-size, temperature or top-k: they are given up (replay/dropped_resume) and "
                "imagined again."
            )
        for number in ready:
            state.commit(Ready(ready=number))
            state.make_ready(number, stored[number])
        for number, status in drop.items():
            self.drop(number, status)

    def count_successes(self) -> None:
        """Count the complete groups whose newest decision is of the learner's version."""
        self.success, limiter = SuccessWindow(), self.state.limiter
        for group in limiter.ready.values():
            if group.newest_version == limiter.version:
                self.success.add(group.successes, group.group_size)
        for closed in limiter.closed.values():
            if closed.filtered is not None and closed.version == limiter.version:
                self.success.add(*closed.filtered)

    def write_in_background(self) -> None:
        """Let a thread write the files from now on, one after another."""
        self._writer = ThreadPoolExecutor(1, "seal")

    def store_soon(self, number: int) -> None:
        """Store a complete group, in the thread if there is one; the receipts of its episodes follow."""
        self.unwritten[number] = self._writer.submit(self.store.write, number, self._members(number))
        self.finish(wait=False)

    def finish(self, *, wait: bool = True) -> None:
        """Record the groups that the thread has written; with `wait`, wait for all."""
        while self.unwritten and (wait or next(iter(self.unwritten.values())).done()):
            number = next(iter(self.unwritten))
            try:
                self._enter(self.unwritten.pop(number).result())
            except (DiskFull, OutOfFiles) as error:
                self.disk.failed(number, error)

    def retry(self) -> None:
        """Retry storing the waiting groups once due."""
        while self.disk.due and not self.unwritten:
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
        self.success.add(group_file.successes, len(members))
        if self.state.limiter.filter_groups and has_no_signal(members):
            self.filter(number)
        self.trim()

    def filter(self, number: int) -> None:
        """Close a stored group without a learning signal."""
        file = self.store.group_files[number]
        event = Filtered(filtered=number, newest_version=file.newest_version, successes=file.successes)
        self.state.commit(event)

    def notify(self, line: str) -> None:
        """Write a line to the log, and to the learner's console unless `NOTICES` lines wait for that."""
        line = "".join(letter if letter.isprintable() else "?" for letter in line)[:2000]  # It is sent.
        self._warn(f"replay: {line}")
        if len(self.notices) < NOTICES:
            self.notices.append(line)

    def set_aside(self, number: int, why: str) -> None:
        """Close a ready group that the learner cannot use; keep its file in another folder."""
        self.drop(number, "dropped_unusable", why[:1000])
        kept = self.store.set_aside(number)
        self.notify(
            f"group {number} is set aside, the learner cannot use it: {why[:300]}. Its file is kept: "
            f"{kept.parent.name}/{kept.name} of the replay folder"
        )

    def drop(
        self, number: int, status: ReceiptStatus, reason: str = "", failure: GroupFailure | None = None
    ) -> None:
        """Give a group up. A number that is granted again loses its file before the event is written."""
        limiter = self.state.limiter
        group, group_file = limiter.open.get(number), self.store.group_files.get(number)
        episodes = list(group.members.values()) if group else []
        count, decisions, task = limiter.group_size, 0, ""
        if group is not None:
            count, decisions = len(episodes), sum(len(episode.policy_versions) for episode in episodes)
            task = episodes[0].task if episodes else ""
        elif group_file is not None:
            count, decisions = group_file.group_size, group_file.decisions
            task = group_file.task
        event = Dropped(
            dropped=number,
            status=status,
            episodes=count,
            stored=group is None,
            decisions=decisions,
            task=task,
            version=limiter.version,
            reason=reason,
        )
        if failure is not None:
            about = {"start_state": failure.start_state, "why": failure.reason, "left": failure.left}
            event = replace(event, cause=failure.cause, **about)
        self.disk.over(number)
        if limiter.grants_again(number, status):
            self.store.remove(number)
        self.state.commit(event)
        for episode in episodes:
            receipt = Receipt(episode_id=episode.episode_id, status=status, reason="its group was given up")
            self.receipts.append((group.actor if group else episode.actor, receipt))

    def trim(self) -> None:
        """Delete the oldest closed groups beyond --replay.max-gigabytes, except those of the last batch."""
        if self.store.total_bytes > self.store.max_bytes:
            again, closed = set(self.state.batch), self.state.limiter.is_closed
            self.store.trim([n for n in self.store.group_files if closed(n) and n not in again])


class AtOnce(Executor):
    """Runs everything in the thread that submits it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run `fn` and return its result as a future."""
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
        """Remove a group that was written or given up."""
        if number in self.groups:
            waited = self.seconds
            self.groups.discard(number)
            if not self.groups:
                self._before = waited
                self._warn(f"replay: goes on after {self._clock() - self._since:.1f} s without {self.wanted}")
