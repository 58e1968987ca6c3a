"""`asyncrl status`: what a run does, or how it ended; in text and JSON, once or until the end."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.commands.runs import _lines
from asyncrl.observability import process_status
from asyncrl.storage import run_owner
from asyncrl.storage.run_folder import State
from support.run_folders import kill_owner, row, write_run


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
