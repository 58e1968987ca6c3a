"""Keep complete groups in a folder of HDF5 files, and recover them after a crash; see docs/replay_format.md.

A file counts once it is complete: written as `.tmp`, synced, renamed, and the folder synced. Only after that
an episode is acknowledged: everything acknowledged is readable, and everything readable is whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

from asyncrl.episode_layout import SCHEMA_VERSION
from asyncrl.errors import CodecMissing, OutOfFiles, ReplayError
from asyncrl.observability.signals import Reserve
from asyncrl.records import Episode, Sampling
from asyncrl.replay.events import MAX_LINE, Ledger, read_line, write_line
from asyncrl.replay.group_file import (
    FORMAT,
    FORMAT_VERSION,
    GroupFile,
    read_group,
    read_group_file,
    write_group,
)
from asyncrl.replay.sealed_file import damaged, fingerprint, write_error
from asyncrl.storage.atomic import flush, replacing
from asyncrl.storage.untrusted import (
    LINES_BYTES,
    kind_of,
    make_folder,
    open_regular,
    parse_json,
    read_bytes,
    read_lines,
    reading,
    remove,
)

T = TypeVar("T")
PATTERN: Final = "group-*.h5"
LEDGER: Final = "ledger.log"


def file_name(number: int) -> str:
    """Return the name of a group's file; all match `PATTERN`."""
    return f"group-{number:08d}.h5"


