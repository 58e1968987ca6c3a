"""Child processes: what they print, how they die, when they come back, and that none outlives its parent."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from asyncrl.errors import ConfigError, RunError
from asyncrl.launch import endpoints
from asyncrl.launch.children import Supervisor, first_traceback
from asyncrl.launch.followers import FirstHost
from asyncrl.launch.job import Hosts, Job, RunInfo
from asyncrl.messaging.sockets import bind_router
from asyncrl.observability import process_status
from asyncrl.storage.run_owner import RunIdentity
from support import child_environment
from support.waiting import wait_for

DEADLINE = 20.0


# What the children run. Only text goes in.


def write_greeting(path, text):
    os.write(1, b"from C\n")
    print("from Python")
    print("an error line", file=sys.stderr)
    Path(path).write_text(text)


def die_until_third_life(path):
    with Path(path).open("a") as lives:
        lives.write("x")
    if len(Path(path).read_text()) < 3:
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError(f"life {Path(path).read_text()}") from error


def refuse_what_came():
    raise ConfigError("success is nan")


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_interrupts_and_wait(path):
    os.kill(os.getpid(), signal.SIGINT)
    Path(path).write_text(str(os.getpid()))
    signal.pause()


def refuse_to_stop(path):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(path).write_text(str(os.getpid()))
    while True:
        signal.pause()


def target(function):
    return f"{__name__}:{function.__name__}"


def ended(pid):
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_child_gets_its_arguments_and_its_output_goes_to_the_log(tmp_path):
    log = tmp_path / "logs" / "actor-1.log"
    child = Supervisor(
        "actor-1", target(write_greeting), (str(tmp_path / "out"), "päckchen"), log, max_respawns=0
    )
    assert child.wait(DEADLINE)
    child.poll()
    assert child.finished
    assert (tmp_path / "out").read_text() == "päckchen"
    first, *rest = log.read_text().splitlines()
    assert first.startswith(f"--- actor-1 starts, process {child.pid}, ")
    assert rest == ["from C", "from Python", "an error line"]
    assert child.respawns == 0


def test_a_dead_child_comes_back_after_a_back_off_that_doubles(tmp_path):
    clock = SimpleNamespace(now=0.0)
    life, arguments = target(die_until_third_life), (str(tmp_path / "lives"),)
    child = Supervisor("actor", life, arguments, tmp_path / "log", 5, 4.0, lambda: clock.now)
    for pause, respawns in ((4.0, 1), (8.0, 2)):
        assert child.wait(DEADLINE)
        child.poll()
        clock.now += pause - 0.01
        child.poll()
        assert child.respawns == respawns - 1
        clock.now += 0.02
        child.poll()
        assert (child.respawns, child.finished) == (respawns, False)
    assert child.wait(DEADLINE)
    for _ in range(2):
        child.poll()
        assert child.finished


def test_a_child_that_lived_long_begins_a_new_row(tmp_path):
    clock = SimpleNamespace(now=0.0)
    child = Supervisor("actor", target(kill_itself), (), tmp_path / "log", 2, 4.0, lambda: clock.now)
    for life, pause in ((1.0, 4.0), (700.0, 4.0), (20.0, 4.0)):  # A new row; then one death more is allowed.
        assert child.wait(DEADLINE)
        clock.now += life
        child.poll()
        clock.now += pause + 0.01
        child.poll()
    assert child.wait(DEADLINE)
    assert child.respawns == 3
    with pytest.raises(RunError, match="died 3 times in a row"):
        child.poll()


def test_dying_too_often_ends_with_the_first_traceback_and_the_log_once(tmp_path):
    log = tmp_path / "log"
    log.write_text("Traceback (most recent call last):\n  of an earlier run\nOldError\n")
    child = Supervisor("actor-1", target(die_until_third_life), (str(tmp_path / "lives"),), log, 1, 0.0)
    assert child.wait(DEADLINE)
    child.poll()
    child.poll()
    assert child.respawns == 1
    assert child.wait(DEADLINE)
    with pytest.raises(RunError) as caught:
        child.poll()
    message = str(caught.value)
    assert message.startswith("actor-1 died 2 times in a row (allowed respawns: 1), last with exit code 1.")
    parts = ("KeyError: 'the cause'", "direct cause", "ValueError: life x\n")
    assert (chain := [message.index(part) for part in parts]) == sorted(chain)
    assert "life xx" not in message
    assert "OldError" not in message
    assert message.count(str(log)) == 1
    assert message.endswith(f"See {log} for everything it printed.")


def test_an_error_of_our_own_is_reported_by_its_sentence(tmp_path):
    child = Supervisor("actor", target(refuse_what_came), (), tmp_path / "log", max_respawns=0)
    assert child.wait(DEADLINE)
    with pytest.raises(RunError, match=r"Its first error:\n\nsuccess is nan\n\nSee ") as caught:
        child.poll()
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("how", ["renamed", "deleted"])
def test_a_run_whose_folder_is_gone_ends_with_one_sentence(tmp_path, how):
    run = tmp_path / "run"
    child = Supervisor("one", f"{__name__}:kill_itself", (), run / "logs" / "one.log", 5, 0.01)
    assert child.wait(DEADLINE)
    run.rename(tmp_path / "other") if how == "renamed" else shutil.rmtree(run)
    with pytest.raises(RunError, match=rf"^{run}, the folder of the run, is gone: .*--resume\.$"):
        child.poll()


def test_a_folder_of_sockets_that_was_cleaned_away_is_made_again_and_followers_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(process_status, "_own_file", None)
    process_status.publish_as(tmp_path, "learner-0")
    short = Path(tempfile.mkdtemp(dir="/tmp"))  # A socket's path has at most 107 bytes.
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr("tempfile.tempdir", None)
    identity = RunIdentity(secret="5" * 64, attempt=1)
    with endpoints.opened(Hosts(), tmp_path, identity) as (folder, endpoint):
        info = RunInfo(
            run_dir=str(tmp_path), replay_endpoint=endpoint, weights_endpoint="", sockets=str(folder)
        )
        first_host = FirstHost(info, Job(rank=1, size=2, local_rank=1, local_size=2))
        shutil.rmtree(short)
        assert not first_host.run_is_over()
        for _ in range(2):
            endpoints.restore_folder(folder, identity)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert (folder / "identity").read_text() == identity.secret
        with zmq.Context() as context, bind_router(context, endpoint):
            assert (folder / "replay").is_socket()
        folder.chmod(0o755)
        with zmq.Context() as context, pytest.raises(ConfigError, match="other users can enter"):
            bind_router(context, endpoint)
    assert first_host.run_is_over()
    shutil.rmtree(short, ignore_errors=True)


def test_a_killed_child_is_reported_by_the_signals_name(tmp_path):
    child = Supervisor("replay", target(kill_itself), (), tmp_path / "log", max_respawns=0)
    assert child.wait(DEADLINE)
    with pytest.raises(RunError, match="last by SIGKILL, which is what the operating system sends"):
        child.poll()


@pytest.mark.parametrize(
    ("function", "deadline", "number"),
    [(ignore_interrupts_and_wait, DEADLINE, signal.SIGTERM), (refuse_to_stop, 0.1, signal.SIGKILL)],
    ids=["asked, after it ignored Ctrl-C", "does not listen"],
)
def test_stop_asks_and_then_ends(tmp_path, function, deadline, number):
    ready = tmp_path / "ready"
    child = Supervisor("actor", target(function), (str(ready),), tmp_path / "log", 5)
    wait_for(ready.exists)
    assert child.stop(deadline) == -number
    assert ended(child.pid)
    child.poll()
    assert (child.respawns, child.finished) == (0, True)


def test_no_child_outlives_a_parent_that_was_killed(tmp_path):
    ready = tmp_path / "ready"
    program = (
        "import signal, sys; from pathlib import Path; from asyncrl.launch.children import Supervisor\n"
        "if __name__ == '__main__':\n"
        f"    sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"    args = ({str(ready)!r},), Path({str(tmp_path / 'log')!r}), 0\n"
        f"    Supervisor('a', {target(refuse_to_stop)!r}, *args)\n"
        "    signal.pause()\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(program)
    environ = child_environment()
    with subprocess.Popen([sys.executable, str(script)], env=environ) as parent:
        try:
            wait_for(lambda: ready.exists() and ready.read_text())
        finally:
            parent.kill()
    wait_for(lambda: ended(int(ready.read_text())))


def test_supervising_needs_no_torch():
    program = "import sys, asyncrl.launch.children, asyncrl.launch.placement, asyncrl.launch.followers\n"
    program += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE, env=child_environment())


DURING = "During handling of the above exception, another exception occurred:"
CRASH = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n  File a"
TRACE = (
    "Traceback (most recent call last):\n"
    '  File "a.py", line 1, in <module>\n'
    "    f()\n"
    "ValueError: bad\n"
    "  do this"
)


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ("", ""),
        ("all is well\n", ""),
        (f"start\n{TRACE}\nmore lines\n{TRACE.replace('bad', 'worse')}\n", TRACE),
        (f"{TRACE}\n\n{DURING}\n\n{TRACE}\nnext\n", f"{TRACE}\n\n{DURING}\n\n{TRACE}"),
        (f"x\n{CRASH}\n", CRASH),
    ],
)
def test_the_first_traceback_of_a_log_is_found_whole(log, found):
    assert first_traceback(log) == found
