"""Whole runs with --evaluate-every: the truth is measured beside the training, which never waits for it."""

import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncrl import cli
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import EvaluationSettings
from asyncrl.errors import ConfigError
from asyncrl.evaluation import run_checkpoints
from asyncrl.launch.environment import WorldFiles
from asyncrl.launch.evaluator import EvaluatorProcess, VersionPlayer, plan
from asyncrl.launch.named_models import settings_of_run
from asyncrl.observability import metrics_training as m
from asyncrl.records import ActionSpec
from asyncrl.simulators.libero.tasks import INSTRUCTIONS
from asyncrl.simulators.rollout import HELD_OUT, evaluation_plays
from asyncrl.simulators.tabletop.scene import TASKS
from support.simulated import COUNTING
from support.simulated import TASKS as COUNTED
from support.tiny_models import start_state
from support.whole_runs import TRAIN, Program, exit_code, left_over, rows

pytestmark = pytest.mark.render


EVALUATED = ("--evaluate-every", "2", "--evaluation.episodes", "1")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_measures_its_first_and_its_last_version(flags, tmp_path) -> None:
    run = tmp_path / "run"
    command = [*TRAIN, *flags, *EVALUATED, "--run-dir", str(run), "--updates", "3"]
    said = Program(tmp_path, "said", command).ends()
    measured = run_checkpoints.read_evaluations(run)
    assert measured[0].version == 0
    assert measured[-1].version == 3, "the end of the run waits for its last version"
    assert all(row.episodes == 1 and row.simulator == "tabletop" for row in measured)
    assert "true [95 %] @update" in said
    assert "true success, tabletop:" in said
    for row in measured:
        assert (run / row.sheet).read_bytes()[:4] == b"\x89PNG"
        assert (run / row.movie).stat().st_size > 0
    lines = [row for row in rows(run) if m.EVAL_SUCCESS.name in row]
    assert [line["step"] for line in lines] == [row.version for row in measured]
    assert [line[m.EVAL_SUCCESS.name] for line in lines] == [row.success for row in measured]
    assert (run / "checkpoints" / "update_000002").is_dir(), "a version that is due is a checkpoint"
    assert left_over(tmp_path) == []


def files_with(*tasks: str) -> WorldFiles:
    return WorldFiles(
        starts=[replace(start_state(number, 64), task=task) for number, task in enumerate(tasks)],
        image_size=64,
        nbytes=0,
        action_spec=ActionSpec(),
    )


@pytest.mark.parametrize("trials", [0, 3])
def test_the_plan_plays_all_tasks_from_starts_that_neither_training_nor_evaluate_has(trials: int) -> None:
    config = TrainConfig(evaluate_every=2, evaluation=EvaluationSettings(episodes=5))
    source, plays = plan(config, files_with(*TASKS[:2]))
    assert (source.name, source.image_size) == ("tabletop", 64)
    own = replace(config.evaluation, simulator=COUNTING, simulator_settings=(f"trials={trials}",), episodes=6)
    source, plays = plan(replace(config, evaluation=own), files_with(*COUNTED))
    spec = source.spec()
    seeds = [{"seed": seed, "episodes": 100_000} for seed in (0, 1, 1000)] if not trials else [{}]
    other = [evaluation_plays(spec, tasks=(), trials=0, repeats=1, **chosen) for chosen in seeds]
    assert not {x.start.name for x in plays} & {x.start.name for found in other for x in found}
    assert all(HELD_OUT <= x.start.seed < 2**31 for x in plays), (
        "training's are below, and 32 bits are enough"
    )
    assert [x.start.trial for x in plays] == [-1] * 6
    assert [x.start.task for x in plays] == (list(COUNTED) * 3 if trials else [""] * 6)
    with pytest.raises(ConfigError, match=r"--seed 20000 has the starts that --evaluate-every plays"):
        evaluation_plays(replace(spec, trials=0), seed=20_000, tasks=(), trials=0, repeats=1)


@pytest.mark.parametrize(
    ("simulator", "task", "said"),
    [
        (
            "tabletop",
            INSTRUCTIONS["libero_goal"][0],
            r"but .* libero_goal has them\. Name one: --evaluation.simulator",
        ),
        ("", "fold the towel", r"but no built-in simulator has the tasks .*'fold the towel'.*Name one"),
    ],
)
def test_a_simulator_without_the_tasks_is_refused(simulator: str, task: str, said: str) -> None:
    config = TrainConfig(evaluate_every=2, evaluation=EvaluationSettings(simulator=simulator))
    with pytest.raises(ConfigError, match=f"--evaluate-every is 2, {said}"):
        plan(config, files_with(task))