class EpisodeStore:
    """One folder of sealed groups with its index in memory. One writer; readers need only h5py."""

    def __init__(
        self, folder: Path, *, group_size: int, max_bytes: int, warn: Callable[[str], None] = print
    ) -> None:
        """Open or create the folder and recover it; beyond `max_bytes` unneeded groups are deleted."""
        self.folder, self.max_bytes, self._warn = folder, max_bytes, warn
        try:
            make_folder(folder)
            self._unlock = weakref.finalize(self, os.close, _lock(folder))
            self.made_with = _check_meta(folder / "replay.json", group_size)
            """Episodes per group when the folder was made; the ledger has later sizes."""
            for torn in folder.glob("*.tmp"):
                remove(torn)
        except OSError as error:
            raise _unwritable(folder, error) from None
        self.group_files: dict[int, GroupFile] = {}
        self.total_bytes = 0
        self._removed: dict[int, tuple[str, ...]] = {}  # Episodes of groups to be sealed again.
        self._reserve = Reserve()
        self._index = FileIndex(folder / "index.log", warn)
        self._recover()
        try:
            self.ledger = Ledger(folder / LEDGER, warn)
        except OSError as error:
            raise _unwritable(folder, error) from None

    def store_group(self, number: int, episodes: Sequence[Episode]) -> GroupFile:
        """Write a complete group durably and enter it."""
        return self.enter(self.write(number, episodes))

    def write(self, number: int, episodes: Sequence[Episode]) -> GroupFile:
        """Write the durable file of a complete group, in any thread; the caller has to `enter` it."""
        members = sorted(episodes, key=lambda episode: episode.member)

        def write() -> GroupFile:
            try:
                return write_group(self.folder / file_name(number), number, members)
            except OSError as error:
                raise write_error(f"group {number} could not be written to {self.folder}", error) from None

        return self._with_reserve(write)

    def _with_reserve(self, action: Callable[[], T]) -> T:
        """Call an action, again with the reserved file descriptors if there were too few."""
        try:
            return action()
        except OutOfFiles:
            with self._reserve.lent():
                return action()

    def enter(self, group_file: GroupFile) -> GroupFile:
        """Record a group whose file is durable."""
        self._enter(group_file)
        self._index.add(group_file)
        return group_file

    def load(self, number: int) -> list[Episode] | None:
        """Read a group of `group_files`; None when its file is damaged, which is then in quarantine."""
        try:
            return self.read(self.group_files[number])
        except (CodecMissing, OutOfFiles):
            raise
        except ReplayError as error:
            self.put_away(number, str(error))
            return None

    def read(self, group_file: GroupFile, *, without: Collection[str] = ()) -> list[Episode]:
        """Read a group's file. Any thread may call this."""
        path, expected = group_file.path, group_file.attributes
        return self._with_reserve(lambda: read_group(path, without=without, attributes=expected))

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
        group_file = self._remove(number)
        away = self.folder / "set_aside"
        try:
            make_folder(away)
            kept = _free_name(away / group_file.path.name)  # The number may be there from a lost ledger.
            group_file.path.rename(kept)
            flush(self.folder)
        except OSError as error:
            raise ReplayError(
                f"{group_file.path} could not be moved to {away}: {error}. Make the folder writable."
            ) from None
        return kept

    def holds(self, number: int, episode_id: str) -> bool:
        """True if an episode is in a group's file, or was in the removed one that is to be sealed again."""
        group_file = self.group_files.get(number)
        return episode_id in (group_file.episode_ids if group_file else self._removed.get(number, ()))

    def close(self) -> None:
        """Let another process write to the folder."""
        self._index.close()
        self.ledger.close()
        self._reserve.close()
        self._unlock()

    def _recover(self) -> None:
        """Find the sealed files: from the index where it matches, else from the files themselves."""
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

    def _enter(self, group_file: GroupFile) -> None:
        if group_file.number in self.group_files:
            self._remove(group_file.number)
        self.group_files[group_file.number] = group_file
        self.total_bytes += group_file.size
        self._removed.pop(group_file.number, None)

    def _remove(self, number: int) -> GroupFile:
        group_file = self.group_files.pop(number)
        self.total_bytes -= group_file.size
        return group_file

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
    """Make the folder of damaged files; anything else that has its name is moved into it."""
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
    handle = open_regular(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ReplayError(
            f"{folder} is written by another process. Wait until it ended, or choose another --run-dir."
        ) from None
    return handle


class FileIndex:
    """A cache of facts about the files of a store, so that opening costs a stat and a short read per file.

    One line per sealed group: CRC-32, then JSON. An entry counts if its checksum holds and its file has the
    same size, modification time and footer; other files are read. So a line needs no fsync.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Read it; `warn` receives a line when the index can no longer be written."""
        self.path, self._warn, self._file = path, warn, -1
        self.lines = 0  # Of the file, right or wrong.
        self._entries = dict[str, dict[str, Any]]()
        try:
            with reading(path, LINES_BYTES) as file:
                for self.lines, line in read_lines(file):
                    self._read(line or b"")
        except OSError:
            self._entries.clear()

    def _read(self, line: bytes) -> None:
        line = line.rstrip(b"\n")
        try:
            if int(line[:8], 16) == zlib.crc32(line[9:]):
                entry = parse_json(line[9:], dict)
                self._entries[entry["path"]] = entry
        except (ValueError, KeyError, TypeError):  # Damaged, or of an earlier version.
            return

    def find(self, path: Path) -> GroupFile | None:
        """Return the facts about a file, or None if it has to be read."""
        try:
            entry: dict[str, Any] = dict(self._entries[path.name])
            found = path.stat()
            now = [found.st_size, found.st_mtime_ns, fingerprint(path)]
            if now != [entry["size"], entry["mtime_ns"], entry.pop("footer")]:
                return None
            entry["path"], entry["sampling"] = path, Sampling(*entry["sampling"])
            entry["episode_ids"] = tuple(entry["episode_ids"])
            return GroupFile(**entry)
        except (OSError, KeyError, TypeError, ValueError):
            return None

    def add(self, group_file: GroupFile) -> None:
        """Append a file that is durable."""
        if self._file >= 0:
            try:
                os.write(self._file, _index_line(group_file))
            except OSError as error:
                self._give_up(error)

    def begin(self, group_files: Iterable[GroupFile], *, complete: bool) -> None:
        """Open the index for new lines; unless it is `complete`, write it again with `group_files`."""
        self._entries = {}
        try:
            if not complete:
                with replacing(self.path) as part:
                    part.write_bytes(b"".join(map(_index_line, group_files)))
            self._file = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._warn(f"{self.path} could not be written: {error}. The next start is slower; nothing is lost.")


def _index_line(group_file: GroupFile) -> bytes:
    entry = asdict(group_file) | {"path": group_file.path.name, "footer": fingerprint(group_file.path)}
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)
