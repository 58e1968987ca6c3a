"""Whole runs with --pace.every: the world is refitted beside the training, which never waits for it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl import cli
from asyncrl.config.pace import PaceSettings
from asyncrl.config.run import TrainConfig
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.keyframe_names import version_named
from asyncrl.launch import refits
from asyncrl.launch.environment import check_environment
from asyncrl.launch.policies import build_policy
from asyncrl.observability import metrics_guard as g
from asyncrl.observability import metrics_pace as m
from asyncrl.observability import process_status
from asyncrl.pace import fitter, rounds
from asyncrl.pace.rounds import Round
from asyncrl.pace.verdicts import Verdicts
from asyncrl.replay_tools.episodes import read_rows, replay_folder
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.worlds import mined_keyframes
from support.join_site import Site
from support.recorded import recorded_spec, write_recorded
from support.tiny_models import GROUP_SIZE, write_models
from support.whole_runs import TRAIN, environment, left_over, reach, rows

pytestmark = pytest.mark.render

PACE = {
    "pace.every": 2,
    "pace.episodes": 8,
    "pace.held-out": 0.5,
    "pace.fresh": 0.5,
    "pace.world-steps": 2,
    "pace.reward-steps": 4,
    "pace.batch": 8,
    "pace.workers": 0,
    "actor.success-threshold": 0.5,
    "actor.max-decisions": 2,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, list[str]]:
    """Models of random weights; the old recordings show what solved looks like, for the policy never does."""
    folder = tmp_path_factory.mktemp("models")
    old = recorded_spec(64, simulator="tabletop", tasks=tuple(TASKS), trials=0)
    write_recorded(folder / "base", old, (17,) * 8)
    return folder, [*write_models(folder), "--pace.base", str(folder / "base")]


def flags(models: tuple[Path, list[str]], **changes: Any) -> list[str]:
    said = PACE | changes
    return [*models[1], *(text for name, value in said.items() for text in (f"--{name}", str(value)))]


def train(*arguments: object) -> None:
    assert cli.run("train", [str(argument) for argument in arguments]) == 0


def worlds_of(run: Path) -> dict[int, list[int]]:
    """Group -> the worlds that drew its decisions."""
    found: dict[int, list[int]] = {}
    for row in read_rows(replay_folder(run), more=["world_versions"]):
        assert row.episode.world_versions is not None
        found.setdefault(row.number, []).extend(row.episode.world_versions.tolist())
    return found


class Judged:
    """Audits of models of random weights say anything: here every refit to an odd version is a better one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fitter, "verdicts", self.verdicts)

    @staticmethod
    def verdicts(world: Any, reward: Any, recordings: Any, **rule: Any) -> Verdicts:
        solved = recordings.solved()
        judged = solved.copy()
        judged[: {0: 3, 1: 2, 2: 2}[world.version]] ^= True
        return Verdicts(judged=judged, solved=solved)


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory) -> Iterator[Path]:
    run = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        Judged(patch)
        settings = [*flags(models), "--imagination.fixed-shape", "--keep-checkpoints", 9]
        train(*settings, "--inline", "--updates", 6, "--checkpoint-every", 3, "--run-dir", run)
        yield run


def test_an_inline_run_makes_a_round_at_every_version_that_is_due(whole: Path) -> None:
    made = rounds.read(whole)
    assert [row.version for row in made] == [2, 4], "nothing is imagined after the last update"
    assert all((row.episodes, row.audited, row.source) == (8, 4, "tabletop") for row in made)
    assert [(row.accepted, row.world, row.wrong, row.wrong_after) for row in made] == [
        (True, 1, 3, 2),
        (False, 1, 2, 2),
    ]
    assert rounds.newest_world(whole) == 1
    assert {version for found in worlds_of(whole).values() for version in found} == {0, 1}
    assert [path.name for path in (whole / "worlds").iterdir()] == ["version_000001"]
    logged = rows(whole)
    assert m.TRUE_SUCCESS.name not in logged[1]
    assert [row[m.ROUND_VERSION.name] for row in logged[2:]] == [2, 2, 4, 4]
    assert logged[-1][m.TRUE_EPISODES.name] == 16
    assert logged[-1][m.WORLD_VERSION.name] == 1


