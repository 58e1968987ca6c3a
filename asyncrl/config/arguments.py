"""Tells the files of settings on a command line from the flags around them. Imports no torch."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, Literal

from asyncrl.config.run import TrainConfig

SUFFIXES: Final = (".toml", ".json")
"""Of a file of settings."""
_HELP: Final = ("help", "help_all")
Values = Literal["none", "one", "many"]
"""How many words behind a flag are its values."""


def split_files(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Take the files of settings out of a command line; they may stand anywhere between the flags.

    What a flag takes is never a file of settings: the word behind it, and of a flag that takes several
    key=value texts each that has an '='.

    Returns:
        The files as they follow each other, and the other words.
    """
    files: list[Path] = []
    rest: list[str] = []
    open_for: Values = "none"
    for word in arguments:
        is_flag = word.startswith("--")
        taken = open_for == "one" or (open_for == "many" and "=" in word)
        if word.endswith(SUFFIXES) and not is_flag and not taken:
            files.append(Path(word))
            continue
        rest.append(word)
        if is_flag:
            open_for = _values_of(word)
        elif open_for == "one":
            open_for = "none"
    return files, rest


def _values_of(flag: str) -> Values:
    """How many words behind a flag are its values; one behind a flag that does not exist."""
    if "=" in flag:
        return "none"
    name = flag.removeprefix("--").replace("-", "_")
    if name in _HELP:
        return "none"
    section, dot, last = name.rpartition(".")
    positive = f"{section}{dot}{last.removeprefix('no_')}"
    known = _settings()
    if known.get(positive) == "none":
        return "none"
    return known.get(name, "one")


@cache
def _settings() -> dict[str, Values]:
    return dict(_walk(TrainConfig, ""))


def _walk(settings: type, section: str) -> Iterator[tuple[str, Values]]:
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _walk(typing.cast(type, hint), f"{section}{field.name}.")
        elif hint is bool:
            yield section + field.name, "none"
        else:
            yield section + field.name, "many" if typing.get_origin(hint) is tuple else "one"
