"""What a whole run tells trackers, monitoring and its provenance."""

import http.client
import json
import signal
import subprocess
import time

import pytest

from asyncrl import cli
from asyncrl.storage import provenance
from support.event_files import curves_in
from support.tiny_models import write_models
from support.whole_runs import PATIENCE, TRAIN, environment, exit_code, free_port, left_over


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.timeout(120)
def test_an_inline_run_tells_how_it_was_started(flags, tmp_path):
    run = tmp_path / "run"
    more = ["--inline", "--updates", "2", "--run-dir", str(run), "--actor.success-threshold", "0.5"]
    assert cli.run("train", [*flags, *more]) == 0
    (start,) = provenance.read(run)[0]
    assert [start[key] for key in ("how", "from_update", "to_update", "ranks")] == ["finished", 0, 2, 1]
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
    command = [*TRAIN, *flags, *more, "--actor.success-threshold", "0.5"]
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
    (start,) = provenance.read(run)[0]
    assert start["how"] == "stopped"
    assert start["to_update"] >= 2
    said = (tmp_path / "said.txt").read_text()
    assert f"http://127.0.0.1:{port}/metrics" in said
    assert start["command"].startswith("asyncrl train ")
