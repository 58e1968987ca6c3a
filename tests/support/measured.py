"""Run a command of asyncrl in a forked child of its own and measure it: code, seconds, memory, what it said.

The parent has imported what the commands need, so that a command costs what it does and not what it imports.
Memory is counted from there on: the child's largest resident size (`ru_maxrss`), and the largest size of its
address space, which shows what was reserved and never touched.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

TRACEBACK = "Traceback (most recent call last)"
CRASHED_CHECK = re.compile(r"cannot be checked: \w+")
"""How `asyncrl doctor` reports a check that raised: a traceback in other words."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a command."""

    code: int
    """Its exit code; negative: the signal that ended it."""
    seconds: float
    resident: int
    """Largest resident size in bytes."""
    reserved: int
    """Largest size of the address space in bytes; 0 when it was killed."""
    hung: bool
    """It was ended after its time."""
    said: str
    """On standard output and error."""

    @property
    def traceback(self) -> bool:
        """Whether it ended with one, or a check of the doctor did."""
        return TRACEBACK in self.said or bool(CRASHED_CHECK.search(self.said))


def run(
    command: Callable[[], int],
    folder: Path,
    *,
    allowed: float,
    environ: Mapping[str, str] | None = None,
    output: int | None = None,
) -> Outcome:
    """Run `command` in a child.

    Args:
        command: Returns the exit code.
        folder: Exists; where what it says is kept. The child's current folder.
        allowed: Seconds; then the child and what it started are killed.
        environ: Variables to set, for the child only.
        output: Handle that becomes the child's standard output, instead of the file of what it says.
    """
    said, size = folder / "said.txt", folder / "reserved.txt"
    size.unlink(missing_ok=True)
    sys.stdout.flush()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_child(command, folder, said, size, environ or {}, output)
    status, usage, hung = _wait(child, began + allowed)
    seconds = time.monotonic() - began
    os.killpg(child, signal.SIGKILL) if _has_group(child) else None
    reserved = int(size.read_text()) if size.exists() and size.stat().st_size else 0
    return Outcome(
        code=os.waitstatus_to_exitcode(status),
        seconds=seconds,
        resident=usage.ru_maxrss * 1024,
        reserved=reserved,
        hung=hung,
        said=said.read_text(errors="replace"),
    )


def _wait(child: int, until: float) -> tuple[int, resource.struct_rusage, bool]:
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return status, usage, False
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
            return status, usage, True
        time.sleep(0.01)


def _has_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _be_child(
    command: Callable[[], int],
    folder: Path,
    said: Path,
    size: Path,
    environ: Mapping[str, str],
    output: int | None,
) -> None:
    code = 70
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ.update(environ)
        handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 2)
        os.dup2(handle if output is None else output, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
        sys.stderr = os.fdopen(
            2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        code = command()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmPeak"):
                    size.write_text(str(int(line.split()[1]) * 1024))
            sys.stderr.flush()
            sys.stdout.flush()  # What Python does at its end: a handle that takes nothing is code 120.
        except OSError:
            code = 120
        os._exit(code)
