"""Choose the groups of a batch, and read them ahead in threads.

The serving thread never waits; others read one group's file at a time, check and encode it. Groups stay in
memory as far as they fit, of others only the verdict. The limiter decides when a batch is chosen.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from asyncrl.errors import CodecMissing, OutOfFiles, ReplayError
from asyncrl.messaging.episode_codec import Buffer
from asyncrl.messaging.wire import encode
from asyncrl.records import Episode
from asyncrl.replay.admission import unusable
from asyncrl.replay.events import Used
from asyncrl.replay.group_file import GroupFile, read_group
from asyncrl.replay.lifecycle import AtOnce, GroupLifecycle

LEFT_OUT: Final = ("video",)  # Arrays that no update reads: threads skip them
MAX_THREADS: Final = 4
READ_AHEAD_BYTES: Final = 8 * 10**9  # Of groups that the learner may get next; of others only the verdict


@dataclass(frozen=True, kw_only=True)
class LoadedGroup:
    """Result of reading a group's file."""

    damaged: str = ""
    unusable: str | None = None  # Why the learner cannot use it; None if it can
    episodes: list[Episode] = field(default_factory=list)
    """In the order of their members; empty if only the verdict was kept."""
    messages: list[list[Buffer]] = field(default_factory=list)
    """A message `batch` for each episode, without copies of its arrays; empty likewise."""


@dataclass(kw_only=True)
class _Entry:
    """A group that is read, or being read."""

    future: Future[LoadedGroup]
    kept: bool  # Its episodes, not only the verdict.
    nbytes: int


class BatchChooser:
    """Gives groups away, each recorded as used before the learner gets it."""

    def __init__(self, lifecycle: GroupLifecycle, warn: Callable[[str], None]) -> None:
        """Read at once where a group is needed; `warn` receives a line if no file can be opened."""
        self._lifecycle, self._store, self._state = lifecycle, lifecycle.store, lifecycle.state
        self._warn, self._out_of_files = warn, False
        self._pool: Executor = AtOnce()
        self._max_bytes, self._without = math.inf, ()
        self._entries: dict[int, _Entry] = {}
        self.reading = False  # True if there are enough groups for the last request, and some are being read.

    def read_in_background(self) -> None:
        """Read in threads from now on, also ahead: see `read_ahead`."""
        self._max_bytes, self._without = READ_AHEAD_BYTES, LEFT_OUT
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "read")

    @property
    def busy(self) -> bool:
        """True if a group is being read."""
        return any(not entry.future.done() for entry in self._entries.values())

    def begin(self) -> None:
        """Forget every read group: its check at a later version may not hold at this one."""
        self._keep_only(set())

    def choose(self, groups: int, request: str) -> list[int] | None:
        """Give complete groups away, oldest first; from then on they count as used.

        Returns:
            Their numbers, each read and usable; None if there are too few, or some are being read.
        """
        last = self._state.batch
        if request and request == self._state.request and self._store.group_files.keys() >= set(last):
            return list(last)
        limiter, self.reading = self._state.limiter, False
        try:
            while not self.reading:
                numbers = limiter.pick(groups, not_awaited=self._lifecycle.disk.groups)
                if numbers is None:
                    return None
                sound = [self._is_sound(number) for number in numbers]
                if all(sound):
                    self._out_of_files = False
                    self._state.commit(Used(used=numbers, request=request, version=limiter.version))
                    self._lifecycle.trim()
                    return numbers
                self.reading = None in sound
        except OutOfFiles as error:
            if not self._out_of_files:
                self._warn(f"replay: waiting for files to open, the learner gets no batch: {error}")
            self._out_of_files = True
        return None

    def _is_sound(self, number: int) -> bool | None:
        """Check again whether the learner can use a ready group, else close it; None: it is being read."""
        group = self._read(number)
        if group is None:
            return None
        if group.damaged:
            self._put_away(number, group.damaged)
            self._lifecycle.drop(number, "dropped_invalid")
        elif group.unusable is not None:
            self.forget(number)
            self._lifecycle.set_aside(number, group.unusable)
        return not group.damaged and group.unusable is None

    def load(self, number: int) -> LoadedGroup | None:
        """Return a stored group with its episodes; None while it is being read."""
        if number not in self._store.group_files:
            return LoadedGroup(damaged=f"the file of group {number} is gone")
        group = self._read(number, keep=True)
        if group is not None and group.damaged:
            self._put_away(number, group.damaged)
        return group

    def pop(self, numbers: Sequence[int]) -> list[list[Episode]]:
        """Return the groups of a batch that was just chosen without threads; forget all that was read."""
        groups = [self.load(number) for number in numbers]
        self._keep_only(set())
        return [group.episodes for group in groups if group is not None]

    def read_ahead(self) -> None:
        """Start to read groups that the learner may get next, and forget the others. Call it often.

        A group that does not fit is only checked, and kept once there is room.
        """
        usable = list(self._state.limiter.usable)
        self._keep_only({*usable, *self._state.batch})
        room = self._max_bytes - self._kept_bytes
        for number in usable:
            entry = self._entries.get(number)
            fits = self._store.group_files[number].size <= room
            if entry is None or (fits and not entry.kept and entry.future.done()):
                self._begin(number, keep=fits)
                room -= self._entries[number].nbytes if fits else 0

    def forget(self, number: int) -> None:
        """Forget a group that was sent, or is damaged."""
        self._entries.pop(number, None)

    def close(self) -> None:
        """Wait for the threads' end: each finishes its file."""
        self._keep_only(set())
        self._pool.shutdown(cancel_futures=True)

    def _read(self, number: int, *, keep: bool = False) -> LoadedGroup | None:
        """Return a group, or start to read it; None while it is being read."""
        self._begin(number, keep=keep)
        future = self._entries[number].future
        if not future.done():
            return None
        try:
            return future.result()
        except ReplayError:
            del self._entries[number]
            raise

    def _begin(self, number: int, *, keep: bool) -> None:
        entry = self._entries.get(number)
        if entry is not None and (entry.kept or not keep):
            return
        group_file = self._store.group_files[number]
        keep = keep or self._kept_bytes + group_file.size <= self._max_bytes
        expected = self._state.limiter.expected(self._state.limiter.version)

        def check(group: Sequence[Episode]) -> str | None:
            return unusable(group, f"{number:08d}", expected)

        future = self._pool.submit(_load, group_file, check, keep, self._without)
        self._entries[number] = _Entry(future=future, kept=keep, nbytes=group_file.size)

    @property
    def _kept_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values() if entry.kept)

    def _keep_only(self, numbers: set[int]) -> None:
        for number in self._entries.keys() - numbers:
            self._entries.pop(number).future.cancel()

    def _put_away(self, number: int, why: str) -> None:
        self.forget(number)
        self._store.put_away(number, why)


def _load(
    group_file: GroupFile,
    check: Callable[[Sequence[Episode]], str | None],
    kept: bool,
    without: Sequence[str],
) -> LoadedGroup:
    try:
        episodes = read_group(group_file.path, without=without)
    except (CodecMissing, OutOfFiles):
        raise
    except ReplayError as error:
        return LoadedGroup(damaged=str(error))
    if without:
        episodes = [replace(episode, video=episode.frames[:0]) for episode in episodes]
    if (why := check(episodes)) is not None:
        return LoadedGroup(unusable=why)
    if not kept:
        return LoadedGroup()
    about = {"number": group_file.number, "size": len(episodes)}
    messages = [encode("batch", episode, **about) for episode in episodes]
    return LoadedGroup(episodes=episodes, messages=messages)
