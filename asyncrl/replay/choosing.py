"""Choose the groups of a batch, of those that were read and found whole and usable.

Part of the replay's one deciding thread. What `loading.py` reads ahead is only bytes: whether a group may be
used is decided when a batch is chosen, by `limiter.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from asyncrl.errors import OutOfFiles
from asyncrl.records import Episode
from asyncrl.replay.admission import unusable
from asyncrl.replay.events import Used
from asyncrl.replay.group_lifecycle import GroupLifecycle
from asyncrl.replay.loading import Check, GroupLoader, LoadedGroup


class BatchChooser:
    """Gives groups away, each noted as used before anybody gets it."""

    def __init__(self, lifecycle: GroupLifecycle, warn: Callable[[str], None]) -> None:
        """Read nothing yet; `warn` receives a line when no file can be opened."""
        self._lifecycle, self._store, self._state = lifecycle, lifecycle.store, lifecycle.state
        self._warn, self._out_of_files = warn, False
        self.loader = GroupLoader(lifecycle.store)
        self.reading = False
        """Whether there are enough groups for the batch that was asked for last, and some are being read."""

    def begin(self) -> None:
        """Forget what was read: what was checked at a later version may not be used at this one."""
        self.loader.keep_only(())

    def sample(self, groups: int, request: str) -> list[list[Episode]] | None:
        """Choose a batch and read it, in this thread.

        Returns:
            Groups of episodes in the order of their members.
        """
        assert not self.loader.in_background
        while (numbers := self.choose(groups, request)) is not None:
            batch = [self.load(number) for number in numbers]
            self.loader.keep_only(())
            sound = [group.episodes for group in batch if group is not None and not group.damaged]
            if len(sound) == len(batch):
                return sound
            request = ""  # It was answered, and a file of that answer is damaged now.
        return None

    def choose(self, groups: int, request: str) -> list[int] | None:
        """Give complete groups away, in the sampler's order; None when there are too few, or not read yet.

        Each was read, and found whole and usable, by this process. From then on they count as used.

        Args:
            groups: How many.
            request: See `Replay.choose`.

        Returns:
            Their numbers, in the batch's order.
        """
        last = self._state.session
        if request and request == last.request and self._store.group_files.keys() >= set(last.batch):
            return list(last.batch)
        try:
            return self._choose(groups, request)
        except OutOfFiles as error:
            if not self._out_of_files:
                self._warn(f"replay: waiting for files to open, the learner gets no batch: {error}")
            self._out_of_files = True
            return None

    def _choose(self, groups: int, request: str) -> list[int] | None:
        limiter, full = self._state.limiter, self._lifecycle.disk
        self.reading = False
        while (numbers := limiter.pick(groups, not_awaited=full.groups)) is not None:
            found = [self._is_sound(number) for number in numbers]
            if all(found):
                self._out_of_files = False
                self._state.commit(Used(numbers=numbers, request=request, version=limiter.version))
                self._lifecycle.trim()
                return numbers
            if None in found:
                self.reading = True
                return None
        return None

    def _is_sound(self, number: int) -> bool | None:
        """Tell whether a ready group can be used; None: not read yet. One that cannot is closed for that.

        What was admitted is checked again as far as the learner needs it: a file may be older than the check,
        or than a setting, or anybody's.
        """
        self.loader.begin(number, self._check_of(number))
        group = self.loader.look(number)
        if group is None:
            return None
        if group.damaged:
            self._put_away(number, group.damaged)
            self._lifecycle.drop(number, "dropped_invalid", stored=True)
        elif group.unusable is not None:
            self.loader.forget(number)
            self._lifecycle.set_aside(number, group.unusable)
        return not group.damaged and group.unusable is None

    def load(self, number: int) -> LoadedGroup | None:
        """Return a stored group with its episodes; None while they are being read. A damaged one is put away.

        Raises:
            OutOfFiles: No file can be opened; it can be tried again.
        """
        if number not in self._store.group_files:
            return LoadedGroup(damaged=f"the file of group {number} is gone")
        self.loader.begin(number, self._check_of(number), keep=True)
        group = self.loader.look(number)
        if group is not None and group.damaged:
            self._put_away(number, group.damaged)
            if number in self._state.limiter.ready:  # It might have been used again.
                self._state.limiter.close_used(number)
        return group

    def read_in_background(self) -> None:
        """Read in threads of their own from now on, also ahead: see `read_ahead`."""
        self.loader.read_in_background(int(self._state.limiter.settings.read_ahead_gigabytes * 1e9))

    def read_ahead(self) -> None:
        """Begin to read what the learner may get next, and let go of what it does not. Call it often.

        A group that is too old when a batch is chosen was read in vain.
        """
        usable = list(self._state.limiter.usable)
        if self._state.limiter.settings.sampler == "newest":
            usable.reverse()
        self.loader.keep_only({*usable, *self._state.session.batch})
        self.loader.begin_ahead(usable, self._check_of)

    def close(self) -> None:
        """Wait for the threads' end."""
        self.loader.close()

    def _put_away(self, number: int, why: str) -> None:
        self.loader.forget(number)
        self._store.put_away(number, why)

    def _check_of(self, number: int) -> Check:
        expected = replace(self._state.limiter.expected(), newest_version=self._state.limiter.version)
        return lambda group: unusable(group, f"{number:08d}", expected)
