"""Read the groups that the learner gets ahead of their use, check them, and write their messages.

    serving thread   `begin`, `look`, `keep_only`; never waits
    reader threads   one group's file at a time: arrays, checksums, `admission.unusable`, messages

What is loaded is kept as far as it fits; of the rest only what was found is. So the thread that serves
neither reads nor checks anything when a batch is chosen. Loading decides nothing: whether a group may be used
is asked when it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from asyncrl.errors import CodecMissing, OutOfFiles, ReplayError
from asyncrl.messaging.episode_codec import Buffer
from asyncrl.messaging.wire import encode
from asyncrl.records import Episode
from asyncrl.replay.files.format import GroupFile
from asyncrl.replay.store import EpisodeStore

LEFT_OUT: Final = ("video",)
"""Arrays that no update looks at: threads do not read them."""
MAX_THREADS: Final = 4
Check = Callable[[Sequence[Episode]], str | None]
"""Says why the learner cannot use a group, or None."""


@dataclass(frozen=True, kw_only=True)
class LoadedGroup:
    """What was found in a group's file."""

    damaged: str = ""
    """Why it cannot be read; empty: it can."""
    unusable: str | None = None
    """Why the learner cannot use it; None: it can."""
    episodes: list[Episode] = field(default_factory=list)
    """In the order of their members; empty where they were not kept."""
    messages: list[list[Buffer]] = field(default_factory=list)
    """A message `batch` for each episode, without copies of its arrays; empty likewise."""


@dataclass(kw_only=True)
class _Entry:
    """A group that is loaded, or being loaded."""

    future: Future[LoadedGroup]
    kept: bool
    """Whether its episodes are kept, not only what was found."""
    nbytes: int


class GroupLoader:
    """Loads groups in threads; without `read_in_background` at once, where they are asked for."""

    def __init__(self, store: EpisodeStore) -> None:
        """Load nothing yet."""
        self._store = store
        self._pool: ThreadPoolExecutor | None = None
        self._max_bytes = 0
        self._entries: dict[int, _Entry] = {}

    def read_in_background(self, max_bytes: int, threads: int = 0) -> None:
        """Read in threads from now on.

        Args:
            max_bytes: Of groups that are kept ahead of their use.
            threads: How many; 0: one for each core, at most `MAX_THREADS`.
        """
        threads = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._max_bytes, self._pool = max_bytes, ThreadPoolExecutor(threads, "read")

    @property
    def in_background(self) -> bool:
        """Whether threads read."""
        return self._pool is not None

    @property
    def busy(self) -> bool:
        """Whether a group is being loaded."""
        return any(not entry.future.done() for entry in self._entries.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the groups whose episodes are kept, or will be."""
        return sum(entry.nbytes for entry in self._entries.values() if entry.kept)

    def begin(self, number: int, check: Check, *, keep: bool = False) -> None:
        """Begin to load a group, unless that was done; with `keep` its episodes are kept whatever their size.

        Args:
            number: Of a group in `EpisodeStore.group_files`.
            check: Called in the reader's thread.
            keep: They are about to be sent.
        """
        entry = self._entries.get(number)
        if entry is not None and (entry.kept or not keep):
            return
        group_file = self._store.group_files[number]
        fits = self._pool is None or self.kept_bytes + group_file.size <= self._max_bytes
        kept = keep or fits
        self._entries[number] = _Entry(
            future=self._submit(group_file, check, kept), kept=kept, nbytes=group_file.size
        )

    def _submit(self, group_file: GroupFile, check: Check, kept: bool) -> Future[LoadedGroup]:
        if self._pool is not None:
            return self._pool.submit(_load, self._store, group_file, check, kept, LEFT_OUT)
        done = Future[LoadedGroup]()
        try:
            done.set_result(_load(self._store, group_file, check, kept))
        except ReplayError as error:
            done.set_exception(error)
        return done

    def look(self, number: int) -> LoadedGroup | None:
        """Return what was found in a group that was begun; None while it is being loaded.

        Raises:
            CodecMissing: It was compacted with a codec that is not installed here.
            OutOfFiles: No file can be opened; it can be begun again.
        """
        future = self._entries[number].future
        if not future.done():
            return None
        try:
            return future.result()
        except ReplayError:
            del self._entries[number]
            raise

    def forget(self, number: int) -> None:
        """Let go of a group: it was sent, or is damaged."""
        self._entries.pop(number, None)

    def keep_only(self, numbers: Collection[int]) -> None:
        """Let go of all other groups."""
        for number in [number for number in self._entries if number not in numbers]:
            self._entries.pop(number).future.cancel()

    def begin_ahead(self, numbers: Iterable[int], check: Callable[[int], Check]) -> None:
        """Begin to load groups that may be used soon, in this order.

        What does not fit is only checked, and kept once there is room.
        """
        room = self._max_bytes - self.kept_bytes
        for number in numbers:
            entry = self._entries.get(number)
            fits = self._store.group_files[number].size <= room
            if entry is None or (fits and not entry.kept and entry.future.done()):
                self.begin(number, check(number), keep=fits)
                room -= self._entries[number].nbytes if fits else 0

    def close(self) -> None:
        """Wait for the threads' end: each finishes the file that it reads."""
        self.keep_only(())
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _load(
    store: EpisodeStore, group_file: GroupFile, check: Check, kept: bool, without: Sequence[str] = ()
) -> LoadedGroup:
    """Read and check one group."""
    try:
        episodes = store.read(group_file, without=without)
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
