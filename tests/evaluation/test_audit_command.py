"""`asyncrl audit` with tiny models, and successes counted in a simulator that the seeds decide."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from asyncrl import cli
from asyncrl.commands.evaluate import main as evaluate_command
from asyncrl.errors import ConfigError
from asyncrl.evaluation.imagined_and_true import AuditedEpisode, table
from asyncrl.evaluation.success_rate import (
    SuccessRate,
    check_fits,
    episode_row,
    evaluate,
    refuse_foreign_tasks,
    simulator_of_tasks,
    summarise,
)
from asyncrl.records import dummy_action
from asyncrl.simulators.interface import SimStart, SimulatorSource
from asyncrl.simulators.libero.tasks import INSTRUCTIONS
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import (
    HELD_OUT,
    Observations,
    Play,
    evaluation_plays,
    evaluation_seeds,
    rollout,
    simulated_sampling_seed,
)
from asyncrl.simulators.tabletop.scene import TASKS as TABLE_TASKS
from asyncrl.simulators.tabletop.simulator import Tabletop
from support.simulated import COUNTING, TASKS
from support.tiny_models import small_policy, write_models

SHORT = ["--episodes", "3", "--rows", "2", "--workers", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two updates with one checkpoint each, whose episodes have two decisions."""
    folder = tmp_path_factory.mktemp("models")
    sampling = ["--algorithm.temperature", "1.6", "--algorithm.top-k", "40"]
    ends = ["--actor.max-decisions", "2", "--actor.success-threshold", "0.4"]
    ends += ["--actor.success-frames", "last"]
    flags = [*write_models(folder), *sampling, *ends, "--inline", "--updates", "2", "--checkpoint-every", "1"]
    assert cli.run("train", [*flags, "--run-dir", str(folder / "run")]) == 0
    return folder / "run"


