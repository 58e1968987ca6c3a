"""Keep complete groups in a folder of HDF5 files, and give them back whatever crash lies between.

    replay.json                format, versions and group size
    ledger.log                 see `ledger.py`
    index.log                  a cache of what the files say; see `index.py`
    lock                       held by the one process that writes
    group-00000012.h5          a sealed group; `.h5.tmp` while it is written
    quarantine/                files that could not be read
    set_aside/                 files of groups that the learner cannot use

A file counts once it is complete: written as `.tmp`, closed, synced, renamed, and the folder synced. Only
after that an episode is acknowledged: what was acknowledged is readable, and what is readable is whole.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.episode_layout import SCHEMA_VERSION
from asyncrl.errors import CodecMissing, OutOfFiles, ReplayError
from asyncrl.observability.signals import Reserve
from asyncrl.records import Episode
from asyncrl.replay.disk_full import write_error
from asyncrl.replay.files.format import (
    FORMAT,
    FORMAT_VERSION,
    GroupFile,
    GroupFileParts,
    damaged,
    describe,
    read_group_file,
)
from asyncrl.replay.files.reader import Buffers, GroupReader
from asyncrl.replay.files.writer import write_group
from asyncrl.replay.index import FileIndex
from asyncrl.replay.ledger import MAX_LINE, Ledger, read_line, write_line
from asyncrl.storage.atomic import flush
from asyncrl.storage.bounded_json import parse_json
from asyncrl.storage.regular_files import kind_of, make_folder, open_regular, read_bytes, remove

PATTERN = "group-*.h5"
LEDGER = "ledger.log"


def file_name(number: int) -> str:
    """Return the name of a group's file; all match `PATTERN`."""
    return f"group-{number:08d}.h5"


