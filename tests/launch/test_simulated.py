"""A simulator as --world: which names mean one, where its episodes begin, what is refused, and whole runs."""

import os
import re
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl import cli
from asyncrl.commands.replay import main as inspect_replay
from asyncrl.config.run import TrainConfig, load_file
from asyncrl.errors import ConfigError
from asyncrl.launch.environment import check_environment, with_world_defaults
from asyncrl.launch.named_models import build_policy, policy_chunk
from asyncrl.launch.simulated import SimulatorFiles, TrainingStarts, inputs_of, sized_for
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status
from asyncrl.records import ActionSpec
from asyncrl.replay.interface import ENDLESS
from asyncrl.replay_tools.episodes import read_rows, replay_folder
from asyncrl.simulators.interface import SimulatorSource
from asyncrl.simulators.rendering import find_backend
from asyncrl.simulators.rollout import HELD_OUT
from asyncrl.storage import checkpoint
from asyncrl.storage.assets import simulator_named
from support.simulated import COUNTING
from support.whole_runs import TRAIN, Program, exit_code, left_over, reach, rows

needs_opengl = pytest.mark.skipif(find_backend() is None, reason="no OpenGL library")
SMALL = ["--world", "tabletop_true", "--policy", "tabletop", "--algorithm.group-size", "2"]
SMALL += ["--algorithm.groups-per-update", "2", "--actor.slots", "4", "--updates", "2"]
SMALL += ["--checkpoint-every", "1"]
STORED = SimulatorSource(name=COUNTING, settings=("trials=60",)).build().spec


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "simulator"),
    [
        ("tabletop", ""),
        ("tabletop_true", "tabletop"),
        ("./tabletop_true", ""),
        ("libero_spatial", "libero_spatial"),
        ("./libero_spatial", ""),
        ("maniskill_stack_cube", "maniskill_stack_cube"),
        (COUNTING, COUNTING),
        ("support.simulated:no_simulator", "support.simulated:no_simulator"),
        ("support.simulated:Nothing", ""),
        (f"{COUNTING}@folder", ""),
        ("no.such.module:make", ""),
        ("runs/models/world", ""),
    ],
)
def test_a_name_is_a_simulators_or_a_world_models(text: str, simulator: str) -> None:
    assert simulator_named(text) == simulator


def test_the_horizon_says_how_many_decisions_there_are() -> None:
    config, said = with_world_defaults(TrainConfig(world="tabletop_true"))
    assert (said.simulated, config.actor.max_decisions, policy_chunk(config)) == (True, 6, 8)
    longer = TrainConfig(world="tabletop_true", simulator=replace(TrainConfig().simulator, horizon=50))
    assert with_world_defaults(longer)[0].actor.max_decisions == 7
    own = TrainConfig(world="tabletop_true", actor=replace(TrainConfig().actor, max_decisions=3))
    assert with_world_defaults(own)[0].actor.max_decisions == 3


# ---- starts --------------------------------------------------------------------------------------


def test_starts_follow_from_seed_and_number_and_no_evaluation_plays_them() -> None:
    spec = SimulatorSource(name="tabletop").spec()
    stream, again, other = (TrainingStarts(spec, seed, "random") for seed in (3, 3, 4))
    drawn = [stream[n] for n in range(300)]
    assert drawn == [again[n] for n in range(300)]
    assert drawn != [other[n] for n in range(300)]
    assert all(0 <= start.seed < HELD_OUT for start in drawn)
    assert len({start.name for start in drawn}) > 295
    assert stream.left({start.name for start in drawn}) == ENDLESS


def test_tasks_of_a_simulator_with_stored_starts_take_turns() -> None:
    for kind in ("random", "evaluation"):
        drawn = [TrainingStarts(STORED, 0, kind)[n] for n in range(200)]
        assert Counter(start.task_id for start in drawn) == {0: 100, 1: 100}
        trials = {start.trial for start in drawn}
        if kind == "random":
            assert trials == {-1}
            assert all(start.seed < HELD_OUT and start.task == STORED.tasks[start.task_id] for start in drawn)
        else:
            assert trials & set(range(50))


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--imagination.context", "frames"], r"--imagination.context is set.*no world model"),
        (["--imagination.compile"], r"--imagination.compile is set"),
        (["--no-keyframes"], r"--keyframes is set.*--simulator.starts"),
        (["--guard.kind", "lasting"], r"--guard.kind is set.*decides itself what succeeds"),
        (["--start-states", "x.h5"], r"--start-states is set"),
        (["--reward", "runs/reward"], r"--reward is set.*decides itself what succeeds"),
        (["--actor.success-threshold", "0.5"], r"--actor.success-threshold is set.*no reward model"),
        (["--actor.success-frames", "last"], r"--actor.success-frames is set"),
        (["--simulator.starts", "evaluation"], r"every seed is a start: none are stored"),
        (["--world-settings", "colour=red"], r"--world tabletop cannot be built.*--world-settings"),
        (["--simulator.image-size", "7"], r"16 to 512 pixels"),
    ],
)
def test_what_means_nothing_for_a_simulator_is_refused_with_the_flag(flags, said, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    assert exit_code([*SMALL, "--inline", "--run-dir", str(run), *flags]) == 2
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", "".join(capsys.readouterr())).split())
    assert re.search(said, text), text
    assert not run.exists()


def test_settings_of_simulators_are_refused_where_a_world_model_imagines() -> None:
    workers = replace(TrainConfig().simulator, workers=2)
    with pytest.raises(ConfigError, match=r"--simulator.workers is set, but --world tabletop is a world"):
        check_environment(TrainConfig(simulator=workers))


def test_a_simulator_of_one_place_needs_a_worker_for_each_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.simulators.tabletop.simulator import Tabletop

    monkeypatch.setattr(Tabletop, "most_places", 1, raising=False)
    config = TrainConfig(world="tabletop_true", actor=replace(TrainConfig().actor, slots=6))
    with pytest.raises(ConfigError, match=r"--actor.slots is 6 in 1 workers.*Use --simulator.workers 6"):
        check_environment(config)
    check_environment(replace(config, simulator=replace(config.simulator, workers=6)))


def files_of(**changes: Any) -> SimulatorFiles:
    source = SimulatorSource(name="tabletop")
    return SimulatorFiles(source=source, spec=replace(source.spec(), **changes))


def test_a_policy_that_cannot_play_is_refused() -> None:
    policy = build_policy(TrainConfig(), torch.device("cpu"))
    files_of().check_policy(policy)
    with pytest.raises(ConfigError, match="makes 7 numbers per step, but tabletop takes 4"):
        files_of(idle=(0.0,) * 4).check_policy(policy)
    read = policy.preprocess

    def only_the_first(frames: Any, tasks: list[str], *states: Any) -> Any:
        if tasks[0] != files_of().spec.tasks[0]:
            raise ConfigError(f"no words for {tasks[0]}")
        return read(frames, tasks, *states)

    policy.preprocess = only_the_first  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="no words for"):
        files_of().check_policy(policy)


