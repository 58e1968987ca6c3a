"""A thread left in a library does not spoil its process's end; the log of a process tells why it failed."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.observability.background_file import CONSOLE, logged_to
from support import child_environment

PROGRAM = """
import sys, time
from torch.distributed import FileStore
from asyncrl.errors import WeightSyncError
from asyncrl.observability.signals import expect_exit
from asyncrl.weights.interface import run_bounded

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


def test_console_lines_the_log_and_a_failure_are_kept_with_times(tmp_path, capsys) -> None:
    path = tmp_path / "logs" / "learner-0.log"

    def fail() -> None:
        with logged_to(path):
            logging.getLogger(CONSOLE).info("update 1")
            logging.getLogger("asyncrl.learner.learner").info("interrupted at version 3")
            logging.getLogger("asyncrl.learner.learner").warning("a bad step")
            raise ZeroDivisionError("division by zero")

    with pytest.raises(ZeroDivisionError):
        fail()
    lines = path.read_text().splitlines()
    assert all(line[:2] == "20" for line in lines[:4])
    assert [line.split(": ", 1)[1] for line in lines[1:4]] == [
        "update 1",
        "interrupted at version 3",
        "a bad step",
    ]
    assert "WARNING asyncrl.learner.learner" in lines[3]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "Traceback (most recent call last):" in lines
    assert capsys.readouterr().err == "a bad step\n"
    logging.getLogger(CONSOLE).info("later")
    assert "later" not in path.read_text()
    assert not logging.getLogger("asyncrl").handlers
