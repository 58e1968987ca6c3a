"""Read RLinf's arrays of objects and EVAC's training checkpoints without running what they name.

Both are pickles. Python's own unpickler follows them, and its only way to a name is `find_class`: here it
answers with stand-ins of this module. A name outside the list of an array file ends the reading. Checkpoints
name classes of their training framework, which PyTorch's ``weights_only`` refuses where they fill containers
of their own: there such a name makes an `Inert` object. Instructions are counted and checked beforehand, so
that a small file cannot ask for much memory.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import AssetError, CheckpointError, first_line
from asyncrl.storage.untrusted import read_bytes

MAX_BYTES: Final = 2**30
MAX_PICKLE: Final = 2**28
MAX_INSTRUCTIONS: Final = 500_000
"""Of an array file, where a frame takes about a hundred; a checkpoint may have ten times as many."""
COPIES: Final = 4
"""Bytes that may be made of each byte of an array file: numpy needs two where protocol 2 writes text."""
_MAX_AXES: Final = 8
_MAX_DEPTH: Final = 16
_NUMERIC: Final = re.compile(r"b1|[iu][1248]|f[248]")
_TEXT: Final = re.compile(r"[SU]\d{1,5}")
_HEADER: Final = re.compile(
    rb"\{'descr': '\|O', 'fortran_order': (?:False|True), 'shape': \((\d{1,9}),\), \}\s*"
)
# fmt: off
_INSTRUCTIONS: Final = frozenset((
    "PROTO", "FRAME", "STOP", "MARK", "POP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "EMPTY_TUPLE", "TUPLE", "TUPLE1",
    "TUPLE2", "TUPLE3", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "APPEND", "APPENDS",
    "SETITEM", "SETITEMS", "ADDITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "BINPERSID", "NEWOBJ",
    "NEWOBJ_EX",
))
_STORAGES: Final = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# fmt: on


class UnsafePickle(ValueError):
    """The file holds something that the library does not write for documented values."""


class _Call:
    """Stands for a function; a file cannot set its attributes."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: object) -> Any:
        return self._make(arguments)

    def __setstate__(self, state: object) -> None:
        raise UnsafePickle("it sets the state of something that has none")


def _unpickled(unpickler: pickle.Unpickler, content: bytes, limit: int) -> Any:
    """Check the instructions in `content`, then let `unpickler` follow them."""
    with warnings.catch_warnings():  # of odd characters in instructions that are refused anyway
        warnings.simplefilter("ignore")
        kept = 0
        for count, (instruction, argument, _) in enumerate(pickletools.genops(content)):
            if count >= limit:
                raise UnsafePickle(f"it has more than {limit} instructions")
            if instruction.name not in _INSTRUCTIONS:
                raise UnsafePickle(f"it holds the instruction {instruction.name}")
            if instruction.name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                # Python reserves memory up to the number, and pickles count up.
                if argument is not None and argument > kept:
                    raise UnsafePickle(f"it remembers number {argument} before number {kept}")
                kept = max(kept, kept + 1 if argument is None else argument + 1)
    try:
        return unpickler.load()
    except UnsafePickle:
        raise
    except Exception as error:  # On broken files the unpickler raises whatever it stumbles upon.
        raise UnsafePickle(first_line(str(error)) or type(error).__name__) from error


# ---- arrays of objects ---------------------------------------------------------------------------


def read_object_array(path: Path) -> list[Any]:
    """Read a one-dimensional array of objects that ``np.save`` wrote (pickle protocol 2 to 5)."""
    try:
        stream = io.BytesIO(read_bytes(path, MAX_BYTES))
        length = _read_header(stream)
        content = stream.read()
        values = _unpickled(_ArrayUnpickler(content), content, MAX_INSTRUCTIONS)
        array = _plain(values, 0, {})
        if not isinstance(array, list) or len(array) != length:
            raise UnsafePickle(f"its header promises {length} objects and the rest is something else")
    except OSError as error:
        raise AssetError(f"{path} cannot be read ({error.strerror}). Check the path.") from error
    except ValueError as error:
        raise AssetError(
            f"{path} was not read: {error}. Only arrays of objects as numpy.save writes them are read, made "
            "of numbers, strings, lists, dicts and numeric arrays; nothing in a file is ever executed. "
            "Write it again from such values."
        ) from error
    return array


