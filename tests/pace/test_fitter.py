"""A round: its true episodes, the audit that decides, what is left behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.actor import ActorSettings
from asyncrl.config.pace import PaceSettings
from asyncrl.config.run import TrainConfig
from asyncrl.errors import RunError
from asyncrl.pace import fitter as fitter_module
from asyncrl.pace import rounds
from asyncrl.pace.fitter import Fitter, WorldAt
from asyncrl.pace.verdicts import Verdicts
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.worlds import mined_keyframes
from support.recorded import recorded_spec, write_recorded

SPEC = recorded_spec(64, simulator="tabletop", tasks=tuple(TASKS), trials=0)
POLICY: Any = None


class Written:
    """True episodes that a program draws; every second one is solved."""

    name = "written"

    def __init__(self) -> None:
        self.spent: list[int] = []
        self.there = True
        self.frames = 9
        """Of an episode."""

    def ready(self, episodes: int) -> bool:
        return self.there

    def collect(self, folder: Path, policy: Any, episodes: int, spent: int) -> None:
        self.spent.append(spent)
        write_recorded(folder, SPEC, (self.frames,) * episodes)


class Judged:
    """Says how many of the held-out episodes each world judges wrongly, and which worlds were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrong: dict[int, int]) -> None:
        self.wrong = wrong
        monkeypatch.setattr(fitter_module, "verdicts", self.verdicts)

    def load(self, at: WorldAt) -> Any:
        version = json.loads((at.folder / "world.json").read_text())["version"]
        assert version == at.version
        return at.version, None

    def verdicts(self, world: int, reward: Any, recordings: Any, **rule: Any) -> Verdicts:
        solved = recordings.solved()
        judged = solved.copy()
        judged[: self.wrong[world]] ^= True
        return Verdicts(judged=judged, solved=solved)


@pytest.fixture
def first(tmp_path: Path) -> WorldAt:
    from support.tiny_models import write_models

    write_models(tmp_path / "models")
    world = tmp_path / "models" / "world"
    return WorldAt(folder=world, reward=world, version=0)


def make(
    tmp_path: Path, first: WorldAt, judged: Judged, *, mines: bool = False, **changes: Any
) -> tuple[Fitter, Written]:
    pace = PaceSettings(
        **{"every": 2, "episodes": 8, "held_out": 0.5, "world_steps": 1, "reward_steps": 1, "batch": 4}
        | changes
    )
    source = Written()
    (tmp_path / "run").mkdir(exist_ok=True)
    config = TrainConfig(pace=pace, actor=ActorSettings(max_decisions=4))
    fitter = Fitter(config, tmp_path / "run", source, first, judged.load, torch.device("cpu"), mines=mines)
    return fitter, source


def test_rounds_go_on_from_the_last_accepted_world(tmp_path: Path, first: WorldAt, monkeypatch) -> None:
    judged = Judged(monkeypatch, {0: 3, 1: 2, 2: 2})
    fitter, source = make(tmp_path, first, judged)
    run = tmp_path / "run"
    one = fitter.round(2, POLICY)
    assert (one.accepted, one.world, one.wrong, one.wrong_after, one.audited) == (True, 1, 3, 2, 4)
    assert (one.episodes, one.successes, one.success) == (8, 4, 0.5)
    assert fitter.present == WorldAt(
        folder=run / "worlds" / "version_000001", reward=run / "worlds" / "version_000001", version=1
    )
    two = fitter.round(4, POLICY)
    assert (two.accepted, two.world, two.wrong, two.wrong_after) == (False, 1, 2, 2), "equal is not better"
    assert fitter.present.version == 1
    judged.wrong[2] = 0
    three = fitter.round(8, POLICY)
    assert (three.accepted, three.world) == (True, 2)
    assert source.spent == [0, 8, 16]
    assert rounds.read(run) == [one, two, three]
    assert sorted(path.name for path in (run / "worlds").iterdir()) == ["version_000001", "version_000002"]
    assert sorted(path.name for path in (run / "true").iterdir()) == [
        f"round_{version:06d}" for version in (2, 4, 8)
    ]


def test_a_round_is_due_once_and_within_the_budget(tmp_path: Path, first: WorldAt, monkeypatch) -> None:
    fitter, source = make(tmp_path, first, Judged(monkeypatch, {0: 1, 1: 1}), budget=16)
    assert [version for version in range(7) if fitter.due(version)] == [2, 4, 6]
    source.there = False
    assert not fitter.due(2)
    source.there = True
    fitter.round(4, POLICY)
    assert [version for version in range(9) if fitter.due(version)] == [6, 8]
    fitter.round(6, POLICY)
    assert not any(fitter.due(version) for version in range(20)), "16 episodes are spent"


def test_a_round_that_fails_leaves_the_world_as_it_was(tmp_path: Path, first: WorldAt, monkeypatch) -> None:
    judged = Judged(monkeypatch, {0: 3, 1: 0})
    fitter, _ = make(tmp_path, first, judged)

    def broken(*arguments: Any, **more: Any) -> None:
        raise RunError("The loss of `world` is nan.")

    with monkeypatch.context() as patch:
        patch.setattr(fitter_module, "refit", broken)
        with pytest.raises(RunError, match="is nan"):
            fitter.round(2, POLICY)
    assert (rounds.read(tmp_path / "run"), fitter.present) == ([], first)
    assert fitter.due(2), "it is tried again"
    assert fitter.round(2, POLICY).accepted


