"""What a run measures of both sides, what follows for its ranks, and that the next start does so."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.loading import load_file
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch import balance
from asyncrl.launch.balance import Balance, advise, chosen_placement, expected_seconds, line, measure
from asyncrl.launch.placement import parse_placement
from asyncrl.observability import metrics_system as s
from support import ROOT
from support.tiny_models import write_models
from support.whole_runs import TORCHRUN, environment, rows

FOUR = parse_placement("learner=0,actor=1-3", 4)


def row(groups_per_minute: float, learner: float, actors: float) -> dict[str, float]:
    return {
        s.GROUPS_PER_MINUTE.name: groups_per_minute,
        s.LEARNER_WAITING.name: learner,
        s.ACTORS_WAITING.name: actors,
    }


def measured(**changes: Any) -> Balance:
    """One learner that needs 6 s, and three actors that need 2 s for its batch."""
    plain: dict[str, Any] = {
        "policy": "tabletop", "world": "tabletop", "adapters": True, "learners": 1, "actors": 3,
        "learner_seconds": 6.0, "actor_seconds": 2.0, "seconds": 6.0,
        "groups_per_update": 8, "group_size": 4, "slots": 4, "max_lag": 2,
    }  # fmt: skip
    return Balance(**(plain | changes))


def test_rows_become_seconds_of_both_sides() -> None:
    config = TrainConfig(algorithm=AlgorithmSettings(groups_per_update=8))
    slow_start = [row(1.0, 0.9, 0.9), row(2.0, 0.9, 0.9)]
    steady = [row(80.0, 0.0, 0.5), row(80.0, 0.1, 0.6), row(80.0, 0.2, 0.7)]
    found = measure(config, FOUR, slow_start + steady)
    assert found is not None
    assert found.seconds == pytest.approx(6.0)  # 8 groups at 80 a minute.
    assert found.learner_seconds == pytest.approx(5.4)
    assert found.actor_seconds == pytest.approx(2.4)
    assert (found.ranks, found.learners, found.actors) == (4, 1, 3)


@pytest.mark.parametrize(
    ("placement", "ranks", "updates"),
    [("learner=0,actor=1", 2, 4), ("auto", 1, 9), ("hybrid", 4, 9), ("collocated", 2, 9)],
)
def test_too_few_updates_or_shared_devices_measure_nothing(placement: str, ranks: int, updates: int) -> None:
    made = [row(60.0, 0.1, 0.1)] * updates
    assert measure(TrainConfig(), parse_placement(placement, ranks), made) is None


def test_actors_that_may_join_are_not_known() -> None:
    listening = dataclasses.replace(TrainConfig().replay, listen="tcp://127.0.0.1:5555")
    made = [row(60.0, 0.1, 0.1)] * 9
    assert measure(TrainConfig(), FOUR, made) is not None
    assert measure(TrainConfig(replay=listening), FOUR, made) is None


def test_rows_with_what_is_no_number_do_not_count() -> None:
    broken = {**row(60.0, 0.1, 0.1), s.GROUPS_PER_MINUTE.name: None}
    assert measure(TrainConfig(), FOUR, [row(60.0, 0.1, 0.1)] * 4 + [broken] * 9) is None  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("learner", "actors", "chosen"),
    [(6.0, 2.0, 2), (6.0, 0.5, 3), (2.0, 6.0, 1), (6.0, 6.0, 1), (60.0, 1.0, 3)],
)
def test_the_split_with_the_shortest_update_is_chosen(learner: float, actors: float, chosen: int) -> None:
    found = measured(learner_seconds=learner, actor_seconds=actors)
    by_hand = {n: max(learner / n, actors * 3 / (4 - n)) for n in (1, 2, 3)}
    advice = advise(found)
    assert (advice.learners, advice.actors) == (chosen, 4 - chosen)
    assert advice.seconds == pytest.approx(min(by_hand.values())) == pytest.approx(by_hand[chosen])


def test_sides_in_turns_add_up() -> None:
    assert expected_seconds(measured(max_lag=0), 2, 2) == pytest.approx(3.0 + 3.0)


def test_all_weights_are_not_gathered_on_fewer_learners_than_held_them() -> None:
    busy_actors: dict[str, Any] = {"learners": 2, "actors": 2, "learner_seconds": 1.0, "actor_seconds": 9.0}
    assert advise(measured(**busy_actors)).learners == 1
    assert advise(measured(adapters=False, **busy_actors)).learners == 2


def test_there_are_no_more_learners_than_groups() -> None:
    assert advise(measured(learner_seconds=60.0, groups_per_update=2)).learners == 2


def test_slots_fit_the_credit_and_groups_the_learners() -> None:
    # 3 x 3 groups of 4 are 36 episodes; two actors have 80 slots.
    advice = advise(measured(slots=40, groups_per_update=3))
    assert (advice.learners, advice.actors, advice.slots, advice.groups_per_update) == (2, 2, 18, 4)
    assert advice.placement == "learner=0-1,actor=2-3"
    assert advise(measured()).slots == 4


def test_the_line_says_what_to_set_and_what_it_gains() -> None:
    said = line(measured())
    assert "1 learner 6 s and 3 actors 2 s; they wait 0% and 67% of the time" in said
    assert "--placement learner=0-1,actor=2-3: 2.00 times the pace" in said
    even = measured(learner_seconds=2.0, actor_seconds=2.0, seconds=2.0)
    assert line(even).endswith("No other placement of 4 ranks keeps both busier")
    crowded = line(dataclasses.replace(even, slots=400))
    assert "Fits this placement: --actor.slots 32" in crowded
    assert "\n" not in said + crowded


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert balance.read(tmp_path) is None
    balance.write(tmp_path, measured())
    assert balance.read(tmp_path) == measured()
    assert json.loads((tmp_path / balance.FILE).read_text())["advice"]["placement"] == "learner=0-1,actor=2-3"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"measured": {}}', '{"measured": 3}', '{"measured": {"policy": 1}}']
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / balance.FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"balance\.json does not say"):
        balance.read(tmp_path)


def config(**changes: Any) -> TrainConfig:
    plain = {
        "algorithm": AlgorithmSettings(group_size=4, groups_per_update=8),
        "lora": dataclasses.replace(TrainConfig().lora, rank=4),
    }
    return TrainConfig(**(plain | changes))


def test_auto_follows_the_run_that_goes_on(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    balance.write(tmp_path, measured())
    better = "learner=0-1,actor=2-3"
    assert chosen_placement(config(), 4, None) == "auto"
    assert chosen_placement(config(), 4, tmp_path) == better
    assert chosen_placement(config(), 4, other) == "auto"
    assert chosen_placement(config(placement="learner=0,actor=1-3"), 4, tmp_path) == "learner=0,actor=1-3"
    few = config(algorithm=AlgorithmSettings(group_size=4, groups_per_update=1))
    assert chosen_placement(few, 4, tmp_path) == "learner=0,actor=1-3"
    assert chosen_placement(config(), 8, tmp_path) == "auto"  # Other ranks: today's rule.
    assert chosen_placement(config(world="models/w"), 4, tmp_path) == "auto"


def train(tmp_path: Path, *flags: str) -> str:
    """Start three ranks to the end; returns what they said."""
    command = [*TORCHRUN, "--nproc-per-node", "3", str(ROOT / "torchrun_scripts" / "train.sh"), *flags]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_says_how_it_is_balanced_and_goes_on_so(tmp_path: Path) -> None:
    flags = [*write_models(tmp_path / "models"), "--algorithm.groups-per-update", "2"]
    run = tmp_path / "run"
    said = train(tmp_path, *flags, "--updates", "7", "--run-dir", str(run))
    assert "1 learner + 2 actors" in said
    found = balance.read(run)
    assert found is not None
    assert line(found) in said
    assert (found.ranks, found.learners, found.actors) == (3, 1, 2)
    made = rows(run)[balance.SKIPPED :]
    assert found == measure(load_file(run / "config.json"), parse_placement("auto", 3), rows(run))
    shares = [made_row[s.ACTORS_WAITING.name] for made_row in made]
    assert min(shares) <= 1 - found.actor_seconds / found.seconds + 1e-9
    assert 1 - found.actor_seconds / found.seconds <= max(shares) + 1e-9

    # Had the learner been the slow side, two ranks would learn.
    balance.write(run, dataclasses.replace(found, learner_seconds=100 * found.actor_seconds))
    said = train(tmp_path, *flags, "--resume", "--updates", "8", "--run-dir", str(run))
    assert "2 learners + 1 actor" in said
    assert json.loads((run / "config.json").read_text())["placement"] == "auto"
    assert len(rows(run)) == 8
