"""A run whose console goes away or stands still goes on, and its lines are found in a file."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.observability import metrics_system as s
from asyncrl.observability import process_status, waits
from asyncrl.storage import checkpoint
from support import child_environment
from support.tiny_models import write_models
from support.whole_runs import TRAIN, environment, left_over, reach, rows

PATIENCE = 30.0
WRITER = """
import logging, sys, time
from pathlib import Path
from asyncrl.observability import console_stream, process_status
console_stream.STALLED_SECONDS = 0.3
run = Path(sys.argv[1])
process_status.publish_as(run, "learner-0")
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
with console_stream.steady_console():
    print("first line", flush=True)
    if sys.argv[2] == "kept":
        console_stream.keep_in(run / "logs" / "console.log")
    sys.stdin.readline()
    for number in range(int(sys.argv[3])):
        print(f"line {number}", flush=True)
    print("error", file=sys.stderr)
(run / "done").write_text("")
print("past it", flush=True)
"""


def wait_for(condition: Callable[[], object], what: Callable[[], str] = str) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, what()
        time.sleep(0.01)


def start(run: Path, mode: str, lines: int, **streams: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, str(run), mode, str(lines)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=child_environment(), **streams)


def test_a_reader_that_left_costs_neither_the_run_nor_its_lines(tmp_path: Path) -> None:
    writer = start(tmp_path, "kept", 3, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert writer.stdout is not None
    assert writer.stdin is not None
    assert writer.stdout.readline() == b"first line\n"
    writer.stdout.close()
    writer.stdin.close()
    assert writer.wait(PATIENCE) == 0, "also what Python flushes at its end finds somebody"
    kept = (tmp_path / "logs" / "console.log").read_text().splitlines()
    assert "the console takes no lines (Broken pipe); they follow here" in kept[0]
    assert kept[1:] == ["line 0", "line 1", "line 2"]


def test_lines_without_a_file_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_status, "_own_file", None)
    monkeypatch.setattr(process_status, "_early", {})
    process_status.publish_as(tmp_path, "rank-1")
    writer = start(tmp_path, "dropped", 5, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert writer.stdout is not None
    assert writer.stdin is not None
    assert writer.stdout.readline() == b"first line\n"
    writer.stdout.close()
    writer.stdin.close()
    assert writer.wait(PATIENCE) == 0
    assert waits.wait_metrics()[s.DROPPED_LINES] == 5


def test_a_lost_terminal_costs_neither_the_run_nor_its_lines(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    writer = start(tmp_path, "kept", 3, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 100).startswith(b"first line")
    os.close(ours)
    assert writer.stdin is not None
    writer.stdin.close()
    assert writer.wait(PATIENCE) == 0
    kept = (tmp_path / "logs" / "console.log").read_text()
    assert "Input/output error" in kept
    assert "line 2\n" in kept
    assert "error\n" in kept


def test_a_console_that_stands_still_is_waited_for_once(tmp_path: Path) -> None:
    writer = start(tmp_path, "kept", 20_000, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert writer.stdin is not None
    writer.stdin.close()
    wait_for((tmp_path / "done").exists)
    assert writer.stdout is not None
    said = writer.stdout.read().decode()
    assert writer.wait(PATIENCE) == 0
    kept = (tmp_path / "logs" / "console.log").read_text().splitlines()
    assert "nobody reads it" in kept[0]
    shown = [line for line in said.splitlines() if line.startswith("line")]
    assert shown + kept[1:] == [f"line {number}" for number in range(20_000)]
    writer.stdout.close()


# --- whole runs ---


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_run_into_head_ends_as_it_would_have_without_it(flags: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        [*TRAIN, *flags, "--updates", "4", "--run-dir", str(run)],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"asyncrl ")
    process.stdout.close()
    assert process.wait(100) == 0
    assert len(rows(run)) == 4
    kept = (run / "logs" / "console.log").read_text()
    assert "Broken pipe" in kept
    assert "asyncrl evaluate" in kept
    assert left_over(tmp_path) == []


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
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


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_killing_collect_leaves_no_workers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncrl", "collect", "--out", str(tmp_path / "data")]
    command += ["--episodes", "5000", "--workers", "2"]
    process = subprocess.Popen(
        command, env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: len(left_over(tmp_path, 0.0)) >= 4)  # Itself, two workers, a resource tracker.
        wait_for(lambda: list((tmp_path / "data").glob("*")))
    finally:
        process.kill()
        process.wait()
    assert left_over(tmp_path) == []
