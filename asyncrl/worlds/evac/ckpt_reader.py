"""Read the tensors of a training checkpoint, and pass over everything else in it, without running its code.

A checkpoint of a training framework holds a pickle that names classes of that framework beside the tensors.
PyTorch's own reader refuses such a file as a whole. Here a small machine follows the pickle's instructions
itself (`pickle_instructions`): it imports nothing and calls nothing on the file's behalf.
The few names that PyTorch writes for tensors select one of its own functions; what any other name would make
becomes a `Foreign`, which holds nothing and does nothing. Instructions that no tensor needs end the reading.
"""

from __future__ import annotations

import math
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

import torch
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.worlds.pickle_instructions import Name, PickleMachine, UnsafePickle

MAX_PICKLE: Final = 2**28
MAX_INSTRUCTIONS: Final = 5_000_000
_MAX_AXES: Final = 8
_STORAGES: Final = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}


class Malformed(ValueError):
    """The archive or its tensors are not what PyTorch writes."""


class Foreign:
    """Stands for an object that is passed over."""


@dataclass(frozen=True)
class Storage:
    """Numbers in the file."""

    dtype: torch.dtype
    key: str
    count: int


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's numbers are."""

    storage: Storage
    offset: int
    """Of its first number."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """Numbers of the storage from its first to its last one."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))


def _whole_numbers(value: object) -> bool:
    """Whether a value is a tuple of whole numbers that are not negative."""
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**48 for n in value)


def _tensor(arguments: tuple[Any, ...]) -> StoredTensor:
    match arguments:
        case (Storage() as storage, int(offset), tuple() as shape, tuple() as strides, *_):
            sized = _whole_numbers(shape) and _whole_numbers(strides) and len(shape) == len(strides)
            if sized and len(shape) <= _MAX_AXES and offset >= 0:
                found = StoredTensor(storage, offset, shape, strides)
                if offset + found.span <= storage.count and math.prod(shape) <= storage.count:
                    return found
    raise Malformed("it has a tensor that does not lie in its storage")


def _parameter(arguments: tuple[Any, ...]) -> Any:
    return arguments[0] if arguments and isinstance(arguments[0], StoredTensor) else Foreign()


_CALLS: Final[dict[str, Callable[[tuple[Any, ...]], Any]]] = {
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": _parameter,
    "collections OrderedDict": lambda arguments: Foreign() if arguments else {},
}


class CkptFile:
    """The tensors of a file that `torch.save` wrote, by name; their numbers are read one tensor at a time."""

    def __init__(self, path: Path) -> None:
        """Read what the file says of its tensors.

        Raises:
            CheckpointError: The file is missing, is no zip archive of PyTorch's, or is broken.
        """
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                pickles = [name for name in archive.namelist() if name.split("/")[1:] == ["data.pkl"]]
                if len(pickles) != 1:
                    raise Malformed("it is no archive that torch.save wrote")
                self._root = pickles[0].removesuffix("data.pkl")
                self._check_order(archive)
                if archive.getinfo(pickles[0]).file_size > MAX_PICKLE:
                    raise Malformed(f"its pickle has more than {MAX_PICKLE} bytes")
                with warnings.catch_warnings():  # of odd characters in what is refused anyway
                    warnings.simplefilter("ignore")
                    content = _Machine().run(archive.read(pickles[0]))
                self.tensors = _named(content)
                self._begins = self._find_storages(archive)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}). Check the path.") from error
        except (zipfile.BadZipFile, ValueError, IndexError, OverflowError, NotImplementedError) as error:
            raise CheckpointError(
                f"{path} was not read: {error}. Only files of torch.save (PyTorch 1.6 or later) are read, "
                "and only their tensors; nothing in a file is ever executed. Download it again."
            ) from error

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shape of every tensor by name."""
        return {name: torch.Size(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """Read one tensor, on the CPU, of memory of its own.

        Raises:
            CheckpointError: The file cannot be read, or became shorter.
        """
        found = self.tensors[name]
        size = found.storage.dtype.itemsize
        try:
            with self.path.open("rb") as file:
                file.seek(self._begins[found.storage.key] + found.offset * size)
                raw = bytearray(file.read(found.span * size))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror}).") from error
        if len(raw) != found.span * size:
            raise CheckpointError(f"{self.path} became shorter while it was read. Download it again.")
        if not raw:
            return torch.empty(found.shape, dtype=found.storage.dtype)
        numbers = torch.frombuffer(raw, dtype=found.storage.dtype)
        return numbers.as_strided(found.shape, found.strides).contiguous()

    def _entry(self, storage: Storage) -> str:
        return f"{self._root}data/{storage.key}"

    def _check_order(self, archive: zipfile.ZipFile) -> None:
        name = f"{self._root}byteorder"
        if name in archive.namelist() and archive.read(name) != b"little":
            raise Malformed("its numbers are in another byte order")

    def _find_storages(self, archive: zipfile.ZipFile) -> dict[str, int]:
        """Find the first byte of every storage: opening the archive for each tensor would take long."""
        entries = {entry.filename: entry for entry in archive.infolist()}
        begins: dict[str, int] = {}
        with self.path.open("rb") as file:
            for name, tensor in self.tensors.items():
                storage = tensor.storage
                entry = entries.get(self._entry(storage))
                whole = storage.count * storage.dtype.itemsize
                if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size != whole:
                    raise Malformed(f"the numbers of tensor {name} are not all there")
                if storage.key not in begins:
                    begins[storage.key] = _first_byte(file, entry)
        return begins


def _first_byte(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Find where an uncompressed entry's bytes begin: behind its own header, whose length it says itself."""
    file.seek(entry.header_offset)
    header = file.read(30)
    if len(header) != 30 or header[:4] != b"PK\x03\x04":
        raise Malformed(f"there is no entry where its list says that {entry.filename} begins")
    name, extra = struct.unpack("<HH", header[26:30])
    return entry.header_offset + len(header) + name + extra


