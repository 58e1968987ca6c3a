"""Read a `TrainConfig` from flags and files of settings, and write it. No torch.

A later file overrides earlier ones, and flags override all.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.config.help import TRAIN, ShortHelp
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.registry import as_texts
from asyncrl.storage.untrusted import load_json, parse_json, read_bytes, shortened

SUFFIXES: Final = (".toml", ".json")
"""Largest file of settings."""
PARTS: Final = ("policy", "world", "reward")
"""Settings that may be a table: ``[world] name = "my.worlds:Mine@DIR"`` and ``[world.settings]``."""
_OFF: Final = (False, 0, -1, "", "none", "auto", [], None)
"""Values of a setting that no longer exists whose loss changes nothing."""
_NO_FILE: Final = re.compile(r"--|[\w.-]+=")


# --- command line ---


def split_files(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split a command line into files of settings, wherever they stand, and other words.

    A file is a word with one of `SUFFIXES` that is neither a flag nor a key=value.
    """
    is_file = [word.endswith(SUFFIXES) and not _NO_FILE.match(word) for word in arguments]
    files = [Path(word) for word, found in zip(arguments, is_file, strict=True) if found]
    return files, [word for word, found in zip(arguments, is_file, strict=True) if not found]


def parse(arguments: Sequence[str], help_text: ShortHelp = TRAIN) -> TrainConfig:
    """Parse `[CONFIG.toml ...] [--flags]`. Help and invalid flags exit.

    Raises:
        ConfigError: A file is invalid, or the settings cannot work together.
    """
    files, flags = split_files(arguments)
    return help_text.parse(TrainConfig, flags, load_files(files))


# --- files ---


def to_toml(config: TrainConfig) -> str:
    """Format all settings as TOML."""
    table = dataclasses.asdict(config)
    parts = {name: value for name, value in table.items() if isinstance(value, dict)}
    lines = [_toml_line(name, value) for name, value in table.items() if name not in parts]
    for name, settings in parts.items():
        lines += ["", f"[{name}]", *(_toml_line(key, value) for key, value in settings.items())]
    return "\n".join(lines) + "\n"


def _toml_line(name: str, value: object) -> str:
    # Texts, numbers, booleans and lists of texts are as in JSON, except one character.
    return f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")


def to_json(config: TrainConfig) -> str:
    """Format all settings as JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def load_file(path: Path) -> TrainConfig:
    """Load settings from TOML, or a run's config.json; absent ones keep their defaults."""
    return load_files([path])


def load_files(paths: Sequence[Path]) -> TrainConfig:
    """Load settings from several files, of which a later one overrides earlier ones.

    Names and types are checked per file, combinations in the result.

    Raises:
        ConfigError: A file is missing or invalid, or has an unknown or wrong-typed setting.
    """
    return _overlaid(TrainConfig(), [(str(path), _read(path)) for path in paths], "")


def _read(path: Path) -> dict[str, Any]:
    of_run = path.suffix == ".json"
    try:
        raw = read_bytes(path)
        table = parse_json(raw) if of_run else tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}). The shipped ones are in configs/."
        ) from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(
            f"{path} is not valid {path.suffix[1:] or 'TOML'}: {why}. Correct it, or give another file."
        ) from None
    return existing_settings(table)[0] if of_run else table


def existing_settings(
    table: dict[str, Any], config: Any = None, section: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the settings of a run's config.json into those that exist, and flag -> value of the others."""
    known, gone = dict[str, Any](), dict[str, Any]()
    config = TrainConfig() if config is None else config
    names = {field.name for field in dataclasses.fields(config)}
    for name, value in table.items():
        part, flag = getattr(config, name, None), f"{section}{name}".replace("_", "-")
        if name not in names:
            gone |= (
                {f"{flag}.{key}": one for key, one in value.items()}
                if isinstance(value, dict)
                else {flag: value}
            )
        elif dataclasses.is_dataclass(part) and isinstance(value, dict):
            known[name], others = existing_settings(value, part, f"{flag}.")
            gone |= others
        else:
            known[name] = value
    return known, gone


def gone_settings(path: Path) -> str:
    """Name the settings of a run's config.json that no longer exist, unless they were off; empty if none."""
    try:
        gone = existing_settings(load_json(path))[1]
    except (OSError, ValueError):  # Reported where the file is loaded.
        return ""
    return ", ".join(f"--{flag} {value}" for flag, value in gone.items() if value not in _OFF)


def overlay(config: Any, table: Any, where: str) -> Any:
    """Return `config` with the settings of a nested table.

    Raises:
        ConfigError: A setting is unknown, of the wrong type, or cannot work.
    """
    return _overlaid(config, [(where, table)], "")


def _overlaid(config: Any, layers: Sequence[tuple[str, Any]], section: str) -> Any:
    """Overlay tables, each with the name of its origin, the lowest first."""
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
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"Perhaps you meant {near[0]!r}." if near else f"Known: {', '.join(sorted(known))}."
                raise ConfigError(f"{where} sets {key!r}, which does not exist. {hint}")
            current = getattr(config, name)
            if dataclasses.is_dataclass(current):
                parts.setdefault(name, []).append((f"{where} [{key}]", value))
            else:
                changes[name] = _typed(value, current, f"{where}: {key}", typing.get_args(hints[name]))
    for name, of_part in parts.items():
        changes[name] = _overlaid(getattr(config, name), of_part, f"{section}{name}.")
    return dataclasses.replace(config, **changes)


def _opened_parts(table: dict[str, Any], where: str, section: str) -> dict[str, Any]:
    """Replace ``[world] name, settings`` by the settings `world` and `world_settings`."""
    found = dict(table)
    for key, value in table.items():
        if not section and key in PARTS and isinstance(value, dict):
            if unknown := sorted(value.keys() - {"name", "settings"}):
                raise ConfigError(f"{where} [{key}] sets {unknown[0]!r}; it takes name and [{key}.settings].")
            del found[key]
            found |= {key: value["name"]} if "name" in value else {}
            found[f"{key}_settings"] = value.get("settings", {})
    return found


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
