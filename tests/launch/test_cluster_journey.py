"""What docs/cluster.md tells the keeper of a cluster, on two nodes: start, watch, stop, queue, finish."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.replay_tools.episodes import read_rows, replay_folder
from support import ROOT
from support.chaos_run import marked_pids
from support.several_hosts import SeveralHosts, address, no_namespaces
from support.slurm import AWAIT_TASKS
from support.whole_runs import PATIENCE, Program, left_over, rows

UPDATES = 40
"""Enough that the run is still going on when it is told that its time is nearly over, and when seen again."""
JOB = "4711"
MONITOR = f"{address(1)}:9400"
READ = """
import json, sys, urllib.error, urllib.request
try:
    with urllib.request.urlopen(sys.argv[1], timeout=10) as answer:
        print(json.dumps([answer.status, answer.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
except OSError:
    print(json.dumps([0, ""]))
"""
SHIMS = {
    "scontrol": '[[ $1 == show ]] && printf "%s\\n" node-1 node-2; exit 0',
    # The command on every node, as slurmd starts it; USR1 is handed on, and what ends ends by itself.
    "srun": """
while [[ $1 != bash ]]; do shift; done
SLURMD_NODENAME=node-1 SLURM_NODEID=0 "$@" & tasks=($!)
SLURMD_NODENAME=node-2 SLURM_NODEID=1 $TO_OTHER_NODE "$@" & tasks+=($!)
trap 'kill -USR1 "${tasks[@]}"' USR1
"""
    + AWAIT_TASKS,
}
Values = dict[tuple[str, str], float]
"""(name of a metric without asyncrl_, name of the process or empty) -> value."""


class Job:
    """A Slurm job of two nodes, started again under the same number, and its run."""

    def __init__(self, tmp_path: Path, hosts: SeveralHosts, flags: list[str]) -> None:
        self.tmp_path, self.hosts = tmp_path, hosts
        self.run, self.calls = tmp_path / "run", tmp_path / "calls"
        more = {
            "algorithm.groups-per-update": 2,
            "checkpoint-every": 1000,
            "updates": UPDATES,
            "run-dir": self.run,
            "monitor.listen": MONITOR,
        }
        self.arguments = [*flags, *(text for name, x in more.items() for text in (f"--{name}", str(x)))]
        self.batches: list[Program] = []
        programs = tmp_path / "programs"
        programs.mkdir()
        for name, body in SHIMS.items():
            note = 'echo "$(basename "$0") $*" >> "$CALLS"'
            (programs / name).write_text(f"#!/usr/bin/env bash\n{note}\n{body}\n")
            (programs / name).chmod(0o755)
        self.variables = {
            "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": str(tmp_path),
            "CALLS": str(self.calls),
            "TO_OTHER_NODE": shlex.join(hosts.from_inside(2)),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": JOB,
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "1",
            "SLURM_CPUS_PER_TASK": "2",
            "SLURM_JOB_NODELIST": "node-[1-2]",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start(self, restarts: int) -> Program:
        """Run the script on the first node, as slurmd does."""
        script = ROOT / "torchrun_scripts" / "slurm_nodes.sbatch"
        command = [*self.hosts.on(1), "bash", str(script), *self.arguments]
        more = dict(self.variables)
        if restarts:
            more["SLURM_RESTART_COUNT"] = str(restarts)
        self.batches.append(Program(self.tmp_path, f"start-{restarts}", command, more=more))
        return self.batches[-1]

    def answer(self, path: str) -> tuple[int, str]:
        """Status and text that the second node gets from the monitor; status 0: none yet."""
        command = [*self.hosts.on(2), sys.executable, "-c", READ, f"http://{MONITOR}{path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        status, text = json.loads(done.stdout)
        return status, text

    def values(self) -> Values:
        """What Prometheus's own parser finds; nothing as long as nobody answers."""
        parser = pytest.importorskip("prometheus_client.parser")
        status, text = self.answer("/metrics")
        assert status in (0, 200), text
        samples = [x for family in parser.text_string_to_metric_families(text) for x in family.samples]
        assert all(sample.labels["run"] == self.run.name for sample in samples)
        return {(x.name.removeprefix("asyncrl_"), x.labels.get("name", "")): x.value for x in samples}

    def until(self, seen: Callable[[Values], bool], batch: Program) -> Values:
        """Wait until the monitor shows what is looked for."""
        deadline = time.monotonic() + PATIENCE
        while not (values := self.values()) or not seen(values):
            assert batch.process.poll() is None, batch.said()
            assert time.monotonic() < deadline, f"not seen: {values} {batch.said()}"
            time.sleep(0.2)
        return values

    def kill(self) -> None:
        """End what a test that failed left behind."""
        for batch in self.batches:
            batch.process.kill()
            batch.process.wait()
        for pid in marked_pids(f"MARK={self.tmp_path}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def called(self, program: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith(program)]


def watch(job: Job, batch: Program) -> None:
    """Look at a run from the second node, as monitoring does."""

    def complete(values: Values) -> bool:
        return values.get(("weights_joined", "")) == 1 and ("run_update", "") in values

    first = job.until(complete, batch)
    later = job.until(lambda values: values["run_update", ""] >= first["run_update", ""] + 2, batch)
    assert later["run_updates", ""] == UPDATES
    assert later["run_healthy", ""] == 1
    assert later["run_last_update_timestamp_seconds", ""] > first["run_last_update_timestamp_seconds", ""]
    assert later["weights_version", ""] <= later["run_update", ""]
    up = {name: value for (metric, name), value in later.items() if metric == "process_up"}
    assert up.keys() >= {"learner-0", "replay"}
    assert set(up.values()) == {1.0}
    assert "actor-1" not in up, "that is a process of another host"
    # Between two activities it has none.
    job.until(lambda values: ("process_activity_seconds", "learner-0") in values, batch)
    status, text = job.answer("/healthz")
    assert status == 200
    health = json.loads(text)
    assert health["healthy"]
    assert health["update"] >= later["run_update", ""]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(500)
def test_two_nodes_train_are_watched_go_back_into_the_queue_and_finish(
    flags: list[str], tmp_path: Path
) -> None:
    if reason := no_namespaces():
        pytest.skip(reason)
    with SeveralHosts(2) as hosts:
        job = Job(tmp_path, hosts, flags)
        try:
            reached = first_start(job)
            last_start(job, reached)
            assert left_over(tmp_path) == []
        finally:
            job.kill()


def first_start(job: Job) -> int:
    """Start, look, and tell it that its time is nearly over; returns the update that it saved."""
    batch = job.start(0)
    watch(job, batch)
    batch.process.send_signal(signal.SIGUSR1)
    said = batch.ends()
    assert "Traceback" not in said
    assert "actor-1 joined (1 joined actor now)" in said, "alone on its node, it fetches by itself"
    reached = len(rows(job.run))
    assert 2 < reached < UPDATES
    saved = [path.name for path in (job.run / "checkpoints").iterdir()]
    assert f"update_{reached:06d}" in saved
    assert job.called("scontrol requeue") == [f"scontrol requeue {JOB}"]
    assert {row.episode.actor for row in read_rows(replay_folder(job.run))} == {"actor-1"}
    return reached


def last_start(job: Job, reached: int) -> None:
    """Start it as Slurm does with a job from the queue, to its end."""
    batch = job.start(1)
    job.until(lambda values: values.get(("run_update", ""), 0) >= reached, batch)
    said = batch.ends()
    assert "Traceback" not in said
    assert [row["step"] for row in rows(job.run)] == list(range(1, UPDATES + 1))
    starts = json.loads((job.run / "provenance.json").read_text())["starts"]
    assert [(x["how"], x["from_update"], x["to_update"], x["job"]) for x in starts] == [
        ("stopped", 0, reached, f"slurm {JOB}"),
        ("finished", reached, UPDATES, f"slurm {JOB}"),
    ]
    assert len(job.called("scontrol requeue")) == 1