def _named(content: Any) -> dict[str, StoredTensor]:
    """Find the state dict in what a file holds: itself, or under the name that its framework gives it.

    Tensors beside it, such as the statistics of a model's inputs, come under their own names.
    """
    found = _tensors(content)
    for wrapper in ("module", "state_dict", "model_state_dict"):  # DeepSpeed, Lightning, others
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
            found |= _tensors(content)
    if not isinstance(content, dict):
        raise Malformed("it is no state dict")
    if not found:
        raise Malformed("it holds no tensors by name")
    return found


def _tensors(content: Any) -> dict[str, StoredTensor]:
    items = content.items() if isinstance(content, dict) else ()
    return {n: t for n, t in items if isinstance(n, str) and isinstance(t, StoredTensor)}


class _Machine(PickleMachine):
    """Finds tensors in what `torch.save` wrote, and stand-ins for all else."""

    def __init__(self) -> None:
        super().__init__(MAX_INSTRUCTIONS)
        self.memo: dict[int, Any] = {}

    def keep(self, index: int | None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise UnsafePickle("it recalls what it did not keep")
        self.stack.append(self.memo[index])

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Foreign):
            raise UnsafePickle("it appends to something that is no list")

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict) and len(items) % 2 == 0:
            for key, value in zip(items[::2], items[1::2], strict=True):
                # Keys of other kinds are none of a state dict, and hashing a deep tuple of them takes long.
                if isinstance(key, str | int | float | bool | None):
                    target[key] = value
        elif not isinstance(target, Foreign):
            raise UnsafePickle("it fills something that is no dict")

    def add(self) -> None:
        self.above_mark()
        if not isinstance(self.stack[-1], Foreign):
            raise UnsafePickle("it adds to something that is no set")

    def named(self, text: str) -> None:
        self.stack.append(Name(text))

    def stored(self) -> None:
        match self.stack.pop():
            case ("storage", Name(text=kind), str(key), str(), int(count)) if kind in _STORAGES:
                if not key.isalnum() or count < 0:
                    raise UnsafePickle("it names a storage in an unusual way")
                self.stack.append(Storage(_STORAGES[kind], key, count))
            case ("storage", Name(), *_):
                self.stack.append(Foreign())
            case _:
                raise UnsafePickle("it refers to something outside that is no storage")

    def call(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, tuple):
            raise UnsafePickle("it calls something without arguments")
        known = _CALLS.get(name.text) if isinstance(name, Name) else None
        if known is _tensor and arguments and isinstance(arguments[0], Foreign):
            known = None  # numbers of a type that is not known here
        self.stack.append(known(arguments) if known else Foreign())

    def make(self, count: int) -> None:
        """Take what an object would be made of, and put a stand-in."""
        for _ in range(count):
            self.stack.pop()
        self.stack.append(Foreign())

    def fill(self) -> None:
        """Take the state of an object. A dict's is what PyTorch says of the versions of modules."""
        self.stack.pop()
        if not isinstance(self.stack[-1], Foreign | dict | StoredTensor):
            raise UnsafePickle("it sets the state of something that has none")

    steps: ClassVar[Mapping[str, Callable[[Any, Any], None]]] = {
        "EMPTY_SET": lambda machine, _: machine.stack.append(Foreign()),
        "POP": lambda machine, _: machine.stack.pop(),
        "ADDITEMS": lambda machine, _: machine.add(),
        "BINPERSID": lambda machine, _: machine.stored(),
        "NEWOBJ": lambda machine, _: machine.make(2),
        "NEWOBJ_EX": lambda machine, _: machine.make(3),
    }
