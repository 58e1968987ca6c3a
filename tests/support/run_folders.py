"""Run folders as runs leave them, made without running anything."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

from asyncrl.config.run import TrainConfig, to_json

KILLED = """
import os, signal, sys
from pathlib import Path
from asyncrl.storage import run_owner
lock = run_owner.acquire(Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def write_run(
    folder: Path,
    *,
    updates: int = 4,
    made: int = 4,
    true: dict[int, float] | None = None,
    started: float = 1_700_000_000.0,
    config: TrainConfig | None = None,
) -> Path:
    """Write a run that ended in order after `made` of `updates` updates; `true`: update -> true success."""
    folder.mkdir(parents=True)
    settings = folder / "config.json"
    settings.write_text(to_json(config or TrainConfig(updates=updates)))
    os.utime(settings, (started, started))
    (folder / "lock").touch()
    rows = [row(step, started) for step in range(1, made + 1)]
    known = (true or {}).items()
    rows += [{"step": step, "time": started, "eval/success_once": rate} for step, rate in known]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    for step in range(1, made + 1):
        checkpoint = folder / "checkpoints" / f"update_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model").write_bytes(bytes(1000))
        (checkpoint / "state.json").write_text('{"files": {"model": 1000}}')
    return folder


def row(step: int, started: float) -> dict[str, Any]:
    """A row of metrics.jsonl; imagined success is a tenth of the update."""
    return {"step": step, "time": started + 60 * step, "env/success_once": step / 10}


def kill_owner(folder: Path) -> None:
    """Have a process take the run's lock and be killed."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], timeout=60)
    assert done.returncode == -9


def contents(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Everything in a folder: name -> mode, time of writing, and checksum of a file or target of a link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        seen = path.lstat()
        what = str(path.readlink()) if path.is_symlink() else ""
        what = f"{zlib.crc32(path.read_bytes()):08x}" if not what and path.is_file() else what
        found[str(path.relative_to(folder))] = (seen.st_mode, seen.st_mtime_ns, what)
    return found
