"""Damage for run folders: 120 things that a copied, broken or hostile folder can hold. For tests and fuzzing.

`DAMAGES` has a name and a function of each. The function is given the folder of a run that ended well and a
folder beside it, which nothing that is done with the run may change. Files are replaced, never changed in
place: a copied run may share large ones with the run that it was copied from.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from asyncrl.replay.files.format import append_footer
from asyncrl.replay.ledger import START, checksum_of, write_line

Damage = Callable[[Path, Path], None]
DAMAGES: dict[str, Damage] = {}
TERABYTES = 8 * 2**40
DEEP = 100_000
"""Levels of nested JSON: more than any stack holds."""
SHARED_FROM = 2**20
"""Bytes from which on a copy of a run shares a file with the original."""
NOT_UTF8 = b'{"caf\xe9": 1}\n'
GROUP = "replay/group-00000001.h5"


def copy_run(run: Path, to: Path) -> Path:
    """Copy a run; large files are the same on the disk."""

    def copied(source: str, target: str) -> str:
        if Path(source).stat().st_size >= SHARED_FROM:
            os.link(source, target)
            return target
        return shutil.copy2(source, target)

    return Path(shutil.copytree(run, to, symlinks=True, copy_function=copied))


def make_neighbour(folder: Path) -> Path:
    """Make the folder that must stay as it is: a file, and folders named as those of a run."""
    for name in ("folder", "folder/update_000001", "folder/processes"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    files = ("file", "folder/file.tmp", "folder/processes/actor-0", "folder/update_000001/state.json")
    for name in files:
        (folder / name).write_text("this belongs to somebody else\n")
    return folder


def contents(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Everything in a folder: name -> mode, time of writing, and checksum of a file or target of a link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        seen = path.lstat()
        what = str(path.readlink()) if path.is_symlink() else ""
        what = f"{zlib.crc32(path.read_bytes()):08x}" if not what and path.is_file() else what
        found[str(path.relative_to(folder))] = (seen.st_mode, seen.st_mtime_ns, what)
    return found


def damage(name: str) -> Callable[[Damage], Damage]:
    """Give a function of the run's folder and the neighbour its name in `DAMAGES`."""

    def enter(function: Damage) -> Damage:
        assert name not in DAMAGES
        DAMAGES[name] = function
        return function

    return enter