@pytest.mark.render
def test_what_is_left_open_is_as_in_the_run(run: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "audit.json"
    assert cli.run("audit", [str(run), *SHORT, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert re.match(r"world \S+, simulator tabletop, temperature 1\.6\nimagined success +\d", said)
    assert re.search(r"\ndecision +1\nPSNR, dB +\d", said)
    content = json.loads(file.read_text())
    settings = content["settings"]
    assert (settings["success_threshold"], settings["success_frames"]) == (0.4, "last")
    assert (settings["max_decisions"], settings["top_k"]) == (2, 40)
    (only,) = content["audits"]
    assert len(only["episodes"]) == only["wrong"]["episodes"] == 3
    assert all(len(episode["psnr"]) == episode["decisions"] <= 2 for episode in only["episodes"])
    assert only["correlation"] is None, "no true success: there is nothing to correlate"


@pytest.mark.render
@pytest.mark.parametrize("simulator", ["tabletop", "support.simulated:untold_tabletop"])
def test_without_start_states_none_are_opened(run: Path, simulator: str, monkeypatch, capsys) -> None:
    def none(*_: object) -> Path:
        raise AssertionError("no start states were named")

    monkeypatch.setattr("asyncrl.commands.audit.start_states_path", none)
    models = run.parent
    named = [str(models / "policy"), "--world", str(models / "world"), "--max-decisions", "1"]
    assert cli.run("audit", [*named, *SHORT, "--simulator", simulator]) == 0
    assert "imagined success" in capsys.readouterr().out


@pytest.mark.render
def test_a_runs_audit_has_a_row_per_version_and_writes_nothing_else(run: Path, tmp_path, capsys) -> None:
    before, file = files(run), tmp_path / "audit.json"
    flags = ["--every-checkpoint", "--success-threshold", "0.1", "--json", str(file)]
    assert cli.run("audit", [str(run), *SHORT, *flags]) == 0
    table_rows = capsys.readouterr().out.splitlines()
    assert table_rows[1].split()[:4] == ["imagined", "true", "wrong", "false"]
    assert [row.split("  ")[0] for row in table_rows[2:]] == ["update 1", "update 2"]
    audits = json.loads(file.read_text())["audits"]
    assert [audit["name"] for audit in audits] == ["update 1", "update 2"]
    assert all(episode["imagined"] for episode in audits[0]["episodes"]), "flags win"
    assert audits[1]["true_success"]["rate"] == 0.0
    assert files(run) == before


def files(run: Path) -> set[Path]:
    return {path for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tabletop", "--world", "tabletop_true"], "--world tabletop_true is a simulator: nothing"),
        (["tabletop", "--true-decisions", "6"], "--true-decisions leaves nothing of 6 decisions to imagine"),
        (["tabletop", "--every-checkpoint"], "--every-checkpoint needs a run's folder, and tabletop is none"),
        (["tabletop", "--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no folder /nowhere"),
        (["tabletop", "--simulator", "libero_gaol"], "libero_gaol"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(arguments: list[str], message: str, capsys) -> None:
    assert cli.run("audit", arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_run_names_no_code(tmp_path: Path, capsys) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"world": "evil.module:World@/folder"}))
    assert cli.run("audit", [str(tmp_path)]) == 2
    assert f"{tmp_path} does not say with which world it is audited" in capsys.readouterr().err


def episode(decisions: int, *, imagined: bool, true: bool) -> AuditedEpisode:
    return AuditedEpisode(
        start="s", task="t", decisions=decisions, imagined=imagined, true=true, judged_true=true,
        psnr=(30.0,) * decisions,
    )  # fmt: skip


def test_tables_say_what_was_counted() -> None:
    episodes = [
        episode(1, imagined=True, true=True),
        episode(1, imagined=True, true=False),
        episode(2, imagined=True, true=True),
        episode(2, imagined=False, true=True),
    ]
    whole = table("head", {"mine": episodes})
    assert re.search(r"^false, of imagined successes +33\.3%  \[6\.1%, 79\.2%\]  1/3$", whole, re.MULTILINE)
    assert re.search(r"^missed, of true successes +33\.3% ", whole, re.MULTILINE)
    assert re.search(r"^reward model wrong on the true frames +0\.0% ", whole, re.MULTILINE)
    curve = table("head", {"update 1": episodes, "update 2": episodes[:2]}).splitlines()
    assert curve[2].split()[:6] == ["update", "1", "75.0%", "[", "30%,", "95%]"]
    assert curve[3].endswith(" -")


def act(shown: Observations) -> np.ndarray:
    """Actions that hold the steps made, as both cameras and the state show them."""
    assert shown.images.shape == (len(shown.tasks), 2, 2, 2, 3)
    assert len(shown.tasks) == len(shown.seeds) == len(shown.states)
    steps = shown.images[:, 0, 0, 0, 0]
    np.testing.assert_array_equal(shown.images[:, 1, 0, 0, 0], shown.states[:, 1])
    return np.broadcast_to(steps[:, None, None], (len(steps), 8, 7)).astype(np.float32)


def pool(slots: int = 1, *settings: str, horizon: int = 24) -> SimulatorPool:
    return SimulatorPool(
        SimulatorSource(name=COUNTING, places=slots, settings=settings, horizon=horizon), workers=0
    )


def plays(seeds: Sequence[int]) -> list[Play]:
    return [Play(start=SimStart(name=f"seed-{seed}", task="", seed=seed)) for seed in seeds]


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (128, 256, 0.4392, 0.5608)],
)
def test_wilson_intervals_are_the_published_ones(successes, episodes, low, high) -> None:
    rate = SuccessRate.of(successes, episodes)
    assert rate.rate == successes / episodes
    assert (rate.low, rate.high) == pytest.approx((low, high), abs=5e-5)


def test_a_rate_prints_with_its_interval_and_no_episodes_say_nothing() -> None:
    assert str(SuccessRate.of(8, 10)) == " 80.0%  [49.0%, 94.3%]  8/10"
    assert str(SuccessRate.of(0, 0)) == "     -  [0.0%, 100.0%]  0/0"


def test_evaluations_own_their_seeds() -> None:
    first, second = evaluation_seeds(0, 100_000), evaluation_seeds(1, 100_000)
    assert min(first) == HELD_OUT == 1_000_000
    assert not set(first) & set(second)
    assert evaluation_seeds(0, 3) == [1_000_000, 1_000_001, 1_000_002]
    assert evaluation_seeds(2, 2) == [1_200_000, 1_200_001]


def test_an_episode_ends_with_the_step_that_solves_it_or_when_time_is_up() -> None:
    seeds = [101, 108, 109, 100]  # solved at step 1, 8, 9, never
    played = {e.seed: e for e in rollout(pool(4), act, plays(seeds))}
    assert {seed: (len(e.actions) - 1, e.steps) for seed, e in played.items()} == {
        101: (1, 1),
        108: (8, 8),
        109: (9, 9),
        100: (24, 24),
    }
    assert [played[seed].solved for seed in seeds] == [True, True, True, False]
    assert [played[seed].truncated for seed in seeds] == [False, False, False, True]
    assert all(len(e.frames) == 1 for e in played.values()), "nobody looks at them"


def test_what_cannot_go_on_is_told_from_what_runs_out_of_time() -> None:
    (episode,) = rollout(pool(1), act, plays([545]))
    assert (episode.steps, episode.solved, episode.terminated, episode.truncated) == (5, False, True, False)
    (episode,) = rollout(pool(1, horizon=5), act, plays([545]))
    assert (episode.terminated, episode.truncated) == (True, True)
    (episode,) = rollout(pool(1, horizon=4), act, plays([545]))
    assert (episode.terminated, episode.truncated) == (False, True)
    (episode,) = rollout(pool(1, horizon=11), act, plays([100]))
    assert (episode.steps, episode.truncated) == (11, True), "a horizon need not be whole decisions"


def test_recorded_decisions_are_whole_and_go_on_behind_the_success() -> None:
    seeds = [101, 108, 109, 100]
    for extra, frames in ((0, [9, 9, 17, 25]), (1, [17, 17, 25, 25])):
        found = {
            e.seed: e for e in rollout(pool(2), act, plays(seeds), keep_frames=True, extra_decisions=extra)
        }
        assert [len(found[seed].frames) for seed in seeds] == frames
        assert np.flatnonzero(found[109].success).tolist() == [9]
        assert found[109].rewards.tolist() == found[109].success.tolist()


def test_action_i_made_frame_i() -> None:
    (episode,) = rollout(pool(1, horizon=16), act, plays([100]), keep_frames=True)
    assert episode.frames[:, 0, 0, 0].tolist() == list(range(17))
    assert episode.more_frames[:, 0, 1, 1, 2].tolist() == episode.states[:, 1].tolist() == list(range(17))
    np.testing.assert_array_equal(episode.actions[0], dummy_action())
    assert episode.actions[1:9].max() == 0  # decided on frame 0
    assert (episode.actions[9:17] == 8).all()  # decided on frame 8


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_policy_of_another_chunk_gets_as_many_steps(chunk: int) -> None:
    found = {e.seed: e for e in rollout(pool(2), lambda shown: act(shown)[:, :chunk], plays([101, 109, 100]))}
    assert {seed: e.steps for seed, e in found.items()} == {101: 1, 109: 9, 100: 24}
    for episode in found.values():
        decided_on = [(step - 1) // chunk * chunk for step in range(1, len(episode.actions))]
        assert episode.actions[1:, 0].tolist() == decided_on


def test_a_slot_is_refilled_as_soon_as_it_is_free() -> None:
    order = [e.seed for e in rollout(pool(2), act, plays([100, 101, 102, 116, 103]))]
    assert order == [101, 100, 102, 103, 116], "100 takes three decisions, the others one and a reset"


def test_a_slot_keeps_to_the_task_that_it_has_loaded() -> None:
    spec = pool(1, "trials=4").spec
    wanted = evaluation_plays(spec, tasks=(), trials=0, repeats=1)
    assert [(p.start.trial, p.start.task_id) for p in wanted[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    order = [e.start.task_id for e in rollout(pool(1, "trials=4"), act, wanted)]
    assert order == [0, 0, 0, 0, 1, 1, 1, 1]
    both = [e.start.task_id for e in rollout(pool(2, "trials=4"), act, wanted)]
    assert sorted(both[:2]) == [0, 1], "two slots, two tasks"


def test_sampling_seeds_differ_between_episodes_and_decisions() -> None:
    seeds = {simulated_sampling_seed(seed, n) for seed in evaluation_seeds(0, 200) for n in range(6)}
    assert len(seeds) == 200 * 6
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_repeated_plays_are_sampled_anew() -> None:
    spec, seen = pool(1).spec, []

    def noting(shown: Observations) -> np.ndarray:
        seen.extend(shown.seeds)
        return act(shown)

    wanted = evaluation_plays(spec, episodes=2, seed=0, tasks=(), trials=0, repeats=3)
    played = list(rollout(pool(1), noting, wanted))
    assert sorted((e.seed, e.repeat) for e in played) == [
        (seed, repeat) for seed in evaluation_seeds(0, 2) for repeat in range(3)
    ]
    assert len(set(seen)) == len(seen)


def test_an_evaluation_counts_by_task_and_does_not_depend_on_the_slots() -> None:
    wanted = evaluation_plays(pool(1).spec, episodes=100, seed=0, tasks=(), trials=0, repeats=1)
    one, played = evaluate(pool(1, horizon=16), act, wanted)
    many, again = evaluate(pool(7, horizon=16), act, wanted)
    assert one == many
    assert [e.seed for e in played] == [e.seed for e in again] == evaluation_seeds(0, 100)
    # Held-out seed 1000000 + i is solved at step i; 16 steps are allowed.
    assert (one.overall.successes, one.overall.episodes) == (16, 100)
    assert {task: rate.successes for task, rate in one.by_task.items()} == {TASKS[0]: 8, TASKS[1]: 8}
    assert one.mean_steps == 8.5


def test_stored_starts_are_chosen_by_number_or_instruction() -> None:
    spec = pool(1, "trials=4").spec
    for twice in (("put c on d",), ("put c on d", "1")):
        chosen = evaluation_plays(spec, tasks=twice, trials=2, repeats=1)
        assert [play.start.name for play in chosen] == ["counting/1/000", "counting/1/001"]
    with pytest.raises(ConfigError, match=r"Its tasks are 0\.\.1"):
        evaluation_plays(spec, tasks=("7",), trials=0, repeats=1)
    with pytest.raises(ConfigError, match="--trials 5: counting has 4 stored starts"):
        evaluation_plays(spec, tasks=(), trials=5, repeats=1)
    for seeds in ({"episodes": 20}, {"seed": 1}):
        with pytest.raises(ConfigError, match="which are stored ones: use --tasks and --trials"):
            evaluation_plays(spec, tasks=(), trials=0, repeats=1, **seeds)
    with pytest.raises(ConfigError, match="which are seeds: use --episodes and --seed"):
        evaluation_plays(pool(1).spec, episodes=1, seed=0, tasks=("0",), trials=0, repeats=1)


def test_frames_are_shown_as_episodes_end_and_kept_of_the_first_plays_only() -> None:
    wanted = evaluation_plays(pool(1).spec, episodes=6, tasks=(), trials=0, repeats=1)
    shown: dict[int, int] = {}
    _, played = evaluate(
        pool(2), act, wanted, on_frames=lambda e: shown.update({e.seed: len(e.frames)}), keep_frames=2
    )
    assert shown == {e.seed: len(e.actions) for e in played}
    assert [len(e.frames) for e in played] == [len(e.actions) for e in played[:2]] + [1] * 4
    assert [len(e.states) for e in played] == [len(e.frames) for e in played]


def test_an_interrupted_evaluation_tells_what_was_played() -> None:
    wanted = evaluation_plays(pool(1).spec, episodes=6, tasks=(), trials=0, repeats=1)
    calls = Mock(side_effect=[None, None, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt) as ended:
        evaluate(pool(1), act, wanted, on_frames=calls)
    assert "of 2 episodes succeeded" in ended.value.__notes__[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--json", "."], "is a folder, where a file is expected"),
        (["--repeats", "2", "--temperature", "0"], "plays a start alike each time"),
        (["--expert.noise", "0.5", "0.1"], "between these two deviations, the smaller one first"),
        (["--expert.noise", "-0.1", "0.1"], "between these two deviations, the smaller one first"),
    ],
)
def test_what_would_be_lost_or_without_effect_is_refused_before_anything_is_played(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ConfigError, SystemExit)) as raised:
        evaluate_command(["tabletop", *flags])
    shown = " ".join((str(raised.value) + capsys.readouterr().err).replace("│", " ").split())
    assert said in shown


def test_a_result_is_plain_values() -> None:
    wanted = evaluation_plays(pool(1).spec, episodes=10, seed=0, tasks=(), trials=0, repeats=1)
    result, played = evaluate(pool(3), act, wanted)
    read = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert summarise(played[:1]).as_dict()["mean_steps"] is None, "no success, no steps to average"
    assert read["overall"]["episodes"] == 10
    assert set(read["by_task"]) == set(TASKS)
    assert json.loads(json.dumps(episode_row(played[3]))) | {"seconds": 0} == {
        "start": "counting/seed-1000003",
        "task": TASKS[1],
        "seed": 1_000_003,
        "repeat": 0,
        "success": True,
        "steps": 3,
        "end": "success",
        "seconds": 0,
    }


def test_tasks_of_one_simulator_lead_to_it_and_others_nowhere() -> None:
    for suite, tasks in INSTRUCTIONS.items():
        assert simulator_of_tasks(tasks) == suite
        assert simulator_of_tasks([tasks[3].capitalize() + "."]) == suite, "however they are written"
    assert simulator_of_tasks(TABLE_TASKS[2:4]) == "tabletop"
    for foreign in ("fold the towel", INSTRUCTIONS["libero_goal"][0]):
        assert simulator_of_tasks([TABLE_TASKS[0], foreign]) == ""
    assert simulator_of_tasks([]) == ""


def test_only_the_chosen_tasks_have_to_be_read_and_no_flag_is_named_that_a_command_lacks() -> None:
    policy, spec = small_policy(), Tabletop.describe()
    spec = replace(spec, tasks=(*spec.tasks, "fold the towel"))
    check_fits(policy, spec, [spec.tasks[0], ""])
    for tasks in ((), [""], ["fold the towel"]):
        with pytest.raises(ConfigError, match="cannot read 'fold', 'towel'") as error:
            check_fits(policy, spec, tasks)
        assert not re.search(r"--(policy|simulator)\b", str(error.value))
    with pytest.raises(
        ConfigError, match="the policy makes 7 numbers per step, but tabletop takes 4"
    ) as error:
        check_fits(policy, replace(spec, idle=(0.0,) * 4))


def test_a_simulator_that_lacks_a_task_is_refused_with_the_one_that_has_them() -> None:
    with pytest.raises(ConfigError) as error:
        refuse_foreign_tasks(TABLE_TASKS, INSTRUCTIONS["libero_goal"], "libero_goal", "Name one.")
    assert "no task of libero_goal" in str(error.value)
    assert str(error.value).endswith("tabletop has them. Name one.")
    with pytest.raises(ConfigError, match=r"'fold the towel', which is no task .* Name one\.$"):
        refuse_foreign_tasks(["fold the towel"], TABLE_TASKS, "tabletop", "Name one.")
    refuse_foreign_tasks(["fold the towel"], (), "my.env:make", "Name one.")
    refuse_foreign_tasks((), TABLE_TASKS, "tabletop", "Name one.")
