"""The line that says what a run is doing: its text, and how it shares a terminal with the lines above it."""

from __future__ import annotations

import os
import pty
import select
import sys
import termios
import time
from pathlib import Path

import pytest

from asyncrl.observability import console_stream, process_status
from asyncrl.observability.process_status import Process, ThreadActivity
from asyncrl.observability.status_line import line


def process(role: str, what: str, *, alive: bool = True) -> Process:
    doing = (
        ThreadActivity(thread="writer", what="writing rows", seconds=1.0, allowed=0.0),
        ThreadActivity(thread="MainThread", what=what, seconds=1.0, allowed=0.0),
    )
    return Process(role=role, pid=1, alive=alive, activities=doing if what else doing[:1])


def test_the_learner_comes_first_and_the_replay_not_at_all() -> None:
    some = [
        process("actor-1", "deciding with version 2"),
        process("learner-0", "waiting for a batch: 1 of 8 groups"),
        process("replay", "serving"),
        process("actor-2", ""),
        process("actor-3", "deciding", alive=False),
    ]
    assert line(some, 65.0, 200) == (
        "0:01:05  [#-----------]  learner-0: waiting for a batch: 1 of 8 groups  "
        "actor-1: deciding with version 2  actor-2: starting  actor-3: ended"
    )
    cut = line(some, 65.0, 40)
    assert cut == "0:01:05  [#-----------]  learner-0: ..."
    assert len(cut) < 40, "a terminal that is filled to its last column begins a new line"


def test_a_wait_says_how_far_it_is_and_keeps_its_deadline(tmp_path: Path) -> None:
    process_status.publish_as(tmp_path, "learner-0")
    with process_status.activity("waiting for a batch", 30.0):
        process_status.describe("waiting for a batch: 3 of 8 groups")
        process_status.progress()
        (now,) = (a for p in process_status.read(tmp_path) for a in p.activities if a.thread == "MainThread")
    assert now.what == "waiting for a batch: 3 of 8 groups"
    assert 30.0 <= now.allowed < 31.0
    assert now.seconds < 1.0


def read_within(terminal: int, length: int, seconds: float) -> str:
    """Read so many characters, which a terminal hands over piece by piece, or what has come by then."""
    seen, until = b"", time.monotonic() + seconds
    while len(seen) < length and select.select([terminal], [], [], max(0.0, until - time.monotonic()))[0]:
        seen += os.read(terminal, 1000)
    return seen.decode()


def test_lines_are_written_above_the_status_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST  # no carriage returns of the terminal's own
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with console_stream.steady_console():
            console_stream.show_status("busy")
            print("a row")
            console_stream.show_status("")
            print("the end")
            console_stream.show_status("")
        expected = "\r\033[Kbusy" + "\r\033[Ka row\nbusy" + "\r\033[K" + "the end\n"
        seen = read_within(master, len(expected), 10.0)
    os.close(master)
    assert seen == expected


def test_a_pipe_never_sees_a_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    with path.open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with console_stream.steady_console():
            console_stream.show_status("busy")
            print("a row")
    assert path.read_text() == "a row\n"
