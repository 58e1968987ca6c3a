"""Bounds of settings, annotated on their types and checked in one place.

    micro_batch: Annotated[int, AtLeast(1, "a pass needs a decision.", "Use 32.")] = 32

Every number has an upper bound, by default `MOST`: a larger one was mistyped, and would overflow in a
library.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

from asyncrl.errors import ConfigError

MOST: Final = 10**9  # Default bound of a number's absolute value
SECONDS: Final = 10**6  # Longest time: eleven days. Timers of the system count milliseconds in 32 bits
THREADS: Final = 1024
PIXELS: Final = 4096
SEEDS: Final = 2**63 - 1  # Largest seed: generators take 64 bits


@dataclass(frozen=True)
class Within:
    """A number in an interval, its ends included unless they are open."""

    lowest: float
    highest: float
    why: str  # Why a smaller one cannot work
    remedy: str
    open_below: bool = False
    open_above: bool = False

    def check(self, flag: str, value: float) -> None:
        """Raise `ConfigError` for a value out of bounds, or NaN."""
        if not (self.lowest < value if self.open_below else self.lowest <= value):
            _refuse(flag, value, f"{self.why} {self.remedy}")
        if not (value < self.highest if self.open_above else value <= self.highest):
            most = f"must be below {self.highest}" if self.open_above else f"can be at most {self.highest}"
            _refuse(flag, value, f"it {most}. {self.remedy}")


class AtLeast(Within):
    """A number from `lowest` to `highest`."""

    def __init__(self, lowest: float, why: str, remedy: str, highest: float = MOST) -> None:
        super().__init__(lowest, highest, f"it must be at least {lowest}: {why}", remedy)


class Positive(Within):
    """A number above 0, up to `highest`."""

    def __init__(self, why: str, remedy: str, highest: float = MOST) -> None:
        super().__init__(0, highest, why, remedy, open_below=True)


_NO_TEXT: Final = {"\0", *map(chr, range(0xD800, 0xE000))}  # NUL and halves of characters
_ANY: Final = Within(-MOST, MOST, "it is no number, or too small.", "Use another one.")


class Bounded:
    """Base of settings, which checks all fields of a new object."""

    SECTION: ClassVar[str] = ""  # Prefix of the flags, such as 'replay.'

    def __init_subclass__(cls, section: str | None = None) -> None:
        """Set `SECTION`, unless it is inherited."""
        if section is not None:
            cls.SECTION = section

    def __post_init__(self) -> None:
        bounds = _bounds(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            flag = self.SECTION + field.name.replace("_", "-")
            value: Any = getattr(self, field.name)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, str | Path):
                    if not _NO_TEXT.isdisjoint(str(part)):
                        raise ConfigError(
                            f"--{flag} is {shown(ascii(part))}, which has a byte that is not UTF-8 text. "
                            "Write it again."
                        )
                elif isinstance(part, int | float):
                    for bound in bounds[field.name] or (_ANY,):
                        bound.check(flag, part)


def shown(value: object) -> str:
    """Format a value in at most 40 characters."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse(flag: str, value: float, why: str) -> typing.NoReturn:
    raise ConfigError(f"--{flag} is {shown(value)}, but {why}")


@cache
def _bounds(settings: type) -> dict[str, list[Within]]:
    return {
        name: [bound for bound in getattr(hint, "__metadata__", ()) if isinstance(bound, Within)]
        for name, hint in typing.get_type_hints(settings, include_extras=True).items()
    }
