"""What a run says at its end, by the world that it imagined in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.run import TrainConfig
from asyncrl.launch.console import WIDTH, banner, final_summary, resumed
from asyncrl.observability import metrics_training as m


@pytest.mark.parametrize(
    ("world", "policy", "simulator", "said"),
    [
        ("tabletop", "tabletop", "tabletop", "asyncrl evaluate RUN"),
        ("tabletop", "my.flow:Flow@x", "tabletop", "asyncrl evaluate my.flow:Flow@RUN"),
        ("worlds/fitted", "tabletop", "libero_goal", "asyncrl evaluate RUN"),
        ("worlds/fitted", "tabletop", "my.env:make", "asyncrl evaluate RUN --simulator my.env:make"),
        ("my.worlds:Mine@x", "tabletop", "", "asyncrl evaluate RUN --simulator SIMULATOR"),
        ("tabletop_true", "tabletop", "tabletop", "asyncrl evaluate RUN, at starts that were not trained on"),
        (
            "worlds/published",
            "models/libero",
            "",
            "not measured here: no built-in simulator plays the tasks of this world. Evaluate it where the "
            "policy came from: asyncrl convert RUN EXPORT --original PUBLISHED",
        ),
        ("worlds/published", "my.flow:Flow@x", "", "asyncrl evaluate my.flow:Flow@RUN --simulator SIMULATOR"),
    ],
)
def test_the_simulator_that_has_the_tasks_is_advised_and_no_other(
    tmp_path: Path, world: str, policy: str, simulator: str, said: str
) -> None:
    run = tmp_path / "run"
    (line,) = (
        line
        for line in final_summary(TrainConfig(world=world, policy=policy), run, "", simulator).splitlines()
        if line.startswith("true success rate:")
    )
    assert said.replace("RUN", str(run)) in line
    assert said.count(" --simulator") == line.count(" --simulator")


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
