"""Command table; every start of the program imports it, so it imports nothing.

A line "`asyncrl NAME ARGUMENTS`: purpose" of the module's docstring is the command's row in `asyncrl --help`.
"""

from __future__ import annotations

_SMALL = ("keys", "configs", "metrics", "completion")
_NAMES = ("train", "actor", "evaluate", "audit", "pace", "collect", "recordings", "fit", "simulators")
_NAMES += ("convert", "replay", "check", "doctor", "runs", "status")
COMMANDS: dict[str, str] = {name: f"asyncrl.commands.{name}:main" for name in _NAMES}
COMMANDS |= {name: f"asyncrl.commands.small:{name}" for name in _SMALL}
