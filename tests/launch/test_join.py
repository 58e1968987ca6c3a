"""`asyncrl actor --join` as a user meets it: whole runs whose actors come late, leave and are killed."""

import signal
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings, WeightSettings
from asyncrl.errors import ConfigError
from asyncrl.launch import endpoints
from asyncrl.launch.job import Hosts
from asyncrl.launch.join import resolved
from asyncrl.launch.placement import parse_placement
from asyncrl.messaging.keys import create_keys
from asyncrl.observability import metrics_system as s
from asyncrl.storage.run_owner import NO_RUN
from support.join_site import Site
from support.whole_runs import exit_code, left_over, rows


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_actors_join_leave_die_and_come_back_while_the_run_goes_on(flags: list[str], tmp_path: Path) -> None:
    alone = ["--placement", "learner=0", "--updates", "100000"]
    with Site(tmp_path, [*flags, *alone]) as site:
        site.train.until("waits up to 600 s (--batch-timeout) for actors to join: asyncrl actor --join")
        first, second = site.actor("first"), site.actor("second")
        site.train.until("second joined")
        site.train.until("first joined")
        site.progress(2)
        assert rows(site.run)[-1][s.WEIGHTS_MEMBERS.name] >= 1
        second.process.send_signal(signal.SIGTERM)
        assert "second: left the run" in second.ends()
        site.train.until("second left (1 joined actor now)")
        first.process.kill()
        site.train.until("first was not heard of for 8 s (0 joined actors now)")
        site.train.until("no actor is left: waits up to 600 s (--batch-timeout) for one to join")
        third = site.actor("third")
        site.train.until("third joined (1 joined actor now)")
        site.progress(2)
        site.train.process.send_signal(signal.SIGINT)
        assert "Traceback" not in site.train.ends()
        assert "third: the run is over" in third.ends()
    reached = len(rows(site.run))
    assert [row["step"] for row in rows(site.run)] == list(range(1, reached + 1))
    assert all(row[s.LAG_MAX.name] <= 2 for row in rows(site.run))
    assert rows(site.run)[-1][s.DROPPED_DEADLINE.name] >= 0
    assert left_over(tmp_path) == []
    assert list((tmp_path / "tmp").glob("asyncrl-*")) == []


@pytest.mark.parametrize(
    ("given", "endpoint"),
    [
        ("localhost:5555", "tcp://127.0.0.1:5555"),
        ("tcp://localhost:5555", "tcp://127.0.0.1:5555"),
        ("10.0.0.5:5555", "tcp://10.0.0.5:5555"),
        ("[::1]:5555", "tcp://[::1]:5555"),
        ("no such name:5555", "--join no such name:5555: no such name has no IPv4 address here"),
        ("ipc:///tmp/x", "ipc:///tmp/x"),
    ],
)
def test_hosts_that_are_joined_have_names_and_no_scheme(given: str, endpoint: str) -> None:
    try:
        assert resolved(given) == endpoint
    except ConfigError as error:
        assert str(error).startswith(endpoint)  # noqa: PT017


def test_what_cannot_join_is_told_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_keys(tmp_path / "many", ["learner", "far", "further"])
    create_keys(tmp_path / "none", ["learner"])
    local = "tcp://127.0.0.1:1"
    cases = [
        (["--join", "tcp://10.0.0.5:5555"], "neither is set"),
        (["--join", "http://x"], "not supported"),
        (["--join", local, "--name", "actor-0"], "the run's own processes"),
        (["--join", local, "--name", "../x"], "--name is"),
        (["--join", local, "--keys", str(tmp_path / "many")], "2 keys of actors (far, further)"),
        (["--join", local, "--keys", str(tmp_path / "none")], "0 keys of actors"),
        (["--join", local, "--keys", str(tmp_path / "many"), "--key", "nobody"], "nobody.secret"),
        (["--join", local, "--keys", str(tmp_path / "many"), "--name", "farthest"], "Name one with --key"),
    ]
    for arguments, why in cases:
        assert cli.run("actor", [*arguments, "--device", "cpu"]) == 2, arguments
        assert why in capsys.readouterr().err


def test_a_placement_without_actors_needs_an_address_to_join(tmp_path, capsys) -> None:
    assert cli.run("train", ["--placement", "learner=0", "--run-dir", str(tmp_path / "run")]) == 2
    assert "without --replay.listen no actor can join" in capsys.readouterr().err
    alone = parse_placement("learner=0", 1, joined=True)
    assert (alone.learners, alone.actors, alone.summary) == ((0,), (), "1 learner")
    create_keys(tmp_path / "keys", ["learner"])
    keys = ["--replay.listen", "tcp://127.0.0.1:5", "--replay.keys", str(tmp_path / "keys")]
    assert cli.run("train", ["--placement", "learner=0", *keys, "--run-dir", str(tmp_path / "run")]) == 2
    assert "no actor could join" in capsys.readouterr().err
    assert exit_code(["--weights.listen", "tcp://127.0.0.1:5"]) == 2
    assert "actors join by --replay.listen first" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_weights_are_fetched_beside_the_replay_unless_said_otherwise() -> None:
    def served_at(config: TrainConfig) -> str:
        hosts = endpoints.with_addresses(config, Hosts())
        return endpoints.weight_settings(config, hosts, "", NO_RUN).listen

    listen = ReplaySettings(listen="tcp://127.0.0.1:5555")
    assert served_at(TrainConfig(replay=listen)) == "tcp://127.0.0.1:0"
    own = WeightSettings(listen="tcp://127.0.0.1:5556")
    assert served_at(TrainConfig(replay=listen, weights=own)) == "tcp://127.0.0.1:5556"
    assert served_at(TrainConfig()) == "", "only in the private folder"
