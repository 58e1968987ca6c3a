"""Checkpoints: whole or not at all, exact, and damaged ones are named."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from asyncrl.errors import CheckpointError
from asyncrl.learner.fsdp import mesh_of_ranks
from asyncrl.storage import checkpoint, checkpoint_state
from asyncrl.storage.checkpoint import Checkpoints, Progress
from support import child_environment
from support.ranks import run_ranks
from support.table_policy import TablePolicy

STATE_FILE = "state/shard-00001-model-00001-of-00001.safetensors"


class Training:
    """A table policy under AdamW, with gradients that follow from the step's number."""

    def __init__(self, policy: TablePolicy | None = None, *, fused: bool = False) -> None:
        self.policy = policy or TablePolicy()
        self.parameters = self.policy.trainable_parameters()
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.05, weight_decay=0.01, fused=fused)

    def learn(self, *numbers: int) -> Training:
        for number in numbers:
            for place, parameter in enumerate(self.parameters.values()):
                generator = torch.Generator().manual_seed(10 * number + place)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            self.optimizer.step()
        return self

    def state(self) -> dict[str, Tensor]:
        state = {name: p.detach().clone() for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{name}.{key}"] = value.clone()
        return state


def saver(policy: TablePolicy) -> Callable[[Path], None]:
    copies = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    return lambda folder: save_file(copies, folder / "model.safetensors")


def begin(
    checkpoints: Checkpoints,
    training: Training,
    version: int,
    write_policy: Callable[[Path], None] | None = None,
) -> Path:
    return checkpoints.save(
        Progress(version=version, groups_used=2 * version, bad_updates=1),
        copy_policy=lambda: write_policy or saver(training.policy),
        optimizer=training.optimizer,
        parameters=training.parameters,
    )


def save(run_dir: Path, training: Training, version: int, *, keep: int = 3) -> Path:
    checkpoints = Checkpoints(run_dir, keep=keep)
    folder = begin(checkpoints, training, version)
    checkpoints.finish()
    return folder


def load(folder: Path, *, fused: bool = False) -> tuple[Training, Progress]:
    training = Training(TablePolicy(seed=99), fused=fused)
    progress = checkpoint.load(folder, optimizer=training.optimizer, parameters=training.parameters)
    return training, progress


def trained(updates: int) -> Training:
    return Training().learn(*range(updates))


@pytest.mark.parametrize("fused", [False, True])
def test_six_updates_equal_three_a_checkpoint_and_three_more_bit_for_bit(tmp_path: Path, fused: bool) -> None:
    """Fused, as on a GPU, AdamW makes the step of all weights at once and counts steps beside them."""
    expected = Training(fused=fused).learn(*range(6)).state()
    saved = save(tmp_path, Training(fused=fused).learn(*range(3)), 3)
    again, progress = load(saved, fused=fused)
    actual = again.learn(*range(progress.version, 6)).state()
    assert len(expected) == 3 + 9  # three parameters, each with step, exp_avg and exp_avg_sq
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_what_is_trained_after_save_returned_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    training, gate = trained(2), threading.Event()
    expected, write = training.state(), saver(training.policy)
    checkpoints = Checkpoints(tmp_path, keep=3)

    def late(folder: Path) -> None:
        assert gate.wait(20)
        write(folder)

    folder = begin(checkpoints, training, 2, late)
    training.learn(2)
    assert checkpoint.latest(tmp_path) is None, "it is published when all of it is written"
    gate.set()
    begin(checkpoints, training, 3)  # Waits for the first.
    assert min(checkpoints.pop_seconds()) > 0
    assert checkpoints.pop_seconds() == (0, 0), "it counts from the last time that it was asked"
    assert checkpoint.latest(tmp_path) is not None
    actual = load(folder)[0].state()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    checkpoints.finish()


def test_a_writer_that_hangs_is_named_at_its_deadline(tmp_path: Path) -> None:
    checkpoints, gate = Checkpoints(tmp_path, keep=3), threading.Event()
    begin(checkpoints, trained(1), 1, lambda folder: gate.wait(20) and None)
    with pytest.raises(CheckpointError, match=r"update_000001 is not written after 0\.05 more seconds"):
        checkpoints.finish(0.05)
    gate.set()
    checkpoints.finish()


def test_progress_and_random_states_come_back(tmp_path: Path) -> None:
    random.seed(5)
    torch.manual_seed(5)
    random.gauss(0, 1)  # leaves a second number in the generator's state
    folder = save(tmp_path, trained(1), 1)
    expected = (random.gauss(0, 1), random.random(), torch.rand(4).tolist())
    _, progress = load(folder)
    assert (random.gauss(0, 1), random.random(), torch.rand(4).tolist()) == expected
    assert progress == Progress(version=1, groups_used=2, bad_updates=1)


def test_a_checkpoint_before_the_first_update_can_be_loaded(tmp_path: Path) -> None:
    again, progress = load(save(tmp_path, trained(0), 0))
    assert progress.version == 0
    assert not again.optimizer.state
    assert torch.equal(again.policy.logits, TablePolicy().logits)


def test_what_had_no_gradient_yet_has_no_state_and_is_resumed(tmp_path: Path) -> None:
    """In the critic's warm-up the optimizer has seen no gradient of the policy."""
    parameters = {name: nn.Parameter(torch.ones(3)) for name in ("policy", "critic")}
    optimizer = torch.optim.AdamW(parameters.values())
    parameters["critic"].grad = torch.ones(3)
    optimizer.step()
    state = checkpoint_state.copy_state(parameters, optimizer, rank=0)
    checkpoint_state.write_state(state, tmp_path, rank=0)
    again = {name: nn.Parameter(torch.zeros(3)) for name in parameters}
    resumed = torch.optim.AdamW(again.values())
    checkpoint_state.read_state(tmp_path, again, resumed)
    assert all(torch.equal(again[name], parameters[name]) for name in parameters)
    assert list(resumed.state) == [again["critic"]]
    assert torch.equal(
        resumed.state[again["critic"]]["exp_avg"], optimizer.state[parameters["critic"]]["exp_avg"]
    )


def test_the_newest_checkpoints_are_kept_and_the_newest_wins(tmp_path: Path) -> None:
    update = trained(1)
    for version in (8, 9, 10, 11, 11):  # The last replaces that of its name.
        save(tmp_path, update, version, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["update_000010", "update_000011"]
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest.name == "update_000011"


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    update = trained(1)
    done = save(tmp_path, update, 1)

    def full_disk(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path, keep=1)
    begin(checkpoints, update, 2, full_disk)
    with pytest.raises(CheckpointError, match=r"update_000002.*No space left.*--keep-checkpoints"):
        begin(checkpoints, update, 3)
    assert not list(tmp_path.rglob("*.tmp"))
    assert checkpoint.latest(tmp_path) == done
    load(done)


@pytest.mark.parametrize("name", ["model.safetensors", STATE_FILE, "random-00000.safetensors"])
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], r"state\.json cannot be read.*Delete the folder update_000001"),
        (lambda text: text.replace('"format": 2', '"format": 1'), r"has format 1.*reads 2"),
    ],
)
def test_a_damaged_state_file_is_named(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    path = save(tmp_path, trained(1), 1) / "state.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.verify(path.parent)


@pytest.mark.parametrize(
    ("rows", "message"), [(5, "does not fit the policy"), (0, "has no weight for extra")]
)
def test_the_state_of_another_policy_is_refused(tmp_path: Path, rows: int, message: str) -> None:
    folder = save(tmp_path, trained(1), 1)
    policy = TablePolicy(rows=rows or 6)
    if not rows:
        policy.extra = nn.Parameter(torch.ones(2))
    other = Training(policy)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(folder, optimizer=other.optimizer, parameters=other.parameters)


CUT = """
import os, signal, sys
from pathlib import Path
from test_checkpoint import Checkpoints, begin, trained, save
run = Path({run!r})
save(run, trained(1), 1)
def cut(folder):
    (folder / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
checkpoints = Checkpoints(run, keep=1)
begin(checkpoints, trained(2), 2, cut)
checkpoints.finish()
"""


@pytest.mark.timeout(60)
def test_a_kill_in_the_middle_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    program = CUT.format(run=str(tmp_path))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, timeout=50, capture_output=True, text=True, env=child_environment())
    assert done.returncode == -signal.SIGKILL, done.stderr
    newest = checkpoint.latest(tmp_path)
    assert newest == tmp_path / "checkpoints" / "update_000001"
    assert newest.with_name("update_000002.tmp").is_dir()
    again, _ = load(newest)
    save(tmp_path, again.learn(1), 2)
    assert not list(tmp_path.rglob("*.tmp"))


