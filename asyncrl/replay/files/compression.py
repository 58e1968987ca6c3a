"""Compress and decode the arrays of a file, for `asyncrl replay compact`.

gzip is part of HDF5. The others are plug-ins of the package hdf5plugin, needed to write and to read them.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, get_args

import h5py
import numpy as np
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
        OSError, ValueError, struct.error: It cannot be decoded.
    """
    check_whole(path)
    with h5py.File(path, "r") as file:
        for name, array in into.items():
            dataset = get_dataset(file, name)
            _decode(path, dataset, array)


def _filters(dataset: Any) -> list[int]:
    created = dataset.id.get_create_plist()
    return [created.get_filter(extent)[0] for extent in range(created.get_nfilters())]


def _decode(path: Path, dataset: Any, array: NDArray[Any]) -> None:
    """Decode a dataset's chunks, each into no more than it may have.

    What a chunk unpacks to stands in the chunk, and the decoders believe it; gzip's goes on as long as there
    is something. So gzip is decoded here, and of the others it is read what they are going to reserve.
    """
    filters, rows = _filters(dataset), (dataset.chunks or (0,))[0]
    alike = rows > 0 and dataset.chunks[1:] == dataset.shape[1:]
    if not alike or len(filters) != 1 or filters[0] not in FILTERS:
        raise ValueError(f"{dataset.name} is not stored as `asyncrl replay compact` does")
    if dataset.id.get_num_chunks() != -(-len(array) // rows):
        raise ValueError(f"{dataset.name} lacks a part of its {len(array)} pictures")
    codec, nbytes = FILTERS[filters[0]], rows * array[:1].nbytes
    _require(path, filters)
    for begin, packed in _chunks(dataset):
        if codec == "gzip":
            chunk = np.frombuffer(zlib.decompressobj().decompress(packed, nbytes + 1), array.dtype)
            into = array[begin : begin + rows]
            into[...] = chunk.reshape(rows, *array.shape[1:])[: len(into)]
        elif (found := _unpacks_to(codec, packed)) != nbytes:
            raise ValueError(f"a chunk of {dataset.name} unpacks to {found} bytes, expected {nbytes}")
    if codec != "gzip":
        dataset.read_direct(array)


def _chunks(dataset: Any) -> Iterator[tuple[int, bytes]]:
    """Read the first row and the stored bytes of every chunk."""
    for number in range(dataset.id.get_num_chunks()):
        begin = dataset.id.get_chunk_info(number).chunk_offset
        left_out, packed = dataset.id.read_direct_chunk(begin)
        if left_out:
            raise ValueError(f"a chunk of {dataset.name} is stored without its codec")
        yield begin[0], packed


def _unpacks_to(codec: Codec, packed: bytes) -> int:
    """Return the bytes that a chunk says it unpacks to, which its decoder will reserve."""
    if codec == "lz4":
        return struct.unpack_from(">Q", packed)[0]
    if codec == "blosc":
        return struct.unpack_from("<I", packed, 4)[0]
    return _zstd_content(packed)


def _zstd_content(packed: bytes) -> int:
    """Return the size of the content that a zstd frame's header states (RFC 8878, 3.1.1.1); -1: none."""
    if packed[:4] != b"\x28\xb5\x2f\xfd":
        return -1
    descriptor = packed[4]
    single, kind, names = descriptor >> 5 & 1, descriptor >> 6, (0, 1, 2, 4)[descriptor & 3]
    size = (single, 2, 4, 8)[kind]
    begin = 5 + (1 - single) + names
    return int.from_bytes(packed[begin : begin + size], "little") + 256 * (kind == 1) if size else -1


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
