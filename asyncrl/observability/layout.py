"""Lay out lines of two parts: for a terminal of some width, or for a file that wants whole lines."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Final

LEAST: Final = 20
"""Columns that the second part has at least; in a narrower terminal it begins below the first."""


def hanging(head: str, text: str) -> str:
    """Put `text` behind `head`; on a terminal it is broken between words and goes on below its beginning.

    Args:
        head: First part, with the blanks behind it.
        text: Second part. Words are never cut, so that paths and commands can be copied.
    """
    if not sys.stdout.isatty():
        return head + text
    width = shutil.get_terminal_size().columns
    indent = len(head) if width - len(head) >= LEAST else 4
    lines = textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False) or [""]
    first = [head + lines[0]] if indent == len(head) else [head.rstrip(), " " * indent + lines[0]]
    return "\n".join([*first, *(" " * indent + line for line in lines[1:])])
