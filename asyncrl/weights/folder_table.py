"""Keep a small table of texts in a private folder, for the processes of one user on one host.

Every key is a file of the folder. There is no server, so nobody can reach the table who may not enter the
folder, and it is gone with it.

    set      writes a file beside it and renames it: a reader sees the old value or the new one
    append   one write of one line at the end (O_APPEND): lines of several processes do not mix
    get      opens regular files only, follows no link, and reads no more than a limit

What is read is checked like anything from a wire; see `table`.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncrl.errors import WeightSyncError
from asyncrl.weights.table import MAX_VALUE, Lines, Table, TableError, TableGone
from asyncrl.weights.wake_up import WakeUp, WakeUpSocket

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

MAX_READ: Final = 1 << 16
"""Bytes of appended lines that one look reads; a longer line is wrong."""
_KEY: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_numbers = itertools.count()


class FolderTable(Table):
    """A table in a folder. Any number of processes and threads may use it at the same time."""

    one_host = True

    def __init__(self, folder: Path) -> None:
        """Use the table in a folder that is there.

        Raises:
            TableGone: it is not there.
            WeightSyncError: other users can enter the folder, or it is another user's.
        """
        super().__init__()
        self.folder, self.endpoint = folder, str(folder)
        with self._trouble():
            about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise WeightSyncError(
                f"{folder} should be a private folder of a run, but it is no folder of mode 0700 of this "
                "user, so others could replace the policy. Use the folder that the learner made."
            )

    @classmethod
    def make(cls, folder: Path) -> FolderTable:
        """Make the folder, which must not be there, and keep cleaners of the temporary folder out of it.

        Raises:
            WeightSyncError: it cannot be made.
        """
        try:
            folder.mkdir(mode=0o700)
            table = cls(folder)
            # systemd-tmpfiles deletes old files of /tmp, but leaves a locked folder alone. The lock lasts as
            # long as the process: nobody closes the descriptor.
            fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_SH)
        except OSError as error:
            raise WeightSyncError(
                f"The folder of the weights {folder} cannot be made ({error.strerror}). "
                "Free it, or set TMPDIR to another folder."
            ) from None
        return table

    def exists(self) -> bool:
        """Tell whether the folder is there."""
        return self.folder.is_dir()

    def set(self, key: str, value: bytes) -> None:
        """Give `key` a value, whole or not at all.

        Raises:
            TableGone: the folder is gone.
            TableError: it cannot be written.
        """
        path = self._path(key)
        part = self.folder / f".{os.getpid()}.{next(_numbers)}"
        with self._trouble():
            try:
                with open(part, "xb", opener=_private) as file:
                    file.write(value)
                self._rename(part, path)
            except OSError:
                with contextlib.suppress(OSError):
                    part.unlink()
                raise

    def get(self, key: str, limit: int = MAX_VALUE) -> bytes | None:
        """Return the value of `key`; None when it has none, or one that is wrong.

        Args:
            key: Of the table.
            limit: Bytes. A longer value is wrong.

        Raises:
            TableGone: the folder is gone.
            TableError: it cannot be read.
        """
        found = self._read(key, 0, limit + 1)
        if found is not None and len(found) > limit:
            self.note_wrong(key, found[:100], f"is longer than {limit} bytes")
            return None
        return found

    def check(self, key: str) -> bool:
        """Tell whether `key` has a value."""
        if os.path.lexists(self._path(key)):
            return True
        self.require()
        return False

    def delete(self, key: str) -> None:
        """Take the value of `key` away, when it has one.

        Raises:
            TableGone: the folder is gone.
            TableError: it cannot be deleted.
        """
        with self._trouble():
            try:
                self._path(key).unlink()
            except FileNotFoundError:
                self.require()
            except IsADirectoryError:
                self.note_wrong(key, b"", "is a folder")

    def list_keys(self) -> list[str]:
        """List the keys that have a value."""
        with self._trouble():
            return [path.name for path in self.folder.iterdir() if _KEY.fullmatch(path.name)]

    def append(self, key: str, line: bytes) -> int:
        """Add a line, without its end, to the value of `key`.

        Returns:
            Bytes of the value up to the end of this line.

        Raises:
            TableGone: the folder is gone.
            TableError: it cannot be written.
        """
        assert b"\n" not in line, line
        # It begins with the end of a line that another process did not finish.
        whole = b"\n" + line + b"\n"
        assert len(whole) <= MAX_READ, len(whole)
        with self._trouble():
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(self._path(key), flags, 0o600)
            try:
                written = os.write(file, whole)
                if written < len(whole):
                    raise OSError(28, "No space left on device")
                return os.lseek(file, 0, os.SEEK_CUR)
            finally:
                os.close(file)

    def read_lines(self, key: str, start: int) -> Lines:
        """Return the complete lines of `key` from byte `start` on, as many as one look reads.

        Raises:
            TableGone: the folder is gone.
            TableError: it cannot be read.
        """
        found = self._read(key, start, MAX_READ) or b""
        complete = found.rfind(b"\n") + 1
        if not complete and len(found) == MAX_READ:
            self.note_wrong(key, found, f"has a line longer than {MAX_READ} bytes")
            return Lines(lines=(), end=start + len(found))
        lines = tuple(line for line in found[:complete].split(b"\n") if line)
        return Lines(lines=lines, end=start + complete)

    def close(self) -> None:
        """Do nothing: the folder is its owner's to remove."""

    def open_wake_up(self) -> WakeUp:
        """Bind a socket in the folder, through which the others wake this process."""
        return WakeUpSocket(self.folder)

    def epoch_store(self, epoch: int, seconds: float) -> Store:
        """Open the store of an epoch's link, a file of the folder. See `Table.epoch_store`."""
        from asyncrl.weights.rendezvous_store import epoch_store

        return epoch_store(self.folder, epoch, seconds)

    def forget_link(self, epoch: int) -> None:
        """Delete the store of an epoch's link.

        While its file is there, torch's destructor of the store writes into it, and would end the process
        on a full disk.
        """
        from asyncrl.weights.rendezvous_store import link_key

        self.delete(link_key(epoch))

    def require(self) -> None:
        """Check that the folder is there.

        Raises:
            TableGone: it is not.
        """
        if not self.exists():
            raise TableGone(f"{self.folder} is gone")

    def _path(self, key: str) -> Path:
        assert _KEY.fullmatch(key), key
        return self.folder / key

    def _rename(self, part: Path, path: Path) -> None:
        try:
            part.replace(path)
        except IsADirectoryError:
            self.note_wrong(path.name, b"", "is a folder")
            path.rename(part.with_name(part.name + ".wrong"))
            part.replace(path)

    def _read(self, key: str, start: int, limit: int) -> bytes | None:
        """Read at most `limit` bytes of a regular file; None when there is none."""
        path = self._path(key)
        try:
            # Not blocking: a named pipe without a writer would hold the reader for ever.
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            self.require()
            return None
        except OSError as error:
            if path.is_symlink() or (path.exists() and not path.is_file()):
                self.note_wrong(key, b"", "is not a regular file")
                return None
            raise self._error(error) from None
        with self._trouble():
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    self.note_wrong(key, b"", "is not a regular file")
                    return None
                return _read_up_to(file, start, limit)
            finally:
                os.close(file)

    @contextlib.contextmanager
    def _trouble(self) -> Any:
        try:
            yield
        except FileNotFoundError:
            self.require()
            raise
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> TableError:
        return TableError(
            f"The weights' folder {self.folder} cannot be used ({error.strerror}). "
            "Free space there, or see what holds this process's files open (ulimit -n); it is tried again."
        )


def _read_up_to(file: int, start: int, limit: int) -> bytes:
    """Read from byte `start` on; a read may return less than was asked for."""
    found = b""
    while len(found) < limit and (more := os.pread(file, min(limit - len(found), 1 << 20), start)):
        found, start = found + more, start + len(more)
    return found


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
