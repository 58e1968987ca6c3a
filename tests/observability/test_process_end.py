"""A thread that was left inside a library does not spoil the end of its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support import child_environment

PROGRAM = """
import sys, time
from torch.distributed import FileStore
from asyncrl.errors import WeightSyncError
from asyncrl.observability.signals import expect_exit
from asyncrl.weights.deadlines import run_bounded

class Answer:  # Comes while Python ends, which takes longer than to hear it.
    store, sleep = FileStore(sys.argv[1], -1), time.sleep

    def __del__(self):
        self.store.set("late", "1")
        Answer.sleep(1)

store = FileStore(sys.argv[1], -1)
try:
    run_bounded(lambda: store.get("late"), seconds=9, what="a look", given_up=lambda: "nobody is there")
except WeightSyncError as error:
    print(error, end="")
sys.modules["answer"] = Answer()
sys.exit(expect_exit(int(sys.argv[2])) if len(sys.argv) > 2 else 0)
"""


def end(store: Path, *code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(store), *code],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("code", [0, 3])
def test_a_call_that_returns_while_the_process_ends_changes_nothing(tmp_path: Path, code: int) -> None:
    done = end(tmp_path / "store", str(code))
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout == "a look was given up: nobody is there."


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 halts such a thread")
def test_without_it_the_process_is_aborted(tmp_path: Path) -> None:
    assert end(tmp_path / "store").returncode == -6, "what the module is for"
