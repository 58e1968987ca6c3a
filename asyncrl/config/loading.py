"""Reads a `TrainConfig` from flags and TOML files, and writes it for the run's folder. Imports no torch.

The file gives the defaults, the flags win. A name that was changed is answered with the new one, and one that
is gone with what to do; in the `config.json` of an older run they are read as the new one, and left out.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import typing
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.registry import as_texts
from asyncrl.storage.bounded_json import DEEPEST, parse_json, shortened
from asyncrl.storage.regular_files import read_bytes

RENAMED: Final = MappingProxyType(
    {
        "replay.silence": "replay.heartbeat_timeout",
        "replay.uses": "replay.max_reuse",
        "replay.order": "replay.sampler",
        "replay.group_deadline": "replay.group_timeout",
        "start_deadline": "startup_timeout",
        "max_wait": "batch_timeout",
        "hang_after": "hang_timeout",
        "weights.deadline": "weights.timeout",
        "algorithm.spread": "algorithm.advantage_scale",
        "correction.low": "correction.min_weight",
        "correction.cap": "correction.max_weight",
        "imagination.memory": "imagination.context",
        "actor.stages": "actor.pipeline_stages",
        "optimizer.final_share": "optimizer.final_lr_share",
        "optimizer.clip_grad": "optimizer.max_grad_norm",
    }
)
"""Name of a setting before 0.1.0 -> its name now."""
REMOVED: Final = MappingProxyType(
    {"replay.shared_megabytes": "Leave it out: pictures go through the socket, which is fast enough."}
)
"""Name of a setting that is gone -> what to do."""
RENAMED_VALUES: Final = MappingProxyType(
    {(f"{section}.level", "chunk"): "decision" for section in ("algorithm", "correction", "critic")}
)
"""Setting and its value before 0.1.0 -> the value now."""
MOST_BYTES: Final = 2**20
"""Of a file of settings."""
PARTS: Final = ("policy", "world", "reward")
"""Settings that a table may give: ``[world] name = "my.worlds:Mine@DIR"`` and ``[world.settings]``."""


def to_json(config: TrainConfig) -> str:
    """Write a configuration so that `load_file` reads it back."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def load_file(path: Path) -> TrainConfig:
    """Read a configuration from TOML (or a run's config.json); absent settings keep their defaults.

    Raises:
        ConfigError: the file is missing, not valid, or has an unknown or wrong-typed setting.
    """
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
    return overlay(TrainConfig(), _renamed(table) if of_run else table, str(path))


def _parse_toml(raw: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"it has more than {DEEPEST} levels") from None


def overlay(config: Any, table: Any, where: str, section: str = "") -> Any:
    """Return `config` with the settings of `table` (nested like the configuration) in place of its own."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table of settings, found {type(table).__name__}.")
    known = {f.name: f for f in dataclasses.fields(config)}
    hints = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    for key, value in _opened_parts(table, where, section).items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{where} sets {key!r}, which does not exist.{_hint(section + name, known)}")
        current = getattr(config, name)
        if dataclasses.is_dataclass(current):
            changes[name] = overlay(current, value, f"{where} [{key}]", f"{section}{name}.")
        else:
            if now := RENAMED_VALUES.get((section + name, str(value))):
                raise ConfigError(f"{where}: {key} is {value!r}, which is called {now!r} now.")
            changes[name] = _typed(value, current, f"{where}: {key}", typing.get_args(hints[name]))
    return dataclasses.replace(config, **changes)


def _renamed(table: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Give the settings of an older run their present names."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if section + key in REMOVED:
            continue
        name = RENAMED.get(section + key, section + key).removeprefix(section)
        now = RENAMED_VALUES.get((section + name, str(value)), value)
        found[name] = _renamed(value, f"{section}{key}.") if isinstance(value, dict) else now
    return found


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
    if name in REMOVED:
        return f" It is gone. {REMOVED[name]}"
    if name in RENAMED:
        return f" It is called {RENAMED[name].rpartition('.')[2]!r} now."
    near = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
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


def parse(arguments: list[str], prog: str = "asyncrl train", description: str | None = None) -> TrainConfig:
    """Read `[CONFIG.toml] [--flags]`: the file gives the defaults, the flags win. Help and errors exit."""
    import tyro

    arguments = list(arguments)
    default = TrainConfig()
    if arguments and arguments[0].endswith((".toml", ".json")):
        default = load_file(Path(arguments.pop(0)))
    refuse_old_flags(arguments)
    return tyro.cli(TrainConfig, args=arguments, default=default, prog=prog, description=description)


def refuse_old_flags(arguments: list[str]) -> None:
    """Answer a flag, or a value of one, that has another name now, or that is gone.

    Raises:
        ConfigError: Says the new name, or what to do.
    """
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        value = value if equals else following
        if name in REMOVED:
            raise ConfigError(f"{flag} is gone. {REMOVED[name]}")
        if now := RENAMED.get(name):
            raise ConfigError(f"{flag} is called --{now.replace('_', '-')} now.")
        if now := RENAMED_VALUES.get((name, value)):
            raise ConfigError(f"{flag} {value} is called {flag} {now} now.")
