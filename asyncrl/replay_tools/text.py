"""Align rows of text in columns, and draw bars of characters, for the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

BAR: Final = 32
"""Characters of the longest bar."""
NOTHING: Final = "-"
"""Stands for a number that does not exist, such as the lag of an episode that was never used."""

SHORT: Final = 13
"""Characters that a cell keeps in one line, however narrow the terminal."""
Item = TypeVar("Item")


def table(rows: Sequence[Sequence[str]], left_out: Sequence[str] = ()) -> str:
    """Align columns: text to the left, numbers to the right.

    A file or a pipe gets all of them, a line per row. In a terminal that is too narrow columns are left out,
    then the others broken into lines.
    """
    if not sys.stdout.isatty():
        return _aligned(rows)
    columns, width = list(range(len(rows[0]))), shutil.get_terminal_size().columns
    for title in left_out:
        if _width(rows, columns) > width:
            columns.remove(rows[0].index(title))
    shown = [[row[i] for i in columns] for row in rows]
    return _aligned(shown) if _width(rows, columns) <= width else _broken(shown, width)


def _width(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> int:
    return sum(max(len(row[i]) for row in rows) + 2 for i in columns) - 2


def _broken(rows: Sequence[Sequence[str]], width: int) -> str:
    """Break cells between words, so that every line fits; numbers stay whole."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for i in range(len(rows[0])):
        right = all(_is_number(row[i]) for row in rows[1:])
        longest = max(len(row[i]) for row in rows)
        drawn.add_column(justify="right" if right else "left", no_wrap=longest <= SHORT, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    console = Console(width=width, no_color=True, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _aligned(rows: Sequence[Sequence[str]]) -> str:
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
