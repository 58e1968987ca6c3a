"""Where each command is. Imported by every start of the program, so it imports nothing."""

from __future__ import annotations

COMMANDS: dict[str, str] = {
    "train": "asyncrl.commands.train:main",
    "actor": "asyncrl.commands.actor:main",
    "evaluate": "asyncrl.commands.evaluate:main",
    "audit": "asyncrl.commands.audit:main",
    "collect": "asyncrl.commands.collect:main",
    "recordings": "asyncrl.commands.recordings:main",
    "fit": "asyncrl.commands.fit:main",
    "simulators": "asyncrl.commands.simulators:main",
    "convert": "asyncrl.commands.convert:main",
    "replay": "asyncrl.commands.replay:main",
    "check": "asyncrl.commands.check:main",
    "doctor": "asyncrl.commands.doctor:main",
    "runs": "asyncrl.commands.runs:main",
    "status": "asyncrl.commands.status:main",
    "keys": "asyncrl.commands.keys:main",
    "configs": "asyncrl.commands.configs:main",
    "metrics": "asyncrl.commands.metrics:main",
    "completion": "asyncrl.commands.completion:main",
}
"""What runs a command. The docstring of its module begins with: `asyncrl NAME ARGUMENTS`: what it does."""
