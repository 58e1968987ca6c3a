"""One function takes every lock: a file system without locks is named, and files are read there."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from asyncrl.storage.untrusted import open_hdf5
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