class Net(nn.Module):
    """Sizes that two ranks cannot divide evenly, and one row that only the first of them holds."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.odd = nn.Parameter(torch.randn(5, 3, generator=generator))
        self.single = nn.Parameter(torch.randn(1, 4, generator=generator))
        self.even = nn.Parameter(torch.randn(4, generator=generator))


def sharded(seed: int, copies: int = 1) -> tuple[Net, torch.optim.Optimizer]:
    """A net after a step, on this rank alone or spread over all; its state follows from the seed."""
    net = Net()
    if dist.is_initialized():
        fully_shard(net, mesh=mesh_of_ranks(torch.device("cpu"), copies))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for number in range(seed):
        for parameter in net.parameters():
            parameter.grad = (parameter.detach() * (number + 1)).sin()
        optimizer.step()
    return net, optimizer


def full_state(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, parameter in net.named_parameters():
        for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name}.{key}"] = full.flatten().tolist()
    return found


def save_net(run_dir: Path, copies: int = 1) -> dict[str, list[float]]:
    net, optimizer = sharded(3, copies)
    link = dist.new_group(backend="gloo") if dist.is_initialized() else None
    checkpoints = Checkpoints(run_dir, keep=2, link=link)
    write = checkpoints.save(
        Progress(version=3, groups_used=6),
        copy_policy=lambda: lambda folder: save_file({"x": torch.ones(1)}, folder / "model.safetensors"),
        optimizer=optimizer,
        parameters=dict(net.named_parameters()),
    )
    checkpoints.finish()
    assert write.is_dir()
    checkpoint.verify(write)
    return full_state(net, optimizer)


def load_net(run_dir: Path, copies: int = 1) -> dict[str, list[float]]:
    net, optimizer = sharded(1, copies)
    folder = checkpoint.latest(run_dir)
    assert folder is not None
    rank = dist.get_rank() if dist.is_initialized() else 0
    progress = checkpoint.load(
        folder, optimizer=optimizer, parameters=dict(net.named_parameters()), rank=rank
    )
    assert progress.groups_used == 6
    return full_state(net, optimizer)


def two_copies_save_and_load(folder: Path) -> tuple[dict, dict]:
    return save_net(folder / "two", copies=2), load_net(folder / "one", copies=2)


def test_of_two_copies_that_hosts_have_one_is_saved_and_any_number_can_go_on(tmp_path: Path) -> None:
    expected = save_net(tmp_path / "one")
    for written, read in run_ranks(two_copies_save_and_load, tmp_path, ranks=4, deadline=100.0):
        assert written == read == expected
    assert load_net(tmp_path / "two") == expected
    state = tmp_path / "two/checkpoints/update_000003/state"
    assert sorted(path.name for path in state.iterdir()) == [
        f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in (1, 2)
    ]


def fail_on_one_rank(run_dir: Path) -> str:
    rank = dist.get_rank()
    checkpoints = Checkpoints(run_dir, keep=2, link=dist.new_group(backend="gloo"))
    checkpoint_state.write_state = partial(_write_or_fail, rank)
    net, optimizer = sharded(1)
    arguments = {"copy_policy": lambda: lambda folder: None, "optimizer": optimizer}
    checkpoints.save(Progress(version=1, groups_used=2), parameters=dict(net.named_parameters()), **arguments)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.finish()
    return str(caught.value)


def _write_or_fail(rank: int, *arguments: object) -> None:
    if rank == 1:
        raise OSError(28, "No space left on device")


def two_ranks_save_load_and_fail(folder: Path) -> tuple[dict, dict, str]:
    return save_net(folder / "two"), load_net(folder / "one"), fail_on_one_rank(folder / "none")


@pytest.mark.timeout(90)
def test_ranks_save_their_parts_and_any_number_of_them_can_go_on(tmp_path: Path) -> None:
    expected = save_net(tmp_path / "one")
    both = run_ranks(two_ranks_save_load_and_fail, tmp_path)
    for written, read, refused in both:
        assert written == expected
        assert read == expected
        assert "update_000001 cannot be written" in refused
    assert "No space left" in both[1][2]
    assert "1 of 2 learner ranks failed" in both[0][2]
    assert checkpoint.latest(tmp_path / "none") is None
    assert load_net(tmp_path / "two") == expected
    names = sorted(path.name for path in (tmp_path / "two/checkpoints/update_000003").rglob("*.safetensors"))
    assert names == [
        "model.safetensors",
        "random-00000.safetensors",
        "random-00001.safetensors",
        *(f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in (1, 2)),
    ]
