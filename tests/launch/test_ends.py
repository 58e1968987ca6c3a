"""How a run ends before its last update, and whole runs whose actors come late, leave and are killed."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.commands.train import read_settings
from asyncrl.config.run import TrainConfig, to_json
from asyncrl.config.sections import OptimizerSettings, ReplaySettings, WeightSettings
from asyncrl.errors import ConfigError
from asyncrl.launch import console, endpoints
from asyncrl.launch.job import Hosts
from asyncrl.launch.join import resolved
from asyncrl.launch.placement import parse_placement
from asyncrl.messaging.keys import create_keys
from asyncrl.observability import metrics_system as s
from asyncrl.observability import process_status
from asyncrl.storage import checkpoint
from asyncrl.storage.run_owner import NO_RUN
from support.join_site import Site
from support.whole_runs import TORCHRUN, Program, exit_code, left_over, reach, rows

FRAGILE = ["--updates", "100000", "--checkpoint-every", "100000"]
PATCHED = """
from asyncrl.__main__ import start
from asyncrl.launch import followers
if __name__ == "__main__":
    followers.MAX_RESPAWNS = 0
    start("train")
"""


@pytest.fixture
def fragile(tmp_path: Path) -> Path:
    """A program that trains, and ends with the first death of an actor."""
    (tmp_path / "fragile.py").write_text(PATCHED)
    return tmp_path / "fragile.py"


def actor_of(run: Path) -> int:
    (actor,) = (one for one in process_status.read(run) if one.role.startswith("actor") and one.alive)
    return actor.pid


@pytest.mark.timeout(60)
def test_a_filter_that_leaves_nothing_ends_the_run_well(flags, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("asyncrl.replay.buffer.MAX_FILTERED_BATCHES", 3)
    run = tmp_path / "run"
    more = ["--inline", "--updates", "5", "--run-dir", str(run), "--actor.success-threshold", "1.0"]
    more += ["--algorithm.filter-groups"]
    assert cli.run("train", [*flags, *more]) == 0
    said = capsys.readouterr().out
    assert re.search(r"stopped after 0 of 5 updates: within each of the last \d groups all episodes", said)
    assert f"asyncrl train --run-dir {run} --resume" in said
    assert checkpoint.latest(run) == run / "checkpoints" / "update_000000"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_actor_that_dies_too_often_ends_the_run_with_what_was_learned(flags, tmp_path, fragile) -> None:
    run = tmp_path / "run"
    with Program(
        tmp_path, "said", [sys.executable, str(fragile), *flags, *FRAGILE, "--run-dir", str(run)]
    ) as program:
        reach(run, 2, program.process, 60)
        os.kill(actor_of(run), signal.SIGKILL)
        errors = program.ends(1)
    reached = len(rows(run))
    assert checkpoint.latest(run) == run / "checkpoints" / f"update_{reached:06d}"
    assert "died 1 time (allowed respawns: 0)" in errors
    assert f"Version {reached} is saved" in errors
    assert f"continue:               asyncrl train --run-dir {run} --resume\n" in errors
    assert left_over(tmp_path) == []


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("placement", ["learner=0,actor=1", "learner=0-1,actor=1"])
def test_rank_0_saves_when_the_actor_of_another_rank_dies_too_often(
    flags: list[str], tmp_path: Path, fragile: Path, placement: str
) -> None:
    run = tmp_path / "run"
    ends = [*FRAGILE, "--placement", placement, "--algorithm.groups-per-update", "2", "--run-dir", str(run)]
    start = [*TORCHRUN, "--nproc-per-node", "2", str(fragile)]
    with Program(tmp_path, "said", [*start, *flags, *ends]) as program:
        reach(run, 2, program.process, 90)
        os.kill(actor_of(run), signal.SIGKILL)
        errors = program.ends(1)
    reached = len(rows(run))
    assert checkpoint.latest(run) == run / "checkpoints" / f"update_{reached:06d}", errors
    assert "Rank 1: actor-1 died 1 time" in errors
    assert errors.count("Its first error") + errors.count("It left no traceback") == 1, "said once"
    assert left_over(tmp_path) == []


@pytest.mark.timeout(60)
def test_an_inline_run_that_waits_in_vain_is_saved_with_its_exit_code(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr("asyncrl.replay.limiter.Limiter.admit", refused_from_group_2(monkeypatch))
    more = ["--inline", "--updates", "9", "--checkpoint-every", "1000", "--batch-timeout", "1"]
    more += ["--replay.max-lag", "0", "--run-dir", str(run)]
    assert cli.run("train", [*flags, *more]) == 1
    assert checkpoint.latest(run) == run / "checkpoints" / "update_000002"
    assert "Version 2 is saved" in capsys.readouterr().err


def refused_from_group_2(monkeypatch: pytest.MonkeyPatch):
    """Admission that finds every episode of group 2 and later invalid."""
    from asyncrl.records import Episode
    from asyncrl.replay.interface import Receipt
    from asyncrl.replay.limiter import Limiter

    admit = Limiter.admit

    def refusing(limiter: Limiter, episode: Episode, actor: str | None = None) -> Receipt:
        if int(episode.group_id) < 2:
            return admit(limiter, episode, actor)
        return Receipt(episode_id=episode.episode_id, status="dropped_invalid", reason="not today")

    return refusing


def test_a_resume_with_more_updates_does_not_raise_a_learning_rate_that_fell(tmp_path: Path) -> None:
    ends_with_the_run = OptimizerSettings(schedule="cosine", decay_updates=10)
    for settings in (TrainConfig(), TrainConfig(optimizer=ends_with_the_run)):
        assert console.notes(settings) == []
    falling = ["--optimizer.schedule", "linear", "--optimizer.learning-rate", "0.1"]
    falling += ["--run-dir", str(tmp_path)]
    begun = read_settings([*falling, "--updates", "2"])
    assert begun.optimizer.decay_updates == 2
    (tmp_path / "config.json").write_text(to_json(begun))
    again = read_settings(["--run-dir", str(tmp_path), "--resume", "--updates", "4"])
    assert (again.updates, again.optimizer.decay_updates) == (4, 2)
    (line,) = console.notes(again)
    assert "the learning rate falls until update 2 of 4 and stays at 0 from there" in line
    longer = ["--run-dir", str(tmp_path), "--resume", "--updates", "6", "--optimizer.decay-updates", "10"]
    assert read_settings(longer).optimizer.decay_updates == 10


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
