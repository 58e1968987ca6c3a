"""The reader of training checkpoints: tensors as PyTorch reads them, and nothing of the rest."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import CheckpointError
from asyncrl.worlds.safe_pickle import CkptFile


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
    file = CkptFile(path)
    assert file.shapes == {name: tensor.shape for name, tensor in tensors().items()}
    for name, tensor in state.items():
        got = file.read(name)
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor), name
        assert got.is_contiguous()


def test_parameters_and_bare_state_dicts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.nn.Parameter(torch.ones(2, 2)), "note": "x"}, path)
    assert torch.equal(CkptFile(path).read("weight"), torch.ones(2, 2))


class Acts:
    """An object whose reading runs a command of its maker's."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_other_objects_are_passed_over_and_run_nothing(tmp_path: Path) -> None:
    path, proof = tmp_path / "a.ckpt", tmp_path / "proof"
    torch.save({"state_dict": {"w": torch.ones(2), "odd": Acts(proof)}, "list": [Acts(proof), {1, 2}]}, path)
    assert list(CkptFile(path).shapes) == ["w"]
    assert not proof.exists()
    torch.load(path, weights_only=False)  # the object does act where it is made
    assert proof.exists()


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


def cut_numbers(entries: dict[str, bytes]) -> None:
    entries[only(entries, "data/0")] = b"1234"


def other_order(entries: dict[str, bytes]) -> None:
    entries[only(entries, "byteorder")] = b"big"


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
        (drop_numbers, "numbers of tensor w are not all there"),
        (cut_numbers, "numbers of tensor w are not all there"),
        (other_order, "byte order"),
        (no_pickle, "no archive that torch.save wrote"),
        (beyond_its_storage, "does not lie in its storage"),
        (set_pickle(b"\x80\x02]."), "no state dict"),
        (set_pickle(b"\x80\x02}."), "no tensors by name"),
        (set_pickle(b"\x80\x02h\x05."), "Memo value not found"),
        (set_pickle(b"\x80\x02(ios\nsystem\n."), "the instruction INST"),
        (set_pickle(b"\x80\x02K\x01Q."), "no storage"),
        (set_pickle(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b."), "sets the state of something"),
        (
            set_pickle(b"\x80\x02ccollections\nOrderedDict\nN}X\x01\x00\x00\x00aK\x01s\x86b."),
            "sets the state",
        ),
        (set_pickle(b"\x80\x02cos\nsystem\n}X\x01\x00\x00\x00aK\x01sb."), "was not read"),
        (set_pickle(b"\x80\x02R."), "stack underflow"),
        (set_pickle(b"\x80\x02}"), "not read"),
        (set_pickle(b""), "not read"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(4)}}, path)
    CkptFile(path)
    rewritten(path, change)
    with pytest.raises(CheckpointError, match=message):
        CkptFile(path)


def test_truncated_old_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(400)}}, path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="was not read"):
        CkptFile(path)
    torch.save({"w": torch.ones(4)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"PyTorch 1\.6 or later"):
        CkptFile(path)
    path.write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(CheckpointError, match="was not read"):
        CkptFile(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        CkptFile(tmp_path / "none.ckpt")


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
            file = CkptFile(path)
            for name, shape in file.shapes.items():
                assert file.read(name).shape == shape
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
    file = CkptFile(path)
    assert {name: tuple(shape) for name, shape in file.shapes.items()} == {
        "net.0.weight": (2, 3),
        "abs_action_mean": (8,),
    }
