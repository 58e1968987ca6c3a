"""`asyncrl replay list|show|video|sheet|stats|verify|imagine|export|prune|compact`: look into a replay.

Everything works on a live run but `prune` and `compact`, which alone change files and refuse on a live run.
Only `imagine` runs models, and imports what they need when it does.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import tyro

from asyncrl.commands.replay_imagine import Imagine
from asyncrl.errors import ConfigError, ReplayError
from asyncrl.replay_tools.cleanup import Compact, Prune
from asyncrl.replay_tools.export import Export
from asyncrl.replay_tools.pictures import Sheet, Video
from asyncrl.replay_tools.statistics import Stats
from asyncrl.replay_tools.tables import List, Show
from asyncrl.replay_tools.verify import Verify

_named = tyro.conf.subcommand
ARGUMENTS: Any = tyro.conf.FlagCreatePairsOff[
    Annotated[List, _named(name="list")]
    | Annotated[Show, _named(name="show")]
    | Annotated[Video, _named(name="video")]
    | Annotated[Sheet, _named(name="sheet")]
    | Annotated[Stats, _named(name="stats")]
    | Annotated[Verify, _named(name="verify")]
    | Annotated[Imagine, _named(name="imagine")]
    | Annotated[Export, _named(name="export")]
    | Annotated[Prune, _named(name="prune")]
    | Annotated[Compact, _named(name="compact")]
]


def main(arguments: list[str]) -> int:
    """Run one of them; return 0, 1 when it found a damage or a difference, 2 for input that cannot work."""
    wanted: Any = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl replay")
    try:
        return wanted.run()
    except (ConfigError, ReplayError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
