"""Formats of weight files: read and write single tensors of safetensors, and state dicts of `torch.save`.

*.safetensors    a file, or shards with `model.safetensors.index.json`. Numbers are read straight into
                 their tensors: the pages of a mapped file would count besides the copy
*.pth            a state dict, read without running code
"""

from __future__ import annotations

import json
import math
import re
import struct
import threading
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._pytree import tree_leaves

from asyncrl.errors import CheckpointError, first_line
from asyncrl.storage.atomic import read_json, replacing
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
"""Name of a type in safetensors -> dtype."""
_NAMES: Final = {dtype: name for name, dtype in TYPES.items()}
_WRAPPERS: Final = ("module", "model_state", "model_state_dict", "state_dict")  # DeepSpeed's is the first.
_HEADER_BYTES: Final = 100_000_000
_OPEN_BYTES: Final = 2**29
"""Bytes read of a mapped ``.pth`` file before it is opened again: they count as memory of this process."""
_SHOWN: Final = 5


@dataclass(frozen=True)
class Spec:
    """Type and shape of a tensor that need not be in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the numbers in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Return a meta tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class _Header:
    kind: str
    shape: tuple[int, ...]
    begin: int = 0  # offset of the numbers in the file; safetensors only


# --- files ---


class SafetensorsFile:
    """A safetensors file, opened for each tensor that is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_exists(path)
        try:
            with safe_open(path, framework="numpy"):  # Checks the header and the length of the file.
                pass
            entries, begin = read_header(path)
            self.headers = {
                name: _Header(entry["dtype"], tuple(entry["shape"]), begin + entry["data_offsets"][0])
                for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0])
            }
        except (SafetensorError, OSError, struct.error, ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({error}). Download or copy it again."
            ) from error

    def read(self, stored: str, into: Tensor) -> None:
        """Read a tensor into a contiguous CPU tensor of its shape and dtype. Thread-safe."""
        target = bytes_of(into)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.headers[stored].begin)
                while len(target):  # One call reads at most 2 GiB.
                    if not (count := file.readinto(target)):
                        raise CheckpointError(
                            f"{self.path} became shorter while it was read. Download or copy it again."
                        )
                    target = target[count:]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror}).") from error


