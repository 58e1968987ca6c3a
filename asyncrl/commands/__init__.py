"""Command table; every start of the program imports it, so it imports nothing.

A line "`asyncrl NAME ARGUMENTS`: purpose" of the module's docstring is the command's row in `asyncrl --help`.
"""

from __future__ import annotations

_SMALL = ("actor", "simulators", "keys", "configs", "metrics", "completion")
_NAMES = ("train", "evaluate", "audit", "pace", "collect", "recordings", "fit")
_NAMES += ("convert", "replay", "check", "doctor", "runs", "status")
COMMANDS: dict[str, str] = {name: f"asyncrl.commands.{name}:main" for name in _NAMES}
COMMANDS |= {name: f"asyncrl.commands.small:{name}" for name in _SMALL}
