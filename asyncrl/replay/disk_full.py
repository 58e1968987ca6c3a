"""Wait for a full disk, or for files to open: when to try again, and how long it took.

While groups wait they stay in memory and nothing new is granted, so what is held is bounded by the credit.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from asyncrl.errors import DiskFull, OutOfFiles, ReplayError
from asyncrl.observability import signals

FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
"""Seconds between two attempts while no space is seen to return; doubled from the first to the longest."""


def is_full(error: OSError) -> bool:
    """Whether an error of writing means that there is no space."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_error(what: str, error: OSError) -> ReplayError:
    """Say why something could not be written (`what` as in 'X could not be written'), and what to do."""
    if signals.exhausted(error):
        return OutOfFiles(f"{what}: {error}. {signals.REMEDY}")
    kind = DiskFull if is_full(error) else ReplayError
    return kind(f"{what}: {error}. Free disk space, or lower --replay.max-gigabytes.")


class DiskWait:
    """The complete groups that the disk does not take."""

    def __init__(self, folder: Path, clock: Callable[[], float], warn: Callable[[str], None]) -> None:
        """Wait for nothing yet.

        Args:
            folder: On the disk.
            clock: Seconds.
            warn: Receives one line when waiting begins and one when it is over.
        """
        self._folder, self._clock, self._warn = folder, clock, warn
        self.groups: set[int] = set()
        """Numbers of the groups that wait."""
        self._since, self._failed_at, self._pause, self._before = 0.0, 0.0, FIRST_PAUSE, 0.0
        self._free = 0
        self.wanted = "disk space"
        """What is waited for."""

    @property
    def seconds(self) -> float:
        """Time waited since the replay was opened."""
        return self._before + (self._clock() - self._since if self.groups else 0.0)

    @property
    def due(self) -> bool:
        """Whether it is time to try again.

        That is `FIRST_PAUSE` after a failure once more space is free than there was, or else after a pause
        that grows: what is used up may be a quota.
        """
        if not self.groups:
            return False
        pause = self._clock() - self._failed_at
        return pause >= self._pause or (pause >= FIRST_PAUSE and self._free_bytes() > self._free)

    def failed(self, number: int, error: DiskFull | OutOfFiles) -> None:
        """Note that a group could not be written."""
        if not self.groups:
            self._since, self._pause = self._clock(), FIRST_PAUSE
            self.wanted = "disk space" if isinstance(error, DiskFull) else "files to open"
            self._warn(f"replay: waiting for {self.wanted}, actors get no new groups: {error}")
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self.groups.add(number)
        self._failed_at, self._free = self._clock(), self._free_bytes()

    def over(self, number: int) -> None:
        """Note that a group was written or given up."""
        if number in self.groups:
            now_waited = self.seconds
            self.groups.discard(number)
            if not self.groups:
                self._before = now_waited
                self._warn(f"replay: goes on after {self._clock() - self._since:.1f} s without {self.wanted}")

    def _free_bytes(self) -> int:
        about = os.statvfs(self._folder)
        return about.f_bavail * about.f_frsize