class PthFile:
    """A mapped state dict of `torch.save`; threads read it in turns."""

    def __init__(self, path: Path) -> None:
        _check_exists(path)
        self.path = path
        self._lock, self._tensors, self._room = threading.Lock(), load_pth(path), _OPEN_BYTES
        self.headers = {
            name: _Header(_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        self._tensors.clear()

    def read(self, stored: str, into: Tensor) -> None:
        """Copy a tensor into a CPU tensor of its shape and dtype."""
        with self._lock:
            if not self._tensors or self._room < 0:
                self._tensors.clear()
                self._tensors, self._room = load_pth(self.path), _OPEN_BYTES
            self._room -= into.nbytes
            into.copy_(self._tensors[stored])


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. Download or copy the checkpoint again.")


def open_files(path: Path) -> Iterator[SafetensorsFile | PthFile]:
    """Open a file, or the weight files of a folder, which must agree with its index."""
    index = path / INDEX
    if not path.is_dir():
        yield SafetensorsFile(path) if path.suffix == ".safetensors" else PthFile(path)
    elif not index.exists():
        yield SafetensorsFile(path / WEIGHTS)
    else:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise CheckpointError(f"{index} has no weight_map of tensors to files beside it. Copy it again.")
        for name in sorted(set(weight_map.values())):
            file = SafetensorsFile(path / name)
            here = {tensor for tensor, file_name in weight_map.items() if file_name == name}
            if different := sorted(file.headers.keys() ^ here):
                raise CheckpointError(
                    f"{index} and {name} differ in {listed(different)}. Copy the folder again."
                )
            yield file


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file: tensor name -> entry, and the offset of the numbers.

    Raises:
        OSError, struct.error, ValueError: It cannot be read.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        entries = parse_json(file.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length


def header_names(path: Path) -> set[str]:
    """Read the tensor names of a safetensors file, even of a truncated one; empty for other files."""
    try:
        return set(read_header(path)[0]) if path.is_file() else set()
    except (OSError, struct.error, ValueError):
        return set()


def names_in(folder: Path) -> set[str]:
    """Read the tensor names in the index and in all safetensors files of a folder."""
    index = folder / INDEX
    weight_map = read_json(index, "Download it again.").get("weight_map") if index.is_file() else None
    indexed = set(weight_map) if isinstance(weight_map, dict) else set[str]()
    return indexed.union(*map(header_names, folder.glob("*.safetensors")))


# --- torch.save without code ---

_OF_NUMPY: Final = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
"""Of files before PyTorch 1.6, whose names are not listed without reading them."""
_GLOBALS_LOCK: Final = threading.Lock()  # PyTorch's list of safe names is one for the process.


class _PassedOver:
    """Stands for classes and functions of a training framework, whose objects are of no use here."""

    def __new__(cls, *_: object, **__: object) -> Any:
        return OrderedDict()  # The one type that PyTorch both fills and gives a state.


class _NumpyPassedOver:
    """Stands for those of NumPy, whose states are tuples."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def load_pth(path: Path) -> dict[str, Tensor]:
    """Read the CPU tensors, mapped if possible, of a `torch.save` file and its state dict; runs no code."""
    try:
        mapped = zipfile.is_zipfile(path)  # Files of PyTorch before 1.6 cannot be mapped.
        with _GLOBALS_LOCK:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if mapped else _OF_NUMPY
            stand_ins: list[Any] = [
                (_NumpyPassedOver if name.startswith("numpy.") else _PassedOver, name) for name in names
            ]
            with torch.serialization.safe_globals(stand_ins):
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if mapped:
            _check_mapped(path, content)
    except Exception as error:  # The unpickler raises anything on damaged files.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        inner = first_line(str(error).rpartition("WeightsUnpickler error: ")[2])
        # Without PyTorch's advice to read it all the same.
        reason = type(error).__name__ if "weights_only" in inner else inner.rstrip(".")
        raise CheckpointError(
            f"{path} was not read: {f'it names {refused[1]}' if refused else reason}. Only the tensors of "
            "torch.save are read, and nothing in a file is ever executed. Copy or download it again."
        ) from error
    tensors = dict[str, Tensor]()
    for wrapper in (*_WRAPPERS, ""):
        if isinstance(content, dict):
            tensors |= {n: t for n, t in content.items() if isinstance(n, str) and isinstance(t, Tensor)}
            content = content[wrapper] if isinstance(content.get(wrapper), dict) else content
    if not tensors:
        raise CheckpointError(f"{path} was not read: it holds no tensors by name. Download it again.")
    return tensors


def _check_mapped(path: Path, content: Any) -> None:
    """Compare the tensors of a mapped file with its records, which PyTorch does only for files it reads.

    Raises:
        ValueError: A record is compressed or shorter than its tensor, which would then have foreign bytes.
    """
    with zipfile.ZipFile(path) as file:
        records = [one for one in file.infolist() if "/data/" in one.filename]
    tensors = [leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    plain = Counter(one.file_size for one in records if one.compress_type == zipfile.ZIP_STORED)
    if Counter(storages.values()) - plain:
        raise ValueError("a record is compressed or shorter than its tensor")


# --- writing ---


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any shape, dtype and device as one safetensors file, atomically."""
    # Wide types first: every tensor must begin at a multiple of its type's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered.items()}
    write_file(path, specs, iter(ordered.items()))


def write_file(path: Path, specs: Mapping[str, Spec], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write a safetensors file tensor by tensor, atomically; the library's writer wants all in memory.

    Args:
        tensors: Name and tensor in the order of `specs`, of these shapes, any dtype and device. Further ones
            are left in the iterator.
    """
    with replacing(path) as part, part.open("wb", buffering=0) as file:
        file.write(_encode_header(specs))
        for name, spec in specs.items():
            found, tensor = next(tensors)
            assert (found, tuple(tensor.shape)) == (name, spec.shape), (found, name, tensor.shape)
            rest = bytes_of(tensor.detach().to("cpu", spec.dtype).contiguous())
            while len(rest):
                rest = rest[file.write(rest) :]


def _encode_header(specs: Mapping[str, Spec]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        if offset % spec.dtype.itemsize:
            raise CheckpointError(
                f"Tensor {name} is wider than those before it. Write all in one type: --dtype."
            )
        offsets = [offset, offset + spec.nbytes]
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def listed(names: Sequence[str]) -> str:
    """Format the first few names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, of any shape and dtype, as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
