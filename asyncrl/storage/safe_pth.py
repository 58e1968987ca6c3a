"""Read files of `torch.save`: tensors, plain containers and NumPy numbers; never a stranger's code.

Training scripts leave NumPy numbers, such as a validation loss, beside the weights. The names that make one
are answered with stand-ins, since NumPy's own functions would make any type and change one in place.
"""

from __future__ import annotations

import re
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import numpy as np
import torch

from asyncrl.errors import CheckpointError, first_line

_NUMBER: Final = re.compile(r"[biufc]\d{1,2}")
_REFUSED: Final = re.compile(r"GLOBAL (\S+)")
_LOCK: Final = threading.Lock()  # PyTorch allows names for the whole process


class _NumberType:
    """Stands for `numpy.dtype`, of numbers only."""

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str) or not _NUMBER.fullmatch(code):
            raise UnpicklingError(f"a NumPy type {code!r}, which is no number")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Sequence[Any]) -> None:
        if state[1] == ">":  # the byte order; the other entries do not concern numbers
            self.dtype = self.dtype.newbyteorder(">")


def _number(kind: object, content: object) -> Any:
    """Stand for `numpy.core.multiarray.scalar`."""
    if not isinstance(kind, _NumberType) or not isinstance(content, bytes):
        raise UnpicklingError("a NumPy scalar that is no number")
    return np.frombuffer(content, kind.dtype, count=1)[0]


_STAND_INS: Final[list[Any]] = [
    (_NumberType, "numpy.dtype"),
    (_number, "numpy.core.multiarray.scalar"),  # NumPy 1
    (_number, "numpy._core.multiarray.scalar"),
]


def load_pth(path: Path) -> Any:
    """Read a `.pth`, `.pt` or `.bin` file; tensors are mapped where the format allows it.

    Returns:
        Tensors of any shape and dtype on the CPU, in the containers of the file.
    """
    mapped = zipfile.is_zipfile(path)  # files of PyTorch before 1.6 cannot be mapped
    try:
        with _LOCK, torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # On broken files the unpickler raises whatever it stumbles upon.
        raise CheckpointError(_explained(path, error)) from error


def _explained(path: Path, error: Exception) -> str:
    # Without PyTorch's advice to read it all the same.
    if refused := _REFUSED.search(str(error)):
        return (
            f"{path} holds more than tensors and numbers: {refused[1]}. To make that again a stranger's code "
            "could be run, so the file is not read. Take a file with the weights alone, as "
            "`torch.save(module.state_dict(), FILE)` or safetensors write it, from whoever made this one."
        )
    inner = first_line(str(error).rpartition("WeightsUnpickler error: ")[2])
    reason = type(error).__name__ + ("" if "weights_only" in inner else f": {inner}")
    return f"{path} cannot be read as tensors ({reason}). Copy it again."
