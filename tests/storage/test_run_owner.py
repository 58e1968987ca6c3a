"""A run folder has one owner, and its processes a secret."""

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.storage import run_owner
from asyncrl.storage.run_owner import FolderInUse
from support.waiting import wait_for

VALID = '{"secret": "' + 32 * "ab" + '", "attempt": %d, "folder": [1, 2]}'
HOLD = """
import sys, time
from pathlib import Path
from asyncrl.storage import run_owner
lock = getattr(run_owner, sys.argv[2])(Path(sys.argv[1]))
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
            run_owner.acquire(tmp_path)
        found = run_owner.owner(tmp_path)
        assert found is not None
        assert found.pid == first.pid
    finally:
        end(first)
    assert run_owner.owner(tmp_path) is None, "the lock ended with its process"
    run_owner.acquire(tmp_path).release()


def test_a_dead_owners_last_process_keeps_others_out_until_it_ends(tmp_path: Path) -> None:
    owner = holder(tmp_path, "acquire")
    member = holder(tmp_path, "join")
    end(owner)
    began = time.monotonic()
    ending = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(1); os.kill({member.pid}, 9)"]
    )
    lock = run_owner.acquire(tmp_path)
    assert time.monotonic() - began > 0.5, "a process of the run still lived"
    lock.release()
    ending.wait(10)
    end(member)


def test_a_member_that_stays_is_an_error_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_owner, "LEAVE_DEADLINE", 0.5)
    owner, member = holder(tmp_path, "acquire"), holder(tmp_path, "join")
    end(owner)
    with pytest.raises(FolderInUse, match=f"process {owner.pid}"):
        run_owner.acquire(tmp_path)
    end(member)


def test_of_many_that_want_it_at_once_one_gets_it(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom asyncrl.storage import run_owner\n"
        "try:\n    lock = run_owner.acquire(Path(sys.argv[1]))\n"
        "except run_owner.FolderInUse:\n    sys.exit(7)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    asking = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(6)]
    wait_for(lambda: sum(process.poll() is not None for process in asking) >= 5)
    for process in asking:
        process.communicate(timeout=60)
    assert sorted(process.returncode for process in asking) == [0, 7, 7, 7, 7, 7]


@pytest.mark.parametrize(
    ("name", "start", "message"),
    [
        ("lock", run_owner.acquire, "lock of the run"),
        ("identity.json", run_owner.next_attempt, r"identity\.json cannot be read"),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_something_else_in_the_place_of_a_file_is_an_error(tmp_path, kind, name, start, message) -> None:
    path, elsewhere = tmp_path / name, tmp_path / "precious"
    elsewhere.write_text("mine")
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(elsewhere), "folder": Path.mkdir}[kind](path)
    with pytest.raises(ConfigError, match=message):
        start(tmp_path)
    assert elsewhere.read_text() == "mine"


@pytest.mark.parametrize(
    "content", ["", "x", "[]", '{"pid": 1}', '{"pid":"1","started":1,"host":"h","since":1}']
)
def test_an_unreadable_owner_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    assert run_owner.owner(tmp_path) is None
    run_owner.acquire(tmp_path).release()


def test_every_start_counts_and_keeps_the_secret(tmp_path: Path) -> None:
    first, second = run_owner.next_attempt(tmp_path), run_owner.next_attempt(tmp_path)
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.secret == second.secret
    assert len(first.secret) == 64
    assert run_owner.read_identity(tmp_path) == second
    assert stat.S_IMODE((tmp_path / "identity.json").stat().st_mode) == 0o600
    assert first.secret not in repr(first)


def test_a_copied_folder_gets_a_secret_of_its_own_and_a_moved_one_keeps_it(tmp_path: Path) -> None:
    original = tmp_path / "run"
    original.mkdir()
    before = run_owner.next_attempt(original)
    shutil.copytree(original, tmp_path / "copy")
    with pytest.raises(ConfigError, match="another folder"):
        run_owner.read_identity(tmp_path / "copy")
    copy = run_owner.next_attempt(tmp_path / "copy")
    assert copy.attempt == 1
    assert before.knows(before.secret)
    assert not any(map(before.knows, (copy.secret, "", "é")))
    original.rename(tmp_path / "moved")
    assert run_owner.read_identity(tmp_path / "moved") == before


@pytest.mark.parametrize(
    "content",
    ["{", "{}", '{"secret": 1, "attempt": 1, "folder": [1, 2]}', VALID % -1, VALID % 10**30, "\udcff"],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "identity.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"identity\.json is damaged\. Delete it"):
        run_owner.next_attempt(tmp_path)


def test_a_file_that_others_can_read_is_no_secret(tmp_path: Path) -> None:
    run_owner.next_attempt(tmp_path)
    (tmp_path / "identity.json").chmod(0o644)
    with pytest.raises(ConfigError, match="others may know"):
        run_owner.read_identity(tmp_path)
