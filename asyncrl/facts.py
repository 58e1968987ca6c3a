"""Checks of external facts: one function per fact, called wherever it enters (table in CONTRIBUTING.md)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, first_line

_STOPS: Final = " .\u3002\uff0e\uff61\u06d4\u0964"  # Also of Chinese, Japanese, Urdu and Hindi.
_HIDDEN: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
"""Letters and marks that show nothing; the other invisible characters have categories of their own."""


def plain_task(text: str) -> str:
    """Return the normal form of an instruction, for prompts and for comparing tasks.

    Lower case, NFC, single blanks, no invisible characters, no full stop at the end.

    >>> plain_task(" Fold the\u200b  Towel.")
    'fold the towel'
    """
    blanks = " ".join(text.split())
    shown = "".join(c for c in blanks if unicodedata.category(c) not in ("Cc", "Cf"))
    composed = unicodedata.normalize("NFC", _HIDDEN.sub("", shown).lower())
    return " ".join(composed.split()).rstrip(_STOPS)


def check_instruction(value: object, where: str) -> str:
    """Return the normal form of a text or its UTF-8; ConfigError if it is damaged or has no word."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    task = plain_task(text) if isinstance(text, str) else ""
    if not any(map(str.isalnum, task)) or not task.isprintable() or "\ufffd" in task:
        raise ConfigError(f"{where}: the instruction {_shown(value)} is no text like 'fold the towel'.")
    return task


def check_instructions(values: object, where: str, count: int = -1) -> tuple[str, ...]:
    """Return the normal forms of `count` instructions (-1: any number), else raise ConfigError."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or count not in (-1, len(values)):
        wanted = "a tuple of texts" if count < 0 else f"a tuple of {count} texts"
        raise ConfigError(f"{where}: the instructions are {_shown(values)}, expected {wanted}.")
    return tuple(check_instruction(value, where) for value in values)


def check_array(values: object, shape: Sequence[int], where: str) -> NDArray[Any]:
    """Return an array of numbers or bools, finite or not; ConfigError for another type or shape."""
    try:
        found: NDArray[Any] = np.asarray(values)
        problem = f"{found.dtype}{list(found.shape)}"
        if found.dtype.kind in "biuf" and found.shape == tuple(shape):
            return found
    except (ValueError, TypeError) as error:  # Ragged, or not in this memory.
        problem = first_line(error)
    wanted = f"{list(shape)} numbers" if shape else "a number"
    raise ConfigError(f"{where} is {_shown(values)} ({problem}), expected {wanted} or bools.")


def check_verdicts(values: object, shape: Sequence[int], where: str) -> NDArray[np.bool_]:
    """Return bools; finite numbers >= 0 become True above 0.5. ConfigError for other values."""
    found = check_array(values, shape, where)
    if found.dtype.kind == "b":
        return found
    if (wrong := found[~(np.isfinite(found) & (found >= 0))]).size:
        raise ConfigError(
            f"{where} is {wrong[0]}, which is neither yes nor no. Give True or False, 0 or 1, or a finite "
            "number from 0 that is above 0.5 for yes."
        )
    return found > 0.5


def check_pictures(found: Any, shape: Sequence[int], where: str) -> None:
    """Raise ConfigError unless `found` is uint8 of `shape` (-1: any size above 0); reads no pixel.

    >>> check_pictures(np.zeros((2, 8, 8, 3), np.uint8), (2, -1, -1, 3), "frames")
    """
    kind = str(getattr(found, "dtype", type(found).__name__)).removeprefix("torch.")
    sizes = tuple(getattr(found, "shape", ()))
    fits = len(sizes) == len(shape) and all(
        size == wanted or wanted < 0 < size for size, wanted in zip(sizes, shape, strict=True)
    )
    if kind != "uint8" or not fits:
        expected = ", ".join("any" if size < 0 else str(size) for size in shape)
        raise ConfigError(
            f"{where} are {kind}{list(sizes)}, expected uint8[{expected}]: red, green and blue from 0 to 255."
        )


def _shown(value: object) -> str:
    return " ".join(ascii(value).split())[:80]  # In one line, also of an array.
