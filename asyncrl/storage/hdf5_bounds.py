"""Check what an HDF5 file declares against its length, before anything of it is read. No torch.

A file of a few thousand bytes can declare a table of terabytes, name another file in the place of a dataset,
or unpack to a thousand times its length. libhdf5 believes all of that and reserves the memory. What is stored
as it is may be as large as the file; what is compressed may unpack to `EXPANSION` times what is stored, or to
`SMALL` bytes where that is more, and to `MOST` bytes in all.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Final

import h5py

from asyncrl.storage.untrusted import open_regular

EXPANSION: Final = 64
"""Decoded bytes per stored byte. Rendered pictures of a table-top come to 20, photographs to 3."""
SMALL: Final = 64 * 2**20
"""Decoded bytes that any dataset may have: black pictures shrink to a thousandth."""
MOST: Final = 4 * 2**30
"""Decoded bytes of a compressed dataset: 21,000 pictures of 256 x 256."""
ATTRIBUTE_BYTES: Final = 2**16


def open_hdf5(path: Path) -> h5py.File:
    """Open a file to read. h5py alone would wait for ever at a named pipe.

    Raises:
        OSError: It is no regular file, or not HDF5.
    """
    os.close(open_regular(path))
    return h5py.File(path, "r")


def dataset_in(file: h5py.File, name: str) -> h5py.Dataset:
    """Find a dataset that can be read with no more memory than its file warrants.

    Raises:
        KeyError: There is nothing of that name.
        TypeError: It is no dataset of this file, or holds texts of no fixed length.
        ValueError: It declares more than the file can hold.
    """
    dataset = described_in(file, name)
    _check_size(dataset, name, _length(file))
    return dataset


def described_in(file: h5py.Group, name: str) -> h5py.Dataset:
    """Find a dataset whose type and shape can be asked for; to read it, see `dataset_in`.

    Raises:
        KeyError: There is nothing of that name.
        TypeError: It is no dataset of this file, or holds texts of no fixed length.
    """
    dataset = _object_in(file, name)
    if not isinstance(dataset, h5py.Dataset):
        raise TypeError(f"{name} is not a dataset of this file")
    created = dataset.id.get_create_plist()
    if (
        created.get_layout() not in (h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED)
        or created.get_external_count()
    ):
        raise TypeError(f"{name} lies in other files")  # To ask for its shape may open them.
    if dataset.dtype.hasobject:
        raise TypeError(f"{name} holds values of no fixed length")
    return dataset


def group_in(file: h5py.Group, name: str) -> h5py.Group:
    """Find a group that lies in this file itself.

    Raises:
        KeyError: There is none of that name.
    """
    try:
        group = _object_in(file, name)
    except KeyError:
        group = None
    if not isinstance(group, h5py.Group):
        raise KeyError(f"there is no group {name}")
    return group


def _object_in(file: h5py.Group, name: str) -> h5py.Group | h5py.Dataset | h5py.Datatype | None:
    """Go to an object by hard links only, for others may lead to another file; None: it has another link."""
    found: Any = file
    for part in name.split("/"):
        link = found.get(part, getlink=True) if isinstance(found, h5py.Group) else None
        if link is None:
            raise KeyError(f"there is no {name}")
        if not isinstance(link, h5py.HardLink):
            return None
        found = found[part]
    return found


def _length(file: h5py.File) -> int:
    if file.driver == "fileobj":  # One that this process writes.
        return file.id.get_filesize()
    return Path(file.filename).stat().st_size


def _check_size(dataset: h5py.Dataset, name: str, file_bytes: int) -> None:
    layout, stored = dataset.id.get_create_plist().get_layout(), dataset.id.get_storage_size()
    nbytes = math.prod(dataset.shape) * dataset.dtype.itemsize
    if stored > file_bytes:
        raise ValueError(f"{name} claims {stored} bytes, the file has {file_bytes}")
    if layout != h5py.h5d.CHUNKED:
        if nbytes != stored:
            raise ValueError(f"{name} declares {nbytes} bytes, but {stored} are stored")
        return
    chunk = math.prod(dataset.chunks or ()) * dataset.dtype.itemsize
    allowed = min(MOST, max(SMALL, EXPANSION * stored))
    if max(nbytes, chunk) > allowed:
        raise ValueError(
            f"{name} declares {max(nbytes, chunk)} bytes, but the {stored} that are stored may unpack to "
            f"{allowed} at most"
        )


def attribute_of(file: h5py.Group, name: str) -> Any:
    """Read an attribute of a file or group, a number or a text.

    Raises:
        KeyError: It has none of that name.
        ValueError: It declares more than `ATTRIBUTE_BYTES`.
    """
    if name not in file.attrs:
        raise KeyError(f"it has no attribute {name}")
    found = file.attrs.get_id(name)
    if math.prod(found.shape) * found.dtype.itemsize > ATTRIBUTE_BYTES:
        raise ValueError(f"its attribute {name} declares more than {ATTRIBUTE_BYTES} bytes")
    return file.attrs[name]
