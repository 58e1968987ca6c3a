"""`asyncrl train` as a user meets it: whole runs with random tiny models, and what it answers to mistakes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl import cli
from asyncrl.observability import metrics_system as r
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status
from asyncrl.observability.metrics import REGISTRY
from asyncrl.replay_tools.episodes import read_rows, replay_folder
from asyncrl.simulators.tabletop.simulator import Tabletop
from asyncrl.storage import checkpoint
from asyncrl.worlds.start_states import save_start_states
from support.tiny_models import GROUP_SIZE, start_state, write_models
from support.whole_runs import ROOT, TORCHRUN, TRAIN, environment, exit_code, left_over, reach, rows


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("models")
    return folder, write_models(folder)


@pytest.mark.timeout(60)
def test_an_inline_run_leaves_a_checkpoint_a_log_and_a_readable_replay(models, tmp_path, capsys, monkeypatch):
    _, flags = models

    def step(simulator: Tabletop, action: object) -> None:
        raise AssertionError("training steps no simulator")

    monkeypatch.setattr(Tabletop, "step", step)
    run = tmp_path / "run"
    # Random reward models answer near one half, so that at this threshold some episodes succeed.
    more = ["--inline", "--updates", "2", "--run-dir", str(run), "--actor.success-threshold", "0.5"]

    assert cli.run("train", [*flags, *more]) == 0

    newest = checkpoint.latest(run)
    assert newest is not None
    assert newest == run / "checkpoints" / "update_000002"
    checkpoint.verify(newest)
    assert [row["step"] for row in rows(run)] == [1, 2]
    assert set(rows(run)[0]) - {"step", "time"} <= set(REGISTRY)
    assert {m.SUCCESS_ONCE.name, r.LAG_MAX.name, m.GRAD_NORM.name} <= set(rows(run)[0])
    episodes = list(read_rows(replay_folder(run)))
    assert len(episodes) >= 2 * GROUP_SIZE
    said = capsys.readouterr().out
    assert "1 process (inline)" in said
    assert f"asyncrl evaluate {run}\n" in said


def forbid_simulator(tmp_path: Path) -> dict[str, str]:
    """An environment in which a process that loads the physics of any simulator fails and leaves a note."""
    trap = tmp_path / "trap" / "mujoco" / "__init__.py"
    trap.parent.mkdir(parents=True)
    trap.write_text(
        f"open({str(tmp_path / 'loaded')!r}, 'w').close()\nraise RuntimeError('simulator loaded')\n"
    )
    settings = environment(tmp_path)
    return settings | {"PYTHONPATH": f"{trap.parents[1]}:{settings['PYTHONPATH']}"}


@pytest.mark.multiprocess
@pytest.mark.timeout(90)
def test_an_asynchronous_run_under_torchrun_keeps_the_lag_bound_and_never_simulates(models, tmp_path):
    _, flags = models
    run, settings = tmp_path / "run", forbid_simulator(tmp_path)
    trapped = subprocess.run([sys.executable, "-c", "import mujoco"], env=settings, capture_output=True)
    assert trapped.returncode == 1
    (tmp_path / "loaded").unlink()
    command = [*TORCHRUN, str(ROOT / "torchrun_scripts" / "train.sh"), *flags]
    done = subprocess.run(
        [*command, "--updates", "4", "--replay.max-lag", "1", "--run-dir", str(run)],
        env=settings,
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "loaded").exists(), "neither the learner nor an actor nor the replay may simulate"
    assert "1 learner + 1 actor" in done.stdout
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    assert all(0 <= row[r.LAG_MAX.name] <= 1 for row in rows(run))
    versions = set()
    for row in read_rows(replay_folder(run)):
        assert np.all(np.diff(row.episode.policy_versions) >= 0)
        assert row.lag is None or row.lag <= 1
        versions |= set(row.episode.policy_versions.tolist())
    assert versions <= {0, 1, 2, 3, 4}
    assert max(versions) >= 2, "new weights never reached the actor"
    assert left_over(tmp_path) == []
    assert list((tmp_path / "tmp").glob("asyncrl-*")) == []


def actor_of(run: Path) -> int:
    (actor,) = (one for one in process_status.read(run) if one.role.startswith("actor") and one.alive)
    return actor.pid


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_an_actor_that_is_killed_comes_back_ctrl_c_leaves_a_checkpoint_and_resume_goes_on(models, tmp_path):
    _, flags = models
    run = tmp_path / "run"
    process = subprocess.Popen(
        [*TRAIN, *flags, "--updates", "100000", "--seed", "7", "--run-dir", str(run)],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        reach(run, 1, process, 60)
        os.kill(actor_of(run), signal.SIGKILL)
        # More updates than the lag bound lets the learner make with what the killed one had imagined.
        reach(run, len(rows(run)) + 6, process, 60)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # What a terminal does: every process of the group gets it.
        said, errors = process.communicate(timeout=30)
        took = time.monotonic() - began
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert took < 10
    assert re.search(r"actor-\d died and came back \(respawn 1\)", said + errors), said + errors
    assert "Traceback" not in errors
    assert f"asyncrl train --run-dir {run} --resume" in said
    newest = checkpoint.latest(run)
    assert newest is not None
    reached = int(newest.name.removeprefix("update_"))
    assert reached == len(rows(run)) >= 3
    assert left_over(tmp_path) == []
    assert list((tmp_path / "tmp").glob("asyncrl-*")) == []

    resumed = subprocess.run(
        [*TRAIN, "--run-dir", str(run), "--resume", "--updates", str(reached + 2)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "seed 7" in resumed.stdout, "a resumed run keeps the settings it was started with"
    assert [row["step"] for row in rows(run)] == list(range(1, reached + 3))
    assert checkpoint.latest(run) == run / "checkpoints" / f"update_{reached + 2:06d}"
    assert left_over(tmp_path) == []


def cut_weights(models: Path, target: Path) -> Path:
    shutil.copytree(models / "policy", target)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return target


def test_what_cannot_work_is_said_with_exit_code_2_and_starts_nothing(models, tmp_path, capsys, monkeypatch):
    folder, flags = models
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "note.txt").write_text("an older run")
    cut = cut_weights(folder, tmp_path / "cut")
    save_start_states(tmp_path / "small.h5", [start_state(0, 32)])
    (tmp_path / "garbage.h5").write_bytes(b"not HDF5")
    cases: list[tuple[list[str], str]] = [
        (["--actor.slotz", "3"], "slotz"),
        (["--algorithm.group-size", "1"], "group-size"),
        (["--placement", "learner=1,actor=0"], "learner=0"),
        (["--placement", "learner=0,critic=1"], "critic"),
        (["--policy", "nowhere"], "nowhere"),
        (["--policy", str(cut)], "model.safetensors"),
        (["--world", "nowhere"], "nowhere"),
        (["--start-states", "small.h5"], "32"),
        (["--start-states", "garbage.h5"], "garbage.h5"),
        (["--run-dir", "used"], "--resume"),
        (["--run-dir", "used", "--resume"], "config.json"),
        (["--resume"], "no run"),
        (["missing.toml"], "missing.toml"),
    ]
    for wrong, named in cases:
        leading = wrong[0].endswith(".toml")
        code = exit_code([*wrong, *flags] if leading else [*flags, *wrong])
        output = capsys.readouterr()
        assert code == 2, wrong
        assert named in output.err, (wrong, output.err)
        assert "Traceback" not in output.err
    assert not (tmp_path / "runs").exists(), "a run that cannot work leaves no folder"


def test_help_and_configs_answer_without_loading_torch(tmp_path):
    program = (
        "import sys; from asyncrl import cli\n"
        "try: cli.run('train', ['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert cli.run('configs', []) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "usage: asyncrl train" in done.stdout
    assert "tabletop.toml" in done.stdout


@pytest.mark.slow
def test_training_never_loads_the_simulator(models, tmp_path):
    _, flags = models
    program = (
        "import sys; from asyncrl import cli\n"
        "assert cli.run('train', sys.argv[1:]) == 0\n"
        "assert 'mujoco' not in sys.modules and 'asyncrl.simulators.tabletop.simulator' not in sys.modules\n"
    )
    more = ["--inline", "--updates", "1", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", program, *flags, *more],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["opensora", "evac"])
def test_the_other_worlds_of_tabletop_are_trained_in_as_the_first(kind: str) -> None:
    from asyncrl.config.loading import load_file
    from asyncrl.config.run import TrainConfig

    config = load_file(ROOT / "configs" / f"tabletop_{kind}.toml")
    starts = "tabletop_evac" if kind == "evac" else "tabletop"
    assert config == replace(TrainConfig(), world=f"tabletop_{kind}", start_states=starts)


def test_every_shipped_configuration_is_valid_and_says_what_it_is_for():
    from asyncrl.config.loading import load_file
    from asyncrl.config.run import TrainConfig

    files = sorted((ROOT / "configs").glob("*.toml"))
    assert files
    for file in files:
        load_file(file)
        assert file.read_text().startswith("# ")
    assert load_file(ROOT / "configs" / "tabletop.toml") == TrainConfig(), "tabletop.toml shows the defaults"
