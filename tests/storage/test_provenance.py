"""How each start of a run came about, in RUN/provenance.json."""

import os
import platform
import socket
import subprocess
from datetime import datetime

import pytest

from asyncrl import __version__
from asyncrl.storage.run_folder import git_state, read_starts, record_start


def record(run_dir, *, attempt=1, version=0, command="asyncrl train --seed 3"):
    told = []
    record_start(run_dir, attempt=attempt, command=command, version=version, tell=told.append)
    return told


def test_a_start_says_command_host_versions_and_time_and_a_resume_adds_one(tmp_path):
    assert record(tmp_path) == []
    assert record(tmp_path, attempt=2, version=5) == []
    first, start = read_starts(tmp_path)
    assert (first["attempt"], start["attempt"]) == (1, 2)
    assert (start["command"], start["from_update"]) == ("asyncrl train --seed 3", 5)
    assert start["host"] == socket.gethostname()
    assert start["versions"].items() >= {"asyncrl": __version__, "python": platform.python_version()}.items()
    assert {"torch", "transformers", "numpy"} <= start["versions"].keys()
    assert datetime.fromisoformat(first["began"]) <= datetime.fromisoformat(start["began"])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[]", "it holds a list"),
        ("{", "Expecting"),
        *((text, "no list of starts") for text in ('{"format": 1}', '{"format": 2, "starts": []}')),
        ('{"format": 1, "starts": [3]}', "no list of starts"),
    ],
)
def test_a_damaged_file_is_said_and_left_as_it_is(tmp_path, content, why):
    (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(ValueError, match=why):
        read_starts(tmp_path)
    assert why in record(tmp_path)[0]
    assert (tmp_path / "provenance.json").read_text() == content


def test_a_file_that_cannot_be_read_is_said_and_does_not_end_the_run(tmp_path):
    os.mkfifo(tmp_path / "provenance.json")
    (told,) = record(tmp_path)
    assert "a named pipe" in told
    assert told.endswith("The run goes on without")


def git(folder, *arguments):
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *names, "-C", folder, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_the_commit_of_a_checkout_and_whether_files_differ_from_it(tmp_path, monkeypatch):
    assert git_state(tmp_path) == ("", False)
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == ("", False)  # Nothing is committed.
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "a")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "new.py").write_text("untracked files are no change")
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "a.py").write_text("2")
    assert git_state(tmp_path) == (commit, True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == ("", False), "without git"
