"""`asyncrl status RUN [--stacks]`: say what every process of a run is doing, and since when."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from asyncrl.errors import ConfigError
from asyncrl.observability import process_status

WRITING_SECONDS = 1.0
"""How long the processes get to write their stacks."""


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Show what the processes of a run on this host are doing, also those that died: what they did last."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of the run."""
    stacks: bool = False
    """Also make every living process append the stacks of its threads to RUN/processes/*.stacks."""


def main(arguments: list[str]) -> int:
    """Print a row per thread; 1 when no process of the run is alive."""
    config = tyro.cli(StatusConfig, args=arguments, prog="asyncrl status")
    run = Path(config.run).expanduser()
    processes = process_status.read(run)
    if not processes:
        raise ConfigError(
            f"{run} has no folder {process_status.FOLDER!r} with files: no run was started there."
        )
    for process in processes:
        print(f"{process.role:<12}{process.pid:>8}  {'alive' if process.alive else 'dead'}")
        for activity in process.activities:
            late = f", more than {activity.allowed:.0f} s" if process.alive and activity.overdue else ""
            print(f"    {activity.thread:<20}{activity.what}, {activity.seconds:.1f} s{late}")
    if config.stacks and (files := process_status.dump_stacks(run)):
        time.sleep(WRITING_SECONDS)
        print("stacks: " + " ".join(map(str, files)))
    return int(not any(process.alive for process in processes))
