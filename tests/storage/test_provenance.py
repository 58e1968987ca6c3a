"""How each start of a run came about, in RUN/provenance.json."""

import os
import platform
import socket
import subprocess
from contextlib import nullcontext
from datetime import datetime

import pytest

from asyncrl import __version__
from asyncrl.storage.run_folder import git_state, read_starts, recorded_start


def recorded(run_dir, *, attempt=1, version=0, updates=10, told=None, command="asyncrl train --seed 3"):
    tell = (told if told is not None else []).append
    return recorded_start(
        run_dir, attempt=attempt, command=command, version=version, updates=updates, tell=tell
    )


def test_a_start_says_command_host_versions_and_times(tmp_path):
    with recorded(tmp_path, attempt=2, version=5) as note:
        (running,) = read_starts(tmp_path)
        assert (running["ended"], running["how"], running["to_update"]) == ("", "", 5)
        note(7, {})
    (start,) = read_starts(tmp_path)
    assert (start["attempt"], start["command"]) == (2, "asyncrl train --seed 3")
    assert start["host"] == socket.gethostname()
    assert start["versions"].items() >= {"asyncrl": __version__, "python": platform.python_version()}.items()
    assert {"torch", "transformers", "numpy"} <= start["versions"].keys()
    assert (start["from_update"], start["to_update"], start["how"]) == (5, 7, "stopped")
    assert datetime.fromisoformat(start["began"]) <= datetime.fromisoformat(start["ended"])


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (None, "finished"),
        (RuntimeError("no memory\nand more"), "failed: RuntimeError: no memory"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_a_run_that_made_all_updates_is_finished_and_a_failure_is_named(tmp_path, error, how):
    ends = pytest.raises(type(error)) if error else nullcontext()
    with ends, recorded(tmp_path) as note:
        note(10, {})
        if error:
            raise error
    assert read_starts(tmp_path)[0]["how"] == how


def test_a_resume_adds_a_start_and_one_that_was_killed_has_no_end(tmp_path):
    killed = recorded(tmp_path)
    killed.__enter__()
    with recorded(tmp_path, attempt=2):
        pass
    assert [(start["attempt"], start["how"]) for start in read_starts(tmp_path)] == [(1, ""), (2, "stopped")]


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
    told = []
    with recorded(tmp_path, told=told):
        assert why in told[0]
    assert (tmp_path / "provenance.json").read_text() == content


def test_a_file_that_cannot_be_read_is_said_and_does_not_end_the_run(tmp_path):
    os.mkfifo(tmp_path / "provenance.json")
    told = []
    with recorded(tmp_path, told=told):
        pass
    assert "a named pipe" in told[0]
    assert told[0].endswith("The run goes on without")


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
