"""A new file for libhdf5 to write to: what the disk refuses is an error only after libhdf5 is done.

When a write fails while libhdf5 closes a file, it keeps the file open, and later the process may crash in it:
seen with HDF5 2.0 on a full disk. No exception handler helps, so libhdf5 must not see such a failure.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import h5py

LIBVER: Final = ("v110", "v110")
"""Files that HDF5 1.10 tools can read, whatever HDF5 version writes them."""


@contextmanager
def new_hdf5(path: Path) -> Iterator[h5py.File]:
    """Create an HDF5 file to write to; the caller makes it durable.

    Raises:
        OSError: It exists, or the disk did not take it; the latter is raised at the end.
    """
    with _Sheltered(path) as raw:
        with h5py.File(raw, "w", libver=LIBVER) as file:
            yield file
        if raw.failure is not None:
            raise raw.failure


class _Sheltered(io.FileIO):
    """A file whose writes always seem to succeed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x+")
        self.failure: OSError | None = None

    def write(self, content: Any, /) -> int:
        """Write all of it, or note why not; after a failure nothing is written any more."""
        left = memoryview(content).cast("B")
        size = len(left)
        while left and self.failure is None:
            try:
                left = left[super().write(left) or 0 :]
            except OSError as error:
                self.failure = error
        self.seek(len(left), os.SEEK_CUR)
        return size

    def truncate(self, size: int | None = None, /) -> int:
        """Set the length, or note why not."""
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
            return size or 0
