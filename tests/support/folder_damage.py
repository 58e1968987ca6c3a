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

import numpy as np

from asyncrl.replay.events import START, checksum_of, write_line
from support.group_damage import CHANGES, TERABYTES, Change, craft_group

Damage = Callable[[Path, Path], None]
DAMAGES: dict[str, Damage] = {}
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
READ = ("config.json", "metrics.jsonl", "replay/ledger.log", "replay/replay.json", GROUP)
STATE = ("newest/state.json", "newest/model.safetensors", SHARD, RANDOM)
LOCKED = ("replay/lock", "replay/ledger.spare")
STATUS = ("processes/inline", "processes/inline.stacks")
UNFINISHED = (
    *("config.json.tmp", "metrics.jsonl.tmp", "replay/group-00000006.h5.tmp"),
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


_place("pipe", (*READ, *STATE, *LOCKED, *STATUS, *UNFINISHED[:3], "processes", "replay/quarantine"), _pipe)
_place("folder", (*READ, *STATE[:2], *LOCKED, *STATUS, *UNFINISHED), _folder)
_place("file", (*FOLDERS, "newest/state", "checkpoints/update_000009"), lambda path: write(path, b"a file"))
_place("8 TB", (*READ, *STATE[:2], "processes/inline"), _huge)
_place("empty", (*READ[:4], *STATE[:1]), lambda path: write(path, b""))
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


# --- HDF5 ---------------------------------------------------------------------

for _name, _change in CHANGES.items():

    @damage(f"group: {_name}")
    def _(run: Path, _: Path, change: Change = _change) -> None:
        craft_group(run / GROUP, change)


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
