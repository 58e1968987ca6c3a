"""Sizes in, offsets in a ring of shared memory out. No I/O."""

from __future__ import annotations

from bisect import bisect
from typing import Final

ALIGNMENT: Final = 64
"""Bytes; every place begins and ends at a multiple."""


class Places:
    """Which parts of a ring are taken: first fit, so that few of its pages are ever touched."""

    def __init__(self, size: int) -> None:
        """Begin with `size` free bytes, rounded down to the alignment."""
        self.free = [(0, size // ALIGNMENT * ALIGNMENT)]
        """(offset, bytes) of the free pieces, in order; no two touch."""
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Return the offset of `size` bytes that nobody else has, or None."""
        size = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        for index, (offset, length) in enumerate(self.free):
            if length >= size:
                self.free[index : index + 1] = [(offset + size, length - size)] if length > size else []
                self._taken[offset] = size
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Free what `take` gave."""
        begin, end = offset, offset + self._taken.pop(offset)
        index = bisect(self.free, (offset, 0))
        if index < len(self.free) and self.free[index][0] == end:
            end += self.free.pop(index)[1]
        if index and sum(self.free[index - 1]) == begin:
            index -= 1
            begin = self.free.pop(index)[0]
        self.free.insert(index, (begin, end - begin))
