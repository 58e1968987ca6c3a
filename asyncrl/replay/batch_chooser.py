"""Choose the groups of a batch, and read them ahead in threads.

The serving thread never waits; others read one group's file at a time, check and encode it. Groups stay in
memory as far as they fit, those of the last batch always. The limiter decides when a batch is chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from asyncrl.errors import CodecMissing, OutOfFiles, ReplayError
from asyncrl.messaging.framing import Buffer
from asyncrl.messaging.wire import encode
from asyncrl.records import Episode
from asyncrl.replay.admission import Expected, problem_for_learner
from asyncrl.replay.events import Used
from asyncrl.replay.group_file import GroupFile, read_group
from asyncrl.replay.lifecycle import AtOnce, GroupLifecycle

LEFT_OUT: Final = ("video",)  # Arrays that no update reads: threads skip them
MAX_THREADS: Final = 4
READ_AHEAD_BYTES: Final = 8 * 10**9  # Of groups that the learner may get next


@dataclass(frozen=True, kw_only=True)
class LoadedGroup:
    """Result of reading a group's file."""

    damaged: str = ""
    problem: str | None = None  # Why the learner cannot use it; None if it can
    episodes: list[Episode] = field(default_factory=list)  # In the order of their members
    messages: list[list[Buffer]] = field(default_factory=list)
    """A message `batch` for each episode, without copies of its arrays."""


class BatchChooser:
    """Gives groups away, each recorded as used before the learner gets it."""

    def __init__(self, lifecycle: GroupLifecycle, warn: Callable[[str], None]) -> None:
        """Read groups when needed, without threads; `warn` gets a line if no file can be opened."""
        self._lifecycle, self._store, self._state = lifecycle, lifecycle.store, lifecycle.state
        self._warn, self._out_of_files = warn, False
        self._pool: Executor = AtOnce()
        self._without: Sequence[str] = ()
        self._groups: dict[int, Future[LoadedGroup]] = {}
        self.reading = False  # True if there are enough groups for the last request, and some are being read.

    def read_in_background(self) -> None:
        """Read in threads from now on, also ahead: see `read_ahead`."""
        self._without = LEFT_OUT
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "read")

    @property
    def busy(self) -> bool:
        """True if a group is being read."""
        return any(not future.done() for future in self._groups.values())

    def forget(self, *, but: Sequence[int] = ()) -> None:
        """Forget all groups read except `but`, whose checks at a later version may not hold now."""
        for number in self._groups.keys() - set(but):
            self._groups.pop(number).cancel()

    def sent(self, number: int) -> None:
        """Forget a group that a learner rank has."""
        self._groups.pop(number, None)

    def choose(self, groups: int, request: str) -> list[int] | None:
        """Give complete groups away, oldest first, as used; None if too few are read and usable by now."""
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
        """Return True if the learner can use a ready group, else close it; None: it is being read."""
        group = self.load(number)
        if group is None:
            return None
        if group.damaged:
            self._lifecycle.drop(number, "dropped_invalid")
        elif group.problem is not None:
            self.sent(number)
            self._lifecycle.set_aside(number, group.problem)
        return not group.damaged and group.problem is None

    def load(self, number: int) -> LoadedGroup | None:
        """Return a stored group, or start to read it; None while it is being read."""
        if number not in self._store.group_files:
            return LoadedGroup(damaged=f"the file of group {number} is gone")
        self._begin(number)
        if not self._groups[number].done():
            return None
        try:
            group = self._groups[number].result()
        except ReplayError:
            del self._groups[number]
            raise
        if group.damaged:
            del self._groups[number]
            self._store.put_away(number, group.damaged)
        return group

    def pop(self, numbers: Sequence[int]) -> list[list[Episode]]:
        """Return the groups of a batch that was just chosen without threads; forget all that was read."""
        groups = [self.load(number) for number in numbers]
        self.forget()
        return [group.episodes for group in groups if group is not None]

    def read_ahead(self) -> None:
        """Start to read groups that the learner may get next, and forget the others. Call it often."""
        usable, files = self._state.limiter.usable, self._store.group_files
        self.forget(but=[*usable, *self._state.batch])
        room = READ_AHEAD_BYTES - sum(files[number].size for number in self._groups if number in files)
        for number in usable:
            room -= 0 if number in self._groups else files[number].size
            if room >= 0:
                self._begin(number)

    def close(self) -> None:
        """Wait for the threads: each finishes its file."""
        self.forget()
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, number: int) -> None:
        if number not in self._groups:
            expected = self._state.limiter.expected(self._state.limiter.version)
            about = self._store.group_files[number], expected, self._without
            self._groups[number] = self._pool.submit(_load, *about)


def _load(group_file: GroupFile, expected: Expected, without: Sequence[str]) -> LoadedGroup:
    try:
        episodes = read_group(group_file.path, without=without)
    except (CodecMissing, OutOfFiles):
        raise
    except ReplayError as error:
        return LoadedGroup(damaged=str(error))
    if without:
        episodes = [replace(episode, video=episode.frames[:0]) for episode in episodes]
    if (why := problem_for_learner(episodes, f"{group_file.number:08d}", expected)) is not None:
        return LoadedGroup(problem=why)
    about = {"number": group_file.number, "size": len(episodes)}
    messages = [encode("batch", episode, **about) for episode in episodes]
    return LoadedGroup(episodes=episodes, messages=messages)
