"""What the files of a store say, remembered beside them: opening costs a stat and a short read per file.

    index.log    one line per sealed group: CRC-32 of the rest of the line, then JSON

A cache, never an authority. An entry counts only when its checksum holds and its file has the size, the time
of writing and the fingerprint (see `files/format.py`) that it had; every other file is read, and the index is
written anew. So a line needs no fsync: a crash loses or tears lines, and those groups are read from their
files. When a group is loaded, what its file says of it is compared with its entry.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from asyncrl.episode_layout import STORED_SCHEMA_VERSIONS
from asyncrl.records import Sampling
from asyncrl.replay.files.format import FORMAT, FORMAT_VERSION, ROOT, GroupFile, fingerprint
from asyncrl.storage.atomic import replacing
from asyncrl.storage.bounded_json import check_types, parse_json
from asyncrl.storage.regular_files import LINES_BYTES, open_regular, read_lines, reading

_VERSIONS: Final = {
    "format": (FORMAT,),
    "format_version": (FORMAT_VERSION,),
    "schema_version": STORED_SCHEMA_VERSIONS,
}


class FileIndex:
    """The lines of `index.log`. Nothing here fails: without an index the files are read."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Read what is there; `warn` receives a line when the index can no longer be written."""
        self.path, self._warn, self._file = path, warn, -1
        self.lines = 0
        """Lines found, right or wrong."""
        self._entries = self._read()

    def find(self, path: Path) -> GroupFile | None:
        """Return what is known of a file, or None when it has to be read."""
        entry = self._entries.get(path.name)
        if entry is None:
            return None
        try:
            found = path.stat()
            if [found.st_size, found.st_mtime_ns, _fingerprint(path)] != entry["file"]:
                return None
            attributes = {key: kind(entry["attributes"][key]) for key, kind in ROOT.items()}
            if any(attributes[key] not in values for key, values in _VERSIONS.items()):
                return None
            return GroupFile(
                path=path,
                number=attributes["group_number"],
                oldest_version=attributes["oldest_version"],
                newest_version=attributes["newest_version"],
                size=found.st_size,
                mtime_ns=found.st_mtime_ns,
                decisions=int(entry["decisions"]),
                sampling=Sampling(float(entry["sampling"][0]), int(entry["sampling"][1])),
                world_version=int(entry["world_version"]),
                success=float(entry["success"]),
                episode_ids=tuple(map(str, entry["episode_ids"])),
                attributes=attributes,
            )
        except (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
            return None

    def add(self, group_file: GroupFile) -> None:
        """Remember a file that is durable."""
        if self._file < 0:
            return
        try:
            os.write(self._file, _line(group_file))
        except OSError as error:
            self._give_up(error)

    def begin(self, group_files: Iterable[GroupFile], *, complete: bool) -> None:
        """Open the index for new lines; unless it is `complete`, write it anew with `group_files` first."""
        self._entries = {}
        try:
            if not complete:
                with replacing(self.path) as part:
                    part.write_bytes(b"".join(map(_line, group_files)))
            self._file = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._warn(f"{self.path} could not be written: {error}. The next start is slower; nothing is lost.")

    def _read(self) -> dict[str, dict[str, Any]]:
        found = dict[str, dict[str, Any]]()
        try:
            with reading(self.path, LINES_BYTES) as file:
                for self.lines, line in read_lines(file):
                    if line is not None and (entry := _entry(line.rstrip(b"\n"))) is not None:
                        found[entry["name"]] = entry
        except OSError:
            return {}
        return found


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        if int(line[:8], 16) != zlib.crc32(line[9:]):
            return None
        entry = parse_json(line[9:], dict)
        check_types(entry, {"name": str, "file": list})
    except ValueError:
        return None
    return entry


def _fingerprint(path: Path) -> int:
    handle = open_regular(path)
    try:
        return fingerprint(handle, os.fstat(handle).st_size)
    finally:
        os.close(handle)


def _line(group_file: GroupFile) -> bytes:
    entry = {
        "name": group_file.path.name,
        "file": [group_file.size, group_file.mtime_ns, _fingerprint(group_file.path)],
        "attributes": group_file.attributes,
        "decisions": group_file.decisions,
        "sampling": group_file.sampling,
        "world_version": group_file.world_version,
        "success": group_file.success,
        "episode_ids": group_file.episode_ids,
    }
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)