def test_an_interrupted_run_ends_where_the_undisturbed_one_does(models, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*flags(models), "--imagination.fixed-shape", "--keep-checkpoints", 9]
    settings += ["--inline", "--checkpoint-every", 3, "--run-dir", run]
    train(*settings, "--updates", 3)
    train("--updates", 6, "--run-dir", run, "--resume")
    kept = {"time", "collect_seconds", "fit_seconds"}
    one, other = (
        [{k: v for k, v in vars(row).items() if k not in kept} for row in rounds.read(folder)]
        for folder in (run, whole)
    )
    assert one == other
    assert worlds_of(run) == worlds_of(whole)
    last = Path("checkpoints") / "update_000006"
    for path in sorted((whole / last).rglob("model.safetensors")):
        ours, theirs = load_file(run / path.relative_to(whole)), load_file(path)
        assert [name for name in theirs if not ours[name].equal(theirs[name])] == []


def test_what_refitted_worlds_drew_is_imagined_again_bit_for_bit(whole: Path, capsys) -> None:
    drawn = worlds_of(whole)
    mixed = max(drawn, key=lambda number: (len(set(drawn[number])), number))
    later = max(number for number, found in drawn.items() if set(found) == {1})
    for number in (mixed, later):
        assert cli.run("replay", ["imagine", str(whole), str(number), "--device", "cpu"]) == 0
        said = capsys.readouterr().out
        assert "version 0, and 1 of its refits" in said
        assert f"{GROUP_SIZE} members: {GROUP_SIZE} equal" in said, said


