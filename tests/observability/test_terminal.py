"""The console: lines outlive their reader, long ones are wrapped, and a status line stands below them."""

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from asyncrl.observability import metrics_system as s
from asyncrl.observability import process_status, terminal, waits
from asyncrl.observability.process_status import Process, ThreadActivity
from asyncrl.observability.terminal import hanging, status_line
from asyncrl.storage import checkpoint
from support import child_environment
from support.tiny_models import write_models
from support.waiting import PATIENCE, wait_for
from support.whole_runs import TRAIN, environment, left_over, reach, rows

WRITER = """
import logging, sys, time
from pathlib import Path
from asyncrl.observability import terminal, process_status
terminal.STALLED_SECONDS = 0.3
run = Path(sys.argv[1])
process_status.publish_as(run, "learner-0")
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
with terminal.steady_console():
    print("first line", flush=True)
    sys.stdin.readline()
    for number in range(int(sys.argv[2])):
        print(f"line {number}", flush=True)
    print("error", file=sys.stderr)
(run / "done").write_text("")
print("past it", flush=True)
"""


def start(run: Path, lines: int, **streams: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, str(run), str(lines)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=child_environment(), **streams)


@pytest.mark.usefixtures("counted")
def test_a_reader_that_left_ends_no_process_and_its_lines_are_counted(tmp_path: Path) -> None:
    writer = start(tmp_path, 5, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert writer.stdout is not None
    assert writer.stdin is not None
    assert writer.stdout.readline() == b"first line\n"
    writer.stdout.close()
    writer.stdin.close()
    assert writer.wait(PATIENCE) == 0, "also what Python flushes at its end finds somebody"
    assert waits.wait_metrics()[s.DROPPED_LINES] == 5


@pytest.mark.usefixtures("counted")
def test_a_lost_terminal_ends_no_process_and_its_lines_are_counted(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    writer = start(tmp_path, 3, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 100).startswith(b"first line")
    os.close(ours)
    assert writer.stdin is not None
    writer.stdin.close()
    assert writer.wait(PATIENCE) == 0
    assert waits.wait_metrics()[s.DROPPED_LINES] == 4


@pytest.mark.usefixtures("counted")
def test_a_console_that_stands_still_is_waited_for_once(tmp_path: Path) -> None:
    writer = start(tmp_path, 20_000, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert writer.stdin is not None
    writer.stdin.close()
    wait_for((tmp_path / "done").exists)
    assert writer.stdout is not None
    said = writer.stdout.read().decode()
    assert writer.wait(PATIENCE) == 0
    shown = [line for line in said.splitlines() if line.startswith("line")]
    assert shown == [f"line {number}" for number in range(len(shown))]
    assert len(shown) + waits.wait_metrics()[s.DROPPED_LINES] == 20_000
    writer.stdout.close()


# --- wrapped lines ---

WORDS = "ten words that say what was found here and there"


def test_a_file_gets_whole_lines_and_a_terminal_those_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert hanging("name  ", WORDS) == f"name  {WORDS}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "32")
    assert hanging("name  ", WORDS) == ("name  ten words that say what\n      was found here and there")
    assert hanging("name  ", "/a/path/that/is/longer/than/the/terminal") == (
        "name  /a/path/that/is/longer/than/the/terminal"
    )
    assert hanging("name  ", "") == "name  "
    assert hanging("a_rather_long_name.toml  ", WORDS) == (
        "a_rather_long_name.toml\n    ten words that say what was\n    found here and there"
    )


# --- the status line ---


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
    assert status_line(some, 65.0, 200) == (
        "0:01:05  learner-0: waiting for a batch: 1 of 8 groups  actor-1: deciding with version 2  "
        "actor-2: starting  actor-3: ended"
    )
    cut = status_line(some, 65.0, 40)
    assert cut == "0:01:05  learner-0: waiting for a ba..."
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
    with os.fdopen(slave, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        with terminal.steady_console():
            terminal.show_status("busy")
            print("a row")
            terminal.show_status("")
            print("the end")
            terminal.show_status("")
        expected = "\r\033[Kbusy" + "\r\033[Ka row\nbusy" + "\r\033[K" + "the end\n"
        seen = read_within(master, len(expected), 10.0)
    os.close(master)
    assert seen == expected


def test_a_pipe_never_sees_a_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    with path.open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with terminal.steady_console():
            terminal.show_status("busy")
            print("a row")
    assert path.read_text() == "a row\n"


# --- whole runs ---


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("placement", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_lost_terminal_saves_and_ends_the_run(flags: list[str], tmp_path: Path, placement: str) -> None:
    """SIGHUP reaches all processes of the terminal, so all get it here, as one process group."""
    run = tmp_path / "run"
    more = ["--inline"] if placement == "inline" else []
    more += ["--updates", "100000", "--checkpoint-every", "100000", "--run-dir", str(run)]
    output = tmp_path / "said"
    with output.open("w") as file:
        process = subprocess.Popen(
            [*TRAIN, *flags, *more],
            env=environment(tmp_path),
            stdout=file,
            stderr=file,
            start_new_session=True,
            # A `nohup` above the tests would be respected.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
    try:
        reach(run, 2, process, 60)
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(40) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert "died" not in output.read_text(), "no child was ended by the signal"
    reached = len(rows(run))
    assert checkpoint.latest(run) == run / "checkpoints" / f"update_{reached:06d}"
    assert left_over(tmp_path) == []
