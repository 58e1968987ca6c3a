"""Checkpoints: whole or not at all, exact, and damaged ones are named."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from learner_fixtures import TablePolicy, groups_of
from safetensors.torch import load_file, save_file

from asyncrl import checkpoint
from asyncrl.checkpoint import Checkpoints, Progress
from asyncrl.config import AlgorithmSettings
from asyncrl.errors import CheckpointError
from asyncrl.learner.batches import build_batch
from asyncrl.learner.update import Update

SETTINGS = AlgorithmSettings(group_size=2, learning_rate=0.05, weight_decay=0.01)


def learn(update: Update, number: int) -> None:
    groups = groups_of([[3, -1], [-1, 12]], seed=number)
    update(build_batch(groups, version=number))


def saver(policy: TablePolicy) -> Callable[[Path], None]:
    return lambda folder: save_file(policy.state_dict(), folder / "model.safetensors")


def save(run_dir: Path, update: Update, version: int, *, keep: int = 3) -> Path:
    assert isinstance(update.policy, TablePolicy)
    return Checkpoints(run_dir, keep=keep).save(
        Progress(version=version, groups_used=2 * version, bad_updates=1, config_hash="abc"),
        save_policy=saver(update.policy),
        optimizer=update.optimizer,
        tensors=update.policy.trainable_tensors(),
    )


def load(folder: Path) -> tuple[Update, Progress]:
    policy = TablePolicy(seed=99)
    policy.load_state_dict(load_file(folder / "model.safetensors"))
    update = Update(policy, SETTINGS)
    return update, checkpoint.load(folder, optimizer=update.optimizer, tensors=policy.trainable_tensors())


def trained(updates: int) -> Update:
    update = Update(TablePolicy(), SETTINGS)
    for number in range(updates):
        learn(update, number)
    return update


def test_six_updates_equal_three_a_checkpoint_and_three_more_bit_for_bit(tmp_path: Path) -> None:
    through, first = trained(6), trained(3)
    again, progress = load(save(tmp_path, first, 3))
    for number in range(progress.version, 6):
        learn(again, number)
    expected, actual = through.policy.trainable_tensors(), again.policy.trainable_tensors()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    expected = checkpoint.optimizer_tensors(through.optimizer, expected)
    actual = checkpoint.optimizer_tensors(again.optimizer, actual)
    assert len(expected) == 9  # three parameters with step, exp_avg and exp_avg_sq
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_progress_and_random_states_come_back(tmp_path: Path) -> None:
    random.seed(5)
    torch.manual_seed(5)
    random.gauss(0, 1)  # leaves a second number in the generator's state
    folder = save(tmp_path, trained(1), 1)
    expected = (random.gauss(0, 1), random.random(), torch.rand(4).tolist())
    _, progress = load(folder)
    assert (random.gauss(0, 1), random.random(), torch.rand(4).tolist()) == expected
    assert progress == Progress(version=1, groups_used=2, bad_updates=1, config_hash="abc")


def test_a_checkpoint_before_the_first_update_can_be_loaded(tmp_path: Path) -> None:
    again, progress = load(save(tmp_path, trained(0), 0))
    assert progress.version == 0
    assert not again.optimizer.state


def test_the_newest_checkpoints_are_kept_and_the_newest_wins(tmp_path: Path) -> None:
    update = trained(1)
    for version in (8, 9, 10, 11):
        save(tmp_path, update, version, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["update_000010", "update_000011"]
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest.name == "update_000011"


def test_a_run_without_checkpoints_has_no_latest_one(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None


def test_an_unfinished_checkpoint_never_counts_and_the_next_save_removes_it(tmp_path: Path) -> None:
    update = trained(1)
    done = save(tmp_path, update, 1)
    unfinished = done.with_name("update_000002.tmp")
    shutil.copytree(done, unfinished)
    assert checkpoint.latest(tmp_path) == done
    save(tmp_path, update, 3)
    assert not unfinished.exists()


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    update = trained(1)
    done = save(tmp_path, update, 1)

    def full_disk(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"update_000002.*No space left.*--keep-checkpoints"):
        Checkpoints(tmp_path, keep=1).save(
            Progress(version=2, groups_used=4),
            save_policy=full_disk,
            optimizer=update.optimizer,
            tensors=update.policy.trainable_tensors(),
        )
    assert checkpoint.latest(tmp_path) == done
    load(done)


def test_saving_a_version_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, trained(1), 1)
    newer = trained(2)
    again, _ = load(save(tmp_path, newer, 1))
    assert torch.equal(again.policy.trainable_tensors()["logits"], newer.policy.trainable_tensors()["logits"])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update_000001"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "random.safetensors"])
def test_a_truncated_or_missing_file_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, trained(1), 1)
    checkpoint.verify(folder)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-5])
    message = rf"{name} cannot be read: it has {len(whole) - 5} bytes, {len(whole)} were written.*--resume"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.verify(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: it is missing"):
        checkpoint.verify(folder)


def test_a_damaged_state_file_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, trained(1), 1)
    text = (folder / "state.json").read_text()
    (folder / "state.json").write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read.*Delete the folder update_000001"):
        checkpoint.verify(folder)


def test_damage_inside_a_file_of_full_size_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, trained(1), 1)
    path = folder / "optimizer.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors cannot be read"):
        load(folder)


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, trained(1), 1)
    state = json.loads((folder / "state.json").read_text()) | {"format": 2}
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"has format 2.*reads 1"):
        checkpoint.verify(folder)


@pytest.mark.parametrize(("rows", "message"), [(5, "does not fit the policy"), (0, "no optimizer state for")])
def test_an_optimizer_state_of_another_policy_is_refused(tmp_path: Path, rows: int, message: str) -> None:
    folder = save(tmp_path, trained(1), 1)
    policy = TablePolicy(rows=rows or 6)
    if not rows:
        policy.extra = torch.nn.Parameter(torch.ones(2))
    other = Update(policy, SETTINGS)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(folder, optimizer=other.optimizer, tensors=policy.trainable_tensors())
