"""`asyncrl replay prune`: the ledger and a limit in, fewer files out."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError, ReplayError
from asyncrl.replay.files.format import Shard
from asyncrl.replay.inspection.choosing import OfReplay
from asyncrl.replay.inspection.fates import Fates, read_fates
from asyncrl.replay.inspection.tables import watched
from asyncrl.replay.reading import shard_or_none, warn
from asyncrl.replay.store import PATTERN, sync


@dataclass(frozen=True, kw_only=True)
class Prune(OfReplay):
    """Delete groups that were used, filtered or dropped. Refuses on a live run, unless --dry-run."""

    keep_gigabytes: float | None = None
    """Delete the oldest of them until the replay is at most this large, in 1e9 bytes."""
    older_than_version: int | None = None
    """Delete those whose newest decision is by an older policy version than this."""
    dry_run: bool = False
    """Only say what would be deleted."""

    def __post_init__(self) -> None:
        if (self.keep_gigabytes is None) == (self.older_than_version is None):
            raise ConfigError(
                "give either --keep-gigabytes X or --older-than-version V: it says what may go."
            )
        if self.keep_gigabytes is not None and self.keep_gigabytes < 0:
            raise ConfigError(
                f"--keep-gigabytes {self.keep_gigabytes} is negative. Use 0 for as little as possible."
            )

    def run(self) -> int:
        """Delete, lowest number first, and say what it frees."""
        folder = self.folder
        with nullcontext() if self.dry_run else locked(folder):
            paths = watched(sorted(folder.glob(PATTERN)), "reading groups")
            shards = [shard for path in paths if (shard := shard_or_none(path)) is not None]
            fates, resume = read_fates(folder, warn), resume_version(folder)
            closed = [shard for shard in shards if expendable(shard, fates, resume)]
            chosen = self._choose(shards, closed)
            if not self.dry_run:
                _delete(folder, chosen)
        for shard in chosen:
            print(f"{shard.path.name}  {shard.size / 1e6:8.2f} MB  {fates.of(shard.number)}")
        freed, total = sum(s.size for s in chosen), sum(s.size for s in shards)
        verb = "would free" if self.dry_run else "freed"
        print(
            f"{verb} {freed / 1e6:.2f} MB of {total / 1e6:.2f} MB: {len(chosen)} of {len(shards)} groups; "
            f"{len(shards) - len(closed)} are still needed, or a resume may need them"
        )
        return 0

    def _choose(self, shards: list[Shard], closed: list[Shard]) -> list[Shard]:
        if self.older_than_version is not None:
            return [shard for shard in closed if shard.newest_version < self.older_than_version]
        excess = sum(shard.size for shard in shards) - int((self.keep_gigabytes or 0.0) * 1e9)
        chosen: list[Shard] = []
        for shard in closed:
            if excess <= 0:
                break
            chosen.append(shard)
            excess -= shard.size
        return chosen


def expendable(shard: Shard, fates: Fates, resume: int | None) -> bool:
    """Whether nobody needs a group: it is closed, and a resume would not use it again.

    Args:
        shard: The group.
        fates: What became of the groups.
        resume: Version of the newest checkpoint; what was used later is used again after a resume.
    """
    if fates.of(shard.number) == "unused":
        return False
    used_at = fates.used.get(shard.number)
    return used_at is None or resume is None or used_at < resume


def resume_version(folder: Path) -> int | None:
    """The version of the run's newest checkpoint; None when it has none."""
    names = [path.name for path in (folder.parent / "checkpoints").glob("update_*")]
    found = [re.fullmatch(r"update_(\d+)", name) for name in names]
    return max((int(match[1]) for match in found if match), default=None)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the replay's lock, so that no run begins meanwhile.

    Raises:
        ReplayError: A run holds it, or the folder is read-only.
    """
    try:
        with (folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError:
        raise ReplayError(
            f"{folder} is written by a live run (which prunes by itself, --replay.max-gigabytes). "
            "Wait until it ended, or use --dry-run."
        ) from None
    except PermissionError as error:
        raise ReplayError(
            f"{folder} cannot be changed: {error}. Run it as the owner of the folder."
        ) from None


def _delete(folder: Path, chosen: list[Shard]) -> None:
    for shard in watched(chosen, "deleting"):
        shard.path.unlink(missing_ok=True)
    if chosen:
        sync(folder)