def _read_header(stream: io.BytesIO) -> int:
    """Read the .npy header; return the number of objects."""
    magic = stream.read(8)
    if magic[:6] != b"\x93NUMPY" or magic[6:] not in (b"\x01\x00", b"\x02\x00"):
        raise UnsafePickle("it is not a .npy file of format 1 or 2")
    size = int.from_bytes(stream.read(2 if magic[6] == 1 else 4), "little")
    match = _HEADER.fullmatch(stream.read(size))
    if match is None:
        raise UnsafePickle("its header does not describe a one-dimensional array of objects")
    return int(match[1])


class _Dtype:
    """Stands for `numpy.dtype`, whose own objects a file could change for the whole process."""

    def __init__(self, code: str) -> None:
        self.code, self.order = code, "|"

    def __setstate__(self, state: object) -> None:
        # (version, byte order, sub-array, field names, fields, ...)
        match state:
            case (3 | 4, ("|" | "<" | ">") as order, None, None, None, *_):
                self.order = order
            case _:
                raise UnsafePickle("it holds structured numbers")


class _Array:
    """Stands for an array between its making and its filling."""

    value: Any = None

    def __init__(self, spend: Callable[[object], None]) -> None:
        self._spend = spend

    def __setstate__(self, state: object) -> None:
        self._spend(state)
        match state:
            case (1, tuple() as shape, _Dtype(code="O8"), bool(), list() as items) if shape == (len(items),):
                self.value = items
            case (1, tuple() as shape, _Dtype() as dtype, bool() as fortran, bytes() as content):
                self.value = _array_of(content, dtype, shape, "F" if fortran else "C")
            case _:
                raise UnsafePickle("it fills an array with something else than its numbers")


def _array_of(content: bytes | bytearray, dtype: _Dtype, shape: tuple[Any, ...], order: str) -> Any:
    """Build an array, or a string from an array of text without axes."""
    if len(shape) > _MAX_AXES or not all(type(size) is int and 0 <= size <= MAX_BYTES for size in shape):
        raise UnsafePickle("it holds an array of an impossible shape")
    if _TEXT.fullmatch(dtype.code) and shape == ():
        wide = "utf-32-be" if dtype.order == ">" else "utf-32-le"
        return bytes(content).decode("utf-8" if dtype.code[0] == "S" else wide).rstrip("\0")
    if not _NUMERIC.fullmatch(dtype.code):
        raise UnsafePickle(f"it holds an array of type {dtype.code!r}")
    numbers = np.dtype(dtype.order + dtype.code)
    if math.prod(shape) * numbers.itemsize != len(content):
        raise UnsafePickle(f"an array of shape {list(shape)} comes with {len(content)} bytes")
    return np.ndarray(shape, numbers, buffer=content, order="F" if order == "F" else "C")


