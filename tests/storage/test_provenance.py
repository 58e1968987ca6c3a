"""How each start of a run came about, in RUN/provenance.json."""

import os
import platform
import socket
import subprocess
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch

from asyncrl import __version__
from asyncrl.storage.provenance import Provenance, devices, git_state, read, this_start

BEGAN = "2025-01-01T00:00:00+00:00"
START = {
    **{"attempt": 1, "command": "asyncrl train", "host": "a", "pid": 1, "began": BEGAN},
    **{"ended": "", "how": "", "from_update": 0, "to_update": 0},
}


def starts_in(run_dir):
    return [SimpleNamespace(**row) for row in read(run_dir)]


def kept(run_dir, start=START, updates=10, told=None):
    return Provenance(run_dir, dict(start), updates=updates, tell=(told if told is not None else []).append)


def test_a_start_says_command_host_versions_devices_and_times(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    begun = this_start(attempt=2, command="asyncrl train --seed 3", from_update=5, ranks=4)
    with kept(tmp_path, begun) as it:
        (running,) = starts_in(tmp_path)
        assert (running.ended, running.how, running.to_update) == ("", "", 5)
        it.note(7, {})
    (start,) = starts_in(tmp_path)
    assert (start.attempt, start.command, start.ranks) == (2, "asyncrl train --seed 3", 4)
    assert (start.host, start.pid, start.python) == (
        socket.gethostname(),
        os.getpid(),
        platform.python_version(),
    )
    assert start.versions["asyncrl"] == __version__
    assert {"torch", "transformers", "numpy"} <= start.versions.keys()
    assert start.devices[-1].endswith(f"{len(os.sched_getaffinity(0))} cores")
    assert start.job == "slurm 4711"
    assert (start.from_update, start.to_update, start.how) == (5, 7, "stopped")
    assert datetime.fromisoformat(start.began) <= datetime.fromisoformat(start.ended)


def test_a_gpu_that_does_not_answer_ends_no_run(monkeypatch):
    def broken(index):
        raise RuntimeError("CUDA error: unknown error\nand more")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    assert devices(gpus=True)[0] == "GPU 0 does not answer (CUDA error: unknown error)"


def test_a_run_without_gpus_asks_for_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("CUDA was asked"))
    assert len(this_start(attempt=1, command="x", from_update=0, ranks=1, gpus=False)["devices"]) == 1


def test_a_run_that_made_all_updates_is_finished_and_a_failure_is_named(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    with kept(tmp_path / "a") as it:
        it.note(10, {})
    assert starts_in(tmp_path / "a")[0].how == "finished"
    with pytest.raises(RuntimeError), kept(tmp_path / "b"):
        raise RuntimeError("no memory\nand more")
    assert starts_in(tmp_path / "b")[0].how == "failed: RuntimeError: no memory"
    with pytest.raises(KeyboardInterrupt), kept(tmp_path / "c"):
        raise KeyboardInterrupt
    assert starts_in(tmp_path / "c")[0].how == "stopped"


def test_a_resume_adds_a_start_and_one_that_was_killed_has_no_end(tmp_path):
    kept(tmp_path)
    with kept(tmp_path, START | {"attempt": 2, "began": "2025-01-02T00:00:00+00:00"}):
        pass
    starts = starts_in(tmp_path)
    assert [(start.attempt, start.how) for start in starts] == [(1, ""), (2, "stopped")]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[]", "it holds a list"),
        ("{", "Expecting"),
        ('{"format": 1}', "starts is missing"),
        ('{"format": 2, "left_out": 0, "starts": []}', "its format is 2"),
        ('{"format": 1, "left_out": 0, "starts": [3]}', "a start is a int"),
        ('{"format": 1, "left_out": 0, "starts": [{"attempt": true}]}', "attempt is True"),
    ],
)
def test_a_damaged_file_is_said_and_left_as_it_is(tmp_path, content, why):
    (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(ValueError, match=why):
        read(tmp_path)
    told = []
    kept(tmp_path, told=told)
    assert why in told[0]
    assert (tmp_path / "provenance.json").read_text() == content


def test_a_file_that_cannot_be_read_is_said_and_does_not_end_the_run(tmp_path):
    os.mkfifo(tmp_path / "provenance.json")
    told = []
    with kept(tmp_path, told=told):
        pass
    assert len(told) == 2
    assert "a named pipe" in told[0]
    assert told[0].endswith("The run goes on without")


def git(folder, *arguments):
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *names, "-C", folder, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_the_commit_of_a_checkout_and_whether_files_differ_from_it(tmp_path):
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


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == ("", False)
