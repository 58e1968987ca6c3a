"""Group files that declare what they do not hold, with a footer that is right: nothing else warns."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from asyncrl.replay.sealed_file import make_footer

Change = Callable[[Any], None]
"""Changes an open HDF5 file."""
CHANGES: dict[str, Change] = {}
TERABYTES = 8 * 2**40


def append_footer(path: Path) -> None:
    """Add a footer without extents to a closed HDF5 file: every byte counts as structure."""
    content = path.read_bytes()
    with path.open("ab") as file:
        file.write(make_footer((), zlib.crc32(content), len(content)))


def craft_group(path: Path, change: Change) -> None:
    """Change a group's file with h5py, and make its footer right again: nothing warns of what it declares."""
    made = path.with_suffix(".made")
    with h5py.File(path, "r") as old, h5py.File(made, "w", libver=("v110", "v110")) as new:
        for name, value in old.attrs.items():
            new.attrs[name] = value
        for name in old:
            old.copy(old[name], new, name)
        change(new)
    append_footer(made)
    made.replace(path)


def _crafted(name: str) -> Callable[[Change], Change]:
    def enter(change: Change) -> Change:
        CHANGES[name] = change
        return change

    return enter


def _replaced(file: Any, name: str, **how: Any) -> h5py.Dataset:
    dtype = file[name].dtype
    del file[name]
    return file.create_dataset(name, dtype=how.pop("dtype", dtype), **how)


@_crafted("8 TB of pictures")
def _(file: Any) -> None:
    _replaced(
        file, "frames", shape=(TERABYTES // 12_288, 64, 64, 3), chunks=(8, 64, 64, 3), compression="gzip"
    )


@_crafted("8 TB of pictures that are not compressed")
def _(file: Any) -> None:
    _replaced(file, "frames", shape=(TERABYTES // 12_288, 64, 64, 3))


@_crafted("a table of 209 GiB")
def _(file: Any) -> None:
    rows = 209 * 2**30 // file["episodes"].dtype.itemsize
    _replaced(file, "episodes", shape=(rows,), chunks=(64,), compression="gzip")


@_crafted("checksums of 209 GiB")
def _(file: Any) -> None:
    _replaced(file, "checksums", shape=(209 * 2**30 // file["checksums"].dtype.itemsize,), chunks=(64,))


@_crafted("a group table of 8 TB in one row")
def _(file: Any) -> None:
    _replaced(file, "group", shape=(2**23,), dtype="S1000000", chunks=(1,))


@_crafted("6 GB of pictures, compressed")
def _(file: Any) -> None:
    """Every chunk is the same 96 MB of black pictures, packed once."""
    rows, count = 8192, 60
    made = _replaced(
        file, "video", shape=(rows * count, 64, 64, 3), chunks=(rows, 64, 64, 3), compression="gzip"
    )
    packed = zlib.compress(bytes(rows * 12_288), 9)
    for number in range(count):
        made.id.write_direct_chunk((number * rows, 0, 0, 0), packed)


@_crafted("pictures in another file")
def _(file: Any) -> None:
    shape = file["frames"].shape
    _replaced(file, "frames", shape=shape, external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])


@_crafted("a link to a named pipe")
def _(file: Any) -> None:
    pipe = Path(file.filename).with_name("pipe.h5")
    if not pipe.exists():
        os.mkfifo(pipe)
    del file["frames"]
    file["frames"] = h5py.ExternalLink(str(pipe), "frames")


@_crafted("a link in a circle")
def _(file: Any) -> None:
    del file["frames"]
    file["frames"] = h5py.SoftLink("/frames")


@_crafted("texts of no fixed length")
def _(file: Any) -> None:
    _replaced(file, "group", shape=(1,), dtype=h5py.string_dtype())[0] = "x"


@_crafted("a virtual dataset")
def _(file: Any) -> None:
    layout = h5py.VirtualLayout(shape=(10**9, 64, 64, 3), dtype="u1")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "frames", shape=(10**9, 64, 64, 3))
    del file["frames"]
    file.create_virtual_dataset("frames", layout)


@_crafted("an attribute of a megabyte")
def _(file: Any) -> None:
    del file.attrs["format"]
    file.attrs.create("format", np.zeros(2**20, "u1"))


@_crafted("no episodes")
def _(file: Any) -> None:
    _replaced(file, "episodes", shape=(0,))


@_crafted("decisions that end at 10^15")
def _(file: Any) -> None:
    table = file["episodes"][...]
    table["N_end"] = 10**15
    file["episodes"][...] = table


@_crafted("decisions before the first")
def _(file: Any) -> None:
    table = file["episodes"][...]
    table["N_begin"], table["M_end"] = -(2**62), -(2**62)
    file["episodes"][...] = table


@_crafted("a negative group number")
def _(file: Any) -> None:
    row = file["group"][...]
    row["group_number"] = -5
    file["group"][...] = row
