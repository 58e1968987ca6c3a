"""Damaged folders of runs: a resume goes on or says in a sentence what to do; nothing outside is touched."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli
from asyncrl.errors import ConfigError
from asyncrl.launch.console import successes
from asyncrl.observability import process_status
from asyncrl.observability.logger import cut_rows_after
from asyncrl.replay.events import START, checksum_of
from asyncrl.storage.run_folder import check_folder
from support.group_damage import CHANGES, TERABYTES, Change, craft_group
from support.run_folders import contents
from support.tiny_models import write_models

Damage = Callable[[Path, Path], None]
SHARED_FROM = 2**20
"""Bytes from which on a copy of a run shares a file with the original."""
NOT_UTF8 = b'{"caf\xe9": 1}\n'
VALUES = {"Infinity": b"Infinity", "10^30": b"1" + b"0" * 30}
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


def _process_0(run: Path, _: Path) -> None:
    whole = (run / "processes/inline").read_bytes()
    write(run / "processes/inline", whole[:8] + bytes(16) + b"\xff" * (len(whole) - 24))


LEDGER, META, ROWS, SETTINGS = "replay/ledger.log", "replay/replay.json", "metrics.jsonl", "config.json"
OUTSIDE = ("checkpoints/update_000004.tmp", "replay/quarantine", "logs")
PUT: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "pipe": (_pipe, (GROUP, "metrics.jsonl.tmp", ROWS, LEDGER)),
    "folder": (_folder, ("checkpoints/update_000004.tmp", META)),
    "8 TB": (_huge, (GROUP, ROWS)),
    "file": (_file, ("logs", "checkpoints/update_000009")),
}
DAMAGES: dict[str, Damage] = {
    **{f"{kind}: {place}": _put(place, put) for kind, (put, places) in PUT.items() for place in places},
    **{f"link out: {place}": _link(place, "file") for place in ("config.json.tmp", LEDGER)},
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
    "ledger.log: used numbers of 10^18": _ledger(
        b'{"used":[1000000000000000000,-5],"request":"r","version":3}'
    ),
    "replay.json: group_size is 10^30": _group_size,
    "processes/inline: process 0": _process_0,
}


GOES_ON = {
    "pipes and folders": (
        f"pipe: {GROUP}",
        "pipe: metrics.jsonl.tmp",
        "folder: checkpoints/update_000004.tmp",
        "processes/inline: process 0",
    ),
    "files and links": (
        f"8 TB: {GROUP}",
        "link out: config.json.tmp",
        "link to a folder outside: checkpoints/update_000004.tmp",
        "metrics.jsonl: not UTF-8",
    ),
    "values": (
        "metrics.jsonl: a step is 10^30",
        "ledger.log: used numbers of 10^18",
        "group: a negative group number",
    ),
}
"""Damages of one folder, each of which a resume would survive alone."""
REFUSED = {
    "pipe: metrics.jsonl": "metrics.jsonl is a named pipe",
    "pipe: replay/ledger.log": "ledger.log is a named pipe",
    "folder: replay/replay.json": "replay.json is a folder",
    "file: logs": "logs is a file, where a folder",
    "file: checkpoints/update_000009": "Delete the folder update_000009",
    "8 TB: metrics.jsonl": "no run wrote that",
    "link out: replay/ledger.log": "ledger.log is a link",
    "link to a folder outside: logs": "logs is a link",
    "link to a folder outside: replay/quarantine": "quarantine is a link",
    "config.json: updates is Infinity": "Infinity, which is not in JSON",
    "config.json: updates is 10^30": "which is too large",
    "config.json: not UTF-8": "not valid json",
    "state.json: version is Infinity": "Infinity, which is not in JSON",
    "newest/state.json: not UTF-8": "state.json cannot be read",
    "replay.json: group_size is 10^30": "replay.json cannot be read",
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three updates, with its newest checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    flags = [*write_models(folder), "--inline", "--updates", "3", "--checkpoint-every", "1"]
    more = ["--keep-checkpoints", "1", "--run-dir", str(folder / "run")]
    assert cli.run("train", [*flags, *more]) == 0
    return folder / "run"


def damaged(name: str, original: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A damaged copy of the run, and its neighbour, which must not change."""
    run, neighbour = copy_run(original, tmp_path / "run"), make_neighbour(tmp_path / "neighbour")
    for damage in GOES_ON.get(name, (name,)):
        DAMAGES[damage](run, neighbour)
    return run, neighbour


def resumed(name: str, original: Path, tmp_path: Path) -> tuple[int, Path]:
    """Damage a copy of the run and resume it; the code, and the copy."""
    run, neighbour = damaged(name, original, tmp_path)
    before = contents(neighbour)
    try:
        code = cli.run("train", ["--run-dir", str(run), "--resume", "--updates", "4"])
    except SystemExit as end:  # How tyro refuses a setting.
        code = int(end.code or 0)
    assert contents(neighbour) == before
    return code, run


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", GOES_ON)
def test_a_resume_goes_on_in_spite_of(name: str, original: Path, tmp_path: Path) -> None:
    code, run = resumed(name, original, tmp_path)
    assert code == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert cli.run("replay", ["verify", str(run)]) in (0, 1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", REFUSED)
def test_a_resume_is_refused_in_a_sentence_because_of(
    name: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = resumed(name, original, tmp_path)
    assert code in (1, 2)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert REFUSED[name] in said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [*GOES_ON, *REFUSED])
def test_every_command_that_looks_into_a_replay_ends_well(name: str, original: Path, tmp_path: Path) -> None:
    run, neighbour = damaged(name, original, tmp_path)
    before = contents(neighbour)
    for command in ("verify", "list", "stats"):
        assert cli.run("replay", [command, str(run)]) in (0, 1, 2)
    # This process is the one that trained; 3: finished, 4: stopped, where the last row cannot be read.
    assert cli.run("status", [str(run)]) in (0, 1, 2, 3, 4)
    assert contents(neighbour) == before


def test_damaged_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"step": "two"}\ncaf\xe9\n'
        + b"9" * 2_000_000
        + b'\n[]\n{"step": 2}\n{"step": 3}\n{"st'
    )
    assert cut_rows_after(path, 2) == 4  # Not the torn last one, which a crash leaves.
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert cut_rows_after(path, 2) == 0


def test_damaged_rows_do_not_keep_the_summary_from_being_printed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"env/success_once": 0.5}\ncaf\xe9\n{"env/success_once": "x"}\n[1]\n')
    assert successes(path) == [0.5, 0.0]


@pytest.mark.parametrize("place", ["processes/actor-0", "processes/.actor-1.7"])
def test_a_pipe_among_the_states_of_processes_is_passed_over(place: str, tmp_path: Path) -> None:
    process_status.publish_as(tmp_path, "learner-0")
    os.mkfifo(tmp_path / place)
    assert [process.role for process in process_status.read(tmp_path)] == ["learner-0"]


def test_a_process_without_a_number_is_dead_and_gets_no_signal(tmp_path: Path) -> None:
    process_status.publish_as(tmp_path, "learner-0")
    whole = (tmp_path / "processes" / "learner-0").read_bytes()
    write(tmp_path / "processes" / "actor-0", whole[:8] + bytes(16) + whole[24:])
    assert [process.alive for process in process_status.read(tmp_path)] == [False, True]


def test_the_files_of_a_run_may_be_absent_but_not_something_else(tmp_path: Path) -> None:
    check_folder(tmp_path)
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "replay.log")
    with pytest.raises(
        ConfigError, match=r"replay\.log is a named pipe, where a file of the run is expected"
    ):
        check_folder(tmp_path)
