"""The reader of `torch.save` files: tensors as PyTorch reads them, and nothing of the rest."""

import os
import pickle
import threading
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
from asyncrl.storage.tensor_files import TensorFiles, load_pth


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
    found = load_pth(path)
    assert found.keys() == tensors().keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_numbers_of_numpy_beside_the_weights_are_passed_over(tmp_path: Path) -> None:
    path, numbers = tmp_path / "resnet_rm.pth", {"acc": np.float64(0.75), "best": np.bool_(True)}
    torch.save({"model_state_dict": {"w": torch.ones(2)}, **numbers}, path)
    assert torch.equal(TensorFiles(path).read("w"), torch.ones(2))


def test_a_file_of_pytorch_before_1_6_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before 1\.6.* save it with a newer PyTorch"):
        TensorFiles(tmp_path / "a.pth")


def test_what_is_allowed_is_allowed_during_the_read_only(tmp_path: Path) -> None:
    before, files = torch.serialization.get_safe_globals(), [tmp_path / f"{i}.pth" for i in range(4)]
    for i, path in enumerate(files):
        torch.save({"w": torch.tensor(i), "options": Namespace(), "n": np.float64(i)}, path)
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda f=f: seen.extend(int(load_pth(f)["w"]) for _ in range(20)))
        for f in files
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [i for i in range(4) for _ in range(20)]
    assert torch.serialization.get_safe_globals() == before


@pytest.mark.parametrize(
    ("content", "shapes"),
    [
        ({"weight": torch.nn.Parameter(torch.ones(2, 2)), "note": "x"}, {"weight": (2, 2)}),
        (  # As a model of poses may be saved: its inputs' statistics are no part of its state dict.
            {"model_state_dict": {"net.0.weight": torch.ones(2, 3)}, "mean": torch.arange(8.0), "epoch": 3},
            {"net.0.weight": (2, 3), "mean": (8,)},
        ),
    ],
)
def test_tensors_beside_others_are_read_by_their_names(tmp_path, content, shapes) -> None:
    torch.save(content, tmp_path / "a.pt")
    assert {name: tuple(one.shape) for name, one in load_pth(tmp_path / "a.pt").items()} == shapes


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
    assert list(load_pth(path)) == ["w"]
    assert not proof.exists()
    torch.load(path, weights_only=False)  # the object does act where it is made
    assert proof.exists()


def test_a_file_that_names_the_operating_system_is_refused(tmp_path: Path) -> None:
    path, proof = tmp_path / "a.ckpt", tmp_path / "proof"
    torch.save({"state_dict": {"w": torch.ones(2)}, "odd": Acts(proof, os.system)}, path)
    with pytest.raises(CheckpointError, match=r"was not read: .*posix.*nothing in a file is ever executed"):
        load_pth(path)
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
        (set_pickle(b"\x80\x02h\x05."), "not read"),
        (set_pickle(b"\x80\x02(ios\nsystem\n."), "Unsupported operand"),
        (set_pickle(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b."), "Can only build"),
        (set_pickle(b"\x80\x02cos\nsystem\n}X\x01\x00\x00\x00aK\x01sb."), "not read"),
        (set_pickle(b""), "not read"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(4)}}, path)
    load_pth(path)
    rewritten(path, change)
    with pytest.raises(CheckpointError, match=message):
        load_pth(path)


def test_truncated_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(400)}}, path)
    whole = path.read_bytes()
    for content in (whole[:-200], pickle.dumps({"w": 1})):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="was not read") as raised:
            load_pth(path)
        assert "weights_only" not in str(raised.value)
    with pytest.raises(CheckpointError, match="was not read"):
        load_pth(tmp_path / "none.ckpt")


@pytest.mark.parametrize("seed", range(2))
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
            for tensor in load_pth(path).values():
                tensor.clone()
            outcomes.add("read")
        except CheckpointError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
    assert not proof.exists()


class Built:
    """Pickles as an object whose state is set afterwards."""

    def __reduce__(self) -> Any:
        return np.dtype, ("f8", False, False), (3, ">", None, None, None, -1, -1, 63)


def test_numpys_own_types_are_never_changed(tmp_path: Path) -> None:
    """`numpy.dtype("f8")` is one object for the whole process, and a file could set its flags."""
    path = tmp_path / "a.pth"
    torch.save({"w": torch.ones(1), "beside": Built()}, path)
    load_pth(path)
    assert (np.dtype("f8").flags, np.dtype("f8").byteorder) == (0, "=")


@pytest.mark.parametrize("damage", ["short", "compressed"])
def test_a_record_that_does_not_hold_its_tensor_is_refused(tmp_path: Path, damage: str) -> None:
    """PyTorch would map the bytes that follow in the file."""
    whole, damaged = tmp_path / "whole.pth", tmp_path / "damaged.pth"
    torch.save({"a": torch.arange(1000.0), "b": torch.ones(5000)}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(damaged, "w") as target:
        for name in source.namelist():
            first = name.endswith("data/0")
            content = source.read(name)[:400] if first and damage == "short" else source.read(name)
            deflated = first and damage == "compressed"
            target.writestr(name, content, zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED)
    assert load_pth(whole)["b"].sum() == 5000
    with pytest.raises(CheckpointError, match="compressed or shorter than its tensor"):
        load_pth(damaged)
