"""A resumed inline run is the run that was never interrupted: same weights, same rows, same groups."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl import cli
from asyncrl.observability import metrics_system as s
from asyncrl.replay_tools.episodes import read_rows, replay_folder
from asyncrl.worlds.start_states import save_start_states
from support.tiny_models import GROUP_SIZE, SIZE, start_state, write_models

PER_UPDATE = 1
HALF, WHOLE = 5, 10
"""Updates until the interruption, and in all."""
TIMES = {s.WEIGHTS_SECONDS.name, s.PEAK_MEMORY.name, s.ACTOR_MEMORY.name, s.ACTOR_DECISIONS.name, "time"}
"""Readings that differ between any two runs, besides everything whose name begins as follows."""
ANY_TIME = ("time/", "wait/", "actor/")
"""What actors report, they report every few seconds."""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of tiny random models. The scores of its only start state scatter around the threshold."""
    folder = tmp_path_factory.mktemp("models")
    written = write_models(folder)
    save_start_states(folder / "starts.h5", [start_state(1, SIZE)])
    more = {
        "actor.success-threshold": 0.5,
        "actor.slots": 3,  # Does not divide the groups, so that members of several share a batch.
        "algorithm.groups-per-update": PER_UPDATE,
        "checkpoint-every": HALF,
        "replay.keep-video-every": 4,
    }
    return [
        *written,
        "--inline",
        *(text for name, value in more.items() for text in (f"--{name}", str(value))),
    ]


def train(*arguments: object) -> None:
    assert cli.run("train", [str(argument) for argument in arguments]) == 0


def rows(run: Path, leave_out: frozenset[str] = frozenset()) -> list[dict[str, float]]:
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith(ANY_TIME) and k not in TIMES | leave_out}
        for row in read
    ]


def uses(run: Path) -> dict[int, list[int]]:
    """Version of the learner -> numbers of the groups it used last at that version."""
    entries = [json.loads(line) for line in (run / "replay" / "ledger.log").read_text().splitlines()]
    return {entry["version"]: entry["used"] for entry in entries if "used" in entry}


def contents(run: Path) -> list[tuple[object, ...]]:
    """What the stored episodes are, without their random ids."""
    return [
        (
            *(row.number, row.used_at, row.outcome, row.episode.member, row.episode.seed),
            *(row.episode.policy_versions.tobytes(), row.episode.rewards.tobytes()),
            row.episode.logprobs.tobytes(),
        )
        for row in read_rows(replay_folder(run))
    ]


def assert_same_run(run: Path, undisturbed: Path, leave_out: frozenset[str] = frozenset()) -> None:
    folder = Path("checkpoints") / f"update_{WHOLE:06d}"
    names = sorted(x.relative_to(run / folder) for x in (run / folder).rglob("*.safetensors"))
    lora = (run / folder / "adapter").is_dir()
    assert len(names) == 3 + lora, "policy, weights with optimizer, random streams; adapters"
    for name in names:
        one, other = (load_file(x / folder / name) for x in (run, undisturbed))
        assert one.keys() == other.keys()
        different = [key for key in one if not one[key].equal(other[key])]
        assert not different, f"{name}: {different[:3]} and {len(different)} in all"
    assert uses(run) == uses(undisturbed)
    assert contents(run) == contents(undisturbed)
    for one, other in zip(rows(run, leave_out), rows(undisturbed, leave_out), strict=True):
        assert one.keys() == other.keys()
        assert {name: (one[name], other[name]) for name in one if one[name] != other[name]} == {}


PPO = [
    *("--algorithm.kind", "ppo", "--critic.warmup-updates", "2", "--optimizer.schedule", "cosine"),
    *("--optimizer.decay-updates", "12", "--algorithm.minibatches", "2", "--algorithm.kl-coef", "0.1"),
]
LORA = ["--lora.rank", "2", "--algorithm.epochs", "2", "--algorithm.kl-coef", "0.1"]


@pytest.mark.parametrize(
    ("max_lag", "filtering", "more"),
    [
        pytest.param(0, False, [], id="lag 0", marks=pytest.mark.slow),
        pytest.param(2, True, [], id="lag 2, mixed groups", marks=pytest.mark.slow),
        pytest.param(2, False, PPO, id="ppo", marks=pytest.mark.slow),
        pytest.param(1, False, LORA, id="lora", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_ends_where_the_undisturbed_one_does(
    flags: list[str], tmp_path: Path, max_lag: int, filtering: bool, more: list[str]
) -> None:
    whole, stopped, killed = tmp_path / "whole", tmp_path / "stopped", tmp_path / "killed"
    settings = [*flags, *more, "--replay.max-lag", max_lag]
    settings += ["--algorithm.filter-groups"] if filtering else []

    train(*settings, "--updates", WHOLE, "--run-dir", whole)
    train(*settings, "--updates", HALF, "--run-dir", stopped)
    train("--updates", WHOLE, "--run-dir", stopped, "--resume")
    assert_same_run(stopped, whole)

    # A learner that was killed at update 10 leaves its replay, but no checkpoint after that of update 5.
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "checkpoints" / f"update_{WHOLE:06d}")
    train("--updates", WHOLE, "--run-dir", killed, "--resume")
    counted_twice = frozenset(
        {s.EPISODES.name, s.DROPPED_RESUME.name, s.DROPPED_DECISIONS[s.DROPPED_RESUME].name}
    )
    assert_same_run(killed, whole, leave_out=counted_twice)
    last, undisturbed = rows(killed)[-1], rows(whole)[-1]
    lost = last[s.DROPPED_RESUME.name]
    assert lost > 0
    assert last[s.EPISODES.name] - lost == undisturbed[s.EPISODES.name]

    for version, numbers in uses(whole).items():
        assert len(numbers) == PER_UPDATE
        row = rows(whole)[version]
        assert row[s.LAG_MEAN.name] == row[s.LAG_MAX.name] == min(version, max_lag)
    mixed = [row[s.SIGNAL_GROUPS.name] for row in rows(whole)]
    assert max(mixed) == 1, "choose a threshold at which the episodes of some groups differ"
    assert mixed == [1.0] * WHOLE if filtering else min(mixed) < 1
    assert (undisturbed[s.FILTERED_GROUPS.name] > 0) == filtering
    successes = [row[s.REPLAY_SUCCESS.name] for row in rows(whole)]
    assert 0 < sum(successes) < WHOLE, "every row has a share, with the filtered groups in it"
    assert undisturbed[s.EPISODES.name] % GROUP_SIZE == 0
