"""What became of a run whose processes were hit, from its files and the notes of `chaos_entry`."""

import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncrl.replay.events import read_entries
from asyncrl.replay.group_file import read_group_file
from asyncrl.replay.store import PATTERN

ENTRY: Final = Path(__file__).with_name("chaos_entry.py")
MAX_LAG: Final = 2


@dataclass(kw_only=True)
class Hit:
    """One process that was hit."""

    role: str
    signal: str
    doing: str
    pid: int
    at: float
    recovered: float | None = None
    """Seconds until a process of this role was at work again."""


@dataclass(kw_only=True)
class Report:
    """What became of a run."""

    hits: list[Hit] = field(default_factory=list)
    returncode: int | None = None
    output: str = ""
    versions: int = 0
    """Updates in metrics.jsonl, each version once."""
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    """Episodes that were acknowledged and are neither stored nor given up by name."""
    doubled: list[str] = field(default_factory=list)
    """Episodes that two updates of the final policy learned from."""
    too_old: list[dict[str, Any]] = field(default_factory=list)
    """Batches with a decision beyond the lag bound."""
    left_over: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def look_at(self, folder: Path) -> None:
        """Count, from the run and the notes in `folder`, what came of the episodes."""
        run = folder / "run"
        notes = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(set(steps))
        self.versions = len(steps)
        stored = {x["receipt"]: x["group"] for x in notes if x.get("status") == "stored"}
        self.acknowledged = len(stored)
        self.lost = sorted(_missing(run, stored))
        batches = [x for x in notes if "batch" in x]
        self.too_old = [x for x in batches if x["version"] - x["oldest"] > MAX_LAG]
        learned = {x["version"]: x["batch"] for x in batches}  # The last batch of a version is what counts.
        uses = Counter(episode for batch in learned.values() for episode in batch)
        self.doubled = sorted(episode for episode, count in uses.items() if count > 1)


def _missing(run: Path, stored: dict[str, int]) -> set[str]:
    """Acknowledged episodes that are in no file, and whose group the ledger does not say was given up."""
    files = (run / "replay").glob(PATTERN)
    found = {episode for path in files for episode in read_group_file(path).episode_ids}
    entries = read_entries(run / "replay" / "ledger.log", print)
    given_up = {entry["dropped"] for entry in entries if entry.get("dropped") is not None}
    return {episode for episode, group in stored.items() if group not in given_up} - found


def marked(mark: str) -> list[str]:
    """Command lines of the processes with `mark` in their environment that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # Ended meanwhile, or somebody else's.
            environ, command = ((folder / name).read_bytes() for name in ("environ", "cmdline"))
            if f"{mark}\0".encode() in environ and command:
                found.append(command.decode().replace("\0", " "))
    return found
