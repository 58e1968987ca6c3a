"""What processes do, read from outside, also by `asyncrl status`; their stacks, and how they end."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.commands.runs import _lines
from asyncrl.observability import metrics_system as m
from asyncrl.observability import process_status, waits
from asyncrl.observability.background_file import CONSOLE, logged_to
from asyncrl.observability.process_status import Watchdog
from asyncrl.storage import run_owner
from asyncrl.storage.run_folder import State
from support import child_environment
from support.run_folders import kill_owner, row, write_run
from support.waiting import wait_for

CHILD = """
import ctypes, sys, threading, time
from pathlib import Path
from asyncrl import cli
from asyncrl.observability import process_status
from asyncrl.observability import waits
from asyncrl.observability import metrics_system as m

process_status.publish_as(Path(sys.argv[1]), "actor-1")

def receive():
    process_status.set_activity("waiting for version 3")
    time.sleep(60)

threading.Thread(target=receive, name="receiver", daemon=True).start()
def stuck_in_a_library():
    with process_status.activity("imagining", float(sys.argv[2])):
        lock, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
        library.pthread_mutex_lock(lock)
        library.pthread_mutex_lock(lock)  # For ever, and PyDLL keeps the interpreter's lock: no Python runs.
time.sleep(0.3)
print("ready", flush=True)
stuck_in_a_library()
"""


@pytest.fixture
def child(tmp_path: Path, request: pytest.FixtureRequest):
    allowed = getattr(request, "param", 600.0)
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), str(allowed)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    wait_for(
        lambda: any(
            "imagining" in activity.what for p in process_status.read(tmp_path) for activity in p.activities
        )
    )
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


def test_every_thread_says_what_it_does_and_since_when_also_the_dead(child, tmp_path) -> None:
    (process,) = process_status.read(tmp_path)
    assert (process.role, process.pid, process.alive) == ("actor-1", child.pid, True)
    said = {activity.thread: activity for activity in process.activities}
    assert said["MainThread"].what == "imagining"
    assert said["receiver"].what == "waiting for version 3"
    assert 0 <= said["MainThread"].seconds < 10
    assert not said["MainThread"].overdue
    child.kill()
    child.wait(10)
    (process,) = process_status.read(tmp_path)
    assert not process.alive
    assert "imagining" in [activity.what for activity in process.activities]
    assert process_status.dump_stacks(tmp_path) == []


@pytest.mark.parametrize("child", [0.5], indirect=True)
def test_a_hanging_child_is_ended_and_its_stacks_are_kept(child: subprocess.Popen[str], tmp_path) -> None:
    said: list[str] = []
    watch = Watchdog(tmp_path, said.append)
    assert child.wait(15) == -signal.SIGKILL
    watch.close()
    assert watch.hangs == 1
    assert "'imagining' takes" in said[0]
    assert "stuck_in_a_library" in (tmp_path / "processes" / "actor-1.stacks").read_text()


def test_a_stopped_process_and_a_reused_number_are_told_apart(child: subprocess.Popen[str]) -> None:
    began = process_status.started(child.pid)
    assert began > 0
    assert not process_status.is_stopped(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    wait_for(lambda: process_status.is_stopped(child.pid))
    os.kill(child.pid, signal.SIGCONT)
    wait_for(lambda: not process_status.is_stopped(child.pid))
    assert process_status.started(child.pid) == began
    assert process_status.started(2**22 + 1) == 0


def test_activities_nest_and_damaged_files_are_left_out(tmp_path: Path) -> None:
    process_status.publish_as(tmp_path, "learner-0")
    process_status.set_activity("")  # An earlier test may have left one.
    (tmp_path / "processes" / "noise").write_bytes(b"\1" * 10)
    with process_status.activity("updating", 5.0):
        with process_status.activity("reading", 1.0):
            (process,) = process_status.read(tmp_path)
            assert [activity.what for activity in process.activities] == ["reading"]
        (process,) = process_status.read(tmp_path)
        assert [(activity.what, activity.allowed) for activity in process.activities] == [("updating", 5.0)]
    (process,) = process_status.read(tmp_path)
    assert process.activities == ()


def test_progress_renews_the_deadline_but_not_the_beginning(tmp_path, monkeypatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(process_status.time, "monotonic", lambda: clock[0])
    process_status.publish_as(tmp_path, "learner-0")
    with process_status.activity("updating", 30.0):
        clock[0] += 20
        process_status.progress()
        for seconds, overdue in ((40, False), (60, True)):
            clock[0] += 20
            (process,) = process_status.read(tmp_path)
            (updating,) = process.activities
            assert (updating.seconds, updating.overdue) == (seconds, overdue)
    process_status.progress()  # Nothing is under way.


def test_waits_are_counted_also_from_before_the_process_joined(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(process_status, "_own_file", None)
    with process_status.waiting(waits.MEETING, 10.0):
        time.sleep(0.05)
    assert waits.wait_metrics() == {}
    process_status.publish_as(tmp_path, "learner-1")
    with process_status.waiting(waits.BATCH, 10.0, " of 4 groups"):
        (process,) = process_status.read(tmp_path)
        time.sleep(0.02)
    (activity,) = process.activities
    assert (activity.what, activity.allowed) == (
        "waiting for a batch of 4 groups",
        10.0 + process_status.GRACE,
    )
    process_status.publish_as(tmp_path, "learner-0")  # The file of another process of the run counts too.
    with process_status.waiting(waits.BATCH, 10.0):
        time.sleep(0.02)
    waits.count(waits.RESPAWNS)
    found = waits.wait_metrics()
    assert 0.05 <= found[waits.MEETING.metric] < 5.0
    assert 0.04 <= found[waits.BATCH.metric] < 5.0
    assert found[m.RESPAWNS] == 1
    assert found[waits.PART.metric] == 0


def test_status_shows_every_thread_and_asks_for_stacks(child, tmp_path, capsys) -> None:
    assert cli.run("status", [str(tmp_path), "--stacks"]) == 0
    said = capsys.readouterr().out
    assert f"{child.pid}  alive" in said
    assert "imagining, " in said
    assert "waiting for version 3, " in said
    assert "stuck_in_a_library" in (tmp_path / "processes" / "actor-1.stacks").read_text()
    child.kill()
    child.wait(10)
    assert cli.run("status", [str(tmp_path)]) == 1
    assert "dead" in capsys.readouterr().out
    assert cli.run("status", [str(tmp_path / "elsewhere")]) == 2


def test_waits_and_counts_have_totals_of_their_own() -> None:
    numbers = [wait.total for wait in waits.WAITS.values()] + [count.total for count in waits.COUNTS]
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < process_status.TOTALS


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


def test_the_exit_code_says_what_became_of_the_run(tmp_path, capsys) -> None:
    write_run(tmp_path / "finished")
    write_run(tmp_path / "stopped", made=3)
    kill_owner(write_run(tmp_path / "dead", made=3))
    lock = run_owner.acquire(write_run(tmp_path / "running"))  # All updates are made.
    for name, code in {"running": 0, "dead": 1, "finished": 3, "stopped": 4}.items():
        assert cli.run("status", [str(tmp_path / name)]) == code
        line = capsys.readouterr().out.splitlines()[0]
        assert line.startswith(f"{name}: {name}, {4 if name in ('finished', 'running') else 3} of 4 updates")
        assert cli.run("status", [str(tmp_path / name), "--json"]) == code
        found = json.loads(capsys.readouterr().out)
        assert (found["state"], found["updates"], found["processes"]) == (name, 4, [])
    lock.release()
    assert cli.run("status", [str(tmp_path)]) == 2


def test_watch_of_a_run_that_has_ended_returns_at_once(tmp_path, capsys) -> None:
    assert cli.run("status", [str(write_run(tmp_path / "a")), "--watch"]) == 0
    assert cli.run("status", [str(write_run(tmp_path / "b", made=1)), "--watch"]) == 4
    said = capsys.readouterr().out.split("\n\n")
    assert [part.partition(",")[0] for part in said if part.strip()] == ["a: finished", "b: stopped"]
    with pytest.raises(SystemExit) as left:
        cli.run("status", [str(tmp_path / "a"), "--watch", "--every", "0"])
    assert left.value.code == 2
    assert "--every is 0" in capsys.readouterr().err


def test_what_is_over_grows_no_older() -> None:
    doing = process_status.ThreadActivity(
        thread="MainThread", what="ending the run", seconds=9.5, allowed=1.0
    )
    ended = process_status.Process(role="learner-0", pid=1, alive=False, activities=(doing,))
    assert _lines(ended, State.FINISHED)[1].split(None, 1)[1] == "ending the run"
    alive = _lines(replace(ended, alive=True), State.RUNNING)[1]
    assert alive.endswith("ending the run, 9.5 s, more than 1 s")


def watcher(run: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "asyncrl", "status", str(run), "--watch", "--every", "0.05", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_watch_follows_a_run_to_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", made=3)
    lock = run_owner.acquire(run)
    process = watcher(run, "--json")
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert (first["state"], first["version"]) == ("running", 3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(4, 0.0)) + "\n")
    while json.loads(process.stdout.readline())["version"] < 4:
        pass
    lock.release()
    rest, errors = process.communicate(timeout=60)
    last = json.loads(rest.splitlines()[-1])
    assert (last["state"], last["version"], process.returncode, errors) == ("finished", 4, 0, "")