def clear(path: Path) -> Path:
    """Make room for something else."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write(path: Path, content: bytes) -> None:
    """Put a file in the place of what is there."""
    clear(path).write_bytes(content)


def checkpoint(run: Path) -> Path:
    """The newest checkpoint."""
    return max((run / "checkpoints").glob("update_??????"))


def _at(run: Path, place: str) -> Path:
    return checkpoint(run) / place.removeprefix("newest/") if place.startswith("newest/") else run / place


SHARD = "newest/state/shard-00001-model-00001-of-00001.safetensors"
RANDOM = "newest/random-00000.safetensors"
READ = ("config.json", "metrics.jsonl", "replay/ledger.log", "replay/index.log", "replay/replay.json", GROUP)
STATE = ("newest/state.json", "newest/model.safetensors", SHARD, RANDOM)
LOCKED = ("replay/lock", "replay/ledger.spare")
STATUS = ("processes/inline", "processes/inline.stacks")
UNFINISHED = (
    *("config.json.tmp", "metrics.jsonl.tmp", "replay/index.log.tmp", "replay/group-00000006.h5.tmp"),
    "checkpoints/update_000004.tmp",
)
FOLDERS = ("logs", "videos", "tensorboard", "processes", "replay", "checkpoints", "replay/quarantine")


def _pipe(path: Path) -> None:
    os.mkfifo(clear(path))


def _folder(path: Path) -> None:
    clear(path).mkdir()
    (path / "inside").write_text("something")


def _huge(path: Path) -> None:
    clear(path).touch()
    os.truncate(path, TERABYTES)


def _place(kind: str, places: tuple[str, ...], put: Callable[[Path], None]) -> None:
    for place in places:

        def function(run: Path, _: Path, place: str = place) -> None:
            if place == "replay/quarantine":
                write(run / GROUP, b"not HDF5")
            put(_at(run, place))

        damage(f"{kind}: {place}")(function)


_place("pipe", (*READ, *STATE, *LOCKED, *STATUS, *UNFINISHED[:4], "processes", "replay/quarantine"), _pipe)
_place("folder", (*READ, *STATE[:2], *LOCKED, *STATUS, *UNFINISHED), _folder)
_place("file", (*FOLDERS, "newest/state", "checkpoints/update_000009"), lambda path: write(path, b"a file"))
_place("8 TB", (*READ, *STATE[:2], "processes/inline"), _huge)
_place("empty", (*READ[:5], *STATE[:1]), lambda path: write(path, b""))
_place("noise", (*READ, *STATE), lambda path: write(path, np.random.default_rng(0).bytes(20_000)))

for _linked in (
    *READ,
    "newest/state.json",
    *LOCKED,
    *STATUS,
    "config.json.tmp",
    "replay/group-00000006.h5.tmp",
):

    @damage(f"link out: {_linked}")
    def _(run: Path, neighbour: Path, place: str = _linked) -> None:
        clear(_at(run, place)).symlink_to(neighbour / "file")


for _linked in (*FOLDERS, "checkpoints/update_000004.tmp", "config.json.tmp.x", "checkpoints/update_000001"):

    @damage(f"link to a folder outside: {_linked}")
    def _(run: Path, neighbour: Path, place: str = _linked) -> None:
        if place == "replay/quarantine":
            write(run / GROUP, b"not HDF5")
        clear(run / place).symlink_to(neighbour / "folder")


@damage("link to itself: metrics.jsonl")
def _(run: Path, _: Path) -> None:
    clear(run / "metrics.jsonl").symlink_to("metrics.jsonl")


@damage("link to /dev/zero: config.json")
def _(run: Path, _: Path) -> None:
    clear(run / "config.json").symlink_to("/dev/zero")


# --- JSON ---------------------------------------------------------------------

DEEP_LIST, DEEP_OBJECT = b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP
VALUES: dict[str, bytes] = {
    "Infinity": b"Infinity",
    "NaN": b"NaN",
    "1e999": b"1e999",
    "10^30": b"1" + b"0" * 30,
    "10^5000": b"1" + b"0" * 5000,
    "text": b'"three"',
    "deep": DEEP_LIST,
    "null": b"null",
    "half a character": b'"\\ud800"',
}


def _with(path: Path, keys: tuple[str, ...], value: bytes) -> bytes:
    """The JSON of a file with `value` in place of an entry."""
    content = json.loads(path.read_text())
    holder: Any = content
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = "@here@"
    return json.dumps(content).encode().replace(b'"@here@"', value)


for _name, _value in VALUES.items():

    @damage(f"config.json: updates is {_name}")
    def _(run: Path, _: Path, value: bytes = _value) -> None:
        write(run / "config.json", _with(run / "config.json", ("updates",), value))

    @damage(f"state.json: version is {_name}")
    def _(run: Path, _: Path, value: bytes = _value) -> None:
        path = checkpoint(run) / "state.json"
        write(path, _with(path, ("progress", "version"), value))

    @damage(f"replay.json: group_size is {_name}")
    def _(run: Path, _: Path, value: bytes = _value) -> None:
        line = json.dumps(json.loads((run / "replay/replay.json").read_text()) | {"group_size": "@here@"})
        fields = json.loads(line)
        del fields["crc32"]
        body = json.dumps(fields, separators=(",", ":")).encode().replace(b'"@here@"', value)
        write(run / "replay/replay.json", body[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(body))

    @damage(f"metrics.jsonl: a step is {_name}")
    def _(run: Path, _: Path, value: bytes = _value) -> None:
        lines = (run / "metrics.jsonl").read_bytes().splitlines(True)
        write(run / "metrics.jsonl", b"".join([lines[0], b'{"step": ' + value + b"}\n", *lines[1:]]))

    @damage(f"ledger.log: a version is {_name}")
    def _(run: Path, _: Path, value: bytes = _value) -> None:
        _append_to_ledger(run, b'{"learner":"x","version":' + value + b"}")


def _append_to_ledger(run: Path, body: bytes) -> None:
    path = run / "replay/ledger.log"
    whole = path.read_bytes()
    last = checksum_of(whole.splitlines()[-1]) or START
    write(path, whole + body[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(last + body))


for _place_of_text in ("config.json", "newest/state.json", "newest/config.json", "replay/replay.json"):

    @damage(f"{_place_of_text}: not UTF-8")
    def _(run: Path, _: Path, place: str = _place_of_text) -> None:
        write(_at(run, place), NOT_UTF8)

    @damage(f"{_place_of_text}: nested deeply")
    def _(run: Path, _: Path, place: str = _place_of_text) -> None:
        write(_at(run, place), DEEP_OBJECT)


@damage("config.json: an array")
def _(run: Path, _: Path) -> None:
    write(run / "config.json", b"[1, 2]")


@damage("config.json: a zero byte in a path")
def _(run: Path, _: Path) -> None:
    write(run / "config.json", _with(run / "config.json", ("policy",), b'"a\\u0000b"'))


@damage("config.json: a path of 5000 letters")
def _(run: Path, _: Path) -> None:
    write(run / "config.json", _with(run / "config.json", ("world",), json.dumps("x" * 5000).encode()))


@damage("state.json: sizes of files are texts")
def _(run: Path, _: Path) -> None:
    path = checkpoint(run) / "state.json"
    write(path, _with(path, ("files",), b'{"config.json": "many"}'))


@damage("state.json: a file outside")
def _(run: Path, _: Path) -> None:
    path = checkpoint(run) / "state.json"
    write(path, _with(path, ("files",), b'{"../../../../neighbour/file": 30}'))


@damage("state.json: a random state of other numbers")
def _(run: Path, _: Path) -> None:
    path = checkpoint(run) / "state.json"
    write(path, _with(path, ("python_random",), b"[3, [1, 2, 9000000000000000000], null]"))


@damage("metrics.jsonl: not UTF-8")
def _(run: Path, _: Path) -> None:
    write(run / "metrics.jsonl", (run / "metrics.jsonl").read_bytes() + b"caf\xe9\n" + NOT_UTF8)


@damage("metrics.jsonl: a line of 300 MB")
def _(run: Path, _: Path) -> None:
    write(run / "metrics.jsonl", (run / "metrics.jsonl").read_bytes() + b"1" * 300_000_000 + b"\n")


@damage("ledger.log: a line of 300 MB")
def _(run: Path, _: Path) -> None:
    write(run / "replay/ledger.log", (run / "replay/ledger.log").read_bytes() + b"1" * 300_000_000 + b"\n")


@damage("ledger.log: used numbers of 10^18")
def _(run: Path, _: Path) -> None:
    _append_to_ledger(run, b'{"used":[1000000000000000000,-5],"request":"r","version":3}')


@damage("ledger.log: used numbers that are none")
def _(run: Path, _: Path) -> None:
    _append_to_ledger(run, b'{"used":["x",[[]],null],"request":"r","version":3}')


@damage("ledger.log: a grant of group 10^18")
def _(run: Path, _: Path) -> None:
    _append_to_ledger(run, b'{"grant":1000000000000000000,"actor":"a","turn":1,"min_version":0}')


@damage("ledger.log: bytes that are not UTF-8, with the right checksum")
def _(run: Path, _: Path) -> None:
    _append_to_ledger(run, b'{"actor":"caf\xe9","session":"s"}')


@damage("index.log: wrong types with the right checksum")
def _(run: Path, _: Path) -> None:
    lines = []
    for body in (
        b'{"name":1,"file":2}',
        b'{"name":"group-00000001.h5","file":[1e400]}',
        DEEP_OBJECT,
        b'{"name":"group-00000001.h5","file":[1,2,3],"attributes":7}',
        b"caf\xe9",
    ):
        lines.append(b"%08x %b\n" % (zlib.crc32(body), body))
    write(run / "replay/index.log", b"".join(lines))


# --- HDF5 ---------------------------------------------------------------------


def craft_group(path: Path, change: Callable[[h5py.File], None]) -> None:
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


def _crafted(name: str) -> Callable[[Callable[[h5py.File], None]], Callable[[h5py.File], None]]:
    def enter(change: Callable[[h5py.File], None]) -> Callable[[h5py.File], None]:
        damage(f"group: {name}")(lambda run, _: craft_group(run / GROUP, change))
        return change

    return enter


def _replaced(file: h5py.File, name: str, **how: Any) -> h5py.Dataset:
    dtype = file[name].dtype  # type: ignore[union-attr]
    del file[name]
    return file.create_dataset(name, dtype=how.pop("dtype", dtype), **how)


@_crafted("8 TB of pictures")
def _(file: h5py.File) -> None:
    _replaced(
        file, "frames", shape=(TERABYTES // 12_288, 64, 64, 3), chunks=(8, 64, 64, 3), compression="gzip"
    )


@_crafted("8 TB of pictures that are not compressed")
def _(file: h5py.File) -> None:
    _replaced(file, "frames", shape=(TERABYTES // 12_288, 64, 64, 3))


@_crafted("a table of 209 GiB")
def _(file: h5py.File) -> None:
    rows = 209 * 2**30 // file["episodes"].dtype.itemsize  # type: ignore[union-attr]
    _replaced(file, "episodes", shape=(rows,), chunks=(64,), compression="gzip")


@_crafted("checksums of 209 GiB")
def _(file: h5py.File) -> None:
    _replaced(file, "checksums", shape=(209 * 2**30 // file["checksums"].dtype.itemsize,), chunks=(64,))  # type: ignore[union-attr]


@_crafted("a group table of 8 TB in one row")
def _(file: h5py.File) -> None:
    _replaced(file, "group", shape=(2**23,), dtype="S1000000", chunks=(1,))


@_crafted("6 GB of pictures, compressed")
def _(file: h5py.File) -> None:
    """Every chunk is the same 96 MB of black pictures, packed once."""
    rows, count = 8192, 60
    made = _replaced(
        file, "video", shape=(rows * count, 64, 64, 3), chunks=(rows, 64, 64, 3), compression="gzip"
    )
    packed = zlib.compress(bytes(rows * 12_288), 9)
    for number in range(count):
        made.id.write_direct_chunk((number * rows, 0, 0, 0), packed)


@_crafted("a chunk that unpacks to 3 GB instead of its 98 kB")
def _(file: h5py.File) -> None:
    made = _replaced(file, "video", shape=(8, 64, 64, 3), chunks=(8, 64, 64, 3), compression="gzip")
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(bytes(2**24)) for _ in range(180)) + packer.flush()
    made.id.write_direct_chunk((0, 0, 0, 0), packed)


@_crafted("pictures in another file")
def _(file: h5py.File) -> None:
    shape = file["frames"].shape  # type: ignore[union-attr]
    _replaced(file, "frames", shape=shape, external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])


@_crafted("a link to a named pipe")
def _(file: h5py.File) -> None:
    pipe = Path(file.filename).with_name("pipe.h5")
    if not pipe.exists():
        os.mkfifo(pipe)
    del file["frames"]
    file["frames"] = h5py.ExternalLink(str(pipe), "frames")


@_crafted("a link in a circle")
def _(file: h5py.File) -> None:
    del file["frames"]
    file["frames"] = h5py.SoftLink("/frames")


@_crafted("texts of no fixed length")
def _(file: h5py.File) -> None:
    _replaced(file, "group", shape=(1,), dtype=h5py.string_dtype())[0] = "x"


@_crafted("a virtual dataset")
def _(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(shape=(10**9, 64, 64, 3), dtype="u1")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "frames", shape=(10**9, 64, 64, 3))
    del file["frames"]
    file.create_virtual_dataset("frames", layout)


@_crafted("an attribute of a megabyte")
def _(file: h5py.File) -> None:
    del file.attrs["format"]
    file.attrs.create("format", np.zeros(2**20, "u1"))


@_crafted("no episodes")
def _(file: h5py.File) -> None:
    _replaced(file, "episodes", shape=(0,))


@_crafted("decisions that end at 10^15")
def _(file: h5py.File) -> None:
    table = file["episodes"][...]  # type: ignore[index]
    table["N_end"] = 10**15
    file["episodes"][...] = table  # type: ignore[index]


@_crafted("decisions before the first")
def _(file: h5py.File) -> None:
    table = file["episodes"][...]  # type: ignore[index]
    table["N_begin"], table["M_end"] = -(2**62), -(2**62)
    file["episodes"][...] = table  # type: ignore[index]


@_crafted("a negative group number")
def _(file: h5py.File) -> None:
    row = file["group"][...]  # type: ignore[index]
    row["group_number"] = -5
    file["group"][...] = row  # type: ignore[index]


# --- safetensors, status ------------------------------------------------------


def _header(length: int, text: bytes) -> Damage:
    return lambda run, _: write(_at(run, SHARD), struct.pack("<Q", length) + text)


damage("shard: a header of 2^63 bytes")(_header(2**63, b"{}"))
damage("shard: a header nested deeply")(_header(len(DEEP_OBJECT), DEEP_OBJECT))
damage("shard: an offset of 10^30")(
    _header(70, b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,%b]}}' % VALUES["10^30"])
)


@damage("shard: one more that is a pipe")
def _(run: Path, _: Path) -> None:
    os.mkfifo(checkpoint(run) / "state/shard-00002-model-00001-of-00001.safetensors")


for _name, _head in {
    "process 0": struct.pack("<QQ", 0, 0),
    "process 2^64 - 1": struct.pack("<QQ", 2**64 - 1, 2**64 - 1),
}.items():

    @damage(f"processes/inline: {_name}")
    def _(run: Path, _: Path, head: bytes = _head) -> None:
        whole = (run / "processes/inline").read_bytes()
        write(run / "processes/inline", whole[:8] + head + b"\xff" * (len(whole) - 24))


@damage("replay: a meta file with the wrong checksum")
def _(run: Path, _: Path) -> None:
    write(run / "replay/replay.json", write_line({"format": "asyncrl-replay"})[:-4] + b'00"}\n')
