"""Reads a `TrainConfig` from flags and TOML files, and writes it for the run's folder. Imports no torch.

Files give the defaults, a later one wins over those before it, and the flags win over all.

Tells the files of settings on a command line from the flags around them. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from asyncrl.config.run import TrainConfig
from asyncrl.config.short_help import ALL, TRAIN, ShortHelp, answer_help
from asyncrl.errors import ConfigError
from asyncrl.registry import as_texts
from asyncrl.storage.untrusted import DEEPEST, parse_json, read_bytes, shortened

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


MOST_BYTES: Final = 2**20
"""Of a file of settings."""
PARTS: Final = ("policy", "world", "reward")
"""Settings that a table may give: ``[world] name = "my.worlds:Mine@DIR"`` and ``[world.settings]``."""


def to_toml(config: TrainConfig) -> str:
    """Write a configuration as a file that `load_file` reads back, every setting of it."""
    table = dataclasses.asdict(config)
    parts = {name: value for name, value in table.items() if isinstance(value, dict)}
    lines = [_toml_line(name, value) for name, value in table.items() if name not in parts]
    for name, settings in parts.items():
        lines += ["", f"[{name}]", *(_toml_line(key, value) for key, value in settings.items())]
    return "\n".join(lines) + "\n"


def _toml_line(name: str, value: object) -> str:
    """Write a text, a number, true or false, or a list of texts: all as in JSON, but for one letter."""
    return f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")


def to_json(config: TrainConfig) -> str:
    """Write a configuration so that `load_file` reads it back."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def load_file(path: Path) -> TrainConfig:
    """Read a configuration from TOML (or a run's config.json); absent settings keep their defaults.

    Raises:
        ConfigError: the file is missing, not valid, or has an unknown or wrong-typed setting.
    """
    return load_files([path])


def load_files(paths: Sequence[Path]) -> TrainConfig:
    """Read several files laid over each other: of a setting that more than one has the last one counts.

    Only what comes out must work as a whole; names and types are checked in every file.
    """
    return _overlaid(TrainConfig(), [(str(path), _read(path)) for path in paths], "")


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = read_bytes(path, MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}). `asyncrl configs` lists the shipped ones."
        ) from None
    of_run = path.suffix == ".json"
    try:
        table = parse_json(raw, dict) if of_run else _parse_toml(raw)
    except ValueError as error:
        raise ConfigError(
            f"{path} is not valid {path.suffix[1:] or 'TOML'}: {error}. Correct it, or give another file."
        ) from None
    return existing_settings(table, TrainConfig()) if of_run else table


def existing_settings(table: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the settings of a run's config.json without those that this version no longer has."""
    names = {field.name for field in dataclasses.fields(config)}
    return {
        name: existing_settings(value, part)
        if dataclasses.is_dataclass(part := getattr(config, name)) and isinstance(value, dict)
        else value
        for name, value in table.items()
        if name in names
    }


def _parse_toml(raw: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"it has more than {DEEPEST} levels") from None


def overlay(config: Any, table: Any, where: str) -> Any:
    """Return `config` with the settings of `table` (nested like the configuration) in place of its own.

    Raises:
        ConfigError: A setting is unknown, of the wrong type, or cannot work.
    """
    return _overlaid(config, [(where, table)], "")


def _overlaid(config: Any, layers: Sequence[tuple[str, Any]], section: str) -> Any:
    """Lay tables over `config`, the first one lowest; each with where it comes from."""
    known = {f.name: f for f in dataclasses.fields(config)}
    hints = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    parts: dict[str, list[tuple[str, Any]]] = {}
    for where, table in layers:
        if not isinstance(table, dict):
            raise ConfigError(f"{where} must be a table of settings, found {type(table).__name__}.")
        for key, value in _opened_parts(table, where, section).items():
            name = key.replace("-", "_")
            if name not in known:
                hint = _hint(name, known)
                raise ConfigError(f"{where} sets {key!r}, which does not exist.{hint}")
            current = getattr(config, name)
            if dataclasses.is_dataclass(current):
                parts.setdefault(name, []).append((f"{where} [{key}]", value))
                continue
            changes[name] = _typed(value, current, f"{where}: {key}", typing.get_args(hints[name]))
    for name, of_part in parts.items():
        changes[name] = _overlaid(getattr(config, name), of_part, f"{section}{name}.")
    return dataclasses.replace(config, **changes)


def _opened_parts(table: dict[str, Any], where: str, section: str) -> dict[str, Any]:
    """Write ``[world] name, settings`` as the two settings `world` and `world_settings`."""
    found = dict(table)
    for key, value in table.items():
        if not section and key in PARTS and isinstance(value, dict):
            if unknown := sorted(value.keys() - {"name", "settings"}):
                raise ConfigError(f"{where} [{key}] sets {unknown[0]!r}; it takes name and [{key}.settings].")
            found |= {key: value["name"]} if "name" in value else {}
            if "name" not in value:
                del found[key]
            found[f"{key}_settings"] = value.get("settings", {})
    return found


def _hint(name: str, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Perhaps you meant {near[0]!r}." if near else f" Known: {', '.join(sorted(known))}."


def _typed(value: Any, current: Any, where: str, choices: tuple[Any, ...]) -> Any:
    if isinstance(current, tuple) and isinstance(value, dict):
        return as_texts(value)
    if isinstance(current, tuple) and isinstance(value, list) and all(isinstance(x, str) for x in value):
        return tuple(value)
    if isinstance(current, float) and type(value) is int and abs(value) < 2**63:
        return float(value)
    words = [word for choice in choices for word in typing.get_args(choice)]
    if words and (value in words or type(value) in choices):  # A union of a type and words.
        return value
    if type(value) is not type(current):
        more = f", or {', '.join(map(repr, words))}" if words else ""
        raise ConfigError(
            f"{where} is {shortened(value)}, expected {type(current).__name__} like {current!r}{more}."
        )
    if choices and not isinstance(current, tuple) and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"Perhaps you meant {near[0]!r}." if near else f"Choose one of: {', '.join(choices)}."
        raise ConfigError(f"{where} is {value!r}, which does not exist. {hint}")
    return value


def parse(
    arguments: Sequence[str], help_text: ShortHelp = TRAIN, description: str | None = None
) -> TrainConfig:
    """Read `[CONFIG.toml ...] [--flags]`: files give the defaults, the flags win. Help and errors exit.

    Args:
        description: What stands above all flags (--help-all); None: what the settings say of themselves.

    Raises:
        ConfigError: A file, or all settings together, cannot work.
    """
    import tyro

    files, flags = split_files(arguments)
    default = load_files(files)
    prog = help_text.command
    if ALL in flags:
        prog += f" {help_text.usage.removesuffix(' [--flags]')}"
    flags = answer_help(flags, lambda: help_text.text(default))
    about = description or help_text.about_all(TrainConfig)
    return tyro.cli(TrainConfig, args=flags, default=default, prog=prog, description=about)
