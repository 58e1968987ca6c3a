"""Bounds that stand beside a setting's type, and the one place where they are checked.

micro_batch: Annotated[int, AtLeast(1, "a pass needs a decision.", "Use 32.")] = 32
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from asyncrl.errors import ConfigError


@dataclass(frozen=True)
class AtLeast:
    """A number that is not below `lowest`, nor NaN."""

    lowest: float
    why: str
    """Why a smaller one cannot work."""
    remedy: str

    def check(self, flag: str, value: float) -> None:
        """Raise `ConfigError` for a value out of bounds: what was set, why it cannot work, what to do."""
        if not value >= self.lowest:
            raise ConfigError(
                f"--{flag} is {value}, but it must be at least {self.lowest}: {self.why} {self.remedy}"
            )


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
            raise ConfigError(f"--{flag} is {value}, but {self.why} {self.remedy}")


@dataclass(frozen=True)
class Positive:
    """A number above zero."""

    why: str
    remedy: str

    def check(self, flag: str, value: float) -> None:
        """Raise `ConfigError` for a value out of bounds."""
        if not value > 0:
            raise ConfigError(f"--{flag} is {value}, but {self.why} {self.remedy}")


class Bounded:
    """Base of settings: checks every bound of its fields when it is made."""

    SECTION: ClassVar[str] = ""
    """What stands before the flags of these settings, such as 'replay.'."""

    def __post_init__(self) -> None:
        for name, bound in _bounds(type(self)):
            bound.check(self.SECTION + name.replace("_", "-"), getattr(self, name))


@cache
def _bounds(settings: type) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(settings, include_extras=True)
    return [
        (field.name, bound)
        for field in dataclasses.fields(settings)
        for bound in getattr(hints[field.name], "__metadata__", ())
        if isinstance(bound, AtLeast | Within | Positive)
    ]
