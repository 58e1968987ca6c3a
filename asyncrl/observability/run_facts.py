"""Say how a run was started: its settings by the names of their flags, and its command."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

LONGEST_COMMAND: Final = 4000
"""Characters of a start command that are kept."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """How a run was started."""

    settings: Mapping[str, object] = field(default_factory=dict)
    """Name as of the flag, such as 'actor.max-decisions' -> value."""
    command: str = ""


NO_FACTS: Final = RunFacts()


def flat(table: Mapping[str, Any]) -> dict[str, object]:
    """Name nested settings as their flags are, lists as one text.

    >>> flat({"seed": 1, "actor": {"max_decisions": 6}, "log_with": ["wandb"]})
    {'seed': 1, 'actor.max-decisions': 6, 'log-with': 'wandb'}
    """
    return dict(_named(table, ""))


def _named(table: Mapping[str, Any], section: str) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        name = section + key.replace("_", "-")
        if isinstance(value, Mapping):
            yield from _named(value, f"{name}.")
        else:
            yield name, " ".join(map(str, value)) if isinstance(value, list | tuple) else value


def start_command() -> str:
    """Return what this process was started with, as one would type it; the end of a long one is left out."""
    program, *arguments = sys.argv
    name = Path(program).name
    first = "asyncrl" if name in ("asyncrl", "__main__.py") else program
    ranks = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else ""
    launcher = f"torchrun --nproc-per-node {ranks} " if ranks and first != "asyncrl" else ""
    text = launcher + shlex.join([first, *arguments])
    return text if len(text) <= LONGEST_COMMAND else f"{text[: LONGEST_COMMAND - 3]}..."
