"""Check what an HDF5 file declares against its length, before anything of it is read. No torch.

A file of a few thousand bytes can declare a table of terabytes, name another file in the place of a dataset,
or unpack to a thousand times its length. libhdf5 believes all of that and reserves the memory. What is stored
as it is may be as large as the file; what is compressed may unpack to `EXPANSION` times what is stored, or to
`SMALL` bytes where that is more, and to `MOST` bytes in all.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import h5py

EXPANSION: Final = 64
"""Decoded bytes per stored byte. Rendered pictures of a table-top come to 20, photographs to 3."""
SMALL: Final = 64 * 2**20
"""Decoded bytes that any dataset may have: black pictures shrink to a thousandth."""
MOST: Final = 4 * 2**30
"""Decoded bytes of a compressed dataset: 21,000 pictures of 256 x 256."""
ATTRIBUTE_BYTES: Final = 2**16


def dataset_in(file: h5py.File, name: str) -> h5py.Dataset:
    """Find a dataset that can be read with no more memory than its file warrants.

    Args:
        file: Open to read, by its path.
        name: Of the dataset.

    Raises:
        KeyError: There is nothing of that name.
        TypeError: It is no dataset of this file, or holds texts of no fixed length.
        ValueError: It declares more than the file can hold.
    """
    link = file.get(name, getlink=True)
    if link is None:
        raise KeyError(f"there is no {name}")
    dataset = file[name] if isinstance(link, h5py.HardLink) else None
    if not isinstance(dataset, h5py.Dataset):
        raise TypeError(f"{name} is not a dataset of this file")
    if dataset.dtype.hasobject:
        raise TypeError(f"{name} holds values of no fixed length")
    _check_size(dataset, name, _length(file))
    return dataset


def _length(file: h5py.File) -> int:
    if file.driver == "fileobj":  # One that this process writes.
        return file.id.get_filesize()
    return Path(file.filename).stat().st_size


def _check_size(dataset: h5py.Dataset, name: str, file_bytes: int) -> None:
    created, stored = dataset.id.get_create_plist(), dataset.id.get_storage_size()
    layout, nbytes = created.get_layout(), math.prod(dataset.shape) * dataset.dtype.itemsize
    if (
        layout not in (h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED)
        or created.get_external_count()
    ):
        raise TypeError(f"{name} lies in other files")
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


def attribute_of(file: h5py.File, name: str) -> Any:
    """Read an attribute of a file, a number or a text.

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
