"""Keep complete groups in a folder of HDF5 files, and recover them after a crash; see docs/replay_format.md.

A file counts once it is complete: written as `.tmp`, synced, renamed, and the folder synced. Only after that
an episode is acknowledged: everything acknowledged is readable, and everything readable is whole.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.episode_layout import SCHEMA_VERSION
from asyncrl.errors import DiskFull, OutOfFiles, ReplayError
from asyncrl.observability import signals
from asyncrl.records import Episode
from asyncrl.replay.events import Ledger, read_line, write_line
from asyncrl.replay.group_file import FORMAT, FORMAT_VERSION, GroupFile, read_group_file, write_group
from asyncrl.replay.sealed_file import damaged, is_full
from asyncrl.storage.atomic import flush, replacing
from asyncrl.storage.untrusted import make_folder, open_regular, parse_json, read_bytes, remove, take_lock

PATTERN: Final = "group-*.h5"
LEDGER: Final = "ledger.log"


def file_name(number: int) -> str:
    """Return the name of a group's file; all match `PATTERN`."""
    return f"group-{number:08d}.h5"


class EpisodeStore:
    """One folder of sealed groups. One writer; readers need only h5py."""

    def __init__(
        self, folder: Path, *, group_size: int, max_bytes: int, warn: Callable[[str], None] = print
    ) -> None:
        """Open or create the folder and recover it; beyond `max_bytes`, unneeded groups are deleted."""
        self.folder, self.max_bytes, self._warn = folder, max_bytes, warn
        self.group_files: dict[int, GroupFile] = {}
        self.total_bytes = 0
        self._removed: dict[int, tuple[str, ...]] = {}  # Episodes of groups to be sealed again.
        try:
            make_folder(folder)
            self._unlock = weakref.finalize(self, os.close, _lock(folder))
            self.made_with = _check_meta(folder / "replay.json", group_size)
            """Episodes per group when the folder was made; the ledger has later sizes."""
            for torn in folder.glob("*.tmp"):
                remove(torn)
            self._recover()
            self.ledger = Ledger(folder / LEDGER, warn)
        except OSError as error:
            raise _unwritable(folder, error) from None

    def write(self, number: int, episodes: Sequence[Episode]) -> GroupFile:
        """Write the durable file of a complete group, in any thread; the caller has to `enter` it."""
        members = sorted(episodes, key=lambda episode: episode.member)
        try:
            return write_group(self.folder / file_name(number), number, members)
        except OSError as error:
            kind, remedy = ReplayError, "Free disk space, or lower --replay.max-gigabytes."
            if signals.exhausted(error):
                kind, remedy = OutOfFiles, signals.REMEDY
            elif is_full(error):
                kind = DiskFull
            why = f"group {number} could not be written to {self.folder}: {error}. {remedy}"
            raise kind(why) from None

    def enter(self, group_file: GroupFile) -> GroupFile:
        """Record a group whose file is durable."""
        if group_file.number in self.group_files:
            self._remove(group_file.number)
        self.group_files[group_file.number] = group_file
        self.total_bytes += group_file.size
        self._removed.pop(group_file.number, None)
        return group_file

    def put_away(self, number: int, why: str) -> None:
        """Move the damaged file of a group into quarantine."""
        if number in self.group_files:
            self._quarantine(self._remove(number).path, why)

    def trim(self, expendable: Iterable[int]) -> list[int]:
        """Delete expendable groups, lowest numbers first, until the size fits; return their numbers."""
        deleted = list[int]()
        for number in sorted(set(expendable) & self.group_files.keys()):
            if self.total_bytes > self.max_bytes:
                self._remove(number).path.unlink(missing_ok=True)
                deleted.append(number)
        return deleted

    def remove(self, number: int) -> None:
        """Delete a group durably, so that its number can be sealed again; `holds` remembers its episodes."""
        if number in self.group_files:
            group_file = self._remove(number)
            self._removed[number] = group_file.episode_ids
            group_file.path.unlink(missing_ok=True)
            flush(self.folder)

    def set_aside(self, number: int) -> Path:
        """Move the file of a group to `set_aside/`, where it is neither read nor deleted; return its path."""
        return self._move(self._remove(number).path, "set_aside")

    def holds(self, number: int, episode_id: str) -> bool:
        """True if an episode is in a group's file, or was in one that `remove` deleted."""
        group_file = self.group_files.get(number)
        return episode_id in (group_file.episode_ids if group_file else self._removed.get(number, ()))

    def close(self) -> None:
        """Let another process write to the folder."""
        self.ledger.close()
        self._unlock()

    def _recover(self) -> None:
        for path in sorted(self.folder.glob(PATTERN)):
            try:
                group_file = read_group_file(path)
                if path.name != file_name(group_file.number):
                    raise damaged(path, f"its header names group {group_file.number}")
                self.enter(group_file)
            except OutOfFiles:
                raise
            except ReplayError as error:
                self._quarantine(path, str(error))

    def _remove(self, number: int) -> GroupFile:
        group_file = self.group_files.pop(number)
        self.total_bytes -= group_file.size
        return group_file

    def _quarantine(self, path: Path, why: str) -> None:
        kept = self._move(path, "quarantine")
        self._warn(f"replay: moved {path.name} to {kept.parent}: {why}")

    def _move(self, path: Path, name: str) -> Path:
        away = self.folder / name
        number, kept = 1, away / path.name
        while kept.is_symlink() or kept.exists():  # As from a lost ledger, which granted the number before.
            number, kept = number + 1, away / f"{path.name}.{number + 1}"
        try:
            make_folder(away)
            path.rename(kept)
            flush(self.folder)
        except OSError as error:
            raise _unwritable(self.folder, error) from None
        return kept


