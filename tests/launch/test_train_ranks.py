"""Two learner ranks and an actor under torchrun, as a user starts them."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status
from asyncrl.storage import checkpoint
from support import ROOT
from support.whole_runs import TORCHRUN, TRAIN, Program, left_over, reach, rows

TWO = ["--placement", "learner=0-1,actor=1", "--algorithm.groups-per-update", "3"]
START = [*TORCHRUN, "--nproc-per-node", "2", str(ROOT / "torchrun_scripts" / "train.sh")]

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_two_learners_train_stop_in_order_and_go_on_also_alone_in_bf16(flags: list[str], tmp_path) -> None:
    run = tmp_path / "run"
    endless = [*START, *flags, *TWO, "--updates", "100000", "--run-dir", str(run)]
    with Program(tmp_path, "said", endless) as program:
        reach(run, 2, program.process, 90)
        os.killpg(program.process.pid, signal.SIGINT)
        program.process.wait(60)
        said = program.said()
    assert "2 learners + 1 actor" in said
    assert "RunError" not in said, said
    assert f'Traceback (most recent call last):\n  File "{ROOT}' not in said
    reached = len(rows(run))
    newest = checkpoint.latest(run)
    assert newest == run / "checkpoints" / f"update_{reached:06d}"
    assert len(list((newest / "state").iterdir())) == 2
    assert left_over(tmp_path) == []

    resumed = [*START, "--run-dir", str(run), "--resume", "--updates", str(reached + 1)]
    Program(tmp_path, "resumed", resumed).ends()
    assert [row["step"] for row in rows(run)] == list(range(1, reached + 2))
    assert all(row[m.GRAD_NORM.name] >= 0 for row in rows(run))
    state = json.loads((checkpoint.latest(run) or run).joinpath("state.json").read_text())
    assert state["progress"]["groups_used"] == 3 * (reached + 1)

    alone = [*TRAIN, "--run-dir", str(run), "--resume", "--placement", "auto"]
    alone += ["--updates", str(reached + 2), "--learner.precision", "bf16"]
    Program(tmp_path, "alone", alone).ends()
    assert len(rows(run)) == reached + 2
    assert left_over(tmp_path) == []
    assert list((tmp_path / "tmp").glob("asyncrl-*")) == []


def test_a_learner_that_is_killed_ends_the_run_with_an_error(flags: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = [*START, *flags, *TWO, "--updates", "100000", "--run-dir", str(run)]
    with Program(tmp_path, "said", endless) as program:
        process = program.process
        reach(run, 1, process, 90)
        victim = next(found.pid for found in process_status.read(run) if found.role == "learner-1")
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        assert process.wait(60) != 0
        said = program.said()
    assert time.monotonic() - began < 50
    assert "another rank is gone" in said or "SIGKILL" in said
    assert left_over(tmp_path, patience=10.0) == []


def test_nothing_outlives_a_killed_torchrun(flags: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    placed = ["--placement", "learner=0,actor=1", "--updates", "100000", "--run-dir", str(run)]
    with Program(tmp_path, "said", [*START, *flags, *placed]) as program:
        reach(run, 1, program.process, 90)
        assert len(left_over(tmp_path, patience=0.0)) >= 5, "torchrun, two ranks, an actor and the replay"
    assert left_over(tmp_path, patience=10.0) == []


def test_idle_models_wait_in_host_memory(flags: list[str], tmp_path: Path) -> None:
    """In turns with the learner, with batches so large that it waits long enough to offload."""
    run = tmp_path / "run"
    large = ["--algorithm.groups-per-update", "2", "--actor.max-decisions", "8"]
    placed = ["--placement", "learner=0,actor=1", "--actor.pipeline-stages", "2"]
    placed += ["--replay.max-lag", "0"]
    offload = ["--actor.offload", "--learner.offload", "--updates", "4", "--run-dir", str(run)]
    said = Program(tmp_path, "said", [*TRAIN, *flags, *placed, *offload, *large]).ends()
    assert "1 learner + 1 actor" in said
    found = rows(run)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert {row[s.LAG_MAX.name] for row in found} == {0}
    # A later batch may come sooner than what pays for offloading.
    assert max(row[s.LEARNER_OFFLOADED.name] for row in found) > 1e6
    assert found[-1][s.ACTOR_MEMORY.name] > 1e6
    logs = sorted(path.name for path in (run / "logs").iterdir())
    assert logs == ["actor-1.log", "learner-0.log", "replay.log"]
    assert left_over(tmp_path) == []
