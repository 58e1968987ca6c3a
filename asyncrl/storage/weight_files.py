"""Open weight files: what their headers say of each tensor, and its numbers, straight into a tensor.

    *.safetensors              one file, or shards with `model.safetensors.index.json`; has no code in it. The
                               library checks the header. Numbers are read here, straight into tensors that
                               stay: its mapped files would count beside the weights copied from them
    *.pth                      a state dict, read without running code (`safe_pth`)

`tensor_reader` gives the tensors of several such files as one collection.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import read_json
from asyncrl.storage.safe_pth import load_pth
from asyncrl.storage.untrusted import parse_json

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of tensors, as safetensors names them."""
_WRAPPERS: Final = ("model_state", "model_state_dict", "state_dict")
_OPEN_BYTES: Final = 2**29
"""What was read of a mapped file counts as memory of this process until it is closed. After so many bytes a
``.pth`` file is opened anew."""
_SHOWN: Final = 5


@dataclass(frozen=True)
class Header:
    """What a file says about one of its tensors."""

    kind: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    begin: int = 0
    """First byte of the numbers; safetensors only."""


def open_files(path: Path) -> Iterator[SafetensorsFile | PthFile]:
    """Open a file, or the weight files of a folder, which have to be those of its index."""
    if not path.is_dir():
        yield SafetensorsFile(path) if path.suffix == ".safetensors" else PthFile(path)
        return
    index = path / INDEX
    if not index.exists():
        yield SafetensorsFile(path / WEIGHTS)
        return
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    ):
        raise CheckpointError(f"{index} has no weight_map of tensors to files beside it. Copy it again.")
    for name in sorted(set(weight_map.values())):
        file = SafetensorsFile(path / name)
        here = {tensor for tensor, file_name in weight_map.items() if file_name == name}
        compare_names(file.path, file.headers.keys(), here, allowed=here)
        yield file


class SafetensorsFile:
    """A safetensors file, opened for each tensor that is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. Download or copy the checkpoint again.")
        try:
            with safe_open(path, framework="numpy"):  # checks the header and the length of the file
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({error}). Download or copy it again."
            ) from error
        try:
            with path.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                entries = parse_json(opened.read(length), dict)
            entries.pop("__metadata__", None)
            ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0])
            self.headers = {
                name: Header(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
                for name, entry in ordered
            }
        except (OSError, struct.error, ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(
                f"{path} has a header that says nothing of its tensors ({error})."
            ) from error

    def read(self, stored: str, into: Tensor) -> None:
        """Read a tensor into one of its shape and dtype, contiguous, on the CPU. Any thread may call this."""
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.headers[stored].begin)
                _read_into(file, bytes_of(into), self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror}).") from error


def _read_into(file: BinaryIO, target: memoryview, path: Path) -> None:
    while len(target):  # One call reads at most 2 GiB.
        count = file.readinto(target)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{path} became shorter while it was read. Download or copy it again.")
        target = target[count:]


class PthFile:
    """A state dict that torch.save wrote, mapped; one thread at a time reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. Download or copy the checkpoint again.")
        kinds = {dtype: kind for kind, dtype in TYPES.items()}
        self._lock, self._tensors, self._room = threading.Lock(), self._open(), _OPEN_BYTES
        self.headers = {
            name: Header(kinds.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        self._tensors.clear()

    def read(self, stored: str, into: Tensor) -> None:
        """Copy a tensor into one of its shape and dtype on the CPU; threads wait for each other."""
        with self._lock:
            if not self._tensors or self._room < 0:
                self._tensors.clear()
                self._tensors, self._room = self._open(), _OPEN_BYTES
            self._room -= into.nbytes
            into.copy_(self._tensors[stored])

    def _open(self) -> dict[str, Tensor]:
        content = load_pth(self.path)
        for wrapper in _WRAPPERS:
            if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
                content = content[wrapper]
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise CheckpointError(
                f"{self.path} is not a state dict of tensors. Copy it again, or save `module.state_dict()`."
            )
        return {str(name): tensor for name, tensor in content.items()}


def compare_names(source: Path | str, found: Set[str], required: Set[str], *, allowed: Set[str]) -> None:
    """Check the names of the tensors in `source`.

    Raises:
        CheckpointError: some that are required are missing, or some are not allowed.
    """
    missing, unknown = sorted(required - found), sorted(found - allowed)
    for problem, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            raise CheckpointError(
                f"{source} {problem} {len(names)} tensors: {listed(names)}. It is not a complete checkpoint "
                "of this policy: copy it again, or use its own config.json."
            )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of any shape and dtype on the CPU, as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def listed(names: Sequence[str]) -> str:
    """The first few names, for people."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
