"""Ctrl-C and SIGTERM end a run with its own last lines, however it was started."""

import contextlib
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext

from asyncrl.launch import torchrun_signals
from asyncrl.launch.torchrun_signals import (
    WAIT,
    WAIT_SECONDS,
    patient,
    quiet_after_signals,
    rendezvous_handler,
    starts_asyncrl,
)
from asyncrl.observability import metrics_system as m
from asyncrl.observability import process_status
from asyncrl.replay_tools.episodes import read_rows, replay_folder
from support.whole_runs import ROOT, TORCHRUN, Program, environment, left_over, reach, rows

SCRIPT = str(ROOT / "torchrun_scripts" / "train.sh")


def forbid_simulator(tmp_path: Path) -> dict[str, str]:
    """An environment in which a process that loads the physics of any simulator fails and leaves a note."""
    trap = tmp_path / "trap" / "mujoco" / "__init__.py"
    trap.parent.mkdir(parents=True)
    note = tmp_path / "loaded"
    trap.write_text(f"open({str(note)!r}, 'w').close()\nraise RuntimeError('simulator loaded')\n")
    return {"PYTHONPATH": f"{trap.parents[1]}:{environment(tmp_path)['PYTHONPATH']}"}


def ended(tmp_path: Path, command: list[str], more: dict[str, str], updates: int, number: int) -> str:
    """Start a run and signal it after some updates, as a terminal does; returns what it said."""
    run = tmp_path / "run"
    endless = [*command, "--updates", "100000", "--run-dir", str(run)]
    with Program(tmp_path, "said", endless, more=more) as program:
        reach(run, updates, program.process, 60)
        os.killpg(program.process.pid, number)
        said = program.ends(128 + number)
    assert "Traceback" not in said, said
    assert said.count(f"\nstopping after {signal.Signals(number).name}: saving what was learned\n") == 1
    assert said.rstrip().splitlines()[-1].startswith("continue:               asyncrl train --run-dir")
    return said


@pytest.mark.multiprocess
def test_a_run_under_torchrun_keeps_the_lag_bound_never_simulates_and_says_its_last_lines(
    flags, tmp_path
) -> None:
    run, command = tmp_path / "run", [*TORCHRUN, SCRIPT, *flags, "--replay.max-lag", "1"]
    said = ended(tmp_path, command, forbid_simulator(tmp_path), 4, signal.SIGINT)
    assert "1 learner + 1 actor" in said
    assert not (tmp_path / "loaded").exists(), "neither the learner nor an actor nor the replay may simulate"
    assert all(0 <= row[m.LAG_MAX.name] <= 1 for row in rows(run))
    versions = set()
    for row in read_rows(replay_folder(run)):
        assert np.all(np.diff(row.episode.policy_versions) >= 0)
        assert row.lag is None or row.lag <= 1
        versions |= set(row.episode.policy_versions.tolist())
    assert max(versions) >= 2, "new weights never reached the actor"
    assert left_over(tmp_path) == []
    assert list((tmp_path / "tmp").glob("asyncrl-*")) == []


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_script_of_bash_that_sigterm_ends_says_its_own_last_lines(flags, tmp_path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # Of bash's torchrun.
    ended(tmp_path, ["bash", SCRIPT, *flags], {"PATH": path}, 1, signal.SIGTERM)
    assert left_over(tmp_path) == []


def test_wrong_settings_are_not_started_again_and_the_last_wait_is_named(monkeypatch, capsys) -> None:
    results = [SimpleNamespace(failures={0: SimpleNamespace(exitcode=code)}) for code in (1, 2)]
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: group)
    monkeypatch.setattr(LocalElasticAgent, "_exit_barrier", lambda self: None)
    torchrun_signals._change_agent()
    agent: Any = LocalElasticAgent.__new__(LocalElasticAgent)
    agent._remaining_restarts, agent._exit_barrier_timeout = 3, 300
    left = [agent._monitor_workers(one) and agent._remaining_restarts for one in results]
    assert left == [3, 0]
    for hosts in (1, 2):
        agent._worker_group = SimpleNamespace(group_world_size=hosts)
        agent._exit_barrier()
    said = capsys.readouterr().out
    assert said == "asyncrl: done here; torchrun waits up to 300 s for the other hosts\n"


