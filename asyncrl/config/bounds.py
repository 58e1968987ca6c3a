"""Bounds that stand beside a setting's type, and the one place where they are checked.

micro_batch: Annotated[int, AtLeast(1, "a pass needs a decision.", "Use 32.")] = 32

Every number has an upper end, also where nobody wrote one: `MOST`. What is larger was mistyped, and would be
answered by an overflow somewhere in a library, or by memory that there is not.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

from asyncrl.errors import ConfigError

MOST: Final = 10**9
"""No number is larger or, below zero, smaller, where its bound does not say otherwise."""
SECONDS: Final = 10**6
"""Longest time: eleven days. Timers of the system count milliseconds in 32 bits."""
THREADS: Final = 1024
LONGEST_NAME: Final = 255
"""Bytes of a file's name, on every usual file system."""
LONGEST_PATH: Final = 3500
"""Bytes of the path of a run or model: Linux takes 4,095, and files lie below it."""
PIXELS: Final = 4096
"""Longest side of a picture."""
SEEDS: Final = 2**63 - 1
"""Largest seed: generators take 64 bits."""


@dataclass(frozen=True)
class AtLeast:
    """A number that is not below `lowest` nor above `highest`, nor NaN."""

    lowest: float
    why: str
    """Why a smaller one cannot work."""
    remedy: str
    highest: float = MOST

    def check(self, flag: str, value: float) -> None:
        """Raise `ConfigError` for a value out of bounds: what was set, why it cannot work, what to do."""
        if not value >= self.lowest:
            raise ConfigError(
                f"--{flag} is {shown(value)}, but it must be at least {self.lowest}: {self.why} {self.remedy}"
            )
        _check_most(flag, value, self.highest, self.remedy)


@dataclass(frozen=True)
class Within:
    """A number of an interval; `open_below` leaves its lower end out."""

    lowest: float
    highest: float
    why: str
    remedy: str
    open_below: bool = False
    open_above: bool = False

    def check(self, flag: str, value: float) -> None:
        """Raise `ConfigError` for a value out of bounds."""
        above = self.lowest < value if self.open_below else self.lowest <= value
        below = value < self.highest if self.open_above else value <= self.highest
        if not (above and below):
            raise ConfigError(f"--{flag} is {shown(value)}, but {self.why} {self.remedy}")


@dataclass(frozen=True)
class Positive:
    """A number above zero, and not above `highest`."""

    why: str
    remedy: str
    highest: float = MOST

    def check(self, flag: str, value: float) -> None:
        """Raise `ConfigError` for a value out of bounds."""
        if not value > 0:
            raise ConfigError(f"--{flag} is {shown(value)}, but {self.why} {self.remedy}")
        _check_most(flag, value, self.highest, self.remedy)


class Bounded:
    """Base of settings: checks every bound of its fields when it is made, and what no field may hold."""

    SECTION: ClassVar[str] = ""
    """What stands before the flags of these settings, such as 'replay.'."""

    def __post_init__(self) -> None:
        bounds = _bounds(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            flag, value = self.SECTION + field.name.replace("_", "-"), getattr(self, field.name)
            for part in value if isinstance(value, tuple) else (value,):
                _check_any(flag, part, bounded=field.name in bounds)
            for bound in bounds.get(field.name, ()):
                bound.check(flag, value)


def check_path(flag: str, text: str) -> None:
    """Refuse a path that no file system takes."""
    parts = [len(part.encode()) for part in text.split("/")]
    if max(parts) > LONGEST_NAME or sum(parts) > LONGEST_PATH:
        raise ConfigError(
            f"--{flag} is {shown(text)}, with a name of {max(parts)} bytes and {sum(parts)} in all, but a "
            f"file's name has at most {LONGEST_NAME} and a path {LONGEST_PATH}. Choose a shorter one."
        )


def shown(value: object) -> str:
    """Write a value for people, in at most 40 characters."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_any(flag: str, value: object, *, bounded: bool) -> None:
    """Refuse numbers without a size, and texts that can be neither a file's name nor written in JSON."""
    if isinstance(value, str | Path):
        text = str(value)
        if "\0" in text or not _is_unicode(text):
            raise ConfigError(
                f"--{flag} is {shown(ascii(text))}, which has a byte that is not UTF-8 text. Write it anew."
            )
    elif isinstance(value, int | float) and not bounded:
        if not (isinstance(value, int) or math.isfinite(value)):
            raise ConfigError(f"--{flag} is {value}, which is no number. Use one.")
        _check_most(flag, abs(value), MOST, "Use a smaller one.")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_most(flag: str, value: float, highest: float, remedy: str) -> None:
    if value > highest:
        raise ConfigError(f"--{flag} is {shown(value)}, but it can be at most {highest}. {remedy}")


@cache
def _bounds(settings: type) -> dict[str, tuple[Any, ...]]:
    hints = typing.get_type_hints(settings, include_extras=True)
    found = {
        field.name: tuple(
            bound
            for bound in getattr(hints[field.name], "__metadata__", ())
            if isinstance(bound, AtLeast | Within | Positive)
        )
        for field in dataclasses.fields(settings)
    }
    return {name: bounds for name, bounds in found.items() if bounds}
