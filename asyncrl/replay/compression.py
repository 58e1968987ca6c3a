"""Codecs of the images that `asyncrl replay compact` rewrote.

gzip is part of HDF5. The others are plug-ins of the package hdf5plugin, needed to write and to read them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, get_args

import h5py

from asyncrl.errors import CodecMissing

Codec = Literal["gzip", "zstd", "lz4", "blosc"]
FILTERS: Final[dict[int, Codec]] = dict(zip((1, 32015, 32004, 32001), get_args(Codec), strict=True))
"""HDF5's registered number of each codec."""


def settings_of(codec: Codec) -> dict[str, Any]:
    """Return the arguments of `create_dataset`. Without a shuffle filter: images have one byte per value.

    Raises:
        CodecMissing: It needs hdf5plugin, which is not installed.
    """
    if codec == "gzip":
        return {"compression": "gzip", "compression_opts": 4}
    plugin = _plugin(f"--codec {codec}")
    if codec == "blosc":
        return dict(plugin.Blosc(cname="zstd", clevel=5, shuffle=plugin.Blosc.NOSHUFFLE))
    return dict(plugin.Zstd(clevel=3) if codec == "zstd" else plugin.LZ4())


def codec_of(dataset: h5py.Dataset) -> Codec | None:
    """Return the codec of a dataset; None if it is stored as it is, or by a filter that we never write."""
    return next((FILTERS[number] for number in _filters(dataset) if number in FILTERS), None)


def require_codec(path: Path, dataset: h5py.Dataset) -> None:
    """Check that a dataset of a file can be decoded here.

    Raises:
        CodecMissing: Its codec needs hdf5plugin, which is not installed.
        ValueError: It is compressed as `asyncrl replay compact` never does.
    """
    numbers = _filters(dataset)
    if dataset.chunks and (len(numbers) != 1 or numbers[0] not in FILTERS):
        raise ValueError(f"{dataset.name} is not stored as `asyncrl replay compact` does")
    for number in numbers:
        if not h5py.h5z.filter_avail(number):
            _plugin(f"{path} is compressed with {FILTERS[number]}")  # Importing it registers its filters.


def _filters(dataset: h5py.Dataset) -> list[int]:
    created = dataset.id.get_create_plist()
    return [created.get_filter(index)[0] for index in range(created.get_nfilters())]


def _plugin(why: str) -> Any:
    if find_spec("hdf5plugin") is None:
        raise CodecMissing(
            f"{why}, which needs the package hdf5plugin. Install it with pip install 'asyncrl[compression]'."
        )
    return import_module("hdf5plugin")