def test_a_round_that_was_killed_halfway_is_made_anew(tmp_path: Path, first: WorldAt, monkeypatch) -> None:
    fitter, _ = make(tmp_path, first, Judged(monkeypatch, {0: 3, 1: 2}))
    run = tmp_path / "run"
    (run / "worlds" / "version_000001.tmp").mkdir(parents=True)
    (run / "worlds" / "version_000001.tmp" / "half").write_text("")
    (run / "worlds" / "version_000001").mkdir()
    (run / "true" / "round_000002").mkdir(parents=True)
    (run / "true" / "round_000002" / "part-00000.h5").write_bytes(b"torn")
    assert fitter.present == first
    assert fitter.round(2, POLICY).accepted
    world = run / "worlds" / "version_000001"
    assert not (world / "half").exists()
    assert np.all([(world / name).is_file() for name in ("world.json", "transformer.safetensors")])


class Killed(BaseException):
    """The fitter ends here, as by SIGKILL: nothing of it catches this."""


@pytest.mark.parametrize("moment", ["before the folder is named", "before the line", "within the line"])
def test_a_fitter_that_is_killed_as_it_hands_a_world_over_leaves_nothing_half(
    tmp_path: Path, first: WorldAt, monkeypatch, moment: str
) -> None:
    judged, run = Judged(monkeypatch, {0: 3, 1: 2}), tmp_path / "run"

    def killed(*arguments: Any) -> None:
        if moment == "within the line":
            (run / rounds.NAME).write_text('{"version": 2, "time": 17')
        raise Killed

    fitter, _ = make(tmp_path, first, judged)
    last = (Path, "rename") if moment == "before the folder is named" else (rounds, "append")
    with monkeypatch.context() as patch:
        patch.setattr(*last, killed)
        with pytest.raises(Killed):
            fitter.round(2, POLICY)
    assert (run / "worlds" / "version_000001").is_dir() == (moment != "before the folder is named")
    assert (rounds.read(run), rounds.newest_world(run)) == ([], None), "actors hear nothing of it"
    again, source = make(tmp_path, first, judged)
    assert again.present == first
    assert again.due(2)
    row = again.round(2, POLICY)
    assert (row.accepted, row.world, source.spent) == (True, 1, [0])
    assert (rounds.read(run), rounds.newest_world(run)) == ([row], 1)
    assert [path.name for path in (run / "worlds").iterdir()] == ["version_000001"]
    assert again.present.version == 1


def test_the_audit_judges_as_the_run_does(tmp_path: Path, first: WorldAt, monkeypatch) -> None:
    asked: list[dict[str, Any]] = []
    judged = Judged(monkeypatch, {0: 1, 1: 1})
    fitter, _ = make(tmp_path, first, judged)
    actor = replace(TrainConfig().actor, success_threshold=0.35, success_frames="last")
    fitter._config = replace(fitter._config, actor=actor)

    def noting(*arguments: Any, **rule: Any) -> Verdicts:
        asked.append(rule)
        return judged.verdicts(*arguments, **rule)

    monkeypatch.setattr(fitter_module, "verdicts", noting)
    fitter.round(2, POLICY)
    assert asked == [{"threshold": 0.35, "success_frames": "last"}] * 2


def names(folder: Path) -> list[str]:
    return [state.name for state in mined_keyframes.load(folder)]


def test_key_frames_are_a_new_version_also_where_the_refit_is_refused(
    tmp_path: Path, first: WorldAt, monkeypatch
) -> None:
    judged = Judged(monkeypatch, {0: 3, 1: 2, 2: 2, 3: 1})
    fitter, source = make(tmp_path, first, judged, mines=True, siblings=0, keyframes=6)
    source.frames = 33
    one = fitter.round(2, POLICY)
    assert (one.published, one.accepted, one.world, one.keyframes) == (True, True, 1, 6)
    assert names(fitter.present.folder) == [f"world-1-keyframe-{row}" for row in range(6)]
    assert {state.elapsed for state in mined_keyframes.load(fitter.present.folder)} <= {1, 2, 3}
    two = fitter.round(4, POLICY)
    assert (two.published, two.accepted, two.world, two.keyframes) == (True, False, 2, 6)
    assert str(two).endswith("refit refused, world 2 has new key frames (6 key frames)")
    assert names(fitter.present.folder) == [f"world-2-keyframe-{row}" for row in range(6)]
    for name in ("transformer.safetensors", "reward.safetensors"):
        assert (fitter.present.folder / name).read_bytes() == (
            rounds.world_folder(tmp_path / "run", 1) / name
        ).read_bytes(), "the weights are those of before"
    source.frames = 9
    judged.wrong[3] = 2
    three = fitter.round(6, POLICY)
    assert (three.published, three.world, three.keyframes) == (False, 2, 0), "too short for a key frame"
    judged.wrong[3] = 1
    four = fitter.round(8, POLICY)
    assert (four.accepted, four.world, four.keyframes) == (True, 3, 6), "those of before go on"
    assert names(fitter.present.folder) == [f"world-3-keyframe-{row}" for row in range(6)]
