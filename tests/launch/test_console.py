"""What a run says at its end, by the world that it imagined in."""

import json
import threading
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import EvaluationSettings, LoraSettings, ReplaySettings
from asyncrl.launch import console
from asyncrl.launch.console import WIDTH, balance, banner, final_summary, nothing_learned, resumed
from asyncrl.launch.placement import parse_placement
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability.logger import MetricsLogger
from support.episodes import make_episode
from support.event_files import pictures_in


@pytest.mark.parametrize(
    ("world", "policy", "simulator", "said"),
    [
        ("tabletop", "tabletop", "tabletop", "asyncrl evaluate RUN"),
        ("tabletop", "my.flow:Flow@x", "tabletop", "asyncrl evaluate my.flow:Flow@RUN"),
        ("worlds/fitted", "tabletop", "libero_goal", "asyncrl evaluate RUN"),
        ("worlds/fitted", "tabletop", "my.env:make", "asyncrl evaluate RUN --simulator my.env:make"),
        ("my.worlds:Mine@x", "tabletop", "", "asyncrl evaluate RUN --simulator package.module:Class"),
        ("tabletop_true", "tabletop", "tabletop", "asyncrl evaluate RUN, at starts that were not trained on"),
        (
            "worlds/published",
            "models/libero",
            "",
            "asyncrl evaluate RUN --simulator package.module:Class (no built-in simulator plays this",
        ),
        (
            "worlds/published",
            "my.flow:Flow@x",
            "",
            "asyncrl evaluate my.flow:Flow@RUN --simulator package.module:Class",
        ),
    ],
)
def test_the_simulator_that_has_the_tasks_is_advised_and_no_other(
    tmp_path: Path, world: str, policy: str, simulator: str, said: str
) -> None:
    run = tmp_path / "run"
    config = TrainConfig(world=world, policy=policy, evaluation=EvaluationSettings(simulator=simulator))
    lines = final_summary(config, run).splitlines()
    (line,) = (line for line in lines if line.startswith("true success rate:"))
    assert said.replace("RUN", str(run)) in line
    assert said.count(" --simulator") == line.count(" --simulator")


@pytest.mark.parametrize(("pictures", "drawn"), [(True, [1, 2, 5, 7]), (False, [])])
def test_some_batches_are_drawn_and_shown(tmp_path: Path, pictures: bool, drawn: list[int]) -> None:
    config = TrainConfig(updates=7, pictures=pictures)
    with MetricsLogger(tmp_path, updates=7, stream=StringIO()) as log:
        show = console.pictures(config, tmp_path, log)
        for version in range(1, 8):
            show(version, [[make_episode(version, member, success=member > 0) for member in range(9)]])
        show(5, [])  # A rank without groups.
    for thread in threading.enumerate():
        if thread.name == "picture":
            thread.join()
    files = sorted((tmp_path / "videos").glob("*"))
    assert [file.name for file in files] == [f"imagined_{version:06d}.png" for version in drawn]
    for file in files:
        with Image.open(file) as picture:
            assert picture.width > 8 * 128
    assert [step for step, _ in pictures_in(tmp_path / "tensorboard")] == drawn


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ([0.5], "50.0% (one update)"),
        ([0.25, 0.5, 0.75], "25.0% (first 1 of 3 updates) -> 75.0% (last 1)"),
        ([0.0] * 4 + [1.0] * 4, "0.0% (first 4 of 8 updates) -> 100.0% (last 4)"),
        ([0.0] * 5 + [0.3] * 9 + [1.0] * 5, "0.0% (first 5 of 19 updates) -> 100.0% (last 5)"),
    ],
)
def test_no_update_is_on_both_sides_of_the_comparison(tmp_path: Path, rates: list[float], said: str) -> None:
    rows = [json.dumps({"step": i, m.SUCCESS_ONCE.name: rate}) for i, rate in enumerate(rates)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    assert f"success in imagination: {said}\n" in final_summary(TrainConfig(), tmp_path)


def test_the_banner_keeps_to_80_columns() -> None:
    lines = banner(TrainConfig(), Path("/runs/some_name"), "1 learner + 3 actors", "cuda:0").splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= WIDTH
    (longest,) = (
        line for line in banner(TrainConfig(), Path("/r" * 50), "x", "cpu").splitlines() if "/r/r" in line
    )
    assert longest == f"run {'/r' * 50}", "what is too long has a line to itself"


def test_a_resumed_run_says_where_it_goes_on() -> None:
    assert resumed(TrainConfig(), 0) == []
    assert resumed(TrainConfig(resume=True, updates=10, run_dir="x"), 4) == ["goes on from version 4 of 10"]
    (line,) = resumed(TrainConfig(resume=True, updates=10, run_dir="x"), 10)
    assert line.startswith("nothing is left to do: version 10 is reached")


FULL = {s.SIGNAL_GROUPS: 0.5, m.RETURN: 0.5, m.REWARD_STD: 0.5}
EQUAL = {s.SIGNAL_GROUPS: 0.0, m.RETURN: 100.0, m.REWARD_STD: 1e-6}


@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [
        ("grpo", FULL, ""),
        ("ppo", FULL, ""),
        ("grpo", {}, ""),
        ("ppo", {m.RETURN: None, m.REWARD_STD: None}, ""),
        ("grpo", EQUAL | {m.REWARD_STD: 0.5}, "no group had both outcomes, so nothing was learned: use "),
        ("ppo", FULL | {s.SIGNAL_GROUPS: 0.0}, ""),  # Its groups may have one episode.
        ("ppo", EQUAL, "all episodes returned 100, so none was better than another: use "),
        ("ppo", FULL | {m.RETURN: 0.0, m.REWARD_STD: 0.0}, "all episodes returned 0, so none was better"),
    ],
)
def test_an_update_of_equal_episodes_taught_nothing(kind: str, row: Any, said: str, tmp_path: Path) -> None:
    named = {metric.name: value for metric, value in row.items()}
    algorithm = AlgorithmSettings(kind=kind)  # pyright: ignore
    why = nothing_learned(algorithm, named)
    assert not nothing_learned(replace(algorithm, advantage="my.own:Advantage"), named)
    assert why.startswith(said)
    assert bool(why) is bool(said)
    assert not why or why.endswith("other start states, or a higher --algorithm.temperature.")
    rows = [named, {m.SUCCESS_ONCE.name: 0.5}, named]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    summary = final_summary(TrainConfig(algorithm=algorithm), tmp_path)
    assert (f"in 2 of 3 updates {why}\n" in summary) is bool(why)
    rows = [*rows, rows[1], rows[1]]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    assert "updates no" not in final_summary(TrainConfig(), tmp_path), "not in most of them"