def test_successes_are_imagined_again_in_a_world_that_is_refitted(models, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ["--inline", "--updates", 4, "--guard.kind", "second", "--run-dir", run]
    with pytest.MonkeyPatch.context() as patch:
        Judged(patch)
        train(*flags(models), *more)
    assert {version for found in worlds_of(run).values() for version in found} == {0, 1}
    episodes = [row.episode for row in read_rows(replay_folder(run), more=["world_versions"])]
    assert {episode.weight for episode in episodes if episode.success} <= {0.0, 1.0}
    assert {episode.weight for episode in episodes if not episode.success} <= {1.0}
    assert any(episode.success for episode in episodes)
    logged = [row for row in rows(run) if g.DISAGREE.name in row]
    assert logged, "there are successes"


def test_a_checkpoint_is_audited_in_the_world_that_it_was_trained_in(whole: Path, capsys) -> None:
    short = ["--episodes", "2", "--rows", "2", "--workers", "1"]
    for version, world in ((3, "version_000001"), (2, "models")):
        folder = whole / "checkpoints" / f"update_{version:06d}"
        assert cli.run("audit", [str(folder), *short]) == 0
        assert world in capsys.readouterr().out.splitlines()[0]


def test_a_resume_without_refits_does_not_go_back_to_the_first_world(
    whole: Path, tmp_path: Path, capsys
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    again = ["--updates", "7", "--run-dir", str(run), "--resume", "--pace.every", "0"]
    world = rounds.world_folder(run, 1)
    assert cli.run("train", again) == 2
    assert "has refitted its world, and would go back to" in capsys.readouterr().err
    train(*again, "--world", str(world))
    assert len(rows(run)) == 7


def test_a_resume_from_an_earlier_checkpoint_forgets_the_later_rounds(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for version in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"update_{version:06d}", ignore_errors=True)
    train("--updates", 4, "--run-dir", run, "--resume")
    assert [row.version for row in rounds.read(run)] == [2]
    assert not rounds.round_folder(run, 4).exists()


def test_groups_begin_at_key_frames_of_the_run_and_are_imagined_again_bit_for_bit(
    models, tmp_path: Path, capsys
) -> None:
    run = tmp_path / "run"
    keyframes = {"pace.siblings": 0, "pace.keyframes": 4, "actor.max-decisions": 4, "keyframe-share": 0.5}
    settings = [*flags(models, **keyframes), "--imagination.fixed-shape", "--inline", "--run-dir", run]
    train(*settings, "--updates", 4)
    (made,) = [row for row in rounds.read(run) if row.version == 2]
    assert made.published
    assert made.keyframes > 0
    begun = {row.number: row.episode for row in read_rows(replay_folder(run), more=["world_versions"])}
    mined = {number: one for number, one in begun.items() if version_named(one.start_state) is not None}
    assert mined, "some begin on the way"
    assert all(number % 2 for number in mined), "every second group does, from then on"
    for one in mined.values():
        version = version_named(one.start_state)
        (state,) = [
            s
            for s in mined_keyframes.load(rounds.world_folder(run, version or 0))
            if s.name == one.start_state
        ]
        assert len(one.world_versions) + state.elapsed <= 4
    capsys.readouterr()
    assert cli.run("replay", ["imagine", str(run), str(max(mined)), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"{GROUP_SIZE} members: {GROUP_SIZE} equal" in said, said


class Running:
    """A run that goes on until it is ended, in processes of its own."""

    def __init__(self, tmp_path: Path, settings: list[str]) -> None:
        self.folder, self.tmp_path = tmp_path / "run", tmp_path
        self.process = subprocess.Popen(
            [*TRAIN, *settings, "--run-dir", str(self.folder), "--updates", "100000"],
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Running:
        reach(self.folder, 1, self.process, 60)
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def pids(self, role: str) -> list[int]:
        return [one.pid for one in process_status.read(self.folder) if one.role == role and one.alive]

    def until(self, true: Any, what: str) -> None:
        deadline = time.monotonic() + 90
        while not true():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def replaced(self, role: str) -> None:
        (pid,) = self.pids(role)
        os.kill(pid, signal.SIGKILL)
        self.until(lambda: self.pids(role) not in ([], [pid]), f"{role} came back")

    def end(self) -> str:
        os.killpg(self.process.pid, signal.SIGINT)
        said, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors
        assert left_over(self.tmp_path) == []
        made = {row.version for row in rounds.read(self.folder)}
        played = {int(path.name.removeprefix("round_")) for path in self.folder.glob("true/*")}
        assert played <= made, "a round that was not finished is put away"
        assert not (self.folder / "checkpoints" / "refitting").exists()
        return said


def accept(run: Path, models: tuple[Path, list[str]], version: int) -> None:
    """Do what a round does that accepts a world."""
    target = rounds.world_folder(run, version)
    shutil.copytree(models[0] / "world", target)
    about = json.loads((target / "world.json").read_text())
    (target / "world.json").write_text(json.dumps(about | {"version": version}))
    values = {"int": 1, "float": 0.0, "bool": True, "str": "the test"}
    numbers: Any = {field.name: values[str(field.type)] for field in fields(Round)}
    rounds.append(run, replace(Round(**numbers), version=version, world=version))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_accepted_worlds_reach_actors_also_those_that_come_back(models, tmp_path) -> None:
    with Running(tmp_path, flags(models, **{"pace.every": 10_000})) as run:

        def drawn_by_last(groups: int) -> set[int]:
            return {world for _, found in sorted(worlds_of(run.folder).items())[-groups:] for world in found}

        run.until(lambda: drawn_by_last(1) == {0}, "the world of the beginning imagines")
        accept(run.folder, models, 1)
        run.until(lambda: drawn_by_last(1) == {1}, "world 1 imagines")
        assert rows(run.folder)[-1][m.WORLD_VERSION.name] == 1
        run.replaced("actor-0")
        at = max(worlds_of(run.folder))
        run.until(lambda: max(worlds_of(run.folder)) > at + 6, "the new actor imagines")
        assert drawn_by_last(4) == {1}, "it took the run's world before it began"
        for version in (2, 3):
            accept(run.folder, models, version)
        run.until(lambda: drawn_by_last(1) == {3}, "world 3 imagines")
        for found in worlds_of(run.folder).values():
            assert max(found) - min(found) <= 1, "no group reaches over more than the bound"
        run.end()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_accepted_worlds_reach_an_actor_that_joined(models, tmp_path) -> None:
    site = Site(tmp_path, flags(models, **{"pace.every": 10_000}))

    def until(true: Any, what: str) -> None:
        deadline = time.monotonic() + 90
        while not true():
            assert site.train.process.poll() is None, site.train.said()
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def drawn() -> set[int]:
        return {world for found in worlds_of(site.run).values() for world in found}

    try:
        site.train.until("waits up to 600 s")
        first = site.actor("first")
        site.progress(2)
        accept(site.run, models, 1)
        until(lambda: 1 in drawn(), "the actor took the new world")
        first.process.send_signal(signal.SIGTERM)
        first.ends()
        at = max(worlds_of(site.run))
        site.actor("second")
        until(lambda: max(worlds_of(site.run)) > at + 4, "another one imagines")
        late = [found for number, found in sorted(worlds_of(site.run).items()) if number > at + 2]
        assert {world for found in late for world in found} == {1}, "it fetched the run's world"
        site.train.process.send_signal(signal.SIGINT)
        assert "Traceback" not in site.train.ends()
    finally:
        for program in site.programs:
            program.process.kill()
    assert left_over(tmp_path) == []


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_training_waits_for_no_fitter_whether_it_stands_still_or_dies(models, tmp_path) -> None:
    with Running(tmp_path, flags(models, **{"pace.workers": 1})) as run:
        run.until(lambda: rounds.read(run.folder), "a round")
        (fitter_pid,) = run.pids("fitter")
        os.kill(fitter_pid, signal.SIGSTOP)
        reach(run.folder, len(rows(run.folder)) + 10, run.process, 60)
        os.kill(fitter_pid, signal.SIGCONT)
        run.replaced("fitter")
        made = len(rounds.read(run.folder))
        run.until(lambda: len(rounds.read(run.folder)) > made, "a round of the new fitter")
        last = rounds.read(run.folder)[-1]
        run.until(lambda: rows(run.folder)[-1].get(m.ROUND_VERSION.name, 0) >= last.version, "its row")
        for row in rounds.read(run.folder):
            assert (row.episodes, row.audited) == (8, 4)
            assert row.version % 2 == 0
        assert (run.folder / "checkpoints" / "best" / "state.json").is_file()
        said = run.end()
        assert "refit: true success" in said
        assert "refits accepted" in said
        assert "best, version" in said


# ---- what is refused -----------------------------------------------------------------------------


def checked(models: tuple[Path, list[str]], **changes: Any) -> None:
    folder = models[0]
    config = TrainConfig(
        policy=str(folder / "policy"),
        world=str(folder / "world"),
        start_states=str(folder / "starts.h5"),
        device="cpu",
    )
    if "world" in changes:  # It is the first to be asked.
        config = replace(config, start_states="tabletop")
    pace = {name: changes.pop(name) for name in list(changes) if name in PaceSettings.__dataclass_fields__}
    config = replace(config, pace=PaceSettings(**({"every": 2} | pace)), **changes)
    policy = build_policy(config, torch.device("cpu"))
    refits.check(config, check_environment(config), policy)


def test_what_can_be_done_is_not_refused(models, tmp_path: Path) -> None:
    checked(models)
    checked(models, recordings=str(tmp_path))
    write_recorded(tmp_path / "base", recorded_spec(64, simulator="tabletop"), (9,))
    checked(models, base=(str(tmp_path / "base"),))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"world": "tabletop_true"}, "tabletop_true is a simulator: it is the truth"),
        ({"recordings": "/no/such/folder"}, "--pace.recordings /no/such/folder is no folder"),
        ({"base": ("/no/such/folder",)}, "--pace.base: /no/such/folder holds no part"),
        ({"simulator": "libero_spatial"}, "libero"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(models, changes: Any, problem: str) -> None:
    with pytest.raises(AsyncRLError, match=problem):
        checked(models, **changes)


def test_recordings_of_another_size_are_no_base(models, tmp_path: Path) -> None:
    write_recorded(tmp_path, recorded_spec(16), (9,))
    with pytest.raises(ConfigError, match="16 x 16 and actions of 7 numbers, but --world draws 64"):
        checked(models, base=(str(tmp_path),))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"simulator": "tabletop", "recordings": "x"}, "come from one of them"),
        ({"every": 2, "world_steps": 0, "reward_steps": 0}, "would refit nothing"),
        ({"budget": 100}, "a round has 256 episodes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        PaceSettings(**changes)
