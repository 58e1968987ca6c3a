"""Read a .npy file of Python objects as plain values, without ever running what the file says.

numpy pickles arrays of objects, and unpickling runs whatever the file asks for. So nothing is unpickled here:
a small machine follows the pickle's instructions itself. It imports nothing and calls nothing of numpy or
Python on the file's behalf; the seven names that numpy writes into such files select one of its own
functions, and any other name or instruction ends the reading. What comes out are numbers, strings, lists,
tuples, dicts and numeric arrays.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncrl.errors import AssetError
from asyncrl.storage.regular_files import read_bytes
from asyncrl.worlds.pickle_instructions import Name, PickleMachine, UnsafePickle

_MAX_AXES: Final = 8
_MAX_SIZE: Final = 2**30
_NUMERIC: Final = re.compile(r"b1|[iu][1248]|f[248]")
_TEXT: Final = re.compile(r"[SU]\d{1,5}")


@dataclass
class Dtype:
    """What the file says about an array's numbers."""

    code: str
    order: str = "|"


@dataclass
class Unfilled:
    """An array between its making and its filling; when it is filled, so are the memo's `indices`."""

    indices: list[int] = field(default_factory=list)


def set_order(dtype: Dtype, state: object) -> None:
    """Take the byte order from what numpy says of a dtype; raises `Refused` for structured ones."""
    # (version, byte order, sub-array, field names, fields, ...): only the byte order may say something.
    match state:
        case (3 | 4, ("|" | "<" | ">") as order, None, None, None, *_):
            dtype.order = order
        case _:
            raise UnsafePickle("it holds structured numbers")


def filled(state: object) -> Any:
    """Build what an `Unfilled` array becomes: an array, a string, or a list for an array of objects."""
    match state:
        case (1, tuple() as shape, Dtype(code="O8"), bool(), list() as items) if shape == (len(items),):
            return items
        case (1, tuple() as shape, Dtype() as dtype, bool() as fortran, bytes() as content):
            return _array(content, dtype, shape, "F" if fortran else "C")
    raise UnsafePickle("it fills an array with something else than its numbers")


def _array(content: bytes | bytearray, dtype: Dtype, shape: tuple[Any, ...], order: str) -> Any:
    """Build an array, or a string from an array without axes."""
    if len(shape) > _MAX_AXES or not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in shape):
        raise UnsafePickle("it holds an array of an impossible shape")
    if _TEXT.fullmatch(dtype.code) and shape == ():
        return _text(bytes(content), dtype)
    if not _NUMERIC.fullmatch(dtype.code):
        raise UnsafePickle(f"it holds an array of type {dtype.code!r}")
    numbers = np.dtype(dtype.order + dtype.code)
    if math.prod(shape) * numbers.itemsize != len(content):
        raise UnsafePickle(f"an array of shape {list(shape)} comes with {len(content)} bytes")
    return np.ndarray(shape, numbers, buffer=content, order="F" if order == "F" else "C")


def _text(content: bytes, dtype: Dtype) -> str:
    encoding = "utf-8" if dtype.code[0] == "S" else "utf-32-be" if dtype.order == ">" else "utf-32-le"
    return content.decode(encoding).rstrip("\0")


def _new_dtype(arguments: tuple[Any, ...]) -> Dtype:
    match arguments:
        case (str() as code, False, True) if (
            code == "O8" or _NUMERIC.fullmatch(code) or _TEXT.fullmatch(code)
        ):
            return Dtype(code)
    raise UnsafePickle("it holds numbers of an unknown type")


def _new_array(arguments: tuple[Any, ...]) -> Unfilled:
    if arguments != (Name("numpy ndarray"), (0,), b"b"):
        raise UnsafePickle("it makes something else than an array")
    return Unfilled()


def _array_of_buffer(arguments: tuple[Any, ...]) -> Any:
    match arguments:
        case ((bytes() | bytearray()) as content, Dtype() as dtype, tuple() as shape, ("C" | "F") as order):
            return _array(content, dtype, shape, order)
    raise UnsafePickle("it makes an array of something else than bytes")


def _scalar(arguments: tuple[Any, ...]) -> Any:
    match arguments:
        case (Dtype() as dtype, bytes() as content):
            found = _array(content, dtype, (), "C")
            return found if isinstance(found, str) else found[()]
    raise UnsafePickle("it makes a number of something else than bytes")


def _encoded(arguments: tuple[Any, ...]) -> bytes:
    """Turn text into bytes: protocol 2 has none, and writes them as characters below 256."""
    match arguments:
        case (str() as text, "latin1"):
            return text.encode("latin1")
    raise UnsafePickle("it encodes text in an unusual way")


