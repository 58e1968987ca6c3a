"""The reader of training checkpoints: tensors as PyTorch reads them, and nothing of the rest."""

from __future__ import annotations

import os
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import CheckpointError
from asyncrl.worlds.evac.published import load_checkpoint


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(60, dtype=torch.float32).view(6, 10)
    return {
        "plain": base.clone(),
        "view": base[2:5, 3:7],
        "turned": base.t(),
        "wide": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "half": torch.randn(3).half(),
        "brain": torch.randn(4).bfloat16(),
        "whole": torch.arange(5),
        "truth": torch.tensor([True, False]),
        "single": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "spread": torch.tensor([1.0, 2.0])[:, None].expand(2, 1),
    }


def test_tensors_are_those_that_pytorch_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    state = OrderedDict(tensors())
    state._metadata = OrderedDict(version=1)  # type: ignore[attr-defined]  # as modules leave it
    torch.save({"state_dict": state, "epoch": 3, "loss": np.float64(0.5)}, path)
    found = load_checkpoint(path)
    assert found.keys() == tensors().keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_parameters_and_bare_state_dicts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.nn.Parameter(torch.ones(2, 2)), "note": "x"}, path)
    assert torch.equal(load_checkpoint(path)["weight"], torch.ones(2, 2))


class Acts:
    """An object whose reading runs a command of its maker's."""

    def __init__(self, path: Path, function: Callable[[str], Any] = eval) -> None:
        self.path, self.function = path, function

    def __reduce__(self) -> tuple[Any, ...]:
        if self.function is eval:
            return eval, (f"__import__('pathlib').Path({str(self.path)!r}).touch()",)
        return self.function, (f"touch {self.path}",)


class Attributes(dict[str, int]):
    """A dictionary of a framework's own, as of hyper-parameters."""


def test_other_objects_are_passed_over_and_run_nothing(tmp_path: Path) -> None:
    path, proof = tmp_path / "a.ckpt", tmp_path / "proof"
    others = [Acts(proof), {1, 2}, Attributes(a=1), defaultdict(list, b=[2]), Path("x"), Namespace(c=3)]
    torch.save({"state_dict": {"w": torch.ones(2), "odd": Acts(proof)}, "list": others}, path)
    assert list(load_checkpoint(path)) == ["w"]
    assert not proof.exists()
    torch.load(path, weights_only=False)  # the object does act where it is made
    assert proof.exists()


def test_a_file_that_names_the_operating_system_is_refused(tmp_path: Path) -> None:
    path, proof = tmp_path / "a.ckpt", tmp_path / "proof"
    torch.save({"state_dict": {"w": torch.ones(2)}, "odd": Acts(proof, os.system)}, path)
    with pytest.raises(CheckpointError, match=r"was not read: .*posix.*nothing in a file is ever executed"):
        load_checkpoint(path)
    assert not proof.exists()


def rewritten(path: Path, change: Any) -> None:
    """Write the archive again with another pickle or without some entries."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def only(entries: dict[str, bytes], end: str) -> str:
    return next(name for name in entries if name.endswith(end))


def drop_numbers(entries: dict[str, bytes]) -> None:
    entries.pop(only(entries, "data/0"))


def no_pickle(entries: dict[str, bytes]) -> None:
    entries.pop(only(entries, "data.pkl"))


def set_pickle(content: bytes) -> Any:
    def change(entries: dict[str, bytes]) -> None:
        entries[only(entries, "data.pkl")] = content

    return change


def beyond_its_storage(entries: dict[str, bytes]) -> None:
    name = only(entries, "data.pkl")
    # The shape (4,) of the tensor, which stands behind its storage and offset, becomes (200,).
    assert entries[name].count(b"K\x04\x85") == 1
    entries[name] = entries[name].replace(b"K\x04\x85", b"K\xc8\x85")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_numbers, "not read"),
        (no_pickle, "not read"),
        (beyond_its_storage, "not resizable"),
        (set_pickle(b"\x80\x02]."), "no tensors by name"),
        (set_pickle(b"\x80\x02}."), "no tensors by name"),
        (set_pickle(b"\x80\x02h\x05."), "not read"),
        (set_pickle(b"\x80\x02(ios\nsystem\n."), "Unsupported operand"),
        (set_pickle(b"\x80\x02K\x01Q."), "not read"),
        (set_pickle(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b."), "Can only build"),
        (set_pickle(b"\x80\x02cos\nsystem\n}X\x01\x00\x00\x00aK\x01sb."), "not read"),
        (set_pickle(b"\x80\x02R."), "not read"),
        (set_pickle(b"\x80\x02}"), "not read"),
        (set_pickle(b""), "not read"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(4)}}, path)
    load_checkpoint(path)
    rewritten(path, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_truncated_old_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(400)}}, path)
    whole = path.read_bytes()
    torch.save({"w": torch.ones(4)}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    for content in (whole[:-200], (tmp_path / "old.ckpt").read_bytes(), pickle.dumps({"w": 1})):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"was not read.*PyTorch 1\.6 or later"):
            load_checkpoint(path)
    with pytest.raises(CheckpointError, match="was not read"):
        load_checkpoint(tmp_path / "none.ckpt")


@pytest.mark.parametrize("seed", range(4))
def test_damaged_pickles_end_in_an_error_or_in_tensors(tmp_path: Path, seed: int) -> None:
    path, proof = tmp_path / "a.ckpt", tmp_path / "proof"
    torch.save({"state_dict": tensors(), "odd": Acts(proof), "set": {1, 2}}, path)
    whole = path.read_bytes()
    rng = np.random.default_rng(seed)

    def damage(entries: dict[str, bytes]) -> None:
        name = only(entries, "data.pkl")
        content = bytearray(entries[name])
        for place in rng.integers(0, len(content), 1):
            content[place] = rng.integers(0, 256)
        entries[name] = bytes(content)

    outcomes = set()
    for _ in range(40):
        path.write_bytes(whole)
        rewritten(path, damage)
        try:
            for tensor in load_checkpoint(path).values():
                tensor.clone()
            outcomes.add("read")
        except CheckpointError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
    assert not proof.exists()


def test_tensors_beside_the_state_dict_come_under_their_own_names(tmp_path: Path) -> None:
    """As a model of poses may be saved: its inputs' statistics are no part of its state dict."""
    path = tmp_path / "poses.pt"
    mean, weight = torch.arange(8.0), torch.ones(2, 3)
    torch.save({"model_state_dict": {"net.0.weight": weight}, "abs_action_mean": mean, "epoch": 3}, path)
    found = load_checkpoint(path)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "net.0.weight": (2, 3),
        "abs_action_mean": (8,),
    }
