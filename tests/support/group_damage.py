"""Group files that declare what they do not hold, with a footer that is right: nothing else warns."""

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from asyncrl.replay.sealed_file import make_footer

Change = Callable[[Any], object]
"""Changes an open HDF5 file."""
PICTURE = (64, 64, 3)


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


def _replaced(file: Any, name: str, **how: Any) -> h5py.Dataset:
    dtype = file[name].dtype
    del file[name]
    return file.create_dataset(name, dtype=how.pop("dtype", dtype), **how)


def _declared(name: str, **how: Any) -> Change:
    return lambda file: _replaced(file, name, **how)


def _linked(link: Callable[[Any], Any]) -> Change:
    def change(file: Any) -> None:
        shown = link(file)
        del file["frames"]
        file["frames"] = shown

    return change


def _to_a_pipe(file: Any) -> h5py.ExternalLink:
    pipe = Path(file.filename).with_name("pipe.h5")
    if not pipe.exists():
        os.mkfifo(pipe)
    return h5py.ExternalLink(str(pipe), "frames")


def _edited(table: str, **values: int) -> Change:
    def change(file: Any) -> None:
        rows = file[table][...]
        for column, value in values.items():
            rows[column] = value
        file[table][...] = rows

    return change


def _virtual(file: Any) -> None:
    layout = h5py.VirtualLayout(shape=(10**9, *PICTURE), dtype="u1")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "frames", shape=(10**9, *PICTURE))
    del file["frames"]
    file.create_virtual_dataset("frames", layout)


CHANGES: dict[str, Change] = {
    "pictures in another file": lambda file: _replaced(
        file, "frames", shape=file["frames"].shape, external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
    ),
    "a link to a named pipe": _linked(_to_a_pipe),
    "a link in a circle": _linked(lambda _: h5py.SoftLink("/frames")),
    "texts of no fixed length": _declared("group", shape=(1,), dtype=h5py.string_dtype(), data=["x"]),
    "a virtual dataset": _virtual,
    "no episodes": _declared("episodes", shape=(0,)),
    "decisions that end at 10^15": _edited("episodes", N_end=10**15),
    "decisions before the first": _edited("episodes", N_begin=-(2**62), M_end=-(2**62)),
    "a negative group number": _edited("group", group_number=-5),
}
