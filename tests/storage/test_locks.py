"""One function takes every lock; files of unknown origin are regular ones, and links change nothing."""

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import read_json, replacing, write_text
from asyncrl.storage.untrusted import (
    check_types,
    make_folder,
    open_hdf5,
    open_regular,
    parse_json,
    read_bytes,
    read_json_lines,
    remove,
)
from support import child_environment

NO_LOCKS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
static int none(void) {
  errno = getenv("LOCK_ERRNO") ? atoi(getenv("LOCK_ERRNO")) : ENOLCK;
  return -1;
}
int flock(int fd, int op) { return none(); }
int lockf(int fd, int command, off_t length) { return none(); }
int fcntl64(int fd, int command, ...) {
  static int (*real)(int, int, ...);
  va_list given; va_start(given, command); void *argument = va_arg(given, void *); va_end(given);
  if (command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK) return none();
  if (!real) real = dlsym(RTLD_NEXT, "fcntl64");
  return real(fd, command, argument);
}
"""
DOORS = r"""
import os, sys
from pathlib import Path
import h5py, numpy as np
from asyncrl.errors import AsyncRLError
from asyncrl.fitting.sources import load_recordings
from asyncrl.fitting.starts import first_states
from asyncrl.replay_tools.files import locked
from asyncrl.storage import run_owner
from asyncrl.worlds.start_states import load_start_states, save_start_states
from support.recorded import recorded_spec, write_recorded
from support.replay import open_store

folder, codes = Path(sys.argv[1]), sys.argv[2:]
ready = folder / "replay"
ready.mkdir()
spec = recorded_spec(16)

def recordings():
    write_recorded(folder / "recorded", spec, (20,))
    return load_recordings([folder / "recorded"])

def robomimic():
    with h5py.File(folder / "lift.hdf5", "w", locking=False) as file:
        for name in ("demo_0",):
            demo = file.create_group(f"data/{name}")
            demo.attrs["task"] = "lift"
            demo["obs/agentview_image"] = np.zeros((5, 8, 8, 3), np.uint8)
            demo["actions"] = np.zeros((5, 7), np.float32)
    load_recordings([folder / "lift.hdf5"])

def starts():
    save_start_states(folder / "starts.h5", first_states(recordings(), 1))
    load_start_states(folder / "starts.h5")

def tool():
    with locked(ready):
        pass

doors = {
    "recordings": recordings, "robomimic": robomimic, "starts": starts, "tool": tool,
    "run": lambda: run_owner.acquire(folder), "store": lambda: open_store(ready),
}
for code in codes:
    os.environ["LOCK_ERRNO"] = code
    for name, door in doors.items():
        try:
            door()
            print(f"{code} {name}: works")
        except AsyncRLError as error:
            print(f"{code} {name}: {error}")
