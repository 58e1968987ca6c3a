"""What numpy's names in a pickled array stand for: plain functions from checked bytes to arrays and text.

`object_arrays` reads the pickle and calls these by name. None of them imports or calls what a file names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

_MAX_AXES: Final = 8
_MAX_SIZE: Final = 2**30
_NUMERIC: Final = re.compile(r"b1|[iu][1248]|f[248]")
_TEXT: Final = re.compile(r"[SU]\d{1,5}")


class Refused(ValueError):
    """What the file asks for is not what numpy writes for documented values."""


@dataclass(frozen=True)
class Name:
    """Something that the file wants to import. Nothing is imported."""

    text: str


@dataclass
class Dtype:
    """What the file says about an array's numbers."""

    code: str
    order: str = "|"


@dataclass
class Unfilled:
    """An array between its making and its filling; `places` in the memo are updated when it is filled."""

    places: list[int] = field(default_factory=list)


def set_order(dtype: Dtype, state: object) -> None:
    """Take the byte order from what numpy says of a dtype; raises `Refused` for structured ones."""
    # (version, byte order, sub-array, field names, fields, ...): only the byte order may say something.
    match state:
        case (3 | 4, ("|" | "<" | ">") as order, None, None, None, *_):
            dtype.order = order
        case _:
            raise Refused("it holds structured numbers")


def filled(state: object) -> Any:
    """Build what an `Unfilled` array becomes: an array, a string, or a list for an array of objects."""
    match state:
        case (1, tuple() as shape, Dtype(code="O8"), bool(), list() as items) if shape == (len(items),):
            return items
        case (1, tuple() as shape, Dtype() as dtype, bool() as fortran, bytes() as content):
            return _array(content, dtype, shape, "F" if fortran else "C")
    raise Refused("it fills an array with something else than its numbers")


def _array(content: bytes | bytearray, dtype: Dtype, shape: tuple[Any, ...], order: str) -> Any:
    """Build an array, or a string from an array without axes."""
    if len(shape) > _MAX_AXES or not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in shape):
        raise Refused("it holds an array of an impossible shape")
    if _TEXT.fullmatch(dtype.code) and shape == ():
        return _text(bytes(content), dtype)
    if not _NUMERIC.fullmatch(dtype.code):
        raise Refused(f"it holds an array of type {dtype.code!r}")
    numbers = np.dtype(dtype.order + dtype.code)
    if math.prod(shape) * numbers.itemsize != len(content):
        raise Refused(f"an array of shape {list(shape)} comes with {len(content)} bytes")
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
    raise Refused("it holds numbers of an unknown type")


def _new_array(arguments: tuple[Any, ...]) -> Unfilled:
    if arguments != (Name("numpy ndarray"), (0,), b"b"):
        raise Refused("it makes something else than an array")
    return Unfilled()


def _array_of_buffer(arguments: tuple[Any, ...]) -> Any:
    match arguments:
        case ((bytes() | bytearray()) as content, Dtype() as dtype, tuple() as shape, ("C" | "F") as order):
            return _array(content, dtype, shape, order)
    raise Refused("it makes an array of something else than bytes")


def _scalar(arguments: tuple[Any, ...]) -> Any:
    match arguments:
        case (Dtype() as dtype, bytes() as content):
            found = _array(content, dtype, (), "C")
            return found if isinstance(found, str) else found[()]
    raise Refused("it makes a number of something else than bytes")


def _encoded(arguments: tuple[Any, ...]) -> bytes:
    """Protocol 2 has no bytes: they are text whose characters are below 256."""
    match arguments:
        case (str() as text, "latin1"):
            return text.encode("latin1")
    raise Refused("it encodes text in an unusual way")


def _no_bytes(arguments: tuple[Any, ...]) -> bytes:
    if arguments:
        raise Refused("it makes bytes of something")
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
