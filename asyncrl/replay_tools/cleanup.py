"""Run `asyncrl replay prune` and `compact`: delete or compress the files of unneeded groups."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import h5py

from asyncrl.config.bounds import AtLeast
from asyncrl.errors import ConfigError, ReplayError
from asyncrl.replay.group_file import GroupFile, read_group, read_group_file
from asyncrl.replay.sealed_file import opened, sealing
from asyncrl.replay.store import PATTERN
from asyncrl.replay_tools.episodes import GroupOutcomes, ReplayCommand, read_outcomes, sound, warn, watched
from asyncrl.storage import run_owner
from asyncrl.storage.assets import kept
from asyncrl.storage.atomic import flush, replacing
from asyncrl.storage.untrusted import dataset_in

IMAGES: Final = ("frames", "final_frame", "video", "more_frames", "final_more_frames")
GZIP: Final = 4  # Level of compression
PER_CHUNK: Final = 8
"""Images in a chunk: neighbours resemble each other, so with fewer the file would be larger."""


@dataclass(frozen=True, kw_only=True)
class Compact(ReplayCommand):
    """Compress the images of groups that were used, filtered or dropped. Refuses on a live run."""

    all: bool = False
    """Also groups that wait: for a run that is over. A resume reads them all the same, only slower."""
    dry_run: bool = False
    """Only say what would be compressed."""

    def run(self) -> int:
        """Rewrite one file after the other and say what it saves; 1 when a file could not be read."""
        folder = self.folder
        with nullcontext() if self.dry_run else locked(folder):
            paths = sorted(folder.glob(PATTERN))
            chosen, unreadable = self._choose(folder, paths)
            sizes, verb, after = [x.size for x in chosen], "would compress", ""
            if not self.dry_run:
                done = [compact(x.path) for x in watched(chosen, "compressing")]
                unreadable += done.count(None)
                sizes = [old for old, new in zip(sizes, done, strict=True) if new is not None]
                verb, after = "compressed", f" to {sum(size or 0 for size in done) / 1e6:.2f} MB"
        print(
            f"{verb} {len(chosen)} of {len(paths)} groups with gzip: {sum(sizes) / 1e6:.2f} MB"
            f"{after}; the others still wait, are compressed already or cannot be read ({unreadable})"
        )
        return 1 if unreadable else 0

    def _choose(self, folder: Path, paths: list[Path]) -> tuple[list[GroupFile], int]:
        outcomes, chosen, unreadable = read_outcomes(folder, warn), list[GroupFile](), 0
        for path in watched(paths, "reading groups"):
            group_file = sound(path, read_group_file)
            if group_file is None:
                unreadable += path.exists()
            elif (self.all or outcomes.of(group_file.number) != "unused") and not is_compressed(path):
                chosen.append(group_file)
        return chosen, unreadable


def is_compressed(path: Path) -> bool:
    """True if the images of a sealed file are compressed: nothing else is stored in chunks."""
    with opened(path) as (file, _):
        return any(dataset_in(file, name).chunks for name in IMAGES if name in file)


def compact(path: Path) -> int | None:
    """Compress the images of a sealed file durably; at any moment its name leads to a whole file.

    Returns:
        Bytes of the new file; None when the old one is damaged, which is reported and left as it is.
    """
    try:
        read_group(path)
        with replacing(path) as part:
            with h5py.File(path, "r") as old, sealing(part) as (new, _):
                _copy(old, new)
            read_group(part)  # Its checksums are those of the old file.
        return path.stat().st_size
    except ReplayError as error:
        warn(f"warning: {error}")
        return None
    except (OSError, RuntimeError) as error:
        raise ReplayError(
            f"{path.name} could not be compressed: {error}. Free disk space; what was compressed stays so."
        ) from None


def _copy(old: h5py.File, new: h5py.File) -> None:
    for name, value in old.attrs.items():
        new.attrs[name] = value
    for name in map(str, old):
        dataset = dataset_in(old, name)
        if name in IMAGES and dataset.size:
            values, chunks = dataset[...], (min(PER_CHUNK, len(dataset)), *dataset.shape[1:])
            packed = new.create_dataset(name, data=values, chunks=chunks, track_times=False, compression=GZIP)
            for key, value in dataset.attrs.items():
                packed.attrs[key] = value
        else:
            old.copy(dataset, new, name)


@dataclass(frozen=True, kw_only=True)
class Prune(ReplayCommand):
    """Delete groups that were used, filtered or dropped. Refuses on a live run, unless --dry-run."""

    keep_gigabytes: Annotated[
        float | None, AtLeast(0, "it is a size.", "Use 0 for as little as possible.")
    ] = None
    """Delete the oldest of them until the replay is at most this large, in 1e9 bytes."""
    older_than_version: int | None = None
    """Delete those whose newest decision is by an older policy version than this."""
    dry_run: bool = False
    """Only say what would be deleted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.keep_gigabytes is None) == (self.older_than_version is None):
            raise ConfigError(
                "give either --keep-gigabytes X or --older-than-version V: it says what may go."
            )

    def run(self) -> int:
        """Delete, lowest number first, and say what it frees."""
        folder = self.folder
        with nullcontext() if self.dry_run else locked(folder):
            paths = watched(sorted(folder.glob(PATTERN)), "reading groups")
            group_files = [x for path in paths if (x := sound(path, read_group_file)) is not None]
            outcomes, resume = read_outcomes(folder, warn), max(kept(folder.parent), default=None)
            closed = [x for x in group_files if expendable(x, outcomes, resume)]
            chosen = self._choose(group_files, closed)
            if chosen and not self.dry_run:
                for group_file in watched(chosen, "deleting"):
                    group_file.path.unlink(missing_ok=True)
                flush(folder)
        for group_file in chosen:
            outcome = outcomes.of(group_file.number)
            print(f"{group_file.path.name}  {group_file.size / 1e6:8.2f} MB  {outcome}")
        freed, total = sum(s.size for s in chosen), sum(s.size for s in group_files)
        verb = "would free" if self.dry_run else "freed"
        print(
            f"{verb} {freed / 1e6:.2f} MB of {total / 1e6:.2f} MB: "
            f"{len(chosen)} of {len(group_files)} groups; "
            f"{len(group_files) - len(closed)} are still needed, or a resume may need them"
        )
        return 0

    def _choose(self, group_files: list[GroupFile], closed: list[GroupFile]) -> list[GroupFile]:
        if self.older_than_version is not None:
            return [x for x in closed if x.newest_version < self.older_than_version]
        excess, chosen = sum(x.size for x in group_files) - int((self.keep_gigabytes or 0.0) * 1e9), []
        for group_file in closed:
            if excess > 0:
                chosen.append(group_file)
                excess -= group_file.size
        return chosen


def expendable(group_file: GroupFile, outcomes: GroupOutcomes, resume: int | None) -> bool:
    """True if a group is closed and a resume, at version `resume` if at all, would not use it again."""
    if outcomes.of(group_file.number) == "unused":
        return False
    used_at = outcomes.used_at(group_file.number)
    return used_at is None or resume is None or used_at < resume


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the locks of run and replay, so that no run begins."""
    of_run = (folder.parent / "config.json").exists()
    try:
        with (
            run_owner.kept_unowned(folder.parent, f"changing {folder}") if of_run else nullcontext(),
            (folder / "lock").open("a") as file,
        ):
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
