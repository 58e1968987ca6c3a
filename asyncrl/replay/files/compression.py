"""Compress and decode the arrays of a file, for `asyncrl replay compact`.

gzip is part of HDF5. The others are plug-ins of the package hdf5plugin, needed to write and to read them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, get_args

import h5py
from numpy.typing import NDArray

from asyncrl.errors import CodecMissing
from asyncrl.replay.files.format import LIBVER, check_whole, get_dataset


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
    """A file whose writes always seem to succeed: libhdf5 may crash when the disk takes no more."""

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


Codec = Literal["gzip", "zstd", "lz4", "blosc"]
FILTERS: Final[dict[int, Codec]] = dict(zip((1, 32015, 32004, 32001), get_args(Codec), strict=True))
"""HDF5's registered number of each codec."""


def settings_of(codec: Codec) -> dict[str, Any]:
    """Return the arguments of `create_dataset`. Without a shuffle filter: the images have one byte per value.

    Raises:
        CodecMissing: It needs hdf5plugin, which is not installed.
    """
    if codec == "gzip":
        return {"compression": "gzip", "compression_opts": 4}
    plugin = _plugin(f"--codec {codec}")
    if codec == "blosc":
        return dict(plugin.Blosc(cname="zstd", clevel=5, shuffle=plugin.Blosc.NOSHUFFLE))
    return dict(plugin.Zstd(clevel=3) if codec == "zstd" else plugin.LZ4())


def codec_of(dataset: Any) -> Codec | None:
    """Return the codec of a dataset; None when it is stored as it is, or by a filter that we never write."""
    return next((FILTERS[number] for number in _filters(dataset) if number in FILTERS), None)


def read_compressed(path: Path, into: dict[str, NDArray[Any]]) -> None:
    """Decode datasets. Every byte of the file is checked first: a decoder might crash on a damaged one.

    Args:
        path: A sealed file.
        into: Name of a dataset -> array of its shape and dtype, to fill.

    Raises:
        CodecMissing: Their codec needs hdf5plugin, which is not installed.
        ReplayError: The file is damaged.
        OSError: It cannot be decoded.
    """
    check_whole(path)
    with h5py.File(path, "r") as file:
        for name, array in into.items():
            dataset = get_dataset(file, name)
            _require(path, _filters(dataset))
            dataset.read_direct(array)


def _filters(dataset: Any) -> list[int]:
    created = dataset.id.get_create_plist()
    return [created.get_filter(extent)[0] for extent in range(created.get_nfilters())]


def _require(path: Path, filters: Iterable[int]) -> None:
    for number in filters:
        if not h5py.h5z.filter_avail(number):
            name = FILTERS.get(number, f"filter {number}")
            _plugin(f"{path} is compressed with {name}")  # Importing it registers its filters.


def _plugin(why: str) -> Any:
    if find_spec("hdf5plugin") is None:
        raise CodecMissing(
            f"{why}, which needs the package hdf5plugin. Install it with pip install 'asyncrl[compression]'."
        )
    return import_module("hdf5plugin")
