"""Command table; every start of the program imports it, so it imports nothing.

A line "`asyncrl NAME ARGUMENTS`: purpose" of the module's docstring is the command's row in `asyncrl --help`.
"""

from __future__ import annotations

_NAMES = (
    *("train", "actor", "evaluate", "audit", "pace", "collect", "recordings", "fit", "simulators"),
    *("convert", "replay", "check", "doctor", "runs", "status", "keys", "metrics"),
)
_SMALL = ("actor", "simulators", "keys", "metrics")
_MODULES = dict.fromkeys(_SMALL, "small") | {"check": "doctor", "recordings": "collect", "status": "runs"}
COMMANDS: dict[str, str] = {
    name: f"asyncrl.commands.{f'{_MODULES[name]}:{name}' if name in _MODULES else f'{name}:main'}"
    for name in _NAMES
}
