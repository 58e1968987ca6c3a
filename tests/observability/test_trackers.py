"""Trackers get a run's rows from a process of their own, and no library can hold up or end the run."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import threading

import pytest

from asyncrl.config.run import TrainConfig, to_json
from asyncrl.errors import ConfigError
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status, waits
from asyncrl.observability.logger import MetricsLogger, WithoutZeros
from asyncrl.observability.trackers import Trackers, check_installed, numbers_of, rows_of
from support.waiting import wait_for

TRACKIO = '''
"""Stands in for trackio: writes what it is told to a file, and does what WRONG says."""
import json, os, signal, time
WRONG = os.environ.get("WRONG", "")
def note(**what):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(what) + "\\n")
class config:
    update = staticmethod(lambda values, allow_val_change: note(config=values))
class Run:
    def log(self, values, step):
        if WRONG == "block":
            time.sleep(600)
        if WRONG == "raise" and step == 2:
            raise ConnectionError("no route to host\\nand a second line")
        if WRONG == "die" and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        note(step=step, values=values)
    def finish(self):
        note(finished=True)
def init(project, name):
    if WRONG == "begin":
        raise SystemExit("no API key")
    print("what a library prints is no answer")
    seen = [os.environ.get(key) for key in ("RANK", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES")]
    note(project=project, name=name, seen=seen)
    return Run()
'''
SLOW = 60.0
"""Seconds that a process may take to import accelerate on a busy host."""


@pytest.fixture
def fake_trackio(tmp_path, monkeypatch):
    """A package `trackio` for the trackers' processes; returns the file of what it is told."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "trackio.py").write_text(TRACKIO)
    told = tmp_path / "told.jsonl"
    told.touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TOLD", str(told))
    return told