def _no_bytes(arguments: tuple[Any, ...]) -> bytes:
    if arguments:
        raise UnsafePickle("it makes bytes of something")
    return b""


CALLS: Final[dict[str, Callable[[tuple[Any, ...]], Any]]] = {
    "numpy dtype": _new_dtype,
    "_codecs encode": _encoded,
    "__builtin__ bytes": _no_bytes,
}
for _package in ("numpy.core", "numpy._core"):  # numpy 1 and 2
    CALLS[f"{_package}.multiarray _reconstruct"] = _new_array
    CALLS[f"{_package}.multiarray scalar"] = _scalar
    CALLS[f"{_package}.numeric _frombuffer"] = _array_of_buffer


MAX_BYTES: Final = 2**30
MAX_INSTRUCTIONS: Final = 500_000
"""About a hundred per frame are usual; it bounds what a small file can make of memory and time."""
COPIES: Final = 4
"""Bytes of texts and numbers that may be made of each byte of the file: numpy needs one, two where protocol 2
writes bytes as text."""
_HEADER: Final = re.compile(
    rb"\{'descr': '\|O', 'fortran_order': (?:False|True), 'shape': \((\d{1,9}),\), \}\s*"
)


def read_object_array(path: Path) -> list[Any]:
    """Read a one-dimensional array of objects that ``np.save`` wrote (pickle protocol 2 to 5).

    Raises:
        AssetError: The file is missing, too large, truncated, or holds anything else than numbers, strings,
            lists, tuples, dicts with string keys, and numeric arrays.
    """
    try:
        content = read_bytes(path, MAX_BYTES)
        stream = io.BytesIO(content)  # whose reads never reserve more than there is
        length = _read_header(stream)
        found = _Machine(COPIES * len(content)).run(stream)
        if not isinstance(found, list) or len(found) != length:
            raise UnsafePickle(f"its header promises {length} objects and the rest is something else")
    except OSError as error:
        raise AssetError(f"{path} cannot be read ({error.strerror}). Check the path.") from error
    except (ValueError, IndexError, OverflowError) as error:  # IndexError: it takes more than it put
        raise AssetError(
            f"{path} was not read: {error}. Only arrays of objects as numpy.save writes them are read, made "
            "of numbers, strings, lists, dicts and numeric arrays; nothing in a file is ever executed. "
            "Write it again from such values."
        ) from error
    return found


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


class _Machine(PickleMachine):
    """Makes values of what `np.save` wrote."""

    def __init__(self, room: int) -> None:
        super().__init__(MAX_INSTRUCTIONS)
        self.room = room
        """Bytes that may still be copied out of the file."""
        self.memo: list[Any] = []

    def keep(self, index: int | None) -> None:
        index = len(self.memo) if index is None else index
        if index > len(self.memo):  # numpy counts up, so a gap is only there to reserve memory
            raise UnsafePickle(f"it remembers number {index} before number {len(self.memo)}")
        top = self.stack[-1]
        self.memo[index : index + 1] = [top]
        if isinstance(top, Unfilled):
            top.indices.append(index)

    def recall(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise UnsafePickle("it appends to something that is no list")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        if not isinstance(target, dict) or len(items) % 2 or not all(isinstance(key, str) for key in keys):
            raise UnsafePickle("it fills something else than a dict with string keys")
        target.update(zip(keys, items[1::2], strict=True))

    def named(self, text: str) -> None:
        if text not in CALLS and text != "numpy ndarray":
            raise UnsafePickle(f"it wants to import {text[:80].replace(' ', '.')!r}")
        self.stack.append(Name(text))

    def spend(self, arguments: object) -> None:
        """Pay for the texts and bytes that something is made of: those remembered can be used again."""
        parts = arguments if isinstance(arguments, tuple) else ()
        self.room -= sum(len(part) for part in parts if isinstance(part, str | bytes | bytearray))
        if self.room < 0:
            raise UnsafePickle("what it holds would take many times its own length")

    def call(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, Name) or name.text not in CALLS or not isinstance(arguments, tuple):
            raise UnsafePickle("it calls something that cannot be called")
        self.spend(arguments)
        self.stack.append(CALLS[name.text](arguments))

    def fill(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Dtype):
            set_order(target, state)
        elif isinstance(target, Unfilled):
            self.spend(state)
            self.stack[-1] = filled(state)
            for index in target.indices:
                self.memo[index] = self.stack[-1]
        else:
            raise UnsafePickle("it sets the state of something that has none")
