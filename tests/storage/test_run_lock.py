"""One owner per run folder, whatever process asks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.storage import run_folder, run_lock
from asyncrl.storage.run_lock import FolderInUse

HOLD = """
import sys, time
from pathlib import Path
from asyncrl.storage import run_lock
lock = getattr(run_lock, sys.argv[2])(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def holder(run_dir: Path, how: str) -> subprocess.Popen[str]:
    """A process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir), how], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def test_a_folder_has_one_owner_which_is_named(tmp_path: Path) -> None:
    first = holder(tmp_path, "acquire")
    try:
        with pytest.raises(FolderInUse, match=f"in use by process {first.pid} on .*, since 20"):
            run_lock.acquire(tmp_path)
        found = run_lock.owner(tmp_path)
        assert found is not None
        assert found.pid == first.pid
    finally:
        end(first)
    assert run_lock.owner(tmp_path) is None, "the lock ended with its process"
    run_lock.acquire(tmp_path).release()


def test_a_dead_owners_last_process_keeps_others_out_until_it_ends(tmp_path: Path) -> None:
    owner = holder(tmp_path, "acquire")
    member = holder(tmp_path, "join")
    end(owner)
    began = time.monotonic()
    ending = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(1); os.kill({member.pid}, 9)"]
    )
    lock = run_lock.acquire(tmp_path)
    assert time.monotonic() - began > 0.5, "a process of the run still lived"
    lock.release()
    ending.wait(10)
    end(member)


def test_a_member_that_stays_is_an_error_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "LEAVE_DEADLINE", 0.5)
    owner, member = holder(tmp_path, "acquire"), holder(tmp_path, "join")
    end(owner)
    with pytest.raises(FolderInUse, match=f"process {owner.pid}"):
        run_lock.acquire(tmp_path)
    end(member)


def test_of_many_that_want_it_at_once_one_gets_it(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom asyncrl.storage import run_lock\n"
        "try:\n    lock = run_lock.acquire(Path(sys.argv[1]))\n"
        "except run_lock.FolderInUse:\n    sys.exit(7)\n"
        "time.sleep(6)\n"
    )
    asking = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(6)]
    assert sorted(process.wait(60) for process in asking) == [0, 7, 7, 7, 7, 7]


def test_a_stopped_owner_is_an_owner(tmp_path: Path) -> None:
    owner = holder(tmp_path, "acquire")
    owner.send_signal(signal.SIGSTOP)
    with pytest.raises(FolderInUse):
        run_lock.acquire(tmp_path)
    end(owner)


def test_a_copied_folder_is_free(tmp_path: Path) -> None:
    original = tmp_path / "a"
    original.mkdir()
    lock = run_lock.acquire(original)
    shutil.copytree(original, tmp_path / "b")
    run_lock.acquire(tmp_path / "b").release()
    lock.release()


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_something_else_in_the_place_of_the_lock_is_an_error(tmp_path: Path, kind: str) -> None:
    path, elsewhere = tmp_path / "lock", tmp_path / "precious"
    elsewhere.write_text("mine")
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(elsewhere), "folder": Path.mkdir}[kind](path)
    with pytest.raises(ConfigError, match="lock of the run"):
        run_lock.acquire(tmp_path)
    assert elsewhere.read_text() == "mine"


@pytest.mark.parametrize(
    "content", ["", "x", "[]", '{"pid": 1}', '{"pid":"1","started":1,"host":"h","since":1}']
)
def test_an_unreadable_owner_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    assert run_lock.owner(tmp_path) is None
    run_lock.acquire(tmp_path).release()


def test_where_the_file_system_has_no_locks_a_heartbeat_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", unsupported)
    monkeypatch.setattr(run_lock, "HEARTBEAT_EVERY", 0.05)
    lock = run_lock.acquire(tmp_path)
    with pytest.raises(FolderInUse):
        run_lock.acquire(tmp_path)
    path = tmp_path / "lock"
    os.utime(path, (1, 1))
    time.sleep(0.5)
    assert time.time() - path.stat().st_mtime < 5, "it beats"
    # As if another host had written it.
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "elsewhere"}))
    assert run_lock.owner(tmp_path) is not None
    lock.release()
    path.write_text(json.dumps({"pid": 1, "started": 1, "host": "elsewhere", "since": 1.0}))
    os.utime(path, (1, 1))
    assert run_lock.owner(tmp_path) is None, "its heart stood still"
    run_lock.acquire(tmp_path).release()


def test_commands_that_change_a_folder_ask_for_it(tmp_path: Path) -> None:
    run = run_folder.claim(TrainConfig(run_dir=str(tmp_path / "run")))
    with (
        pytest.raises(FolderInUse, match=f"pruning would .*process {os.getpid()}"),
        run_lock.owned(run.path, "pruning"),
    ):
        raise AssertionError("not reached")
    run.lock.release()
    with run_lock.owned(run.path, "pruning"), pytest.raises(FolderInUse):
        run_lock.acquire(run.path)
