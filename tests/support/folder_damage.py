"""Damage for run folders: what a copied, broken or hostile folder can hold.

`DAMAGES` has a name and a function of each. The function is given the folder of a run that ended well and a
neighbouring folder, which nothing that is done with the run may change. Files are replaced, never changed in
place: a copied run may share large ones with the run that it was copied from.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.replay.events import START, checksum_of
from support.group_damage import CHANGES, TERABYTES, Change, craft_group

Damage = Callable[[Path, Path], None]
DEEP = 100_000
"""Levels of nested JSON: more than any stack holds."""
SHARED_FROM = 2**20
"""Bytes from which on a copy of a run shares a file with the original."""
NOT_UTF8 = b'{"caf\xe9": 1}\n'
VALUES = {
    "Infinity": b"Infinity",
    "10^30": b"1" + b"0" * 30,
    "text": b'"three"',
    "deep": b"[" * DEEP + b"]" * DEEP,
}
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


def _pipe(path: Path) -> None:
    os.mkfifo(clear(path))


def _folder(path: Path) -> None:
    clear(path).mkdir()
    (path / "inside").write_text("something")


def _file(path: Path) -> None:
    write(path, b"a file")


def _huge(path: Path) -> None:
    clear(path).touch()
    os.truncate(path, TERABYTES)


def _put(place: str, put: Callable[[Path], None]) -> Damage:
    def function(run: Path, _: Path) -> None:
        if place == "replay/quarantine":
            write(run / GROUP, b"not HDF5")
        put(_at(run, place))

    return function


def _link(place: str, target: str) -> Damage:
    def function(run: Path, neighbour: Path) -> None:
        _put(place, lambda path: clear(path).symlink_to(neighbour / target))(run, neighbour)

    return function


def _json(place: str, keys: tuple[str, ...], value: bytes) -> Damage:
    """Put `value` in the place of an entry of a JSON file."""

    def function(run: Path, _: Path) -> None:
        content = json.loads(_at(run, place).read_text())
        holder: Any = content
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = "@here@"
        write(_at(run, place), json.dumps(content).encode().replace(b'"@here@"', value))

    return function


def _rows(line: bytes) -> Damage:
    def function(run: Path, _: Path) -> None:
        lines = (run / "metrics.jsonl").read_bytes().splitlines(True)
        write(run / "metrics.jsonl", b"".join([lines[0], line, *lines[1:]]))

    return function


def _ledger(body: bytes) -> Damage:
    """Append a line with the right checksum."""

    def function(run: Path, _: Path) -> None:
        path = run / "replay/ledger.log"
        whole = path.read_bytes()
        last = checksum_of(whole.splitlines()[-1]) or START
        write(path, whole + body[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(last + body))

    return function


def _group_size(run: Path, _: Path) -> None:
    fields = json.loads((run / "replay/replay.json").read_text()) | {"group_size": "@here@"}
    del fields["crc32"]
    body = json.dumps(fields, separators=(",", ":")).encode().replace(b'"@here@"', VALUES["10^30"])
    write(run / "replay/replay.json", body[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(body))


def _group(change: Change) -> Damage:
    return lambda run, _: craft_group(run / GROUP, change)


def _one_more_shard(run: Path, _: Path) -> None:
    os.mkfifo(checkpoint(run) / "state/shard-00002-model-00001-of-00001.safetensors")


def _process_0(run: Path, _: Path) -> None:
    whole = (run / "processes/inline").read_bytes()
    write(run / "processes/inline", whole[:8] + bytes(16) + b"\xff" * (len(whole) - 24))


LEDGER, META, ROWS, SETTINGS = "replay/ledger.log", "replay/replay.json", "metrics.jsonl", "config.json"
OUTSIDE = ("checkpoints/update_000004.tmp", "replay/quarantine", "logs", "tensorboard")
PUT: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "pipe": (_pipe, (GROUP, "metrics.jsonl.tmp", SETTINGS, ROWS, LEDGER, "newest/state.json", "processes")),
    "folder": (
        _folder,
        (
            "replay/group-00000006.h5.tmp",
            "checkpoints/update_000004.tmp",
            "config.json.tmp",
            ROWS,
            LEDGER,
            META,
        ),
    ),
    "8 TB": (_huge, (GROUP, ROWS, SETTINGS)),
    "file": (_file, ("processes", "logs", "replay/quarantine", "checkpoints/update_000009")),
}
DAMAGES: dict[str, Damage] = {
    **{f"{kind}: {place}": _put(place, put) for kind, (put, places) in PUT.items() for place in places},
    **{f"link out: {place}": _link(place, "file") for place in ("config.json.tmp", ROWS, LEDGER)},
    **{f"link to a folder outside: {place}": _link(place, "folder") for place in OUTSIDE},
    **{f"config.json: updates is {n}": _json(SETTINGS, ("updates",), value) for n, value in VALUES.items()},
    **{
        f"state.json: version is {n}": _json("newest/state.json", ("progress", "version"), value)
        for n, value in VALUES.items()
    },
    **{f"metrics.jsonl: a step is {n}": _rows(b'{"step": ' + value + b"}\n") for n, value in VALUES.items()},
    **{
        f"{place}: not UTF-8": _put(place, lambda path: write(path, NOT_UTF8))
        for place in (SETTINGS, "newest/state.json")
    },
    **{f"group: {name}": _group(change) for name, change in CHANGES.items()},
    "metrics.jsonl: not UTF-8": _rows(b"caf\xe9\n" + NOT_UTF8),
    "ledger.log: a version is Infinity": _ledger(b'{"learner":"x","version":Infinity}'),
    "ledger.log: used numbers of 10^18": _ledger(
        b'{"used":[1000000000000000000,-5],"request":"r","version":3}'
    ),
    "ledger.log: used numbers that are none": _ledger(b'{"used":["x",[[]],null],"request":"r","version":3}'),
    "replay.json: group_size is 10^30": _group_size,
    "shard: one more that is a pipe": _one_more_shard,
    "processes/inline: process 0": _process_0,
}