def test_inline_has_no_process_for_it() -> None:
    with pytest.raises(ConfigError, match="--inline is one process"):
        TrainConfig(inline=True, evaluate_every=5)


def test_evaluate_takes_simulator_and_sampling_from_the_run(flags, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    sampling = ["--algorithm.temperature", "1.6", "--algorithm.top-k", "40"]
    assert cli.run("train", [*flags, *sampling, "--inline", "--updates", "1", "--run-dir", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"true success rate:      asyncrl evaluate {run}\n" in said
    short = ["--episodes", "2", "--workers", "1", "--horizon", "8", "--image-size", "64"]
    assert cli.run("evaluate", [str(run), *short]) == 0
    assert capsys.readouterr().out.startswith("simulator tabletop, temperature 1.6, top-k 40\n")
    newest = run / "checkpoints" / "update_000001"
    assert cli.run("evaluate", [str(newest), *short, "--temperature", "0"]) == 0
    assert "temperature 0, top-k 40" in capsys.readouterr().out


@pytest.mark.multiprocess
def test_training_goes_on_without_an_evaluator_that_plays_nothing_or_dies(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("asyncrl.launch.evaluator.RESPAWNS", 0)
    config = TrainConfig(evaluate_every=1, updates=5, hang_timeout=1.0)
    (tmp_path / "logs").mkdir()
    evaluator = EvaluatorProcess(config, tmp_path, 0, lambda step, values: None, 0)
    try:
        assert evaluator.finish(3, lambda: True) == "version 3 was not measured"
        why = evaluator.finish(5, lambda: False)
        assert why.startswith("version 5 was not measured: nothing moved on for 1 s (--hang-timeout)")
        (child,) = (one for one in multiprocessing.active_children() if one.name == "evaluator")
        child.kill()
        until = time.monotonic() + 60
        while not (said := evaluator.poll()) and time.monotonic() < until:
            time.sleep(0.1)
        assert evaluator.finish(5, lambda: False) == ""
    finally:
        evaluator.close()
    (line,) = said
    assert line.startswith("true success is not measured any more, the training goes on: evaluator died 1")


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (
            {"evaluate_every": 2, "evaluation": {"simulator": "evil.module:C"}},
            "--evaluation.simulator evil.module:C",
        ),
        ({"world": "maniskill_pick_cube", "world_settings": ["module=evil"]}, "--world-settings module=evil"),
    ],
)
def test_a_resumed_run_names_no_code(tmp_path, monkeypatch, capsys, settings, flag) -> None:
    """What a run's folder says is not imported: a copied one could say anything."""
    run = tmp_path / "run"
    (run / "checkpoints" / "update_000001").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(settings))
    (tmp_path / "evil").mkdir()
    for name in ("__init__.py", "module.py"):
        (tmp_path / "evil" / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert exit_code(["--resume", "--run-dir", str(run)]) == 2
    assert f"names {flag.split()[1]}, which is code" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()


def test_evaluate_leaves_out_a_module_that_a_run_names(tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    said = {"world": "maniskill_pick_cube", "world_settings": ["module=evil", "wrist=true"]}
    (run / "config.json").write_text(json.dumps(said))
    assert settings_of_run(run).simulator_settings == ("wrist=true",)


@pytest.mark.timeout(60)
def test_settings_of_a_published_policy_are_not_said_of_checkpoints(flags, tmp_path) -> None:
    """Settings of the published folder that a run began with are not used for its checkpoints."""
    policy = Path(flags[1])
    config = TrainConfig(
        evaluate_every=2,
        policy=str(policy),
        policy_settings=("norm_key=libero",),
        evaluation=EvaluationSettings(episodes=1),
    )
    player = VersionPlayer(config, *plan(config, files_with(*TASKS[:2])), tmp_path, torch.device("cpu"))
    try:
        assert player(2, policy)[0].overall.episodes == 1
        with pytest.raises(ConfigError, match="no action statistics for"):
            player(0, None)
    finally:
        player.close()
