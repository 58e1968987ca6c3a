"""Align rows of text in columns, and draw bars of characters, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

BAR: Final = 32
"""Characters of the longest bar."""
NOTHING: Final = "-"
"""Stands for a number that does not exist, such as the lag of an episode that was never used."""

Item = TypeVar("Item")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: text to the left, numbers to the right; the first row may hold titles."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numeric = [all(_is_number(row[i]) for row in rows[1:]) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def bar(value: float, most: float) -> str:
    """Return ``#`` in proportion to `value`; what is not zero shows at least one."""
    return "#" * max(1, round(BAR * value / most)) if value > 0 else ""


def watched(items: Sequence[Item] | Iterable[Item], what: str) -> Iterator[Item]:
    """Yield the items; after 2 s a progress bar appears on stderr, and it goes away at the end."""
    from tqdm import tqdm

    return iter(tqdm(items, desc=what, delay=2, leave=False))


def _is_number(text: str) -> bool:
    return text == NOTHING or text.strip("%").replace(".", "", 1).replace("-", "", 1).isdigit()