def test_a_policy_is_shown_what_it_says_it_reads_and_else_all_there_is() -> None:
    policy: Any = build_policy(TrainConfig(), torch.device("cpu"))
    three = replace(files_of().spec, cameras=("a", "b", "c"), state_dim=5)
    assert inputs_of(policy, three) == (1, False)
    assert inputs_of(SimpleNamespace(), three) == (3, True)  # type: ignore[arg-type]
    says: Any = SimpleNamespace(
        pictures=2, proprio_numbers=5, image_size=96, action_spec=ActionSpec(chunk=1), sample_arrays={}
    )
    assert inputs_of(says, three) == (2, True)
    assert sized_for(SimulatorSource(name="tabletop"), says).image_size == 96
    assert sized_for(SimulatorSource(name="tabletop", image_size=32), says).image_size == 32
    found = replace(files_of(), spec=three).episode_format(says, 9)
    assert found.simulator is not None
    assert (found.image_size, found.simulator.more_cameras, found.simulator.state_dim) == (96, 1, 5)
    assert (found.action_spec, found.max_decisions, found.world_version) == (ActionSpec(chunk=1), 9, -1)


# ---- whole runs ----------------------------------------------------------------------------------


PPO = ["--algorithm.kind", "ppo", "--critic.warmup-updates", "0"]


@needs_opengl
def test_a_run_in_a_simulator_trains_and_repeats_itself(tmp_path, capsys) -> None:
    weights = []
    for run, more in ((tmp_path / "ppo", PPO), (tmp_path / "one", []), (tmp_path / "other", [])):
        assert (
            cli.run("train", [*SMALL, *more, "--inline", "--replay.max-lag", "1", "--run-dir", str(run)]) == 0
        )
        newest = checkpoint.latest(run)
        assert newest == run / "checkpoints" / "update_000002"
        checkpoint.verify(newest)
        weights.append((newest / "model.safetensors").read_bytes())
    assert weights[1] == weights[2] != weights[0]
    said = capsys.readouterr().out
    assert "decisions 6 (48 steps of tabletop), workers 0" in said
    assert f"asyncrl evaluate {run}, at starts that were not trained on" in said
    assert inspect_replay(["verify", str(run)]) == 0
    episodes = [row.episode for row in read_rows(replay_folder(run))]
    assert len(episodes) >= 8
    config = load_file(run / "config.json")
    files = check_environment(config)
    assert isinstance(files, SimulatorFiles)
    stream = TrainingStarts(files.spec, config.seed, "random")
    for episode in episodes:
        assert episode.start_state == stream[int(episode.group_id)].name
        assert episode.world_version == -1
        assert episode.success == bool(episode.rewards.any())
        assert episode.success or episode.steps == 48
    assert {m.SUCCESS_ONCE.name, m.GRAD_NORM.name} <= set(rows(run)[0])


@pytest.mark.slow
@needs_opengl
@pytest.mark.multiprocess
def test_a_run_goes_on_when_a_worker_of_its_actor_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [*TRAIN, *SMALL, "--simulator.workers", "2", "--updates", "3", "--run-dir", str(run)]
    with Program(tmp_path, "said", command) as program:
        reach(run, 1, program.process, 100.0)
        (actor,) = [one.pid for one in process_status.read(run) if one.role == "actor-0"]
        children = Path(f"/proc/{actor}/task/{actor}/children").read_text().split()
        workers = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        program.ends()
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    assert all(row["replay/lag_max"] <= 2 for row in rows(run))
    assert "Its episodes are played again (1 of 5 times)" in (run / "logs" / "actor-0.log").read_text()
    assert inspect_replay(["verify", str(run)]) == 0
    assert left_over(tmp_path) == []
