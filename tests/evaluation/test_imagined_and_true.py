"""Audits in which every verdict is known, and versions of a run that are measured as they come."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.evaluation import run_checkpoints
from asyncrl.evaluation.imagined_and_true import Audit, AuditedEpisode, AuditModels, audit, psnr_by_decision
from asyncrl.evaluation.run_checkpoints import RunCheckpoints, is_due
from asyncrl.evaluation.success_rate import Evaluation, SuccessRate
from asyncrl.policies.interface import ActResult, SamplingParams
from asyncrl.records import ActionSpec, StartState
from asyncrl.simulators.interface import SimStart, SimulatorSource
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import Play
from asyncrl.storage import checkpoint
from asyncrl.storage.checkpoint import clean_up, forget_best_after
from asyncrl.storage.run_folder import BEFORE, BEST, HELD
from support.simulated import COUNTING, TASKS, RowsState

SIZE = 2
SCORED = 10
"""Brightness that the reward model calls a success."""
DECISIONS = 3
EXACT = 10 * math.log10(255**2 / 1e-3)


class CountingWorld:
    """Frame i has brightness i, as in the simulator; with the second task it stays dark."""

    version, image_size, action_spec, device = 0, SIZE, ActionSpec(), torch.device("cpu")

    def __init__(self) -> None:
        self.calls = list[tuple[np.ndarray, list[int]]]()

    def start(self, states: Sequence[StartState], *, decisions: int = 0) -> Any:
        assert decisions == DECISIONS
        rows = [[float(s.present_frame[0, 0, 0]), float(s.task == TASKS[0])] for s in states]
        return np.array(rows).view(RowsState)

    def imagine(self, state: Any, actions: Tensor, noise_seeds: Sequence[int]) -> Any:
        self.calls.append((actions.numpy().copy(), list(noise_seeds)))
        steps = (state[:, :1] + np.arange(1, 9)) * state[:, 1:]
        frames = torch.from_numpy(steps.astype(np.uint8))[:, :, None, None, None]
        return frames.expand(-1, -1, SIZE, SIZE, 3), state + np.array([8, 0])


class Judge:
    """One frame of all looks like a success."""

    image_size = 0

    def score(self, frames: Tensor, tasks: Sequence[str]) -> Tensor:
        assert len(frames) == len(tasks)
        return 0.9 * (frames[..., 0, 0, 0] == SCORED).float()


class Repeater:
    """Its actions are the brightness that it is shown."""

    action_spec = ActionSpec()

    def preprocess(self, frames: np.ndarray, tasks: Sequence[str], states: Any = None) -> np.ndarray:
        return frames.reshape(len(frames), -1)[:, 0].astype(np.float32)

    def act(self, inputs: np.ndarray, sampling: SamplingParams, seeds: Sequence[int]) -> ActResult:
        actions = torch.from_numpy(inputs)[:, None, None].expand(-1, 8, 7)
        nothing = torch.zeros(())
        return ActResult(actions=actions, sample={}, logprob=nothing, value=None, entropy=nothing)


def models(world: CountingWorld | None = None, **changes: Any) -> AuditModels:
    parts: dict[str, Any] = {
        "policy": Repeater(),
        "world": world or CountingWorld(),
        "reward": Judge(),
        "sampling": SamplingParams(temperature=1.0),
        "max_decisions": DECISIONS,
        "threshold": 0.7,
        "success_frames": 1,
    }
    return AuditModels(**parts | changes)


def pool(places: int = 2) -> SimulatorPool:
    return SimulatorPool(SimulatorSource(name=COUNTING, places=places, horizon=8 * DECISIONS), workers=0)


def plays(*seeds: int) -> list[Play]:
    return [Play(start=SimStart(name=f"seed-{seed}", task="", seed=seed)) for seed in seeds]


# Even seeds have the first task; seed s is solved at step s mod 100.
RIGHT, LATER, NEVER, MISSED, AGREED = 1010, 1020, 1000, 1011, 1001 + 98
SEEDS = (RIGHT, LATER, NEVER, MISSED, AGREED)


def found(rows: int, places: int = 2) -> list[AuditedEpisode]:
    with pool(places) as simulators:
        return audit(models(), simulators, plays(*SEEDS), rows=rows)


def test_every_verdict_is_held_against_what_the_same_actions_led_to() -> None:
    right, later, never, missed, agreed = found(rows=8)
    assert [e.imagined for e in (right, later, never, missed, agreed)] == [True, True, True, False, False]
    assert [e.true for e in (right, later, never, missed, agreed)] == [True, False, False, True, False]
    assert [e.decisions for e in (right, later, never, missed, agreed)] == [2, 2, 2, 3, 3]
    assert all(e.judged_true for e in (right, later, never, missed, agreed)), "step 10 is in all of them"
    assert right.psnr == pytest.approx((EXACT, EXACT), abs=1e-3)
    steps = np.arange(1, 25).reshape(3, 8)
    dark = (10 * np.log10(255**2 / steps.astype(float) ** 2)).mean(1)
    assert missed.psnr == pytest.approx(dark, abs=1e-3)


def test_rates_are_counted_over_what_they_are_of() -> None:
    result = Audit.of(found(rows=8))
    assert (result.imagined_success.successes, result.imagined_success.episodes) == (3, 5)
    assert (result.true_success.successes, result.true_success.episodes) == (2, 5)
    assert (result.wrong.successes, result.wrong.episodes) == (3, 5)
    assert (result.false.successes, result.false.episodes) == (2, 3)
    assert (result.missed.successes, result.missed.episodes) == (1, 2)
    assert (result.wrong_on_true_frames.successes, result.wrong_on_true_frames.episodes) == (3, 5)
    assert result.correlation == pytest.approx(np.corrcoef([1, 1, 1, 0, 0], [1, 0, 0, 1, 0])[0, 1])
    assert len(result.psnr) == 3
    nothing = Audit.of([])
    assert (nothing.wrong.episodes, math.isnan(nothing.correlation), nothing.psnr) == (0, True, ())


@pytest.mark.parametrize(("rows", "places"), [(1, 1), (2, 3), (5, 1), (16, 2)])
def test_batches_and_places_change_nothing(rows: int, places: int) -> None:
    assert found(rows, places) == found(8)


def test_the_policy_sees_imagined_frames_and_the_simulator_gets_its_actions(monkeypatch) -> None:
    asked = list[float]()
    with pool() as simulators:
        step = simulators.step

        def recorded(slot: int, actions: Any, **more: Any) -> None:
            asked.append(float(actions[0, 0]))
            step(slot, actions, **more)

        monkeypatch.setattr(simulators, "step", recorded)
        audit(models(), simulators, plays(RIGHT), rows=1)
        audit(models(), simulators, plays(MISSED), rows=1)
    assert asked == [0.0, 8.0, 0.0, 0.0, 0.0], "in the dark world it sees 0, though the simulator counts on"


def test_imagination_begins_behind_true_decisions() -> None:
    world = CountingWorld()
    with pool() as simulators:
        found = audit(models(world, true_decisions=1), simulators, plays(RIGHT, LATER, 1004, AGREED), rows=8)
    assert [e.start for e in found] == ["seed-1010", "seed-1020", "seed-1099"], (
        "seed 1004 was solved in step 4"
    )
    verdicts = [(e.imagined, e.true, e.judged_true) for e in found]
    assert verdicts == [(True, True, True), (True, False, True), (False, False, True)]
    assert [e.decisions for e in found] == [1, 1, 2]
    assert len(found[2].psnr) == 2
    first = world.calls[0][0][:, 0, 0]
    assert first.tolist() == [8.0] * 8, "the policy sees the frame after the true decision"


def test_an_interrupted_audit_tells_what_was_found() -> None:
    calls = Mock(side_effect=[None, KeyboardInterrupt])
    with pool() as simulators, pytest.raises(KeyboardInterrupt) as ended:
        audit(models(), simulators, plays(*SEEDS), rows=2, progress=calls)
    assert ended.value.__notes__ == ["3 of 4 verdicts were wrong"]


def test_the_success_rule_of_the_run_ends_episodes() -> None:
    with pool() as simulators:
        (strict,) = audit(models(success_frames=2), simulators, plays(RIGHT), rows=1)
        (low,) = audit(models(threshold=0.95), simulators, plays(RIGHT), rows=1)
    assert (strict.imagined, strict.decisions, strict.judged_true) == (False, 3, False)
    assert not low.imagined


def test_decisions_without_a_true_frame_have_no_psnr() -> None:
    frames = np.zeros((16, 2, 2, 3), np.uint8)
    assert len(psnr_by_decision(frames, frames[:9], 8)) == 2
    assert psnr_by_decision(frames, frames[:0], 8) == ()


def save(run: Path, version: int) -> Path:
    """A complete checkpoint whose one file says its version."""
    folder = run / "checkpoints" / f"update_{version:06d}"
    (folder / "state").mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"weights {version}")
    (folder / "state" / "part.safetensors").write_text("optimizer")
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*.safetensors")
    }
    (folder / "state.json").write_text(json.dumps({"files": files, "progress": {"version": version}}))
    return folder


class Player:
    """Measures what it is told to: version -> successes of 10. Notes what it was given."""

    def __init__(self, successes: dict[int, int]) -> None:
        self.successes = successes
        self.played: list[tuple[int, str]] = []

    def __call__(self, version: int, folder: Path | None) -> tuple[Evaluation, str, str]:
        content = "" if folder is None else (folder / "model.safetensors").read_text()
        self.played.append((version, content))
        rate = SuccessRate.of(self.successes[version], 10)
        return Evaluation(overall=rate, by_task={}, mean_steps=20.0), f"{version}.png", ""


def opened(run: Path, player: Player, every: int = 5, last: int = 100) -> RunCheckpoints:
    return RunCheckpoints(run, player, every=every, last=last, simulator="tabletop", temperature=1.0)


def test_the_first_policy_is_measured_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    player = Player({0: 4})
    checkpoints = opened(tmp_path, player)
    assert checkpoints.round()
    assert not checkpoints.round(), "nothing else is due"
    assert player.played == [(0, "")]
    (row,) = run_checkpoints.read_evaluations(tmp_path)
    assert (row.version, row.successes, row.episodes, row.success, row.best) == (0, 4, 10, 0.4, True)
    assert (row.low, row.high) == pytest.approx((0.1682, 0.6873), abs=1e-4)
    assert (row.simulator, row.temperature, row.steps, row.sheet) == ("tabletop", 1.0, 20.0, "0.png")
    assert str(row) == "40.0% [16.8%, 68.7%] of 10 (version 0)"


def test_the_newest_version_that_is_due_is_measured_and_what_was_skipped_is_counted(tmp_path: Path) -> None:
    player = Player({0: 4, 20: 5, 25: 6})
    checkpoints = opened(tmp_path, player)
    checkpoints.round()
    for version in (5, 10, 12, 15, 20, 21):
        save(tmp_path, version)
    assert checkpoints.round()
    assert not checkpoints.round(), "21 is not due, and older ones are not caught up with"
    save(tmp_path, 25)
    assert checkpoints.round()
    assert [version for version, _ in player.played] == [0, 20, 25]
    assert [row.skipped for row in run_checkpoints.read_evaluations(tmp_path)] == [0, 3, 0]


def test_the_last_version_is_due_whatever_its_number() -> None:
    assert [version for version in range(1, 8) if is_due(version, 5, 7)] == [5, 7]
    assert not is_due(7, 0, 7), "--evaluate-every 0"


def test_the_best_version_stays_and_of_two_equal_ones_the_later(tmp_path: Path) -> None:
    player = Player({0: 4, 5: 6, 10: 5, 15: 6})
    checkpoints = opened(tmp_path, player)
    kept = []
    for version in (0, 5, 10, 15):
        if version:
            save(tmp_path, version)
        checkpoints.round()
        best = tmp_path / "checkpoints" / BEST / "model.safetensors"
        kept.append(best.read_text() if best.exists() else "")
    assert kept == ["", "weights 5", "weights 5", "weights 15"]
    assert [row.best for row in run_checkpoints.read_evaluations(tmp_path)] == [True, True, False, True]
    assert not list((tmp_path / "checkpoints").glob("evaluating*"))


def test_a_checkpoint_may_be_deleted_while_it_is_measured(tmp_path: Path) -> None:
    class Slow(Player):
        def __call__(self, version: int, folder: Path | None) -> tuple[Evaluation, str, str]:
            if version:
                shutil.rmtree(tmp_path / "checkpoints" / f"update_{version:06d}")
            return super().__call__(version, folder)

    player = Slow({0: 4, 5: 6})
    checkpoints = opened(tmp_path, player)
    checkpoints.round()
    save(tmp_path, 5)
    assert checkpoints.round()
    assert player.played[-1] == (5, "weights 5")
    assert (tmp_path / "checkpoints" / BEST / "state" / "part.safetensors").read_text() == "optimizer"


def test_a_checkpoint_that_goes_away_is_left_for_the_next_round(tmp_path: Path) -> None:
    player = Player({0: 4, 10: 5})
    checkpoints = opened(tmp_path, player)
    checkpoints.round()
    (save(tmp_path, 5) / "state" / "part.safetensors").unlink()  # It is being deleted, file by file.
    assert not checkpoints.round()
    assert not (tmp_path / "checkpoints" / HELD).exists()
    save(tmp_path, 10)
    assert checkpoints.round()
    assert [version for version, _ in player.played] == [0, 10]


def test_files_are_copied_where_there_are_no_links(tmp_path: Path, monkeypatch) -> None:
    def refused(source: Path, copy: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    source = save(tmp_path, 5)
    monkeypatch.setattr(checkpoint.os, "link", refused)
    checkpoint.keep_copy(source, tmp_path / "copy")
    shutil.rmtree(source)
    assert (tmp_path / "copy" / "model.safetensors").read_text() == "weights 5"


def test_a_process_that_comes_back_measures_nothing_twice(tmp_path: Path) -> None:
    first = Player({0: 4, 5: 6})
    checkpoints = opened(tmp_path, first)
    checkpoints.round()
    save(tmp_path, 5)
    checkpoints.round()
    assert not opened(tmp_path, Player({})).round()


def test_a_resumed_run_forgets_what_it_makes_anew(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path, Player({0: 4, 5: 6, 10: 7}))
    checkpoints.round()
    for version in (5, 10):
        save(tmp_path, version)
        checkpoints.round()
    best = tmp_path / "checkpoints" / BEST
    forget_best_after(tmp_path, 10)
    assert best.is_dir()
    run_checkpoints.cut_evaluations(tmp_path, 5)
    forget_best_after(tmp_path, 9)
    assert not best.exists()
    assert [row.version for row in run_checkpoints.read_evaluations(tmp_path)] == [0, 5]


def test_lines_that_are_none_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(tmp_path, Player({0: 4})).round()
    path = tmp_path / "evaluations.jsonl"
    whole = json.loads(path.read_text())
    wrong = [{**whole, "version": "1"}, {**whole, "version": True}, {"version": 3}, [1]]
    wrong += [{**whole, "success": None}]
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in wrong)
        file.write('{"version": 9, "ti')
    assert [row.version for row in run_checkpoints.read_evaluations(tmp_path)] == [0]
    assert caplog.text.count("evaluations.jsonl: line") == len(wrong)
    checkpoints = opened(tmp_path, Player({5: 6}))
    save(tmp_path, 5)
    checkpoints.round()
    assert [row.version for row in run_checkpoints.read_evaluations(tmp_path)] == [0, 5], "behind a torn one"


def test_a_best_version_that_was_being_replaced_is_put_back(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(tmp_path, 5).rename(folder / BEFORE)
    save(tmp_path, 10).rename(folder / HELD)
    clean_up(tmp_path)
    assert (folder / BEST / "model.safetensors").read_text() == "weights 5"
    assert sorted(path.name for path in folder.iterdir()) == [BEST]
