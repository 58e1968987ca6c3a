"""A set of whole numbers that grows with its gaps, not with its members: numbers in, membership out."""

from __future__ import annotations

from bisect import bisect_right


class Ranges:
    """Sorted ranges of numbers that do not touch each other."""

    def __init__(self) -> None:
        """Hold no number."""
        self._begins: list[int] = []
        self._ends: list[int] = []
        """First number behind each range."""

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._begins, number) - 1
        return place >= 0 and number < self._ends[place]

    def add(self, number: int) -> None:
        """Put a number in."""
        if number in self:
            return
        place = bisect_right(self._begins, number)
        behind = place > 0 and self._ends[place - 1] == number
        before = place < len(self._begins) and self._begins[place] == number + 1
        if behind and before:
            self._ends[place - 1] = self._ends.pop(place)
            del self._begins[place]
        elif behind:
            self._ends[place - 1] = number + 1
        elif before:
            self._begins[place] = number
        else:
            self._begins.insert(place, number)
            self._ends.insert(place, number + 1)

    def discard(self, number: int) -> None:
        """Take a number out, if it is there."""
        if number not in self:
            return
        place = bisect_right(self._begins, number) - 1
        begin, end = self._begins[place], self._ends[place]
        parts = [(first, last) for first, last in ((begin, number), (number + 1, end)) if first < last]
        self._begins[place : place + 1] = [first for first, _ in parts]
        self._ends[place : place + 1] = [last for _, last in parts]
