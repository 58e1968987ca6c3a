"""Names of settings that were changed or are gone, and what stands in their place now.

A file or a flag with such a name is refused with its successor, so that nobody is told only "unknown"; in the
`config.json` of an older run it is read as the new one, and left out where it is gone. Whoever renames or
removes a setting adds a line here.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, Final

from asyncrl.errors import ConfigError

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


def successor(name: str) -> str:
    """Say what became of a setting of a file, as a sentence that goes on; empty when it never was one.

    Args:
        name: With its section, such as 'replay.uses'.
    """
    if name in REMOVED:
        return f" It is gone. {REMOVED[name]}"
    if now := RENAMED.get(name):
        return f" It is called {now.rpartition('.')[2]!r} now."
    return ""


def with_present_names(table: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Give the settings of an older run their present names and values; what is gone is left out.

    Args:
        table: Nested like the configuration.
        section: What stands before its names, such as 'replay.'.
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        if section + key in REMOVED:
            continue
        name = RENAMED.get(section + key, section + key).removeprefix(section)
        now = RENAMED_VALUES.get((section + name, str(value)), value)
        found[name] = with_present_names(value, f"{section}{key}.") if isinstance(value, dict) else now
    return found


def refuse_old_value(name: str, value: object, where: str) -> None:
    """Answer a value that has another name now.

    Args:
        name: Of the setting, with its section.
        value: Of a file.
        where: File and setting, for the error.

    Raises:
        ConfigError: Says the new name.
    """
    if now := RENAMED_VALUES.get((name, str(value))):
        raise ConfigError(f"{where} is {value!r}, which is called {now!r} now.")


def refuse_old_flags(arguments: Iterable[str]) -> None:
    """Answer a flag, or a value of one, that has another name now, or that is gone.

    Raises:
        ConfigError: Says the new name, or what to do.
    """
    arguments = list(arguments)
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