def _unwritable(folder: Path, error: OSError) -> ReplayError:
    where = f"{Path(error.filename).name}: " if error.filename else ""
    return ReplayError(
        f"{folder} cannot be written: {where}{error.strerror or error}. Free disk space, or choose another "
        "--run-dir."
    )


def read_meta(folder: Path) -> dict[str, Any]:
    """Read a replay folder's replay.json."""
    path = folder / "replay.json"
    try:
        line = read_bytes(path).strip()
        version = parse_json(line).get("format_version")
        if type(version) is int and version != FORMAT_VERSION:
            raise ReplayError(
                f"{folder} was made with format_version {version}, this asyncrl reads {FORMAT_VERSION}. "
                "Use the version that wrote it, or choose a new --run-dir."
            )
        meta = read_line(line)
    except (OSError, ValueError) as error:
        raise ReplayError(f"{folder} is no replay folder: {path.name} cannot be read ({error}).") from None
    if meta.get("format") != FORMAT:
        raise ReplayError(f"{folder} is no replay folder: replay.json does not say {FORMAT!r}.")
    return meta


def _check_meta(path: Path, group_size: int) -> int:
    expected = {"format": FORMAT, "format_version": FORMAT_VERSION, "schema_version": SCHEMA_VERSION}
    if not path.exists():
        with replacing(path) as part:
            part.write_bytes(write_line(expected | {"group_size": group_size}) + b"\n")
    found = read_meta(path.parent)
    for key, value in expected.items():
        if found.get(key) != value:
            raise ReplayError(
                f"{path.parent} was made with {key} {found.get(key)}, this run has {value}. "
                "Keep the version of asyncrl, or choose a new --run-dir."
            )
    size = found.get("group_size")
    if type(size) is not int or size < 1:
        raise ReplayError(
            f"{path} has the group size {size!r}, expected a positive whole number. It is damaged: move the "
            "replay folder away."
        )
    return size


def _lock(folder: Path) -> int:
    path = folder / "lock"
    handle = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        if take_lock(path, handle):
            return handle
        raise ReplayError(
            f"{folder} is written by another process. Wait until it ended, or choose another --run-dir."
        )
    except BaseException:
        os.close(handle)
        raise