def balance_of(
    folder: Path, pace: float | None, learner: float, actors: float, placement: str = "auto", **changes: Any
) -> str:
    """The line of four ranks after nine updates of 8 groups; the first four were of another start."""
    names = (s.GROUPS_PER_MINUTE.name, s.LEARNER_WAITING.name, s.ACTORS_WAITING.name)
    shares = [(1.0, 0.9, 0.9)] * 6 + [(pace, learner, actors)] * 3
    rows = [{"step": n, **dict(zip(names, row, strict=True))} for n, row in enumerate(shares, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    plain = {"algorithm": AlgorithmSettings(groups_per_update=8), "lora": LoraSettings(rank=4)}
    return balance(TrainConfig(**(plain | changes)), parse_placement(placement, 4, joined=True), folder, 4)


LINE = "balance: an update takes 1 learner 6 s and 3 actors 2 s; they wait 0% and 67% of the time. "


def test_the_line_of_both_sides_names_the_split_with_the_shortest_update(tmp_path: Path) -> None:
    # 8 groups at 80 a minute are 6 s: two learners need 3 s, and two actors as long.
    assert balance_of(tmp_path, 80.0, 0.0, 2 / 3) == (
        f"{LINE}--placement learner=0-1,actor=2-3: 2.00 times the pace"
    )
    even = balance_of(tmp_path, 80.0, 0.0, 0.0)
    assert even.endswith("No other placement of 4 ranks keeps both busier")
    in_turns = balance_of(tmp_path, 60.0, 0.25, 0.75, replay=ReplaySettings(max_lag=0))
    assert in_turns.endswith("--placement learner=0-1,actor=2-3: 1.33 times the pace"), "6/2 + 2*3/2 of 8 s"


def test_there_are_no_more_learners_than_groups(tmp_path: Path) -> None:
    for groups, said in ((1, "No other"), (2, "learner=0-1,actor=2-3:"), (8, "learner=0-2,actor=3:")):
        few = AlgorithmSettings(groups_per_update=groups)
        assert said in balance_of(tmp_path, 80.0, 0.0, 0.99, algorithm=few)


def test_all_weights_are_not_gathered_on_fewer_learners_than_held_them(tmp_path: Path) -> None:
    busy_actors = (80.0, 0.9, 0.0, "learner=0-1,actor=2-3")
    assert "--placement learner=0,actor=1-3:" in balance_of(tmp_path, *busy_actors)
    assert "No other placement" in balance_of(tmp_path, *busy_actors, lora=LoraSettings())


@pytest.mark.parametrize(
    ("placement", "pace", "listen"),
    [("collocated", 80.0, ""), ("auto", None, ""), ("auto", 80.0, "tcp://127.0.0.1:5555")],
)
def test_nothing_is_said_of_shared_devices_too_few_numbers_or_actors_that_may_join(
    tmp_path: Path, placement: str, pace: float | None, listen: str
) -> None:
    assert balance_of(tmp_path, pace, 0.0, 0.5, placement, replay=ReplaySettings(listen=listen)) == ""
