"""Command table; every start of the program imports it, so it imports nothing.

A line "`asyncrl NAME ARGUMENTS`: purpose" of the module's docstring is the command's row in `asyncrl --help`.
"""

from __future__ import annotations

_SMALL = ("actor", "simulators", "keys", "configs", "metrics", "completion")
_NAMES = (
    *("train", "actor", "evaluate", "audit", "pace", "collect", "recordings", "fit", "simulators"),
    *("convert", "replay", "check", "doctor", "runs", "status", "keys", "configs", "metrics", "completion"),
)
COMMANDS: dict[str, str] = {
    name: f"asyncrl.commands.{f'small:{name}' if name in _SMALL else f'{name}:main'}" for name in _NAMES
}
