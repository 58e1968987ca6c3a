"""`.pth` files: NumPy numbers beside the weights are read, anything else that is no tensor is refused."""

from __future__ import annotations

import argparse
import collections
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.storage.tensor_files import TensorFiles
from asyncrl.storage.weight_files import load_pth
from asyncrl.worlds.evac.published import load_checkpoint

WEIGHT = torch.arange(6.0).view(2, 3)


def saved(path: Path, *, numpy_1: bool = False, **beside: object) -> Path:
    """A training checkpoint; `numpy_1`: with the name that NumPy before 2.0 writes."""
    torch.save({"model_state_dict": {"net.weight": WEIGHT}, **beside}, path)
    if numpy_1:
        raw = path.read_bytes()
        old, new = b"cnumpy._core.multiarray\nscalar\n", b"cnumpy.core.multiarray\nscalar\n"
        assert old in raw
        content = torch.load(path, weights_only=False)
        legacy = path.with_suffix(".old")
        torch.save(content, legacy, _use_new_zipfile_serialization=False)
        path.write_bytes(legacy.read_bytes().replace(old, new))
    return path


@pytest.mark.parametrize("numpy_1", [False, True])
def test_numbers_of_numpy_beside_the_weights_are_read(tmp_path: Path, numpy_1: bool) -> None:
    numbers = {
        "val_acc": np.float64(0.75),
        "loss": np.float32(-1.5),
        "epoch": np.int64(7),
        "best": np.bool_(True),
        "swapped": np.dtype(">f8").type(0.1),
    }
    file = saved(tmp_path / "resnet_rm.pth", numpy_1=numpy_1, **numbers)
    assert torch.equal(TensorFiles(file).read("net.weight"), WEIGHT)
    read = load_pth(file)
    assert {name: read[name] for name in numbers} == numbers
    assert type(read["loss"]) is np.float32


def test_what_is_allowed_is_allowed_during_the_read_only(tmp_path: Path) -> None:
    before = torch.serialization.get_safe_globals()
    load_pth(saved(tmp_path / "a.pth", val_acc=np.float64(0.75)))
    with pytest.raises(CheckpointError):
        load_pth(saved(tmp_path / "b.pth", options=argparse.Namespace()))
    assert torch.serialization.get_safe_globals() == before


def test_threads_may_read_at_the_same_time(tmp_path: Path) -> None:
    files = [saved(tmp_path / f"{i}.pth", val_acc=np.float64(i)) for i in range(4)]
    seen: list[float] = []
    threads = [
        threading.Thread(target=lambda f=f: seen.extend(float(load_pth(f)["val_acc"]) for _ in range(20)))
        for f in files
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert collections.Counter(seen) == {float(i): 20 for i in range(4)}


class _Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class _Built:
    """Pickles as an object whose state is set afterwards."""

    def __init__(self, function: Any, arguments: tuple[object, ...], state: object) -> None:
        self.parts = function, arguments, state

    def __reduce__(self) -> Any:
        return self.parts


SCALAR = np.float64(0).__reduce__()[0]


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (argparse.Namespace(lr=1), r"holds more than tensors and numbers: argparse\.Namespace"),
        (Path("x"), r"holds more than tensors and numbers: pathlib\."),
        (np.zeros(3), r"holds more than tensors and numbers: numpy\._core\.multiarray\._reconstruct"),
        (_Call(print, "ran"), r"holds more than tensors and numbers: print"),
        (np.str_("text"), r"a NumPy type 'U4', which is no number"),
        (_Call(np.dtype, "O"), r"a NumPy type 'O', which is no number"),
        (_Call(SCALAR, 1, 2), r"a NumPy scalar that is no number"),
        (_Call(SCALAR, np.dtype("f8"), b"abc"), r"cannot be read as tensors \(ValueError: buffer is smaller"),
        (_Built(np.dtype, ("f8", False, True), (3,)), r"cannot be read as tensors"),
    ],
    ids=["namespace", "path", "array", "function", "text", "objects", "no type", "short", "state"],
)
def test_everything_else_is_refused_and_no_advice_is_to_read_it_unsafely(
    tmp_path: Path, beside: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match=said) as raised:
        TensorFiles(saved(tmp_path / "resnet_rm.pth", beside=beside))
    words = str(raised.value)
    assert not any(advice in words for advice in ("weights_only", "trust", "safe_globals", "\n"))
    assert "ran" not in capsys.readouterr().out


def test_numpys_own_types_are_never_changed(tmp_path: Path) -> None:
    """`numpy.dtype("f8")` is one object for the whole process, and a file could set its flags."""
    state = (3, ">", None, None, None, -1, -1, 63)
    file = saved(tmp_path / "a.pth", beside=_Built(np.dtype, ("f8", False, False), state))
    load_pth(file)
    assert (np.dtype("f8").flags, np.dtype("f8").byteorder) == (0, "=")


def test_a_broken_file_says_so(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.pth")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"a\.pth cannot be read as tensors .*Copy it again") as raised:
        load_pth(file)
    assert "weights_only" not in str(raised.value)
    tensor: Tensor = load_pth(saved(file))["model_state_dict"]["net.weight"]
    assert torch.equal(tensor, WEIGHT)


@pytest.mark.parametrize("damage", ["short", "compressed"])
def test_a_record_that_does_not_hold_its_tensor_is_refused(tmp_path: Path, damage: str) -> None:
    """PyTorch would map the bytes that follow in the file."""
    whole, damaged = tmp_path / "whole.pth", tmp_path / "damaged.pth"
    torch.save({"a": torch.arange(1000.0), "b": {"c": torch.ones(5000)}}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(damaged, "w") as target:
        for name in source.namelist():
            first = name.endswith("data/0")
            content = source.read(name)[:400] if first and damage == "short" else source.read(name)
            deflated = first and damage == "compressed"
            target.writestr(name, content, zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED)
    assert load_pth(whole)["b"]["c"].sum() == 5000
    for load in (load_pth, load_checkpoint):
        with pytest.raises(CheckpointError, match="compressed or shorter than its tensor"):
            load(damaged)
