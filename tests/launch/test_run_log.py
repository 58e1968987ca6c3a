"""What a whole run tells trackers, monitoring and its provenance, and the replay's compaction at its end."""

import dataclasses
import fcntl
import http.client
import json
import signal
import subprocess
import time

import pytest

from asyncrl import cli
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings
from asyncrl.launch import console
from asyncrl.replay.group_file import read_group
from asyncrl.replay_tools.cleanup import codec_in
from asyncrl.storage import provenance
from support.event_files import curves_in
from support.recorded_run import make_run
from support.tiny_models import write_models
from support.whole_runs import PATIENCE, TRAIN, environment, exit_code, free_port, left_over

COMPACT = TrainConfig(updates=4, replay=ReplaySettings(compact_at_end=True))


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def groups_in(run):
    return sorted((run / "replay").glob("group-*.h5"))


def compacted(config, run, version, *, stop=lambda: False):
    lines = []
    console.compact_at_end(config, run, version, stop_requested=stop, tell=lines.append)
    return lines


def test_a_run_that_made_all_updates_is_compacted_and_says_what_it_saved(tmp_path):
    run = make_run(tmp_path)
    (line,) = compacted(COMPACT, run, 4)
    assert line.startswith("compressed 3 of 4 groups with gzip: ")
    assert [codec_in(path) for path in groups_in(run)] == ["gzip", "gzip", None, "gzip"]
    assert all(read_group(path) for path in groups_in(run))


@pytest.mark.parametrize(
    ("config", "version", "stop"),
    [
        (TrainConfig(updates=4), 4, False),
        (COMPACT, 3, False),
        (COMPACT, 4, True),
    ],
    ids=["not asked for", "updates are missing", "asked to stop"],
)
def test_other_ends_leave_the_replay_as_it_is(tmp_path, config, version, stop):
    run = make_run(tmp_path)
    assert compacted(config, run, version, stop=lambda: stop) == []
    assert [codec_in(path) for path in groups_in(run)] == [None] * 4


def test_a_stop_on_the_way_ends_after_the_group_under_way(tmp_path):
    run = make_run(tmp_path)
    answers = iter([False, False, True])
    (line,) = compacted(COMPACT, run, 4, stop=lambda: next(answers))
    assert "stopped after 1" in line
    assert [codec_in(path) for path in groups_in(run)] == ["gzip", None, None, None]


def test_a_replay_that_cannot_be_compacted_is_said_and_nothing_is_raised(tmp_path):
    run = make_run(tmp_path)
    with (run / "replay" / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (line,) = compacted(COMPACT, run, 4)
    assert line.startswith("--replay.compact-at-end: the replay is not compressed (")
    assert line.endswith(f"The run ended well all the same; later: asyncrl replay compact {run}")
    assert [codec_in(path) for path in groups_in(run)] == [None] * 4


@pytest.mark.timeout(120)
def test_an_inline_run_tells_how_it_was_started_and_compacts_its_replay(flags, tmp_path, capsys):
    run = tmp_path / "run"
    more = ["--inline", "--updates", "2", "--run-dir", str(run), "--actor.success-threshold", "0.5"]
    assert cli.run("train", [*flags, *more, "--replay.compact-at-end"]) == 0
    (start,) = (provenance.Launch(**row) for row in provenance.read(run)[0])
    assert (start.how, start.from_update, start.to_update, start.ranks) == ("finished", 0, 2, 1)
    assert "compressed " in capsys.readouterr().out
    assert "gzip" in [codec_in(path) for path in groups_in(run)]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curves = curves_in(run / "tensorboard")
    never = {name for name in rows[0] if not name.startswith("env/") and not any(row[name] for row in rows)}
    assert "replay/dropped_invalid" in never
    assert not never & curves.keys()
    assert [value for _, value in curves["env/success_once"]] == [row["env/success_once"] for row in rows]


def test_a_tracker_that_is_not_installed_ends_the_start_with_nothing_made(
    flags, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = tmp_path / "run"
    more = ["--inline", "--updates", "1", "--run-dir", str(run), "--log-with", "tensorboard", "mlflow"]
    assert exit_code([*flags, *more]) == 2
    assert "pip install mlflow" in capsys.readouterr().err
    assert not run.exists()


def answer(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        found = connection.getresponse()
        return found.status, found.read().decode()
    finally:
        connection.close()


@pytest.mark.multiprocess
@pytest.mark.timeout(200)
def test_a_run_is_monitored_from_its_first_moment_until_it_is_stopped(flags, tmp_path):
    port, run = free_port(), tmp_path / "run"
    more = ["--updates", "10000", "--run-dir", str(run), "--monitor.listen", str(port)]
    command = [*TRAIN, *flags, *more, "--actor.success-threshold", "0.5", "--replay.compact-at-end"]
    with (tmp_path / "said.txt").open("w") as said:
        process = subprocess.Popen(command, env=environment(tmp_path), stdout=said, stderr=said)
    try:
        values, until = {}, time.monotonic() + PATIENCE
        while values.get("asyncrl_run_update", 0) < 2:
            assert process.poll() is None, (tmp_path / "said.txt").read_text()
            assert time.monotonic() < until, values
            try:
                status, text = answer(port, "/metrics")
            except ConnectionRefusedError:  # It loads its models.
                time.sleep(0.1)
                continue
            assert status == 200
            values = {}
            for line in text.splitlines():
                name, _, value = line.rpartition(" ")
                if not line.startswith("#"):
                    values[name.partition("{")[0]] = float(value)
                    values[name] = float(value)
            time.sleep(0.1)
        assert values['asyncrl_process_up{name="learner-0",role="learner",run="run"}'] == 1
        assert values['asyncrl_process_up{name="actor-0",role="actor",run="run"}'] == 1
        assert values['asyncrl_process_up{name="replay",role="replay",run="run"}'] == 1
        assert values["asyncrl_weights_version"] >= 1
        status, text = answer(port, "/healthz")
        assert (status, json.loads(text)["healthy"]) == (200, True)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE)
    assert code == 0, (tmp_path / "said.txt").read_text()
    assert left_over(tmp_path) == []
    with pytest.raises(ConnectionRefusedError):
        answer(port, "/healthz")
    (start,) = (provenance.Launch(**row) for row in provenance.read(run)[0])
    assert start.how == "stopped"
    assert start.to_update >= 2
    said = (tmp_path / "said.txt").read_text()
    assert f"http://127.0.0.1:{port}/metrics" in said
    assert "compressed" not in said
    assert dataclasses.asdict(start)["command"].startswith("asyncrl train ")