def run_with(run_dir, rows, *, name="trackio", close_seconds=SLOW, resume_step=0, after_rows=None):
    """Write rows as a learner does; returns the lines that the console said."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.json").write_text(to_json(TrainConfig(seed=7)))
    stream = io.StringIO()
    with MetricsLogger(run_dir, updates=99, resume_step=resume_step, stream=stream) as log:
        trackers = Trackers(
            [name, "tensorboard"],
            run_dir,
            log.banner,
            command="asyncrl train --seed 7",
            close_seconds=close_seconds,
        )
        log.readers.append(trackers.note)
        for step, values in enumerate(rows, start=resume_step + 1):
            log.write(step, values)
        if after_rows is not None:
            after_rows(log, stream)
    trackers.close()
    return stream.getvalue().splitlines()


def told_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(lines):
    return [line for line in lines if line.startswith(("trackio", "mlflow", "wandb"))]


ROWS = [{m.SUCCESS_ONCE: 0.25 * step, s.RESPAWNS: 0.0} for step in (0, 1, 2)]


def test_a_tracker_gets_project_name_settings_command_and_every_row(tmp_path, fake_trackio, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    lines = run_with(tmp_path / "run-7", ROWS)
    begun, configured, *rows, finished = told_in(fake_trackio)
    assert begun == {"project": "asyncrl", "name": "run-7", "seen": [None, None, ""]}
    assert configured["config"]["command"] == "asyncrl train --seed 7"
    assert configured["config"]["seed"] == 7
    assert configured["config"]["actor.success-threshold"] == 0.7
    assert rows == [{"step": step, "values": {"env/success_once": 0.25 * (step - 1)}} for step in (1, 2, 3)]
    assert finished == {"finished": True}
    assert said(lines) == []
    assert "what a library prints" in (tmp_path / "run-7/logs/tracker-trackio.log").read_text()


def test_a_resumed_run_sends_only_its_own_rows(tmp_path, fake_trackio):
    run_with(tmp_path / "run", ROWS[:2])
    fake_trackio.write_text("")
    run_with(tmp_path / "run", [{m.SUCCESS_ONCE: 1.0}], resume_step=2)
    assert [row["step"] for row in told_in(fake_trackio) if "step" in row] == [3]


def test_a_row_that_a_tracker_refuses_is_said_once_counted_and_the_others_arrive(
    tmp_path, fake_trackio, monkeypatch
):
    monkeypatch.setenv("WRONG", "raise")
    process_status.publish_as(tmp_path / "run", "learner-0")
    before = process_status.totals()[waits.LOST_TRACKED.total]
    (line,) = said(run_with(tmp_path / "run", ROWS))
    log = tmp_path / "run/logs/tracker-trackio.log"
    assert line == (
        f"trackio does not take update 2 (ConnectionError: no route to host). The run goes on: {log}"
    )
    assert [row["step"] for row in told_in(fake_trackio) if "step" in row] == [1, 3]
    assert process_status.totals()[waits.LOST_TRACKED.total] - before == 1
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize(
    ("wrong", "reason"), [("begin", "SystemExit: no API key"), ("die", "its process ended with exit code -9")]
)
def test_a_tracker_that_cannot_begin_or_dies_is_said_and_later_rows_are_counted(
    tmp_path, fake_trackio, monkeypatch, wrong, reason
):
    monkeypatch.setenv("WRONG", wrong)

    def lost():
        return process_status.totals()[waits.LOST_TRACKED.total]

    def write_until_gone(log, stream):
        wait_for(lambda: (log.write(4, ROWS[0]), lost() > before)[1])

    process_status.publish_as(tmp_path / "run", "learner-0")
    before = lost()
    (line,) = said(run_with(tmp_path / "run", ROWS, after_rows=write_until_gone))
    log = tmp_path / "run/logs/tracker-trackio.log"
    assert line == f"trackio gets nothing any more ({reason}). The run goes on: {log}"
    assert lost() - before == 1
    assert "Fatal Python error" not in log.read_text()


def test_a_tracker_that_blocks_for_ever_holds_up_neither_a_row_nor_the_end(
    tmp_path, fake_trackio, monkeypatch
):
    monkeypatch.setenv("WRONG", "block")
    lines = run_with(tmp_path / "run", ROWS, close_seconds=1.0)  # It would sleep for ten minutes.
    assert said(lines) == [
        "trackio was ended: 1 s after the run it had not finished, and updates may be missing there. "
        "metrics.jsonl has them"
    ]
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3


def test_a_tracker_of_a_run_that_was_killed_sends_what_is_there_and_ends(tmp_path, fake_trackio):
    run = tmp_path / "run"
    program = (
        "import io, os, sys, time; from pathlib import Path\n"
        "from asyncrl.config.run import to_json; from asyncrl.config.run import TrainConfig\n"
        "from asyncrl.observability import metrics_training as m\n"
        "from asyncrl.observability.logger import MetricsLogger\n"
        "from asyncrl.observability.trackers import Trackers\n"
        "run = Path(sys.argv[1]); run.mkdir(); (run / 'config.json').write_text(to_json(TrainConfig()))\n"
        "log = MetricsLogger(run, updates=9, stream=io.StringIO())\n"
        "sent = Trackers(['trackio'], run, log.banner)\n"
        "for step in (1, 2): log.write(step, {m.SUCCESS_ONCE: 0.5})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, run], timeout=SLOW)
    assert killed.returncode == -9
    wait_for(lambda: {"finished": True} in told_in(fake_trackio))
    assert [row["step"] for row in told_in(fake_trackio) if "step" in row] == [1, 2]


def test_a_tracker_that_is_not_installed_is_refused_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install comet-ml wandb\. Or leave it out"):
        check_installed(["comet_ml", "tensorboard", "wandb"])
    check_installed(["tensorboard"])


def test_a_folder_of_its_name_is_no_tracker(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("asyncrl.observability.trackers.PACKAGES", {"left_over": "x", "whole": "y"})
    for name in ("left_over", "whole"):
        (tmp_path / name).mkdir()
    (tmp_path / "whole" / "__init__.py").touch()
    with pytest.raises(ConfigError, match=r"names left_over, which is not installed.*pip install x\."):
        check_installed(["left_over", "whole"])


def test_an_unknown_tracker_is_refused_where_it_is_set():
    with pytest.raises(ConfigError, match="--log-with names 'wandbb', which is no tracker"):
        TrainConfig(log_with=("wandbb",))
    assert TrainConfig(log_with=("tensorboard", "wandb")).log_with == ("tensorboard", "wandb")


def test_every_tracker_is_one_that_accelerate_knows():
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    from asyncrl.observability.trackers import ALWAYS, PACKAGES

    assert {ALWAYS, *PACKAGES} <= LOGGER_TYPE_TO_CLASS.keys()


def test_zeros_are_held_back_until_there_is_something_else_and_what_is_no_number_is_left_out():
    held_back = WithoutZeros()
    first = numbers_of({"step": 1, "time": 5.0, "a": 0.0, "env/return": 0.0, "b": None, "c": True})
    assert held_back(first) == {"env/return": 0.0}
    assert held_back(numbers_of({"step": 2, "time": 6.0, "a": 2.0, "b": 1})) == {"a": 2.0, "b": 1.0}
    assert held_back({"a": 0.0}) == {"a": 0.0}


def test_rows_are_read_as_they_grow_and_a_line_that_is_not_whole_waits(tmp_path):
    path, over = tmp_path / "metrics.jsonl", threading.Event()
    path.write_text('{"step": 1}\n{"step": 2}\nno row\n{"st')
    rows = rows_of(path, len('{"step": 1}\n'), over)
    assert next(rows)["step"] == 2
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert next(rows)["step"] == 3
    over.set()
    assert list(rows) == []


def test_an_evaluation_of_an_earlier_update_is_sent_with_the_newest_and_says_of_which(tmp_path, fake_trackio):
    def evaluated(log, stream):
        log.write_evaluation(0, {m.EVAL_SUCCESS: 0.5})

    run_with(tmp_path / "run", ROWS, after_rows=evaluated)
    last = [row for row in told_in(fake_trackio) if "step" in row][-1]
    assert last == {"step": 3, "values": {"eval/success_once": 0.5, "eval/version": 0.0}}


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow")
def test_mlflow_keeps_the_rows_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    lines = run_with(tmp_path / "run-7", ROWS, name="mlflow")
    assert said(lines) == []
    (kept,) = (tmp_path / "mlruns").glob("*/*/metrics/env/success_once")
    points = [line.split()[1:3] for line in kept.read_text().splitlines()]
    assert [(int(step), float(value)) for value, step in points] == [(1, 0.0), (2, 0.25), (3, 0.5)]
    assert (kept.parents[2] / "params" / "seed").read_text() == "7"
    assert (kept.parents[2] / "params" / "command").read_text() == "asyncrl train --seed 7"
    assert (kept.parents[2] / "tags" / "mlflow.runName").read_text() == "run-7"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_wandb_keeps_the_rows_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    lines = run_with(tmp_path / "run-7", ROWS, name="wandb")
    assert said(lines) == []
    (kept,) = (tmp_path / "run-7" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"env/success_once" in kept.read_bytes()
