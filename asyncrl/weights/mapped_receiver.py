"""Swap the newest version into the policy straight out of the learner's memory: an actor has no copy of it.

swap_into (actor's thread)   copies the newest version, by the steps of `transports.shared_versions`
                             waits for  the learner's sum of it (SUM_SECONDS), which is made at the same time
the receiver's thread        consumes   the learner's manifest, offers and announcements
                             produces   the number of the newest version
                             waits for  forming (deadline), and a swap that is under way
                             ended by   the learner, a newer offer, close

While a swap is under way no receipt is given, and without it the learner does not go on to the version after
the one it announced. So while the group stays the same, a swap meets at most one set that is packed anew
under its hands, and finds the other one whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.observability import waits
from asyncrl.weights import packing
from asyncrl.weights.broadcast_receiver import BroadcastReceiver
from asyncrl.weights.swap_buffer import MAX_DAMAGED
from asyncrl.weights.table_entries import VersionHeader
from asyncrl.weights.transports.shared_versions import Note, SharedLink, SharedVersions

TRIES: Final = 8
"""Copies in one swap after which it fails. More than two need a group that falls apart all the time."""
SUM_SECONDS: Final = 5.0
"""Longest wait for the learner's sum: it sums 1 GB up in 0.2 s, and began before the actor did."""
SUM_POLL_SECONDS: Final = 0.0005
"""Pause between two looks for it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Set:
    """One of the learner's buffer sets."""

    buffers: packing.Buffers
    views: dict[str, Tensor]
    """Where each tensor lies in them."""


class MappedReceiver(BroadcastReceiver):
    """Copies out of what a `SharesBuffers` transport maps. See `interface.Receiver`."""

    _versions: SharedVersions | None = None
    """What is mapped; it stays when the learner is gone."""
    _sets: tuple[_Set, ...] = ()
    """The two buffer sets in it."""
    _unsummed = -1
    """A version whose sum did not come."""

    # --- the actor's thread ---

    def _copy_newest(self, tensors: Mapping[str, Tensor]) -> int:
        """Copy a whole version that is newer than the one held; return which one the tensors hold now."""
        try:
            return self._copy_whole(tensors)
        except WeightSyncError as error:
            self._fail(error)  # The tensors hold parts of versions, and so no later swap may say otherwise.
            raise

    def _copy_whole(self, tensors: Mapping[str, Tensor]) -> int:
        note = self._choose(newer_than=self._held)
        if note is None:
            return self._held
        damaged, problem = 0, f"none stayed whole in {TRIES} tries"
        for _ in range(TRIES):
            if note is None:
                break
            found = self._copy(note, tensors)
            expected = self._await_sum(note)
            if found == expected:
                return note.version
            if expected is not None:
                damaged += 1
                problem = (
                    f"version {note.version} there has checksum {found:x}, expected {expected:x}. Another "
                    "program writes into it, or the memory is faulty"
                )
                _log.warning("%s: %s", self._name, problem)
                if damaged >= MAX_DAMAGED:
                    break
            # Anything whole from now on, the version that was held too: the tensors are none any more.
            note = self._choose(newer_than=-1)
        raise WeightSyncError(
            f"{self._name} cannot copy a version out of the memory of the learner at {self._endpoint}: "
            f"{problem}. Restart the run with --resume."
        )

    def _choose(self, newer_than: int) -> Note | None:
        """Choose the set to copy: the newest that was announced, for it is packed anew last.

        Of those that were not announced yet, the older one: it comes next, and is kept until the receipt.
        """
        assert self._versions is not None  # It was mapped before a version was announced.
        notes = [self._versions.notes.note(index) for index in (0, 1)]
        whole = [note for note in notes if note.version > newer_than and not self._in_doubt(note)]
        announced = [note for note in whole if note.version <= self._version]
        if announced:
            return max(announced, key=lambda note: note.version)
        return min(whole, key=lambda note: note.version, default=None)

    def _in_doubt(self, note: Note) -> bool:
        return note.checksum is None and note.version == self._unsummed

    def _copy(self, note: Note, tensors: Mapping[str, Tensor]) -> int:
        """Copy a set and return its sum. Copies onto a GPU end before this does: the memory is not pinned."""
        source = self._sets[note.buffer_index]
        return packing.copy_and_sum(tensors, self._manifest, source.buffers, source.views)

    def _await_sum(self, note: Note) -> int | None:
        """Return the learner's sum of what was copied; None: the set was packed anew, or no sum comes."""
        now = self._look(note)
        if now is None or now.checksum is not None:
            return now and now.checksum
        until = time.monotonic() + SUM_SECONDS
        with waits.waiting(waits.LEARNERS_SUM, SUM_SECONDS, f": version {note.version}"):
            while (now := self._look(note)) is not None and now.checksum is None:
                if time.monotonic() > until or self._learner.gone:
                    self._unsummed = note.version
                    return None
                time.sleep(SUM_POLL_SECONDS)
        return now and now.checksum

    def _look(self, note: Note) -> Note | None:
        """Read a note again; None when it is about another version by now."""
        assert self._versions is not None
        now = self._versions.notes.note(note.buffer_index)
        return now if now.version == note.version else None

    # --- the receiver's thread ---

    def _form(self) -> None:
        super()._form()
        link = self._session.link
        assert isinstance(link, SharedLink)
        if link.versions is not self._versions:
            with self._changed:  # Not while a swap is under way.
                self._versions = link.versions
                self._sets = tuple(self._set(mapped) for mapped in link.versions.buffers)

    def _set(self, mapped: packing.Buffers) -> _Set:
        """Look at mapped memory, ``[bytes]`` uint8 each, as buffers of the manifest's dtypes."""
        dtypes = [getattr(torch, dtype) for dtype in self._manifest.dtypes]
        buffers = [memory.view(dtype) for memory, dtype in zip(mapped, dtypes, strict=True)]
        return _Set(buffers=buffers, views=packing.views_in(self._manifest, buffers))

    def _receive(self, header: VersionHeader) -> None:
        """Let the actor know of a version, once no swap is under way. Nothing is copied here."""
        self._note(header.version)
