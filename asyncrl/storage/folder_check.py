"""Check what lies in a run's folder before processes start that would each stumble over it, again and again.

Only what no process can do without, and only what kind of thing it is: what is in the files, their readers
check. Damaged group files go to quarantine, and without an index or a reserve of disk space a run goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError
from asyncrl.storage.untrusted import LINES_BYTES, kind_of

FOLDERS: Final = ("logs", "checkpoints", "replay", "videos", "tensorboard", "processes", "true", "worlds")
FILES: Final = ("config.json", "metrics.jsonl", "replay/replay.json", "replay/ledger.log", "replay/lock")
LOGS: Final = ("logs/*.log", "processes/*")


def check_folder(run_dir: Path) -> None:
    """Check the kinds of what a run reads and writes; what is not there will be made.

    Raises:
        ConfigError: Something else is in its place, or it is impossibly large; names it.
    """
    for path in (run_dir / name for name in FOLDERS):
        if (path.is_symlink() or path.exists()) and kind_of(path) != "a folder":
            raise _wrong(path, kind_of(path) or "a file", "a folder")
    files = [run_dir / name for name in FILES]
    for path in (*files, *(path for pattern in LOGS for path in sorted(run_dir.glob(pattern)))):
        if kind := kind_of(path):
            raise _wrong(path, kind, "a file")
        if path.exists() and (size := path.stat().st_size) > LINES_BYTES:
            raise ConfigError(
                f"{path} has {size} bytes, more than the limit of {LINES_BYTES}: no run wrote that. Move it "
                "away."
            )


def _wrong(path: Path, found: str, expected: str) -> ConfigError:
    why = ": what the run writes must stay in its folder" if found == "a link" else ""
    return ConfigError(f"{path} is {found}, where {expected} of the run is expected{why}. Move it away.")
