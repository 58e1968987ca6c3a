"""Check a run without starting it, and print its settings: `asyncrl train --dry-run`.

First what `asyncrl train` refuses before its first process, then those checks of the doctor that start no
process and write no file. Standard output gets the settings and nothing else, so that it can be a file.
"""

from __future__ import annotations

import os
import sys

from asyncrl import __version__
from asyncrl.config.loading import to_toml
from asyncrl.config.run import TrainConfig
from asyncrl.doctor.checks import Examination, Verdict, examine, render
from asyncrl.doctor.host import existing_parent
from asyncrl.errors import ConfigError
from asyncrl.launch import console, endpoints, rendezvous
from asyncrl.launch.placement import checked_placement, ranks_named
from asyncrl.launch.placement_text import sizes_of_hosts
from asyncrl.replay.store import read_meta
from asyncrl.storage import run_folder
from asyncrl.storage.folder_check import check_folder


def dry_run(config: TrainConfig) -> int:
    """Check, and print the settings with what the world says where the user said nothing.

    Of several ranks the first one does it.

    Returns:
        0: a run with these settings would start here.
    """
    if rendezvous.rank():
        return 0
    _refuse(config)
    examination = Examination(config=config)
    said = [*console.notes(config)]
    checks = 0
    for finding in examine(examination, reading_only=True):
        checks += 1
        if finding.verdict is Verdict.BROKEN:
            raise ConfigError(f"{finding.seen} {finding.advice}".rstrip())
        if finding.verdict is Verdict.WARNING:
            said.append(render(finding))
    for line in said:
        print(line, file=sys.stderr)
    print(f"# asyncrl {__version__}: all settings of a run. Start it: asyncrl train FILE")
    print(to_toml(examination.config), end="", flush=True)
    print(f"{checks} checks passed. Nothing was started or written.", file=sys.stderr)
    return 0


def _refuse(config: TrainConfig) -> None:
    """Refuse what the run would refuse before it looks at models."""
    if not config.inline:
        ranks = rendezvous.world_size() if "RANK" in os.environ else ranks_named(config.placement)
        placement = checked_placement(config, ranks)
        endpoints.check(config, placement, several_hosts=len(sizes_of_hosts(config.placement)) > 1)
        endpoints.check_free(config)
    run_folder.check_free(config)
    folder = run_folder.locate(config)
    if config.resume:
        check_folder(folder)
        if (folder / run_folder.REPLAY / "replay.json").exists():
            read_meta(folder / run_folder.REPLAY)
    if not os.access(above := existing_parent(folder), os.W_OK | os.X_OK):
        raise ConfigError(f"--run-dir {folder} cannot be made: {above} is read-only. Choose another folder.")
