"""Monitoring by HTTP: what Prometheus reads, when a run is not healthy, and that no client can hold it up."""

import http.client
import json
import socket
import sys
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import MonitorSettings
from asyncrl.errors import ConfigError
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status
from asyncrl.observability.metrics import REGISTRY
from asyncrl.observability.monitor import (
    Monitor,
    check_free,
    line_about,
    name_of,
    parse_address,
    stalled,
    unhealthy,
)
from asyncrl.observability.process_status import Process, ThreadActivity

PATIENCE = 30.0


@pytest.fixture
def monitor(tmp_path):
    """Of a run `mine` whose learner is this process."""
    run_dir = tmp_path / "mine"
    process_status.publish_as(run_dir, "learner-0")
    process_status.set_activity("")
    with Monitor(("127.0.0.1", 0), run_dir, updates=40, resume_step=3, clock=lambda: 1000.0) as it:
        yield it
    process_status.set_activity("")


def ask(monitor, path, method="GET"):
    """Status, type and text of an answer."""
    connection = http.client.HTTPConnection(*monitor.address, timeout=PATIENCE)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type"), answer.read().decode()
    finally:
        connection.close()


def values_in(text):
    """(name, labels) -> value, as Prometheus's own parser reads them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_the_last_row_the_progress_and_the_processes(monitor):
    monitor.note(4, {m.GRAD_NORM: 0.5, s.GROUPS_PER_MINUTE: 11.25})
    process_status.set_activity("waiting for a batch")
    status, kind, text = ask(monitor, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    values, run = values_in(text), (("run", "mine"),)
    assert values["asyncrl_train_actor_grad_norm", run] == 0.5
    assert values["asyncrl_time_groups_per_minute", run] == 11.25
    assert values["asyncrl_run_update", run] == 4
    assert values["asyncrl_run_updates", run] == 40
    assert values["asyncrl_run_last_update_timestamp_seconds", run] == 1000.0
    assert values["asyncrl_run_healthy", run] == 1
    learner = (("name", "learner-0"), ("role", "learner"), *run)
    assert values["asyncrl_process_up", learner] == 1
    assert 0 <= values["asyncrl_process_activity_seconds", learner] < PATIENCE


def test_every_metric_has_help_and_type_and_names_are_quoted(tmp_path):
    with Monitor(("127.0.0.1", 0), tmp_path / 'a "run"\\of\nmine', updates=1) as monitor:
        monitor.note(1, dict.fromkeys(REGISTRY.values(), float("inf")) | {m.APPROX_KL: float("nan")})
        _, _, text = ask(monitor, "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in REGISTRY.values():
        family = families[name_of(metric.name)]
        assert family.type == "gauge"
        assert family.documentation.startswith(metric.meaning)
        ((labels, value),) = [(sample.labels, sample.value) for sample in family.samples]
        assert labels == {"run": 'a "run"\\of\nmine'}
        assert str(value) == ("nan" if metric == m.APPROX_KL else "inf")


def test_a_thread_that_takes_longer_than_it_may_is_not_healthy(monitor):
    process_status.set_activity("updating version 3", 900.0)
    status, kind, text = ask(monitor, "/healthz")
    assert (status, kind) == (200, "application/json")
    assert json.loads(text) == {"healthy": True, "update": 3, "seconds_since": 0.0, "reasons": []}
    process_status.set_activity("updating version 3", 1e-6)
    status, _, text = ask(monitor, "/healthz")
    assert status == 503
    (reason,) = json.loads(text)["reasons"]
    assert reason == "learner-0: 'updating version 3' takes 0 s, and may 0 s"
    assert values_in(ask(monitor, "/metrics")[2])["asyncrl_run_healthy", (("run", "mine"),)] == 0


def activity(seconds, allowed):
    return ThreadActivity(thread="MainThread", what="x", seconds=seconds, allowed=allowed)


@pytest.mark.parametrize(
    ("seconds", "allowed", "expected"),
    [
        (839, 900, False),
        (841, 900, True),  # Its last minute: a wait's own deadline is over then.
        (10_000, 0, False),  # It may take any time.
        (14, 30, False),
        (16, 30, True),
    ],
)
def test_no_progress_is_nearly_all_of_the_time_that_an_activity_may_take(seconds, allowed, expected):
    activities = (activity(seconds, allowed),)
    assert stalled(activities[0]) is expected
    for alive in (True, False):  # A dead process is not judged by what it did last.
        process = Process(role="actor-1", pid=1, alive=alive, activities=activities)
        assert bool(unhealthy([process])) is (alive and expected)


def test_processes_that_died_before_this_start_of_the_run_are_not_shown(tmp_path):
    process_status.publish_as(tmp_path, "learner-0")
    own = (tmp_path / "processes" / "learner-0").read_bytes()
    dead = own[:8] + (2**22 - 7).to_bytes(8, "little") + (1).to_bytes(8, "little") + own[24:]
    (tmp_path / "processes" / "actor-8").write_bytes(dead)
    time.sleep(0.02)  # The clock of files goes in steps of up to 10 ms.
    with Monitor(("127.0.0.1", 0), tmp_path, updates=1) as monitor:
        time.sleep(0.02)
        (tmp_path / "processes" / "actor-9").write_bytes(dead)
        values = values_in(ask(monitor, "/metrics")[2])
    up = {dict(labels)["name"]: value for (name, labels), value in values.items() if name.endswith("_up")}
    assert up == {"learner-0": 1.0, "actor-9": 0.0}


def test_other_paths_and_methods_are_refused(monitor):
    assert ask(monitor, "/config.json")[0] == 404
    assert ask(monitor, "/../identity.json")[0] == 404
    assert [ask(monitor, "/metrics", method)[0] for method in ("POST", "HEAD")] == [501, 501]
    assert ask(monitor, "/healthz?verbose")[0] == 200


def test_a_client_that_says_nothing_is_cut_off_and_others_are_answered(tmp_path):
    with (
        Monitor(("127.0.0.1", 0), tmp_path, updates=1, request_seconds=0.5) as monitor,
        socket.create_connection(monitor.address, timeout=PATIENCE) as slow,
    ):
        slow.sendall(b"GET /met")
        assert ask(monitor, "/healthz")[0] == 200
        assert slow.recv(100) == b""


def test_nobody_answers_after_the_end(tmp_path):
    with Monitor(("127.0.0.1", 0), tmp_path, updates=1, request_seconds=0.5) as monitor:
        address = monitor.address
        open_one = socket.create_connection(address, timeout=PATIENCE)
        assert ask(monitor, "/healthz")[0] == 200
    assert open_one.recv(100) == b""
    open_one.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=PATIENCE)
    monitor.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("node-3:9400", ("node-3", 9400)),
    ],
)
def test_an_address_without_a_host_is_this_host_only(text, address):
    assert parse_address(text) == address
    assert TrainConfig(monitor=MonitorSettings(listen=text)).monitor.listen == text


@pytest.mark.parametrize(
    "text", ["http://localhost:9400", "localhost", "0", "65536", "1:", "٣٣٣", "-1", "9" * 99]
)
def test_an_address_that_cannot_be_one_is_refused_where_it_is_set(text):
    with pytest.raises(ConfigError, match=r"--monitor\.listen is .* expected HOST:PORT"):
        MonitorSettings(listen=text)


def test_an_address_that_somebody_has_is_refused_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--monitor.listen is {port}, but it cannot be opened"):
            check_free(str(port))
    check_free("")


def test_a_missing_package_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"prometheus_client is not installed.*asyncrl\[monitor\]"):
        check_free("9400")


def test_the_console_says_what_can_be_read_beyond_this_host():
    assert line_about("9400") == "monitor:                http://127.0.0.1:9400/metrics and /healthz"
    assert line_about("localhost:9400").count("\n") == 0
    assert "without a key" in line_about("0.0.0.0:9400")
    assert line_about("[::]:9400").startswith("monitor:                http://[::]:9400/metrics")
