"""Play a scene on a disk of 8 MB that is really full: a tmpfs in a namespace of its own, where allowed.

A scene is a function of a test module that runs in a child process with the small disk's folder; the module
ends with ``globals()[sys.argv[1]](Path(sys.argv[2]))`` under ``if __name__ == "__main__"``.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from support import child_environment

MOUNT = 'mount -t tmpfs -o size="$0" none "$1" && shift && exec "$@"'


def on_a_small_disk(folder: Path, *command: str, size: str = "8m") -> subprocess.CompletedProcess[str]:
    """Run a command in a namespace in which `folder` is a disk of `size`."""
    whole = ["unshare", "-Urm", "sh", "-c", MOUNT, size, str(folder), *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=120, env=child_environment())


def play_on_a_small_disk(scene: Callable[[Path], None], folder: Path, size: str = "8m") -> str:
    """Play a scene with `folder` as the small disk, or skip the test; returns what it printed."""
    try:
        probe = on_a_small_disk(folder, "true")
    except FileNotFoundError as error:
        pytest.skip(f"no small disk can be made here: {error}")
    if probe.returncode:
        pytest.skip(f"mounting in a user namespace is not allowed here: {probe.stderr.strip()}")
    module = scene.__code__.co_filename
    done = on_a_small_disk(folder, sys.executable, module, scene.__name__, str(folder), size=size)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free(folder: Path) -> int:
    """Bytes that are free on the disk of `folder`."""
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


def leave(folder: Path, nbytes: int) -> Path:
    """Write the ballast anew so that exactly `nbytes` (whole pages) are free.

    The scene's own threads may write between the look at the disk and the ballast, so both are done again
    until they agree.
    """
    ballast = folder / "ballast"
    for _ in range(100):
        ballast.unlink(missing_ok=True)
        with suppress(OSError), ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free(folder) - nbytes)
        if free(folder) == nbytes:
            return ballast
        time.sleep(0.05)
    raise AssertionError(f"{free(folder)} bytes are free on {folder}, not {nbytes}")
