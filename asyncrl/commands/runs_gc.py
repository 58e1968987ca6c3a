"""Run `asyncrl runs gc`: say what of ended runs nobody needs, and delete it when told to.

Only what is recognised can go: checkpoints before the newest ones, checkpoints that were never finished, and
of finished runs the groups that `asyncrl replay prune` would delete. A run that is running is never touched,
and while something of a run is deleted no other can begin in its folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import tyro

from asyncrl.config.bounds import AtLeast, Bounded
from asyncrl.replay.store import PATTERN
from asyncrl.replay_tools.cleanup import expendable, resume_version
from asyncrl.replay_tools.episodes import group_file_or_none, read_outcomes, warn
from asyncrl.replay_tools.text import table, watched
from asyncrl.storage import run_lock
from asyncrl.storage.atomic import flush
from asyncrl.storage.best_checkpoint import LEFT_BY_EVALUATOR
from asyncrl.storage.checkpoint_copy import is_whole
from asyncrl.storage.regular_files import kind_of, remove
from asyncrl.storage.run_lock import FolderInUse
from asyncrl.storage.run_state import State, runs_in, summarise

GROUPS: Final = "groups that were used"
OLDER: Final = "older checkpoints"
UNFINISHED: Final = "unfinished checkpoints"
MB: Final = 1e6
_CHECKPOINT: Final = re.compile(r"update_(\d{6,})")
_PART: Final = ".tmp"


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Something that can be deleted."""

    path: Path
    kind: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Gc(Bounded):
    """Say what of the ended runs of a folder can be deleted; --yes deletes it.

    What can go: checkpoints but the newest ones and the best; unfinished checkpoints; of finished runs the
    groups of the replay that no resume needs. Running runs, and all that is not recognised, are left alone.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = Path("runs")
    """Folder of runs, or one run."""
    keep_checkpoints: Annotated[int, AtLeast(1, "a run goes on from the newest.", "Use 1.")] = 1
    """Newest checkpoints of each run that stay."""
    yes: bool = False
    """Delete it."""
    json: bool = False
    """Print a JSON list of all paths, each with run, kind and bytes."""

    def run(self) -> int:
        """List, and with --yes delete; 1 when something could not be deleted."""
        found: list[tuple[Path, State, list[Leftover]]] = []
        for run in runs_in(self.folder.expanduser()):
            state = summarise(run).state
            leftovers = (
                [] if state is State.RUNNING else list(leftovers_of(run, state, self.keep_checkpoints))
            )
            found.append((run, state, leftovers))
        print(self._as_json(found) if self.json else self._text(found), flush=True)
        if not self.yes:
            return 0
        left = [path for run, state, leftovers in found for path in self._delete(run, state, leftovers)]
        for path in left:
            warn(f"{path} could not be deleted. Delete it as its owner.")
        return int(bool(left))

    def _delete(self, run: Path, state: State, listed: list[Leftover]) -> list[Path]:
        """Delete what was listed of a run and still is not needed; return what is still there."""
        if not listed:
            return []
        try:
            with run_lock.kept_unowned(run, "runs gc"):
                now = set(leftovers_of(run, state, self.keep_checkpoints))
                chosen = [one for one in listed if one in now]
                for one in chosen:
                    _delete_one(one)
                for folder in {one.path.parent for one in chosen}:
                    flush(folder)
        except FolderInUse as error:
            warn(str(error))
        return [one.path for one in listed if one.path.exists()]

    def _as_json(self, found: list[tuple[Path, State, list[Leftover]]]) -> str:
        rows: list[dict[str, Any]] = [
            {"run": str(run), "path": str(one.path), "kind": one.kind, "bytes": one.nbytes}
            for run, _, leftovers in found
            for one in leftovers
        ]
        return json.dumps(rows, indent=2)

    def _text(self, found: list[tuple[Path, State, list[Leftover]]]) -> str:
        rows = [("run", "state", "what", "number", "MB")]
        for run, state, leftovers in found:
            for kind in (GROUPS, OLDER, UNFINISHED):
                if of_kind := [one.nbytes for one in leftovers if one.kind == kind]:
                    rows.append((run.name, state.value, kind, str(len(of_kind)), f"{sum(of_kind) / MB:.1f}"))
        total = sum(one.nbytes for _, _, leftovers in found for one in leftovers)
        lines = [table(rows)] if len(rows) > 1 else []
        if running := [run.name for run, state, _ in found if state is State.RUNNING]:
            lines.append(f"left alone, for it runs: {', '.join(running)}")
        verb = "deleting" if self.yes else "would free"
        lines.append(
            f"{verb} {total / MB:.1f} MB in {self.folder}"
            + ("" if self.yes or not total else "; --yes does it")
        )
        return "\n".join(lines)


def leftovers_of(run: Path, state: State, keep: int) -> Iterator[Leftover]:
    """Find what nobody needs of a run that has ended."""
    if kind_of(run / "checkpoints") == "a folder":
        yield from _checkpoints(run / "checkpoints", keep)
    replay = run / "replay"
    if state is State.FINISHED and kind_of(replay) == "a folder" and (replay / "replay.json").is_file():
        outcomes, resume = read_outcomes(replay, warn), resume_version(replay)
        for path in watched(sorted(replay.glob(PATTERN)), f"reading groups of {run.name}"):
            group = group_file_or_none(path) if not kind_of(path) else None
            if group is not None and expendable(group, outcomes, resume):
                yield Leftover(path=path, kind=GROUPS, nbytes=group.size)


def _checkpoints(folder: Path, keep: int) -> Iterator[Leftover]:
    """Find unfinished checkpoints, and those before the newest; a link, like 'best', keeps what it names."""
    paths = [path for path in sorted(folder.iterdir()) if kind_of(path) == "a folder"]
    for path in paths:
        unfinished = path.suffix == _PART and _CHECKPOINT.fullmatch(path.stem)
        if unfinished or path.name in LEFT_BY_EVALUATOR:
            yield Leftover(path=path, kind=UNFINISHED, nbytes=folder_bytes(path, freed=True))
    complete = sorted((int(match[1]), path) for path in paths if (match := _CHECKPOINT.fullmatch(path.name)))
    if complete and not is_whole(newest := complete[-1][1]):
        warn(f"{newest} is not whole, so that the checkpoints before it stay")
        return
    named = {path.resolve() for path in folder.iterdir() if path.is_symlink()}
    for _, path in complete[:-keep]:
        if path.resolve() not in named:
            yield Leftover(path=path, kind=OLDER, nbytes=folder_bytes(path, freed=True))


def folder_bytes(folder: Path, *, freed: bool = False) -> int:
    """Add up the sizes of all files of a folder; one that has two names there counts once.

    Args:
        freed: Count only what is free once the folder is deleted: no file that has a name elsewhere, as those
            of the best checkpoint have.
    """
    sizes: dict[tuple[int, int], int] = {}
    for above, _, names in os.walk(folder):
        for name in names:
            try:
                found = (Path(above) / name).lstat()
            except FileNotFoundError:  # A live run deletes files that it no longer needs.
                continue
            if not freed or found.st_nlink == 1:
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def _delete_one(one: Leftover) -> None:
    """Delete it; a checkpoint that is half deleted must not look like a complete one."""
    try:
        path = one.path
        if one.kind == OLDER:
            path = one.path.with_name(one.path.name + _PART)
            one.path.rename(path)
        remove(path)
    except OSError as error:
        warn(f"{one.path}: {error.strerror}")