class _ArrayUnpickler(pickle.Unpickler):
    """Answers the seven names that numpy writes, of its versions 1 and 2."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._room = COPIES * len(content)

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the stand-in of a name."""
        known = f"{module} {name}".replace("numpy.core.", "numpy._core.")
        if known not in _NUMPY_NAMES:
            raise UnsafePickle(f"it wants to import {f'{module}.{name}'[:80]!r}")
        return _NDARRAY if known == "numpy ndarray" else _Call(lambda given: self._made(known, given))

    def _spend(self, parts: object) -> None:
        """Pay for the texts and bytes that a value is made of: those remembered can be used again."""
        held = parts if isinstance(parts, tuple) else ()
        self._room -= sum(len(part) for part in held if isinstance(part, str | bytes | bytearray))
        if self._room < 0:
            raise UnsafePickle("what it holds would take many times its own length")

    def _made(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self._spend(arguments)
        match name, *arguments:
            case ("numpy dtype", str(code), False, True) if (
                code == "O8" or _NUMERIC.fullmatch(code) or _TEXT.fullmatch(code)
            ):
                return _Dtype(code)
            case ("numpy._core.multiarray _reconstruct", kind, (0,), b"b") if kind is _NDARRAY:
                return _Array(self._spend)
            case ("numpy._core.multiarray scalar", _Dtype() as dtype, bytes(content)):
                number = _array_of(content, dtype, (), "C")
                return number if isinstance(number, str) else number[()]
            case (
                "numpy._core.numeric _frombuffer",
                (bytes() | bytearray()) as content,
                _Dtype() as dtype,
                tuple() as shape,
                ("C" | "F") as order,
            ):
                return _array_of(content, dtype, shape, order)
            case ("_codecs encode", str(text), "latin1"):  # Protocol 2 has no bytes.
                return text.encode("latin1")
            case ("__builtin__ bytes",):
                return b""
        raise UnsafePickle(f"it calls {name.replace(' ', '.')} in an unusual way")


_NDARRAY: Final = object()
# fmt: off
_NUMPY_NAMES: Final = frozenset((
    "numpy ndarray", "numpy dtype", "numpy._core.multiarray _reconstruct", "numpy._core.multiarray scalar",
    "numpy._core.numeric _frombuffer", "_codecs encode", "__builtin__ bytes",
))
# fmt: on


def _plain(value: Any, depth: int, done: dict[int, Any]) -> Any:
    """Put values in the place of stand-ins, and refuse every other kind of object."""
    if depth > _MAX_DEPTH:
        raise UnsafePickle("it holds lists within lists, or one in itself")
    if id(value) not in done:
        content = value.value if isinstance(value, _Array) else value
        if isinstance(content, dict) and all(isinstance(key, str) for key in content):
            content = {key: _plain(item, depth + 1, done) for key, item in content.items()}
        elif isinstance(content, list | tuple):
            content = type(content)(_plain(item, depth + 1, done) for item in content)
        elif not isinstance(
            content, str | bytes | bytearray | int | float | None | np.ndarray | np.generic
        ) or (content is None and value is not None):
            raise UnsafePickle(f"it holds an object of type {type(value).__name__}")
        done[id(value)] = content
    return done[id(value)]


# ---- checkpoints ---------------------------------------------------------------------------------


class Inert:
    """Stands for any object of a training framework: it takes everything and does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def _ignore(self, *_: object) -> None:
        pass

    append = extend = add = __setitem__ = __setstate__ = __call__ = _ignore


class _Names(dict[Any, Any]):
    """Stands for `OrderedDict`; PyTorch keeps versions of modules as its state."""

    def __setstate__(self, state: object) -> None:
        pass


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str
    length: int


class StoredTensor(NamedTuple):
    """Place of a tensor's numbers. A tuple: a file cannot change it after it was checked."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _stored_tensor(arguments: tuple[Any, ...]) -> Any:
    match arguments:
        case (_Storage() as storage, int(offset), tuple() as shape, tuple() as strides, *_):
            sizes = (offset, *shape, *strides)
            fits = len(shape) == len(strides) <= _MAX_AXES
            if fits and all(type(size) is int and 0 <= size < 2**48 for size in sizes):
                last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
                end = 0 if 0 in shape else offset + last + 1
                if max(end, math.prod(shape)) <= storage.length:
                    return StoredTensor(storage, offset, shape, strides)
        case (Inert(), *_):
            return Inert()
    raise UnsafePickle("it has a tensor that does not lie in its storage")


class _CheckpointUnpickler(pickle.Unpickler):
    """Answers the names that PyTorch writes for tensors; any other one is `Inert`."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the stand-in of a name."""
        match module, name:
            case "torch", _ if name in _STORAGES:
                return _STORAGES[name]
            case "torch._utils", "_rebuild_tensor_v2":
                return _Call(_stored_tensor)
            case "torch._utils", "_rebuild_parameter":
                return _Call(lambda given: given[0] if isinstance(given[0], StoredTensor) else Inert())
            case "collections", "OrderedDict":
                return _Call(lambda given: Inert() if given else _Names())
        return Inert

    def persistent_load(self, pid: Any) -> Any:
        """Return the storage that an id stands for."""
        match pid:
            case ("storage", torch.dtype() as dtype, str(key), str(), int(count)):
                return _Storage(dtype, key, count)
            case ("storage", *_):
                return Inert()
        raise UnsafePickle("it refers to something outside that is no storage")


class CkptFile:
    """Tensors of a file that `torch.save` wrote, by name; their numbers are read one tensor at a time.

    The state dict is the file's content, or lies under the name that its framework gives it. Tensors beside
    it, such as the statistics of a model's inputs, come under their own names.
    """

    def __init__(self, path: Path) -> None:
        """Read names, shapes and places."""
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive, path.open("rb") as file:
                root, content = _read_content(archive)
                self.tensors = _named_tensors(content)
                entries = {entry.filename: entry for entry in archive.infolist()}
                self._begins: dict[str, int] = {}
                for name, (storage, *_) in self.tensors.items():
                    entry = entries.get(f"{root}data/{storage.key}")
                    whole = storage.length * storage.dtype.itemsize
                    if entry is None or entry.compress_type or entry.file_size != whole:
                        raise UnsafePickle(f"the numbers of tensor {name} are not all there")
                    if storage.key not in self._begins:
                        self._begins[storage.key] = _first_byte(file, entry)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}). Check the path.") from error
        except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError) as error:
            raise CheckpointError(
                f"{path} was not read: {error}. Only files of torch.save (PyTorch 1.6 or later) are read, "
                "and only their tensors; nothing in a file is ever executed. Download it again."
            ) from error

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shape of every tensor by name."""
        return {name: torch.Size(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """Read one tensor, on the CPU, into memory of its own."""
        (dtype, key, _), offset, shape, strides = self.tensors[name]
        span = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        try:
            with self.path.open("rb") as file:  # a storage may hold many tensors
                file.seek(self._begins[key] + offset * dtype.itemsize)
                raw = bytearray(file.read(span * dtype.itemsize))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror}).") from error
        if len(raw) != span * dtype.itemsize:
            raise CheckpointError(f"{self.path} became shorter while it was read. Download it again.")
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).as_strided(shape, strides).contiguous()


def _first_byte(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Find where an uncompressed entry's bytes begin: behind its own header, whose end has two lengths."""
    file.seek(entry.header_offset)
    header = file.read(30)
    if len(header) != 30 or header[:4] != b"PK\x03\x04":
        raise UnsafePickle(f"{entry.filename} does not begin where its list says")
    return entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))


def _read_content(archive: zipfile.ZipFile) -> tuple[str, Any]:
    """Return the folder within the archive, and what the pickle in it holds."""
    pickles = [name for name in archive.namelist() if name.split("/")[1:] == ["data.pkl"]]
    if len(pickles) != 1:
        raise UnsafePickle("it is no archive that torch.save wrote")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise UnsafePickle("its numbers are in another byte order")
    if archive.getinfo(pickles[0]).file_size > MAX_PICKLE:
        raise UnsafePickle(f"its pickle has more than {MAX_PICKLE} bytes")
    content = archive.read(pickles[0])
    return root, _unpickled(_CheckpointUnpickler(io.BytesIO(content)), content, 10 * MAX_INSTRUCTIONS)


def _named_tensors(content: Any) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for wrapper in ("module", "state_dict", "model_state_dict", ""):  # DeepSpeed, Lightning, others
        if not isinstance(content, dict):
            raise UnsafePickle("it is no state dict")
        tensors |= {n: t for n, t in content.items() if isinstance(n, str) and isinstance(t, StoredTensor)}
        content = content[wrapper] if isinstance(content.get(wrapper), dict) else content
    if not tensors:
        raise UnsafePickle("it holds no tensors by name")
    return tensors
