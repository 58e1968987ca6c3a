"""Writes `asyncrl COMMAND --help`: what is often used, on one screen; `--help-all` is every flag. No torch.

    The run
      --updates N             optimizer updates to make in all (10)

A table of `Often` says which flags these are; what stands in brackets is the settings' own default, or what a
file on the command line says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SHORT: Final = ("-h", "--help")
ALL: Final = "--help-all"
COLUMN: Final = 34
"""Where what a flag does begins; a longer flag has a blank behind it."""
WIDTH: Final = 80
"""Columns that no line goes beyond."""


@dataclass(frozen=True)
class Often:
    """A line of the short help."""

    name: str
    """Of the setting, with its section: 'replay.max_lag'."""
    value: str
    """What stands behind the flag; empty: the flag takes nothing."""
    what: str
    """It does, in few words."""


Groups = Mapping[str, Sequence[Often]]
"""Heading -> what stands below it."""


@dataclass(frozen=True, kw_only=True)
class ShortHelp:
    """Everything of a short help but the values of the settings."""

    command: str
    """With the program: 'asyncrl train'."""
    usage: str
    """What stands behind the command."""
    about: str
    """One or two lines."""
    groups: Groups
    examples: Sequence[str]
    """Whole commands."""
    own: Mapping[str, str] | None = None
    """Flags that are no settings -> what they do; shown below the first heading."""

    def text(self, settings: Any) -> str:
        """Write it."""
        lines = [f"usage: {self.command} {self.usage}", "", self.about]
        for number, (heading, group) in enumerate(self.groups.items()):
            lines += ["", heading, *(_line(one, settings) for one in group)]
            if not number:
                lines += [_row(flag, what) for flag, what in (self.own or {}).items()]
        lines += ["", *(f"  {example}" for example in self.examples)]
        return "\n".join([*lines, "", f"Every flag, with all that it does: {self.command} {ALL}"])

    def about_all(self, settings: type) -> str:
        """Write what stands above all flags: what the settings say of themselves, and the own flags."""
        own = (f"{flag}: {what}." for flag, what in (self.own or {}).items())
        return " ".join([inspect.cleandoc(settings.__doc__ or ""), *own, "--help: what is often used."])

    def names(self) -> Iterator[str]:
        """Name the settings that are shown."""
        yield from (one.name for group in self.groups.values() for one in group)


def answer_help(arguments: Sequence[str], short: Callable[[], str]) -> list[str]:
    """Print the short help and exit where it is asked for; else return the arguments.

    Raises:
        SystemExit: With 0, after the short help.
    """
    if ALL in arguments:
        return ["--help"]
    if any(argument in SHORT for argument in arguments):
        print(short())
        raise SystemExit(0)
    return list(arguments)


def value_of(settings: Any, name: str) -> Any:
    """Read a setting by its name with its section."""
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def _line(one: Often, settings: Any) -> str:
    flag = f"--{one.name.replace('_', '-')} {one.value}"
    return _row(flag.rstrip(), f"{one.what}{_default(value_of(settings, one.name))}")


def _default(value: Any) -> str:
    """Write a default behind what a flag does; a switch and what is empty need none."""
    if isinstance(value, bool) or value in ("", (), Path()):
        return ""
    return f" ({' '.join(map(str, value)) if isinstance(value, tuple) else value})"


def _row(flag: str, what: str) -> str:
    return f"  {flag:<{COLUMN - 3}} {what}"