class SignalException(Exception):
    """What torchrun raises, by name and attribute."""

    def __init__(self, sigval: signal.Signals) -> None:
        self.sigval = sigval


def test_only_signals_are_quiet() -> None:
    shown, left = list[BaseException](), list[int]()
    hook = quiet_after_signals(lambda kind, error, trace: shown.append(error), left.append)
    for error in (SignalException(signal.SIGINT), ValueError("mine"), SignalException(signal.SIGTERM)):
        hook(type(error), error, None)
    assert [type(error) for error in shown] == [ValueError]
    assert left == [130, 143]


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        (["torchrun", SCRIPT], True),
        (["torchrun", "--nproc-per-node", "3", os.path.relpath(SCRIPT), "--updates", "4"], True),
        (["run.py", "--standalone", "-m", "asyncrl", "train"], True),
        (["torchrun", "--no-python", "bash", SCRIPT], True),
        (["torchrun", "their/torchrun_scripts/train.sh"], False),
        (["torchrun", "train.py", "--config", "asyncrl"], False),
        (["torchrun", "-m", "their.asyncrl"], False),
        (["torchrun"], False),
    ],
)
def test_only_torchruns_of_asyncrl_are_changed(command, ours, monkeypatch) -> None:
    assert starts_asyncrl(command) == ours
    before = sys.excepthook
    monkeypatch.setattr(torchrun_signals.sys, "argv", command)
    monkeypatch.setattr(sys, "excepthook", before)  # So that they are put back afterwards.
    monkeypatch.setattr(PContext, "close", PContext.close)
    monkeypatch.setenv(WAIT, "")
    monkeypatch.delenv(WAIT)
    with pytest.raises(RuntimeError, match="no rendezvous back-end"):
        rendezvous_handler()("params")
    assert (sys.excepthook is not before) == ours
    assert os.environ.get(WAIT) == (str(WAIT_SECONDS) if ours else None)
    monkeypatch.setenv(WAIT, "7")  # The user's own stays.
    with contextlib.suppress(RuntimeError):
        rendezvous_handler()
    assert os.environ[WAIT] == "7"


def test_a_torch_that_names_its_agent_otherwise_is_said(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torchrun_signals.sys, "argv", ["torchrun", SCRIPT])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(PContext, "close", PContext.close)
    monkeypatch.setenv(WAIT, "7")
    monkeypatch.setattr(local_elastic_agent, "LocalElasticAgent", type("Renamed", (), {}))
    with pytest.raises(RuntimeError, match="no rendezvous back-end"):
        rendezvous_handler()("params")
    assert "torchrun of this torch ends runs in its own way" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "said", "waits"), [(77, {}, 77), (None, {"timeout": 66}, 66)])
def test_ranks_have_time_at_the_first_signal_alone(seconds, said, waits) -> None:
    asked = list[tuple[object, object, int]]()
    close = patient(lambda ranks, number, allowed: asked.append((ranks, number, allowed)), seconds)
    close("ranks")
    close("ranks", signal.SIGTERM, 5)
    for _ in range(2):
        try:
            raise SignalException(signal.SIGINT)
        except SignalException as error:
            close("ranks", error.sigval, **said)
    close("ranks", signal.SIGTERM)
    assert asked == [
        ("ranks", None, 30),
        ("ranks", signal.SIGTERM, 5),
        ("ranks", signal.SIGINT, waits),
        ("ranks", signal.SIGINT, 1),
        ("ranks", signal.SIGTERM, 30),
    ]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_signal_ends_ranks_that_do_not_answer(flags, tmp_path) -> None:
    run = tmp_path / "run"
    command = [*TORCHRUN, SCRIPT, *flags, "--updates", "100000", "--run-dir", str(run)]
    with Program(tmp_path, "said", command) as program:
        process = program.process
        reach(run, 1, process, 60)
        (learner,) = (found for found in process_status.read(run) if found.role == "learner-0")
        os.kill(learner.pid, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(signal.SIGINT)
        said = program.ends(130)
    assert "Traceback" not in said, said
    assert left_over(tmp_path) == []


def test_the_installed_package_names_it() -> None:
    named = {point.name: point.value for point in metadata.entry_points(group="torchrun.handlers")}
    assert named["asyncrl"] == "asyncrl.launch.torchrun_signals:rendezvous_handler"
