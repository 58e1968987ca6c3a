"""Checks of single fields of a message, for `wire` and `episodes`: values in, `WireError` out."""

from __future__ import annotations

import math
import reprlib
from typing import Any, Final

from asyncrl.errors import WireError

MAX_TEXT: Final = 4096
MAX_READINGS: Final = 256


def shown(value: Any) -> str:
    """Show what a peer sent: shortly, and however deep it is nested (str() gives up on that)."""
    return reprlib.repr(value)[:80]


def check_keys(where: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuse missing and unknown fields."""
    if found.keys() != expected.keys():
        raise WireError(f"{where} has the fields {sorted(found)[:20]!s:.200}, expected {sorted(expected)}.")


def check_value(where: str, value: Any, expected: type) -> None:
    """Refuse a value of another type than `expected`, or one that cannot be stored."""
    if type(value) is not expected:
        raise WireError(f"{where} is a {type(value).__name__}, expected {expected.__name__}.")
    if isinstance(value, str):
        check_text(where, value)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise WireError(f"{where} does not fit into 64 bits.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise WireError(f"{where} is {value}, expected a finite number.")
    elif isinstance(value, dict):
        if len(value) > MAX_READINGS:
            raise WireError(f"{where} has {len(value)} entries, allowed are {MAX_READINGS}.")
        for name, number in value.items():
            check_text(where, name)
            check_value(where, number, float)


def check_text(where: str, text: str) -> None:
    """Refuse a text that is too long or that HDF5 cannot store."""
    if len(text) > MAX_TEXT:
        raise WireError(f"{where} has {len(text)} characters, allowed are {MAX_TEXT}.")
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise WireError(f"{where} holds a character that is not text (NUL or a lone surrogate).")