class EpisodeStore:
    """One folder of sealed groups with its index in memory. One writer; readers need only h5py."""

    def __init__(
        self, folder: Path, *, group_size: int, max_bytes: int, warn: Callable[[str], None] = print
    ) -> None:
        """Open or create the folder and recover what is in it.

        Args:
            folder: The run's replay folder.
            group_size: Episodes per group, noted in a new folder; see `made_with`.
            max_bytes: Beyond this, groups that are no longer needed are deleted, oldest first.
            warn: Receives one line per damaged file.

        Raises:
            ReplayError: The folder belongs to another writer, format or version, or the disk does not take
                it.
        """
        self.folder, self.max_bytes, self._warn = folder, max_bytes, warn
        try:
            make_folder(folder)
            self._unlock = weakref.finalize(self, os.close, _lock(folder))
            self.made_with = _check_meta(folder / "replay.json", group_size)
            """Episodes per group when the folder was made; the ledger says what a resume changed."""
            for torn in folder.glob("*.tmp"):
                remove(torn)
        except OSError as error:
            raise _unwritable(folder, error) from None
        self.group_files: dict[int, GroupFile] = {}
        """Group number -> sealed file."""
        self.total_bytes = 0
        """Size of all sealed files."""
        self._removed: dict[int, tuple[str, ...]] = {}  # Ids of those that are to be sealed anew.
        self._reserve = Reserve()
        self._reader, self._index = GroupReader(), FileIndex(folder / "index.log", warn)
        self._recover()
        try:
            self.ledger = Ledger(folder / LEDGER, warn)
        except OSError as error:
            raise _unwritable(folder, error) from None

    def store_group(self, number: int, episodes: Sequence[Episode]) -> GroupFile:
        """Write a complete group durably; when this returns it survives a crash. See `write`."""
        return self.enter(self.write(number, episodes))

    def write(self, number: int, episodes: Sequence[Episode]) -> GroupFileParts:
        """Make the durable file of a complete group. Any thread may call this; the caller has to `enter` it.

        Args:
            number: Of its grant; not stored yet.
            episodes: All members.

        Raises:
            DiskFull: There is no space. Nothing is left behind; it can be tried again.
            OutOfFiles: No file can be opened. Nothing is left behind; it can be tried again.
            ReplayError: The disk does not take it for another reason. Nothing is left behind.
        """
        members = sorted(episodes, key=lambda episode: episode.member)
        try:
            return self._write(number, members)
        except OutOfFiles:
            with self._reserve.lent():
                return self._write(number, members)

    def _write(self, number: int, members: Sequence[Episode]) -> GroupFileParts:
        path = self._path(number)
        temporary = path.with_suffix(".h5.tmp")
        try:
            written = write_group(temporary, number, members)
            temporary.rename(path)
            flush(self.folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise write_error(f"group {number} could not be written to {self.folder}", error) from None
        return written

    def enter(self, written: GroupFileParts) -> GroupFile:
        """Note a group whose file is durable."""
        path = self._path(written.attributes["group_number"])
        group_file = describe(path, written.attributes, written.table, written.found)
        self._enter(group_file)
        self._reader.remember(path, written)
        self._index.add(group_file)
        return group_file

    def load(
        self, number: int, *, buffers: Buffers | None = None, verify: bool = False
    ) -> list[Episode] | None:
        """Read a group; None when its file is damaged, which is then in quarantine.

        Args:
            number: Of a group in `group_files`.
            buffers: See `GroupReader.read`; the episodes are then valid until the next load into them.
            verify: Check the checksums also when they were checked before.

        Raises:
            CodecMissing: It was compacted with a codec that is not installed here.
            OutOfFiles: No file can be opened; it can be tried again.
        """
        try:
            return self.read(self.group_files[number], buffers=buffers, verify=verify)
        except (CodecMissing, OutOfFiles):
            raise
        except ReplayError as error:
            self.put_away(number, str(error))
            return None

    def read(
        self,
        group_file: GroupFile,
        *,
        without: Collection[str] = (),
        buffers: Buffers | None = None,
        verify: bool = False,
    ) -> list[Episode]:
        """Read a group's file. Any thread may call this, for each file one.

        Args:
            group_file: From `group_files`.
            without: See `GroupReader.read`.
            buffers: The same.
            verify: The same.

        Raises:
            CodecMissing: It was compacted with a codec that is not installed here.
            OutOfFiles: No file can be opened; it can be tried again.
            ReplayError: It is damaged, or gone.
        """
        read = partial(
            self._reader.read,
            group_file.path,
            without=without,
            buffers=buffers,
            verify=verify,
            attributes=group_file.attributes,
        )
        try:
            return read()
        except OutOfFiles:
            with self._reserve.lent():
                return read()

    def put_away(self, number: int, why: str) -> None:
        """Move the file of a group into quarantine: it is damaged."""
        group_file = self._take_out(number)
        if group_file is not None:
            self._quarantine(group_file.path, why)

    def trim(self, expendable: Iterable[int], aged: Iterable[int] = ()) -> list[int]:
        """Delete groups, lowest number first, until the size is within the limit; return what was deleted.

        Args:
            expendable: Groups that may be deleted.
            aged: Groups that are deleted whatever the size.
        """
        deleted = sorted(set(aged) & self.group_files.keys())
        for number in deleted:
            self._delete(number)
        if self.total_bytes > self.max_bytes:
            for number in sorted(set(expendable) & self.group_files.keys()):
                if self.total_bytes <= self.max_bytes:
                    break
                self._delete(number)
                deleted.append(number)
        return deleted

    def remove(self, number: int) -> None:
        """Delete a group durably, so that its number can be sealed again. `holds` knows its episodes."""
        if number in self.group_files:
            self._removed[number] = self.group_files[number].episode_ids
            self._delete(number)
            flush(self.folder)

    def set_aside(self, number: int) -> Path:
        """Move the file of a group away, where it is neither read nor deleted; returns where it is now.

        Raises:
            ReplayError: The disk does not take it.
        """
        group_file = self._take_out(number)
        assert group_file is not None
        away = self.folder / "set_aside"
        kept, count = away / group_file.path.name, 1
        while kept.exists():  # The number was set aside before, in a folder whose ledger was lost.
            count += 1
            kept = away / f"{group_file.path.stem}_{count}.h5"
        try:
            make_folder(away)
            group_file.path.rename(kept)
            flush(self.folder)
        except OSError as error:
            raise ReplayError(
                f"{group_file.path} could not be moved to {away}: {error}. Make the folder writable."
            ) from None
        return kept

    def holds(self, number: int, episode_id: str) -> bool:
        """Tell whether an episode is in a group's file, or in the removed one that was to be sealed anew."""
        group_file = self.group_files.get(number)
        return episode_id in (group_file.episode_ids if group_file else self._removed.get(number, ()))

    def close(self) -> None:
        """Let another process write to the folder."""
        self._index.close()
        self.ledger.close()
        self._reserve.close()
        self._unlock()

    def _recover(self) -> None:
        """Find the sealed files: in the index where it can be believed, else in the files themselves."""
        misses = 0
        for path in sorted(self.folder.glob(PATTERN)):
            group_file = self._index.find(path)
            try:
                misses += group_file is None
                group_file = group_file or read_group_file(path)
                if path.name != file_name(group_file.number):
                    raise damaged(path, f"it says that it is group {group_file.number}")
                self._enter(group_file)
            except OutOfFiles:
                raise
            except ReplayError as error:
                self._quarantine(path, str(error))
        complete = not misses and self._index.lines == len(self.group_files)
        self._index.begin(self.group_files.values(), complete=complete)

    def _path(self, number: int) -> Path:
        return self.folder / file_name(number)

    def _enter(self, group_file: GroupFile) -> None:
        self._take_out(group_file.number)
        self.group_files[group_file.number] = group_file
        self.total_bytes += group_file.size
        self._removed.pop(group_file.number, None)

    def _take_out(self, number: int) -> GroupFile | None:
        group_file = self.group_files.pop(number, None)
        if group_file is not None:
            self.total_bytes -= group_file.size
            self._reader.forget(group_file.path)
        return group_file

    def _delete(self, number: int) -> None:
        group_file = self._take_out(number)
        assert group_file is not None
        group_file.path.unlink(missing_ok=True)

    def _quarantine(self, path: Path, why: str) -> None:
        try:
            away = _quarantine_folder(self.folder)
            path.rename(_free_name(away / path.name))
        except OSError as error:
            raise _unwritable(self.folder, error) from None
        self._warn(f"replay: moved {path.name} to {away}: {why}")


def _unwritable(folder: Path, error: OSError) -> ReplayError:
    where = f"{Path(error.filename).name}: " if error.filename else ""
    return ReplayError(
        f"{folder} cannot be written: {where}{error.strerror or error}. Free disk space, or choose another "
        "--run-dir."
    )


def _quarantine_folder(folder: Path) -> Path:
    """Make the folder of damaged files. What has its name and is none is a damaged file too."""
    away = folder / "quarantine"
    if kind_of(away) != "a folder" and (away.is_symlink() or away.exists()):
        away.rename(other := _free_name(folder / "quarantine.file"))
        away.mkdir()
        other.rename(away / other.name)
    away.mkdir(exist_ok=True)
    return away


def _free_name(path: Path) -> Path:
    """Return `path`, with a number behind it where something has that name."""
    number, free = 1, path
    while free.is_symlink() or free.exists():
        number, free = number + 1, path.with_name(f"{path.name}.{number + 1}")
    return free


def read_meta(folder: Path) -> dict[str, Any]:
    """Read a replay folder's replay.json.

    Raises:
        ReplayError: It is not there or cannot be read.
    """
    path = folder / "replay.json"
    try:
        line = read_bytes(path, MAX_LINE).strip()
        version = parse_json(line, dict).get("format_version")
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
    """Check replay.json, or make it; returns the group size that it names."""
    expected = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "schema_version": SCHEMA_VERSION,
    }
    if not path.exists():
        temporary = path.with_suffix(".json.tmp")
        temporary.write_bytes(write_line(expected | {"group_size": group_size}) + b"\n")
        flush(temporary)
        temporary.rename(path)
        flush(path.parent)
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
    handle = open_regular(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ReplayError(
            f"{folder} is written by another process. Wait until it ended, or choose another --run-dir."
        ) from None
    return handle
