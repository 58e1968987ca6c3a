"""Say in shared memory which version lies in each of the learner's two buffer sets, and read it there.

    learner                                      actor (`mapped_receiver`), between two decisions
    1  the set that is not sent: note -1         a  read the notes, choose a set that holds a version
    2  pack it                                   b  copy its tensors and sum it up in the same pass
    3  note its version                          c  the version is another one than before: a
    4  note its sum                              d  wait for the sum; another one than b's: a
    5  only then the other set: 1

So there always is a set with a whole version and its sum, also when the learner is killed or halted at any
step, and its memory outlives it. A version never comes twice: what is the same in a and c was not packed anew
between the two.

That holds where another processor sees stores in the order in which they were made, as on x86. Elsewhere a
version or a sum may be seen before some of the words that it is about. Then the sums differ, since any word
that is not the version's changes b's, and the actor copies again. So d decides, and a and c only say which
set is worth a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from asyncrl.weights.transports.interface import BufferPair

_VERSION, _SUMMED, _CHECKSUM = range(3)
WORDS: Final = 6
"""int64 numbers of the notes: for each set its version, the version that the sum is of, and the sum."""
NOTHING: Final = -1
"""The version of a set that is being packed, or was never."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a buffer set holds."""

    buffer_index: int
    version: int
    """-1: none."""
    checksum: int | None
    """See `packing.checksum`; None: it is not known yet."""


class SharedNotes:
    """The notes on both sets; the learner writes them, actors read them."""

    def __init__(self, words: NDArray[np.int64]) -> None:
        """Look at notes that are there.

        Args:
            words: ``[WORDS]``, memory that learner and actors have.
        """
        self._words = words.reshape(2, 3)

    def clear(self) -> None:
        """Say that neither set holds a version. The learner's, at the start."""
        self._words[:] = NOTHING

    def packing(self, buffer_index: int) -> None:
        """Note that a set is going to be packed."""
        self._words[buffer_index, _VERSION] = NOTHING

    def packed(self, buffer_index: int, version: int) -> None:
        """Note what a set holds."""
        self._words[buffer_index, _VERSION] = version

    def summed(self, buffer_index: int, version: int, checksum: int) -> None:
        """Note the sum of the version that a set holds."""
        self._words[buffer_index, _CHECKSUM] = checksum
        self._words[buffer_index, _SUMMED] = version

    def note(self, buffer_index: int) -> Note:
        """Read the note on a set."""
        version, summed = int(self._words[buffer_index, _VERSION]), int(self._words[buffer_index, _SUMMED])
        known = version == summed
        return Note(
            buffer_index=buffer_index,
            version=version,
            checksum=int(self._words[buffer_index, _CHECKSUM]) if known else None,
        )


@dataclass(frozen=True)
class SharedVersions:
    """The learner's two buffer sets as an actor sees them."""

    buffers: BufferPair
    """``[bytes]`` uint8, one per dtype and set. To be read only: the system ends a process that writes."""
    notes: SharedNotes


@runtime_checkable
class SharedLink(Protocol):
    """What a `SharesBuffers` transport gives a member, besides what `interface.Link` says."""

    @property
    def versions(self) -> SharedVersions:
        """Return what the member may read, also after the link has ended; the same one for each epoch."""
        ...