"""


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("locks")
    (folder / "locks.c").write_text(NO_LOCKS)
    library = folder / "locks.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, folder / "locks.c", "-ldl"], check=True)
    return library


def test_every_lock_that_cannot_be_taken_says_why(preloaded: Path, tmp_path: Path) -> None:
    codes = [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO]
    done = subprocess.run(
        [sys.executable, "-c", DOORS, tmp_path, *map(str, codes)],
        capture_output=True,
        text=True,
        timeout=120,
        env=child_environment() | {"LD_PRELOAD": str(preloaded)},
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    for code in codes:
        assert {said[f"{code} {name}"] for name in ("recordings", "robomimic", "starts")} == {"works"}
        why = ": its file system has no locks" if code != errno.EIO else ""
        expected = f"lock cannot be locked ({os.strerror(code)}){why}. Choose another folder (--run-dir)"
        assert [name for name in ("tool", "run", "store") if expected not in said[f"{code} {name}"]] == []


def test_a_file_that_another_process_writes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "written.h5"
    h5py.File(path, "w").close()
    with path.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process writes it: wait for its end"):
            open_hdf5(path)
    open_hdf5(path).close()


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


KINDS: dict[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": a_socket,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR, os.O_WRONLY | os.O_APPEND]
)
def test_what_is_no_file_is_refused_at_once_and_named(kind: str, flags: int, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # The path of a socket is short.
    KINDS[kind](Path("here"))
    with pytest.raises(OSError, match=f"it is {kind}, where a file is expected: move it away"):
        open_regular(Path("here"), flags)


def test_a_device_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="a device, where a file is expected"):
        read_bytes(tmp_path / "zero")


def test_a_link_is_read_but_never_written(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "link").symlink_to("outside")
    assert read_bytes(tmp_path / "link") == b"mine"
    for flags in (os.O_WRONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_APPEND):
        with pytest.raises(OSError, match="it is a link, where a file is expected"):
            open_regular(tmp_path / "link", flags)
    assert (tmp_path / "outside").read_text() == "mine"


def test_a_folder_of_a_run_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    with pytest.raises(OSError, match="file is a file, where a folder is expected"):
        make_folder(tmp_path / "file")
    with pytest.raises(OSError, match="link is a link, so that what is written would lie elsewhere"):
        make_folder(tmp_path / "link")


def test_removing_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("mine")
    for name, target in (("folder.tmp", "elsewhere"), ("file.tmp", "elsewhere/file"), ("none.tmp", "none")):
        (tmp_path / name).symlink_to(target)
        remove(tmp_path / name)
        assert not (tmp_path / name).is_symlink()
    remove(tmp_path / "absent")
    assert (tmp_path / "elsewhere" / "file").read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "link to a file"])
def test_an_atomic_write_is_not_misled_by_what_has_its_unfinished_name(kind: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    part = tmp_path / "config.json.tmp"
    {
        "folder": lambda: (part.mkdir(), (part / "inside").write_text("")),
        "link": lambda: part.symlink_to(outside),
        "pipe": lambda: os.mkfifo(part),
        "link to a file": lambda: part.symlink_to(outside / "file"),
    }[kind]()
    write_text(tmp_path / "config.json", "new")
    assert (tmp_path / "config.json").read_text() == "new"
    assert (outside / "file").read_text() == "mine"


def test_nothing_is_published_into_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("mine")
    (tmp_path / "final").symlink_to("elsewhere")
    with pytest.raises(NotADirectoryError), replacing(tmp_path / "final") as part:
        part.mkdir()
    assert (tmp_path / "elsewhere" / "file").read_text() == "mine"


REFUSED = {
    "Infinity": (b'{"a": Infinity}', "Infinity, which is not in JSON"),
    "NaN": (b'{"a": NaN}', "NaN, which is not in JSON"),
    "a float beyond all": (b'{"a": 1e999}', "the number 1e999, which is too large"),
    "10^30": (b'{"a": 1' + b"0" * 30 + b"}", "which is too large"),
    "5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "which is too large"),
    "-2^63": (b'{"a": -9223372036854775808}', "which is too large"),
    "a list deeper than the stack": (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
    "no UTF-8": (b'{"caf\xe9": 1}', "utf-8"),
    "half a character": (b'{"a": "\\ud800"}', "surrogates not allowed"),
    "a key twice": (b'{"a": 1, "b": {"c": 1, "\\u0063": 2}}', "it has a key twice, of .'c'."),
    "a mark of the byte order": (b'\xef\xbb\xbf{"a": 1}', "BOM"),
    "another type": (b"[1]", "it holds a list, expected a dict"),
    "nothing": (b"", "Expecting value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_again_is_refused(name: str) -> None:
    raw, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        parse_json(raw)


def test_types_are_named() -> None:
    expected = {"step": int, "rate": float, "name": (str, type(None))}
    check_types({"step": 1, "rate": 2, "name": None, "other": []}, expected)
    for wrong, why in (
        ({"step": True, "rate": 1.0, "name": ""}, "step is True, expected int"),
        ({"step": 1, "rate": "x" * 100, "name": ""}, r"rate is 'x+\.\.\., expected float or int"),
        ({"step": 1, "rate": 1.0}, "name is missing"),
    ):
        with pytest.raises(ValueError, match=why):
            check_types(wrong, expected)


def test_rows_that_are_none_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n[1]\ncaf\xe9\n' + b"1" * 2_000_000 + b'\n{"step": NaN}\n{"step": 2}\n{"step": 3}'
    )
    for _ in range(2):
        assert list(read_json_lines(path)) == [{"step": 1}, {"step": 2}]
    lines = [record.getMessage().split(" is damaged")[0] for record in caplog.records]
    assert lines == [f"{path}: line {number}" for number in (2, 3, 4, 5)]
    path.write_text('{"step": true}\n{"step": 1.0}\n{}\n{"step": 2}\n')
    assert list(read_json_lines(path, {"step": int})) == [{"step": 2}]
    assert "line 1 is damaged and left out: step is True, expected int" in caplog.text
    assert list(read_json_lines(tmp_path / "absent")) == []


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(b'{"a": Infinity}')
    with pytest.raises(CheckpointError, match=r"state\.json is not JSON \(.*\)\. Copy the folder again"):
        read_json(tmp_path / "state.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(CheckpointError, match=r"folder\.json cannot be read: it is a folder"):
        read_json(tmp_path / "folder.json")
